"""The best values at an edge of their grid, where a better one may lie beyond, and the next value to try."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from llama_core.config.section import LARGEST
from llama_core.sweep.grid import GridValue, complaints
from llama_core.sweep.naming import key_in_words, value_in_words

Number = int | float
Settings = Mapping[str, GridValue]
NOMINAL = frozenset({"training.seed"})
"""Keys with numbers that are neither more nor less."""
_COSTS = frozenset({"training.steps", "parallel.gpus", "launch.nodes"})
"""Keys of which more is better, at its price: an edge of their grid says nothing. So are the sizes of a model."""
_ROUND = (1, 2, 3, 5, 10)
"""What people write before a power of ten."""


@dataclass(frozen=True)
class Edge:
    """The best value of a key is the largest or smallest of its grid."""

    key: str
    value: Number
    end: Literal["largest", "smallest"]
    next: Number
    """The value that continues the grid."""

    def sentence(self, keys: Iterable[str]) -> str:
        """Return what it means; ``keys`` are those of the grid."""
        name = key_in_words(self.key, keys)
        value, following = (value_in_words(number) for number in (self.value, self.next))
        return f"The best {name}, {value}, is the {self.end} in the grid: try {following}."


def edges(ranked: Sequence[Settings], every: Sequence[Settings]) -> Iterator[Edge]:
    """Yield each edge of the grid that the best element lies at.

    Args:
        ranked: the settings of the elements with a result, the best first.
        every: those of all elements, also of those that failed or could not run.
    """
    for key, value in ranked[0].items() if ranked else ():
        values = numbers_of(every, key)
        if not _has_optimum(key) or not values or len(numbers_of(ranked, key)) < 2:  # nothing says that it matters
            continue
        end: Literal["largest", "smallest"] = "largest" if value == values[-1] else "smallest"
        inwards = values[::-1] if end == "largest" else values
        following = _next(inwards)
        if value == inwards[0] and following is not None and not any(complaints(key, following)):
            yield Edge(key, inwards[0], end, following)


def _has_optimum(key: str) -> bool:
    return key not in NOMINAL | _COSTS and not key.startswith("architecture.")


def numbers_of(settings: Iterable[Settings], key: str) -> list[Number]:
    """Return the different values of a key, ascending; empty if one of them is no number to calculate with."""
    values = {own[key] for own in settings if key in own}
    numbers = [
        value for value in values if isinstance(value, Number) and not isinstance(value, bool) and abs(value) < LARGEST
    ]
    return sorted(numbers) if len(numbers) == len(values) else []


def is_geometric(values: Sequence[Number]) -> bool:
    """Return whether ascending values are spaced more evenly by their ratios than by their differences."""
    if len(values) < 2 or values[0] <= 0:
        return False
    if len(values) == 2:
        return values[1] >= 2 * values[0]
    ratios = [math.log(later / earlier) for earlier, later in pairwise(values)]
    differences = [later - earlier for earlier, later in pairwise(values)]
    return _unevenness(ratios) < _unevenness(differences)


def _unevenness(steps: Sequence[float]) -> float:
    return statistics.pstdev(steps) / statistics.fmean(steps)


def _next(inwards: Sequence[Number]) -> Number | None:
    """Return the value beyond the first one of a row of values, at its spacing; None if no other integer follows."""
    first, second = inwards[:2]
    are_integers = isinstance(first, int) and isinstance(second, int)
    if is_geometric(sorted(inwards)):
        following = first * first / second
        rounded = _rounded(following)
        lies_beyond = (rounded < first) == (following < first) and rounded != first
        if lies_beyond and not _is_doubled_or_tenfold(inwards):
            following = rounded
    else:
        following = first + (first - second)
        if following <= 0 < first:
            following = first / 2
    if are_integers:
        return None if round(following) == first else round(following)
    return float(f"{following:.6g}")


def _is_doubled_or_tenfold(values: Sequence[Number]) -> bool:
    """Return whether all values follow from each other by one power of two, or of ten."""
    ratios = [one / other for one, other in pairwise(values)]
    powers = [round(math.log(ratios[0], base)) for base in (2, 10)]
    steps = (base**power for base, power in zip((2.0, 10.0), powers, strict=True))
    return any(all(math.isclose(ratio, step, rel_tol=1e-6) for ratio in ratios) for step in steps)


def _rounded(value: float) -> float:
    """Return the nearest value by its ratio of those that people write: 1, 2, 3 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return min((power * digit for digit in _ROUND), key=lambda near: abs(math.log(near / value)))
