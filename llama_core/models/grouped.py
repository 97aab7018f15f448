"""Products of rows with matrices, in groups: the rows of each expert with that expert's matrix.

A group is any number of consecutive rows. One operator hides which code runs: torch's grouped kernel, or a product
per group where that kernel lacks the dtype or refuses the strides. It also works on fake tensors and in compiled code,
and torch's FLOP counter knows it.
"""

# Shape suffixes: R rows, I columns of the rows, O columns of the result, E groups

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

_ALIGNMENT = 16
"""Bytes that the strides of the kernel's arguments must be multiples of."""
_BLACKWELL = 10
"""Major compute capability of the first devices of this architecture."""
_KERNEL_DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}


@torch.library.custom_op("llama_core::grouped_product", mutates_args=())
def grouped_product(x_RI: Tensor, w_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return ``x_RI[ends_E[e - 1] : ends_E[e]] @ w_EIO[e]`` for every group e, one below the other: [R, O].

    Args:
        x_RI: the rows; those of the first group first.
        w_EIO: a matrix for each group, in the dtype of the rows.
        ends_E: one past the last row of each group, int32; the last is R.
    """
    if _has_kernel(x_RI, w_EIO):
        return F.grouped_mm(x_RI, w_EIO, offs=ends_E)
    out_RO = x_RI.new_empty((x_RI.shape[0], w_EIO.shape[2]))
    for x, w, out in zip(_groups(x_RI, ends_E), w_EIO.unbind(), _groups(out_RO, ends_E), strict=True):
        torch.mm(x, w, out=out)
    return out_RO


@torch.library.custom_op("llama_core::grouped_outer_product", mutates_args=())
def grouped_outer_product(x_RI: Tensor, y_RO: Tensor, ends_E: Tensor) -> Tensor:
    """Return ``x.T @ y`` for the rows of every group: [E, I, O]. It is zero for a group without rows."""
    if _has_kernel(x_RI, y_RO):
        out_EIO = F.grouped_mm(x_RI.t(), y_RO, offs=ends_E)
        if skips_empty_groups(x_RI.device):
            is_empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
            out_EIO.masked_fill_(is_empty_E[:, None, None], 0)
        return out_EIO
    out_EIO = x_RI.new_empty((len(ends_E), x_RI.shape[1], y_RO.shape[1]))
    for x, y, out in zip(_groups(x_RI, ends_E), _groups(y_RO, ends_E), out_EIO.unbind(), strict=True):
        torch.mm(x.t(), y, out=out)
    return out_EIO


@torch.library.custom_op("llama_core::grouped_sum", mutates_args=())
def grouped_sum(x_RO: Tensor, ends_E: Tensor) -> Tensor:
    """Return the sum of the rows of every group, [E, O], added in a fixed order; zero for a group without rows."""
    ones_RI = x_RO.new_ones((x_RO.shape[0], _ALIGNMENT // x_RO.itemsize))
    if x_RO.is_cuda and _has_kernel(ones_RI, x_RO):  # no device waits for the sizes of the groups
        sums_EIO: Tensor = grouped_outer_product(ones_RI, x_RO, ends_E)
        return sums_EIO[:, 0].clone()
    return torch.stack([group.sum(0) for group in _groups(x_RO, ends_E)])


def add_to_groups(x_RO: Tensor, rows_EO: Tensor, ends_E: Tensor) -> Tensor:
    """Return ``x_RO`` with the row of its group added to each of its rows, in the same dtype."""
    out_RO: Tensor = _AddToGroups.apply(x_RO, rows_EO, ends_E)  # type: ignore[no-untyped-call]
    return out_RO


class _AddToGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RO: Tensor, rows_EO: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(ends_E)
        places_R = torch.arange(x_RO.shape[0], device=x_RO.device, dtype=ends_E.dtype)
        return rows_EO[torch.searchsorted(ends_E, places_R, right=True)].add_(x_RO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor, None]:
        (ends_E,) = ctx.saved_tensors
        return grad_RO, grouped_sum(grad_RO.contiguous(), ends_E), None


def _has_kernel(*tensors: Tensor) -> bool:
    """Return whether torch has a grouped kernel for these tensors."""
    device = tensors[0].device.type
    dtype = tensors[0].dtype
    return dtype in _KERNEL_DTYPES.get(device, ()) and all(map(_is_aligned, tensors))


def skips_empty_groups(device: torch.device) -> bool:
    """Return whether the kernel's outer product may leave the matrix of a group without rows as it was in memory.

    Source: pytorch issue 172439, for Blackwell.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _BLACKWELL


def _is_aligned(tensor: Tensor) -> bool:
    strides = [stride * tensor.itemsize for stride in tensor.stride() if stride != 1]
    return tensor.numel() > 0 and not any(place % _ALIGNMENT for place in (tensor.data_ptr(), *strides))


def _groups(x: Tensor, ends_E: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, ends_E.diff(prepend=ends_E.new_zeros(1)).tolist())


@grouped_product.register_fake
def _(x_RI: Tensor, w_EIO: Tensor, ends_E: Tensor) -> Tensor:
    return x_RI.new_empty((x_RI.shape[0], w_EIO.shape[2]))


@grouped_outer_product.register_fake
def _(x_RI: Tensor, y_RO: Tensor, ends_E: Tensor) -> Tensor:
    return x_RI.new_empty((ends_E.shape[0], x_RI.shape[1], y_RO.shape[1]))


@grouped_sum.register_fake
def _(x_RO: Tensor, ends_E: Tensor) -> Tensor:
    return x_RO.new_empty((ends_E.shape[0], x_RO.shape[1]))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_RI, w_EIO, ends_E = ctx.saved_tensors
    grad_RO = grad_RO.contiguous()
    needs_x, needs_w, _ = ctx.needs_input_grad
    return (
        grouped_product(grad_RO, w_EIO.mT, ends_E) if needs_x else None,
        grouped_outer_product(x_RI, grad_RO, ends_E) if needs_w else None,
        None,
    )


grouped_product.register_autograd(_backward, setup_context=_save)


@register_flop_formula([torch.ops.llama_core.grouped_product, torch.ops.llama_core.grouped_outer_product])
def _flops(x_shape: Any, other_shape: Any, *_: Any, **__: Any) -> int:
    """Return two FLOPs per row and element of its matrix, for either operator."""
    flops: int = 2 * x_shape[0] * x_shape[1] * other_shape[-1]
    return flops
