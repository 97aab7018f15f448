"""What a checkpoint says about how far its run had come."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llama_core.errors import CheckpointError, RunDirectoryError
from llama_core.records.checkpoints import STATE, recorded_counters
from llama_core.records.files import checked_record


@dataclass(frozen=True)
class CheckpointProgress:
    """What the trainer's counters in a checkpoint say about its worth."""

    tokens: int = 0
    """Tokens trained on so far."""
    eval_loss: float | None = None
    """The held-out loss after the checkpoint's step; None if it was not evaluated."""
    eval_losses: Mapping[str, float] = field(default_factory=dict)
    """The same of each named part of the held-out tokens."""

    def loss(self, name: str) -> float | None:
        """Return the held-out loss of a name, or over all tokens if it is empty; None unless it is finite."""
        loss = self.eval_losses.get(name) if name else self.eval_loss
        return loss if loss is not None and math.isfinite(loss) else None


def read_progress(checkpoint: Path) -> CheckpointProgress:
    """Return what a checkpoint records; what an unreadable one would record if its step had not been evaluated."""
    try:
        return checked_record(recorded_counters(checkpoint), CheckpointProgress, checkpoint / STATE)
    except (CheckpointError, RunDirectoryError):
        return CheckpointProgress()


def first_of_each(num_tokens: int, checkpoints: Iterable[Path]) -> list[Path]:
    """Return the first of some checkpoints, given oldest first, at or after each multiple of ``num_tokens`` above 0."""
    first: dict[int, Path] = {}
    for path in checkpoints:
        first.setdefault(read_progress(path).tokens // num_tokens, path)
    first.pop(0, None)
    return list(first.values())
