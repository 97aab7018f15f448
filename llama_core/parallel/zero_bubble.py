"""Backwards in two parts: the gradient of a stage's input at once, those of its matrices later.

A matrix whose gradient is deferred keeps its input and the gradient of its output until then.

Source: Qi et al. 2023, arXiv:2401.10241, section 2.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llama_core.models.grouped import grouped_outer_product, grouped_product
from llama_core.models.layers import Linear
from llama_core.models.llama import Llama
from llama_core.models.moe import ExpertLinear


class DeferredGradients:
    """The deferred matrix gradients of a model's blocks, under keys that the caller chooses.

    Args:
        model: a part of a model with plain parameters; its blocks' matrices then use this object.
    """

    def __init__(self, model: Llama) -> None:
        self._put_off: dict[Hashable, list[Callable[[], None]]] = defaultdict(list)
        self._key: Hashable | None = None
        for module in model.layers.modules():
            if isinstance(module, Linear) and module.weight.requires_grad:
                module.multiply = self._multiply
            if isinstance(module, ExpertLinear):
                module.multiply = self._multiply_groups

    @contextmanager
    def put_off(self, key: Hashable) -> Iterator[None]:
        """Defer the matrix gradients of the backwards in the block until ``compute`` is called with ``key``."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    @torch.no_grad()
    def compute(self, key: Hashable) -> None:
        """Add the gradients deferred under ``key`` to the parameters' gradients."""
        for add in self._put_off.pop(key):
            add()

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = _Linear.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return out

    def _multiply_groups(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        out: Tensor = _GroupedLinear.apply(x, weight, ends, self)  # type: ignore[no-untyped-call]
        return out

    def take(self, weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
        """Return the gradient of ``weight``, or defer it and return None."""
        if self._key is None:
            return gradient().to(weight.dtype)
        self._put_off[self._key].append(partial(_add_gradient, weight, gradient))
        return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferred = deferred
        return x @ weight.to(x.dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = partial(_weight_gradient, x, grad_out)
        return grad_out @ weight.to(x.dtype), ctx.deferred.take(weight, gradient), None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.deferred = deferred
        out: Tensor = grouped_product(x, weight.to(x.dtype).mT, ends)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        gradient = partial(grouped_outer_product, grad_out, x, ends)
        return grouped_product(grad_out, weight.to(x.dtype), ends), ctx.deferred.take(weight, gradient), None, None


def _weight_gradient(x: Tensor, grad_out: Tensor) -> Tensor:
    return grad_out.flatten(0, -2).t() @ x.flatten(0, -2)


def _add_gradient(weight: Tensor, gradient: Callable[[], Tensor]) -> None:
    made = gradient().to(weight.dtype)
    weight.grad = made if weight.grad is None else weight.grad.add_(made)
