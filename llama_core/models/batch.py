"""What a model is trained on. Nothing here imports torch, so that data can be looked at without it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORE_INDEX = -100
"""The target of a token that does not count."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of tokens, what follows each token, and where each stands in its document."""

    tokens_BS: "Tensor"
    """Token ids, int64."""
    targets_BS: "Tensor"
    """Next tokens, int64; -100 where there is none to predict."""
    positions_BS: "Tensor | None"
    """Positions inside each document, int64, 0 at its first token; None where a row is one text."""

    def num_targets(self) -> "Tensor":
        """Return how many targets are not -100: an int64 scalar on the batch's device."""
        return (self.targets_BS != IGNORE_INDEX).sum()

    def split(self, microbatch_size: int) -> list["Batch"]:
        """Return the rows in order as batches of ``microbatch_size``; the last one may be smaller."""
        starts = range(0, len(self.tokens_BS), microbatch_size)
        return [self._rows(slice(start, start + microbatch_size)) for start in starts]

    def to(self, device: "torch.device | str") -> "Batch":
        """Return the batch on ``device``."""
        positions_BS = None if self.positions_BS is None else self.positions_BS.to(device)
        return Batch(self.tokens_BS.to(device), self.targets_BS.to(device), positions_BS)

    def _rows(self, rows: slice) -> "Batch":
        positions_BS = None if self.positions_BS is None else self.positions_BS[rows]
        return Batch(self.tokens_BS[rows], self.targets_BS[rows], positions_BS)
