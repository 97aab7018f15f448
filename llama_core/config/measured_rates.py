"""What a machine's operations were measured to take: seconds by kind of operation and by size.

A kind is a name such as ``product bf16 forward``; its sizes are numbers, such as a product's rows, columns and outputs.
Some sizes were measured by themselves, because a run asked for them. The others lie between the points of a grid: there
the logarithm of the time is interpolated linearly over the logarithms of the sizes, so that it is exact for any power
law. Below a grid a time is that of its smallest size, since starting an operation takes as long; above it, and where a
size has one value on the grid, the time grows as the work does.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import exp, log, prod
from typing import Any, Self

Sizes = tuple[int, ...]
"""The numbers that a measured time depends on, all at least 1."""


@dataclass(frozen=True)
class Measured:
    """The seconds of one kind of operation, by its sizes."""

    points: Mapping[Sizes, float] = field(default_factory=dict)
    """Seconds of sizes that were measured by themselves."""
    axes: tuple[tuple[int, ...], ...] = ()
    """The values of each size on the grid, ascending; empty without a grid."""
    grid: tuple[float, ...] = ()
    """Seconds at the grid's points, the last size varying fastest."""
    growth: tuple[float, ...] = ()
    """The power of each size with which the work grows."""

    def seconds(self, sizes: Sizes) -> float | None:
        """Return the seconds of an operation of these sizes; None if nothing was measured that tells it."""
        if sizes in self.points:
            return self.points[sizes]
        if not self.grid:
            return None
        beyond = 1.0
        cells = []
        for size, axis, power in zip(sizes, self.axes, self.growth, strict=True):
            if len(axis) == 1 or size > axis[-1]:
                beyond *= (size / axis[-1]) ** power
            cells.append(_cell(size, axis))
        logarithm = 0.0
        for corner in product((0, 1), repeat=len(cells)):
            weight = prod(share if upper else 1 - share for (_, share), upper in zip(cells, corner, strict=True))
            if weight:
                logarithm += weight * log(self.grid[self._place(cells, corner)])
        return beyond * exp(logarithm)

    def _place(self, cells: Sequence[tuple[int, float]], corner: Sequence[int]) -> int:
        """Return the place in ``grid`` of a corner of a cell."""
        place = 0
        for (lower, _), upper, axis in zip(cells, corner, self.axes, strict=True):
            place = place * len(axis) + lower + upper
        return place

    def with_points(self, points: Mapping[Sizes, float]) -> "Measured":
        """Return the same with more sizes that were measured by themselves."""
        return Measured({**self.points, **points}, self.axes, self.grid, self.growth)

    def as_dict(self) -> dict[str, Any]:
        """Return the measurements as a record."""
        points = {"x".join(map(str, sizes)): seconds for sizes, seconds in sorted(self.points.items())}
        return {"points": points, "axes": self.axes, "grid": self.grid, "growth": self.growth}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the measurements that ``as_dict`` recorded.

        Raises:
            ValueError, TypeError, KeyError: if the record is none.
        """
        points = {tuple(map(int, sizes.split("x"))): _positive(value) for sizes, value in record["points"].items()}
        axes = tuple(tuple(map(int, axis)) for axis in record["axes"])
        grid = tuple(map(_positive, record["grid"]))
        growth = tuple(map(float, record["growth"]))
        if len(grid) != (prod(map(len, axes)) if axes else 0) or len(growth) != len(axes):
            raise ValueError("a grid does not have a number for each of its points")
        if any(sorted(set(axis)) != list(axis) for axis in axes):
            raise ValueError("the sizes of a grid do not ascend")
        return cls(points, axes, grid, growth)


def _positive(value: float) -> float:
    seconds = float(value)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{value} is no time in seconds")
    return seconds


def _cell(size: int, axis: Sequence[int]) -> tuple[int, float]:
    """Return the lower point of the interval of an axis that holds ``size``, and how far into it that lies, 0 to 1."""
    if size <= axis[0] or len(axis) == 1:
        return 0, 0.0
    if size >= axis[-1]:
        return len(axis) - 2, 1.0
    lower = bisect_right(axis, size) - 1
    return lower, log(size / axis[lower]) / log(axis[lower + 1] / axis[lower])


@dataclass(frozen=True)
class MeasuredRates:
    """What operations take on a rank, if so many ranks compute on a machine at once."""

    kinds: Mapping[str, Measured] = field(default_factory=dict)
    """By name of the kind."""
    layers_share: tuple[float, float] = (1.0, 1.0)
    """What the forward and the backward of whole layers took, over the sums of their operations, each measured alone:
    in a layer caches are less warm, and Python runs between operations."""
    ends_share: tuple[float, float] = (1.0, 1.0)
    """The same of the embedding, the final norm and the head with its loss."""

    def seconds(self, kind: str, sizes: Sizes) -> float | None:
        """Return the seconds of an operation; None if nothing was measured that tells it."""
        measured = self.kinds.get(kind)
        return None if measured is None else measured.seconds(sizes)

    def with_points(self, points: Mapping[tuple[str, Sizes], float]) -> "MeasuredRates":
        """Return the same with more sizes that were measured by themselves."""
        kinds = dict(self.kinds)
        for (kind, sizes), seconds in points.items():
            kinds[kind] = kinds.get(kind, Measured()).with_points({sizes: seconds})
        return replace(self, kinds=kinds)

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)
