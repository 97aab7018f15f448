"""Which kernels a run computes with, as far as its memory and its time depend on them."""

from typing import Literal

from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan

DocumentAttention = Literal["none", "mask", "varlen"]
"""How attention is kept inside packed documents: not at all, as a row counts as one; by an additive mask; or by a
kernel that knows where each document begins, skips the scores between documents and holds no mask."""


def runs_on_cuda(config: RunConfig) -> bool:
    """Return whether a resolved ``config`` runs on CUDA, whose kernels make loss and norms without copies in fp32."""
    return config.launch.device == "cuda"


def document_attention(config: RunConfig, plan: ParallelPlan) -> DocumentAttention:
    """Return how attention is kept inside packed documents when a resolved ``config`` runs under ``plan``.

    Without the varlen kernel, every block on a ring of context-parallel ranks has a mask. With a sliding window, every
    row is a document at least.
    """
    if not config.data.document_mask and not config.spec.sliding_window:
        return "none"
    is_narrow = config.training.precision != "fp32"
    has_kernel = has_document_kernel(config.launch.device, is_narrow=is_narrow)
    return "varlen" if has_kernel and plan.attention == "auto" else "mask"


def has_document_kernel(device: str, *, is_narrow: bool) -> bool:
    """Return whether a kind of device has the varlen kernel, which takes 16 bits alone."""
    return device == "cuda" and is_narrow
