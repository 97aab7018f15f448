"""Activation checkpointing: keep less for the backward pass and compute it again instead."""

from functools import partial

from torch.utils.checkpoint import checkpoint

from llama_core.config.run import RecomputeMode
from llama_core.models.llama import Llama


def apply_recompute(model: Llama, mode: RecomputeMode) -> None:
    """Make ``model`` keep only the input of every block for the backward pass, if ``mode`` is ``'full'``.

    Each block then runs its forward twice: the gradients are the same bit for bit, for about a third more arithmetic.
    With ``'none'`` nothing changes.

    Source: Chen et al. 2016, arXiv:1604.06174.
    """
    if mode == "none":
        return
    for block in model.layers.values():
        # not torch's checkpoint_wrapper, which puts a name of its own into model.named_parameters()
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
