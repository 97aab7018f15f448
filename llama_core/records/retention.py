"""Which checkpoints of a run stay on disk. What each of them records decides, so that a resumed run decides alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_core.records.evaluation_jobs import waiting_checkpoints
from llama_core.records.progress import first_of_each, read_progress


def by_held_out_loss(checkpoints: Sequence[Path], name: str) -> list[Path]:
    """Return the checkpoints whose step was evaluated, the lowest loss first; of equal ones, the earlier first.

    Args:
        checkpoints: checkpoints of one run, oldest first.
        name: name of the held-out loss, or empty for the one over all tokens.
    """
    losses = {path: read_progress(path).loss(name) for path in checkpoints}
    evaluated = {path: loss for path, loss in losses.items() if loss is not None}
    return sorted(evaluated, key=evaluated.__getitem__)


@dataclass(frozen=True)
class Retention:
    """The checkpoints that a run keeps: each that one of the rules keeps."""

    newest: int
    """How many of the newest, at least one, which the run resumes from."""
    best: int = 0
    """How many of those with the lowest held-out loss."""
    best_by: str = ""
    """The name of that loss; empty for the one over all held-out tokens."""
    every_tokens: int = 0
    """Keep the first checkpoint at or after each multiple of this many tokens; 0: none for that."""
    waiting: int = 0
    """How many of the oldest that wait for their evaluation, or are being evaluated."""
    waiting_every_tokens: int = 0
    """Only the first at or after each multiple of this many tokens waits; 0: each checkpoint."""

    def kept(self, checkpoints: Sequence[Path]) -> set[Path]:
        """Return those of a run's checkpoints, given oldest first, that stay."""
        kept = set(checkpoints[-self.newest :])
        if self.best:
            kept.update(by_held_out_loss(checkpoints, self.best_by)[: self.best])
        if self.every_tokens:
            # The first checkpoint after a multiple is never deleted, so it still is the first when this is asked again.
            kept.update(first_of_each(self.every_tokens, checkpoints))
        if self.waiting:
            kept.update(waiting_checkpoints(checkpoints, self.waiting_every_tokens)[: self.waiting])
        return kept

    def most(self, num_tokens: int, num_saves: int) -> int:
        """Return how many checkpoints there are at most at once.

        Args:
            num_tokens: tokens that the run trains on; 0 if unknown, and then milestones do not count.
            num_saves: most checkpoints that the run writes.
        """
        milestones = min(num_saves, num_tokens // self.every_tokens) if self.every_tokens else 0
        # One more than are kept: the oldest is removed only once the newest is complete.
        return self.newest + self.best + milestones + self.waiting + 1
