"""Whether training diverged: all steps were taken, but the loss ended far above its start."""

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress

from llama_core.errors import RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import TrainingSummary
from llama_core.records.metrics import read_metrics

FAR_ABOVE = 0.25
"""Share of the first loss by which the last ones exceed it. Losses of single batches differ by less."""
_LAST = 0.1
"""Share of the steps whose median is the loss at the end."""


def divergence(losses: Sequence[float], held_out: float | None = None) -> str:
    """Return how training diverged, in words; empty if it did not.

    Args:
        losses: the training loss of every step.
        held_out: the held-out loss after the last step.
    """
    if not losses:
        return ""
    start = losses[0]
    last = losses[-max(1, round(_LAST * len(losses))) :]
    if not all(map(math.isfinite, last)):
        return "the training loss is not finite at the end"
    end = statistics.median(last)
    if end > start + FAR_ABOVE * abs(start):
        return f"the training loss ended at {end:.4g}, far above the {start:.4g} of its first step"
    if held_out is not None and not math.isfinite(held_out):
        return "the held-out loss is not finite"
    return ""


def divergence_of(run: RunDirectory, summary: TrainingSummary) -> str:
    """Return how the training of a run diverged, in words; empty if it did not, or its metrics are damaged."""
    losses: list[float] = []
    with suppress(RunDirectoryError):
        losses = read_metrics(run)["loss"].to_pylist()
    return divergence(losses, summary.eval_loss)
