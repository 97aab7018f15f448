"""Stand-ins for fused operators on fake tensors: they hold the same bytes, but compute no values.

On CUDA, torch's norm is one kernel, and so is the unpacking of a matrix. A compiled block computes its norms and its
gated product in a few kernels, and keeps for its backward what is cheapest to keep.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate

from llama_core.config.model_spec import Activation, OfBoth
from llama_core.config.nf4 import BLOCK, BLOCK_BYTES
from llama_core.config.run import RunConfig
from llama_core.models import cast_weights, layers, loss, moe, nf4
from llama_core.planning.kernels import runs_on_cuda
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.byte_counter import replaced
from llama_core.training import bf16_moments


@contextmanager
def kernels_of(config: RunConfig, plan: ParallelPlan) -> Iterator[None]:
    """Run the kernels of a CUDA run and of compiled blocks, where a run has them."""
    on_cuda = runs_on_cuda(config)
    with ExitStack() as stack:
        if on_cuda:  # on fake tensors, the operators of the loss launch no kernel
            stack.enter_context(replaced(loss, "uses_kernels", lambda hidden_TD: True))
            stack.enter_context(replaced(cast_weights, "multiplies_into_fp32", lambda x: True))
            stack.enter_context(replaced(bf16_moments, "uses_kernel", lambda weight: True))
            stack.enter_context(replaced(bf16_moments, "run_in_one_kernel", lambda *arguments, **named: None))
        if on_cuda or plan.compile:
            stack.enter_context(replaced(layers, "rms_norm", _rms_norm))
            stack.enter_context(replaced(nf4, "unpack", _unpack))
        if plan.compile:
            for owner in (layers, moe):
                stack.enter_context(replaced(owner, "gated", _Gated.apply))
        yield


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    if not (isinstance(x, DTensor) and isinstance(weight, DTensor)):
        return _apply_norm(x, weight)
    # a rank's tokens give a part of the gradient of the weight
    mesh = x.device_mesh
    divided = any(place.is_shard() for place in x.placements)
    part = weight.to_local(grad_placements=[Partial() if divided else Replicate()])
    return DTensor.from_local(_apply_norm(x.to_local(), part), mesh, x.placements, run_check=False)


def _apply_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    out: Tensor = _RMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


def _unpack(packed: nf4.Packed, place: nf4.BlockPlace, like: Tensor) -> Tensor:
    rows, num_bytes = packed.bytes_OK.shape
    return like.new_empty(rows, num_bytes // BLOCK_BYTES * BLOCK)


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and the fp32 scale of every row, as ``aten::_fused_rms_norm`` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return _gradients(ctx, x, weight)


class _Gated(torch.autograd.Function):
    """Keeps gate and up, or only gate if it needs no gradient itself and up's own depends on it alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        reads_up = ctx.needs_input_grad[0] or activation in get_args(OfBoth)
        ctx.save_for_backward(gate, up if reads_up else None)
        return torch.empty_like(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # which begins a recomputation, if no product after it did
        return _gradients(ctx, grad, grad, None)


def _gradients(ctx: Any, *like: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return a gradient like each of the inputs that need one; None of the others, and of what is no tensor."""
    needed = zip(like, ctx.needs_input_grad, strict=True)
    return tuple(torch.empty_like(x) if x is not None and is_needed else None for x, is_needed in needed)
