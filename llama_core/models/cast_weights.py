"""Products with fp32 weights that are read from a copy in half precision, and whose gradients are made in fp32.

A rank that holds whole weights would otherwise cast each of them at every use, and widen every gradient.
"""

# Shape suffixes: I columns of a weight, O its rows, T tokens (B * S), R rows of groups, E groups

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llama_core.models.grouped import grouped_outer_product, grouped_product

Take = Callable[[Tensor, Callable[[], Tensor]], Tensor | None]
"""Returns the gradient of a weight that a function makes, or defers it and returns None."""


def _at_once(weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
    return gradient()


def cast_linear(x: Tensor, weight_OI: Tensor, cast_OI: Tensor | None, take: Take = _at_once) -> Tensor:
    """Return ``x @ weight.T`` in the dtype of ``x``.

    Args:
        x: [..., I].
        weight_OI: the weight, which gets the gradient, in its own dtype.
        cast_OI: the same in the dtype of ``x``; None to cast it, in the forward and again in the backward.
        take: what becomes of the gradient.
    """
    out: Tensor = _CastLinear.apply(x, weight_OI, cast_OI, take)  # type: ignore[no-untyped-call]
    return out


def cast_grouped(
    x_RI: Tensor, weight_EOI: Tensor, cast_EOI: Tensor | None, ends_E: Tensor, take: Take = _at_once
) -> Tensor:
    """Return the same for rows in groups, each with a matrix of its own; see ``grouped_product``."""
    out: Tensor = _CastGrouped.apply(x_RI, weight_EOI, cast_EOI, ends_E, take)  # type: ignore[no-untyped-call]
    return out


def in_place_of(weight: Tensor, cast_weight: Tensor) -> Tensor:
    """Return ``cast_weight``, whose gradient goes to ``weight``, in its dtype."""
    out: Tensor = _InPlaceOf.apply(weight, cast_weight)  # type: ignore[no-untyped-call]
    return out


class _CastLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, cast_OI: Tensor | None, take: Take) -> Tensor:
        ctx.save_for_backward(x, weight_OI, cast_OI)
        ctx.take = take
        return x @ _narrow(weight_OI, cast_OI, x).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, cast_OI = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _narrow(weight_OI, cast_OI, x)
        gradient = partial(_wide_product, grad.flatten(0, -2).t(), x.flatten(0, -2), weight_OI.dtype)
        return grad_x, ctx.take(weight_OI, gradient), None, None


class _CastGrouped(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any, x_RI: Tensor, weight_EOI: Tensor, cast_EOI: Tensor | None, ends_E: Tensor, take: Take
    ) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI, cast_EOI, ends_E)
        ctx.take = take
        out: Tensor = grouped_product(x_RI, _narrow(weight_EOI, cast_EOI, x_RI).mT, ends_E)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_EOI, cast_EOI, ends_E = ctx.saved_tensors
        grad_RO = grad.contiguous()
        grad_x = grouped_product(grad_RO, _narrow(weight_EOI, cast_EOI, x_RI), ends_E)
        gradient = partial(_grouped_gradient, grad_RO, x_RI, ends_E, weight_EOI.dtype)
        return grad_x, ctx.take(weight_EOI, gradient), None, None, None


class _InPlaceOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast_weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return cast_weight.view_as(cast_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _narrow(weight: Tensor, cast_weight: Tensor | None, x: Tensor) -> Tensor:
    return weight.to(x.dtype) if cast_weight is None else cast_weight


def _wide_product(left_OT: Tensor, right_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``left @ right`` in ``dtype``, which may be wider than theirs."""
    if dtype != left_OT.dtype and multiplies_into_fp32(left_OT):
        return torch.mm(left_OT, right_TI, out_dtype=dtype)
    return torch.mm(left_OT, right_TI).to(dtype)


def multiplies_into_fp32(x: Tensor) -> bool:
    """Return whether products of half precision can have fp32 results. The dry run of a CUDA run replaces this."""
    return x.is_cuda


def _grouped_gradient(grad_RO: Tensor, x_RI: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    made: Tensor = grouped_outer_product(grad_RO, x_RI, ends_E)
    return made.to(dtype)
