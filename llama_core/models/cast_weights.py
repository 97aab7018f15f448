"""Products in half precision with fp32 weights, whose gradients are made in fp32.

What is multiplied is a copy of the weight: a lasting one, or one that is made at each use.
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


def takes_wide_gradient(weight: Tensor, x: Tensor) -> bool:
    """Return whether the gradient of a weight is made in its own dtype, which is wider than that of ``x``."""
    return weight.requires_grad and weight.itemsize > x.itemsize


def cast_linear(x: Tensor, weight_OI: Tensor, cast_OI: Tensor | None, take: Take = _at_once) -> Tensor:
    """Return ``x @ weight.T`` in the dtype of ``x``.

    Args:
        x: [..., I].
        weight_OI: the weight, which gets the gradient, in its own dtype.
        cast_OI: the same in the dtype of ``x``; None to cast it, in the forward and again in the backward.
        take: what becomes of the gradient.
    """
    made = _MakesGradients.apply(x, weight_OI, cast_OI, take)  # type: ignore[no-untyped-call]
    return _product(made, x, _cast(weight_OI, cast_OI, x))


def cast_grouped(
    x_RI: Tensor, weight_EOI: Tensor, cast_EOI: Tensor | None, ends_E: Tensor, take: Take = _at_once
) -> Tensor:
    """Return the same for rows in groups, each with a matrix of its own; see ``grouped_product``."""
    made = _MakesGroupedGradients.apply(x_RI, weight_EOI, cast_EOI, ends_E, take)  # type: ignore[no-untyped-call]
    return _product(made, x_RI, _cast(weight_EOI, cast_EOI, x_RI), ends_E)


def _product(made: Tensor, x: Tensor, weight: Tensor, ends_E: Tensor | None = None) -> Tensor:
    out: Tensor = _Product.apply(made, x.detach(), weight, ends_E)  # type: ignore[no-untyped-call]
    return out


def in_place_of(weight: Tensor, cast_weight: Tensor) -> Tensor:
    """Return ``cast_weight``, whose gradient goes to ``weight``, in its dtype."""
    out: Tensor = _InPlaceOf.apply(weight, cast_weight)  # type: ignore[no-untyped-call]
    return out


class _MakesGradients(torch.autograd.Function):
    """Keeps what the gradients of a product are made from, and makes them from the gradient of what it returns.

    That stands for the result of the product, which ``_Product`` computes after this. In one function, autograd would
    keep the inputs only once the result exists; a recomputation ends when the last tensor is kept, and would compute
    the last product of a block for nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, cast_OI: Tensor | None, take: Take) -> Tensor:
        ctx.save_for_backward(x, weight_OI, cast_OI if ctx.needs_input_grad[0] else None)
        ctx.take = take
        return x.new_empty(()).expand(*x.shape[:-1], weight_OI.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, cast_OI = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _cast(weight_OI, cast_OI, x)
        gradient = partial(_wide_product, grad.flatten(0, -2).t(), x.flatten(0, -2), weight_OI.dtype)
        return grad_x, ctx.take(weight_OI, gradient), None, None


class _MakesGroupedGradients(torch.autograd.Function):
    """The same for rows in groups."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any, x_RI: Tensor, weight_EOI: Tensor, cast_EOI: Tensor | None, ends_E: Tensor, take: Take
    ) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI, cast_EOI if ctx.needs_input_grad[0] else None, ends_E)
        ctx.take = take
        return x_RI.new_empty(()).expand(x_RI.shape[0], weight_EOI.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_EOI, cast_EOI, ends_E = ctx.saved_tensors
        grad_RO = grad.contiguous()
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_product(grad_RO, _cast(weight_EOI, cast_EOI, x_RI), ends_E)
        gradient = partial(_grouped_gradient, grad_RO, x_RI, ends_E, weight_EOI.dtype)
        return grad_x, ctx.take(weight_EOI, gradient), None, None, None


class _Product(torch.autograd.Function):
    """Computes a product, whose gradient goes to what stands for it."""

    @staticmethod
    def forward(ctx: Any, stands_for_it: Tensor, x: Tensor, weight: Tensor, ends_E: Tensor | None) -> Tensor:
        return x @ weight.mT if ends_E is None else grouped_product(x, weight.mT, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


class _InPlaceOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast_weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return cast_weight.view_as(cast_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _cast(weight: Tensor, cast_weight: Tensor | None, x: Tensor) -> Tensor:
    return weight.detach().to(x.dtype) if cast_weight is None else cast_weight


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
