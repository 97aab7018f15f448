"""Fewer points for a long series, without losing a spike."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

MAX_POINTS = 600
"""Most points of a line, to keep the page of a long run small: a figure is some 1,000 px wide."""


def buckets(length: int, most_points: int, points_per_bucket: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of equal parts of a series, few enough to leave at most ``most_points`` in all."""
    number = max(1, (most_points - 2) // points_per_bucket)  # the first and the last point are kept too
    yield from pairwise(np.linspace(0, length, number + 1).astype(int).tolist())


def kept(*series: "pd.Series[Any]", most_points: int = MAX_POINTS) -> npt.NDArray[np.intp]:
    """Return the positions to draw, in order, of series that share their x.

    Up to ``most_points``, this draws all of them. With more, it draws the first, the last, and in every bucket the
    lowest and the highest finite value of each series. A bucket with values that are not finite keeps the first of
    them, so that gaps stay.
    """
    length = len(series[0])
    if length <= most_points:
        return np.arange(length)
    columns = [np.asarray(values, dtype=float) for values in series]
    finite = [np.isfinite(column) for column in columns]
    per_bucket = sum(2 if known.all() else 3 for known in finite)
    positions = {0, length - 1}
    for begin, end in buckets(length, most_points, per_bucket):
        for column, known in zip(columns, finite, strict=True):
            inside = begin + np.flatnonzero(known[begin:end])
            if inside.size:
                positions |= {int(inside[column[inside].argmin()]), int(inside[column[inside].argmax()])}
            if inside.size < end - begin:
                positions.add(begin + int(np.argmin(known[begin:end])))
    return np.array(sorted(positions))
