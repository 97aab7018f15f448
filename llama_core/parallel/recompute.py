"""Activation checkpointing: keep less for the backward pass and compute it again instead."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from llama_core.config.run import RecomputeMode
from llama_core.models.llama import Llama

PRODUCTS = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
"""The matrix products of a block, in the order in which its forward computes them."""
KEPT_PRODUCTS = frozenset({"wq", "wv", "wo", "w1"})
"""Those whose results ``selective`` keeps. Nothing needs w2's, so that of the others wk and w3 are computed again."""

_ATTENTION = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


def apply_recompute(model: Llama, mode: RecomputeMode, layers: Collection[int] | None = None) -> None:
    """Make some blocks of ``model`` keep less for the backward pass; the gradients are the same bit for bit.

    ``full`` keeps the input of a block and runs its whole forward again: about a third more arithmetic. ``selective``
    keeps the results of attention and of ``KEPT_PRODUCTS`` too, and computes the rest again. ``none`` changes nothing.

    Args:
        model: the model, or a part of it.
        mode: what is computed again.
        layers: which layers, by their place in the whole model; by default all that ``model`` has.

    Source: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198 (selective).
    """
    if mode == "none":
        return
    contexts: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}
    for name, block in model.layers.items():
        if layers is None or int(name) in layers:
            # not torch's checkpoint_wrapper, which puts a name of its own into model.named_parameters()
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **contexts)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_KeepCostly())  # type: ignore[no-untyped-call]


class _KeepCostly:
    """Decides for one forward of one block, and again for its repetition, which results to keep."""

    def __init__(self) -> None:
        self._num_products = {False: 0, True: 0}

    def __call__(self, context: SelectiveCheckpointContext, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if func is torch.ops.aten.mm.default:
            name = PRODUCTS[self._num_products[context.is_recompute]]
            self._num_products[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if name in KEPT_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE
