"""The held-out loss, row by row: its mean, how far chance moves it, and how far two models are apart.

Two models that are evaluated on the same rows find the same rows hard. The difference row by row varies much less than
either loss, so models are compared by it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

MAX_ROWS = 4096
"""Most rows that are kept apart; of more, neighbours are added up."""
TOLD_APART = 2.0
"""Standard errors above which a difference is hardly chance: 95 of 100 differences by chance alone are smaller."""


@dataclass(frozen=True)
class Difference:
    """How far one mean lies above another."""

    amount: float
    standard_error: float | None
    """None if it is unknown: a loss over fewer than two rows."""

    @property
    def spread(self) -> float | None:
        """How far chance alone moves the difference, either way."""
        return None if self.standard_error is None else TOLD_APART * self.standard_error

    @property
    def is_told_apart(self) -> bool | None:
        """Whether the difference is larger than its spread; None if that is unknown."""
        return None if self.spread is None else abs(self.amount) > self.spread

    def __str__(self) -> str:
        """Return the difference and its spread, such as ``0.0130 ± 0.0201``."""
        return f"{self.amount:.4f}" if self.spread is None else f"{self.amount:.4f} ± {self.spread:.4f}"


@dataclass(frozen=True, repr=False)
class HeldOutRows:
    """The loss of each held-out row, in the order of the rows, which no plan changes."""

    losses: tuple[float, ...]
    """The sum over what counts in a row."""
    counts: tuple[int, ...]
    """How much counts in a row, such as the number of its targets."""

    def __repr__(self) -> str:
        """Return the mean and its spread: there may be thousands of rows."""
        spread = "" if self.spread is None else f" ± {self.spread:.4f}"
        return f"<{len(self.counts):,} held-out rows: {self.mean:.4f}{spread} over {self.count:,}>"

    @classmethod
    def of(cls, losses: Sequence[float], counts: Sequence[int]) -> Self:
        """Return the rows in which anything counts; of very many rows, neighbours are added up."""
        counted = [(loss, count) for loss, count in zip(losses, counts, strict=True) if count]
        together = max(1, math.ceil(len(counted) / MAX_ROWS))
        groups = [counted[start : start + together] for start in range(0, len(counted), together)]
        return cls(
            tuple(math.fsum(loss for loss, _ in group) for group in groups),
            tuple(sum(count for _, count in group) for group in groups),
        )

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Return the rows of several parts, one part after another."""
        parts = list(parts)
        losses = [loss for rows in parts for loss in rows.losses]
        return cls.of(losses, [count for rows in parts for count in rows.counts])

    @property
    def count(self) -> int:
        """How much counts in all rows."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean loss over what counts; NaN if nothing does."""
        return math.fsum(self.losses) / self.count if self.counts else math.nan

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean over rows drawn at random; None for fewer than two rows.

        Tokens of one row are not independent, so rows are the samples. A ratio of two sums over rows has, to first
        order, the error of the mean of ``loss - mean * count`` (Cochran 1977, Sampling Techniques, section 2.11).
        """
        return _standard_error(self.losses, self.counts)

    @property
    def spread(self) -> float | None:
        """How far chance alone moves the mean, either way."""
        return None if self.standard_error is None else TOLD_APART * self.standard_error

    def above(self, other: "HeldOutRows") -> Difference:
        """Return how far this mean lies above another: row by row, if both are over the same rows."""
        amount = self.mean - other.mean
        if self.counts == other.counts:
            apart = [one - another for one, another in zip(self.losses, other.losses, strict=True)]
            return Difference(amount, _standard_error(apart, self.counts))
        errors = (self.standard_error, other.standard_error)
        if None in errors:
            return Difference(amount, None)
        return Difference(amount, math.hypot(*(error for error in errors if error is not None)))


def _standard_error(sums: Sequence[float], counts: Sequence[int]) -> float | None:
    num_rows = len(counts)
    if num_rows < 2:
        return None
    total = sum(counts)
    mean = math.fsum(sums) / total
    squares = math.fsum((one - mean * count) ** 2 for one, count in zip(sums, counts, strict=True))
    return math.sqrt(squares * num_rows / (num_rows - 1)) / total
