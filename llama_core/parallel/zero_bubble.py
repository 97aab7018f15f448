"""Backwards in two parts: the gradient of a stage's input at once, those of its matrices later.

A matrix whose gradient is deferred keeps its input and the gradient of its output until then.

Source: Qi et al. 2023, arXiv:2401.10241, section 2.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from llama_core.models.cast_weights import cast_grouped, cast_linear
from llama_core.models.layers import Linear
from llama_core.models.llama import Llama
from llama_core.models.moe import ExpertLinear


class DeferredGradients:
    """The deferred matrix gradients of a model's blocks, under keys that the caller chooses.

    Args:
        model: a part of a model with plain parameters; its blocks' matrices then use this object.
    """

    def __init__(self, model: Llama) -> None:
        self._deferred: dict[Hashable, list[Callable[[], None]]] = defaultdict(list)
        self._key: Hashable | None = None
        for module in model.layers.modules():
            if isinstance(module, Linear) and module.weight.requires_grad:
                module.multiply = self._multiply
            if isinstance(module, ExpertLinear):
                module.multiply = self._multiply_groups

    @contextmanager
    def deferring(self, key: Hashable) -> Iterator[None]:
        """Defer the matrix gradients of the backwards in the block until ``compute`` is called with ``key``."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    @torch.no_grad()
    def compute(self, key: Hashable) -> None:
        """Add the gradients deferred under ``key`` to the parameters' gradients."""
        waiting = deque(self._deferred.pop(key, ()))
        while waiting:
            waiting.popleft()()  # and drop what it has kept

    def _multiply(self, x: Tensor, weight: Tensor, cast_weight: Tensor | None) -> Tensor:
        return cast_linear(x, weight, cast_weight, self.take)

    def _multiply_groups(self, x: Tensor, weight: Tensor, cast_weight: Tensor | None, ends: Tensor) -> Tensor:
        return cast_grouped(x, weight, cast_weight, ends, self.take)

    def take(self, weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
        """Return the gradient of ``weight``, or defer it and return None."""
        if self._key is None:
            return gradient()
        self._deferred[self._key].append(partial(_add_gradient, weight, gradient))
        return None


def _add_gradient(weight: Tensor, gradient: Callable[[], Tensor]) -> None:
    made = gradient()
    weight.grad = made if weight.grad is None else weight.grad.add_(made)
