"""Is a result slower than earlier ones of the same work? The threshold is the noise of the earlier results themselves.

The statistic is the distance of the new median step time (in logarithms) from the median of the ``RECENT`` latest
earlier ones, over the noise between them. The noise is the upper quartile of the differences between all pairs. One
strange result in eight does not set it; a second speed that the machine has on one night in four does.

The statistic does not depend on the unit or on the size of the noise. Its distribution without a change is therefore
known for normal noise and a number of earlier results; it is simulated here, and gives the p-value.

Source: quantiles of pairwise differences as a scale: Rousseeuw and Croux 1993, Alternatives to the median absolute
deviation, JASA 88, section 3; there the lower quartile, which two speeds do not move.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

ALARM_RATE = 0.01
"""Probability of at least one false alarm in a sweep in which nothing has changed, however many elements it has."""
FEWEST = 4
"""Fewest earlier results for a verdict: with fewer, their noise is hardly known."""
WINDOW = 12
"""Most earlier results that are looked at, the latest ones."""
RECENT = 5
"""The latest of them, whose median is the speed to expect. Three results at a new speed make it the expected one."""

_SIMULATED = 100_000
"""Draws of the distribution without a change; the smallest p-value is one over that."""
_QUANTILE = 0.75
"""Share of the pairs that differ by at most the noise."""
_OF_NORMAL = 0.6147
"""Standard deviation of normal noise over that quantile, which is 1.1503 √2 of them."""
_MIN_NOISE = 1e-6
"""Noise of equal results: a clock's resolution."""


def expected(earlier: Sequence[float]) -> float:
    """Return the value to expect after earlier ones, oldest first."""
    import numpy as np

    return float(np.median(earlier[-RECENT:]))


def noise(earlier: Sequence[float]) -> float:
    """Return the relative standard deviation between earlier step times, robustly; at least two are needed."""
    import numpy as np

    return _OF_NORMAL * float(_spread(np.log(np.asarray(earlier[-WINDOW:], dtype=float))))


def p_value(seconds: float, earlier: Sequence[float], own_noise: float = 0.0) -> float:
    """Return the probability that chance alone puts a step time this far above the earlier ones, or farther.

    A small value means slower, one near 1 means faster.

    Args:
        seconds: the new median step time.
        earlier: the earlier ones, oldest first, at least ``FEWEST``.
        own_noise: relative standard error of the new one; replaces the noise between the earlier ones if it is larger.
    """
    import numpy as np

    past = np.log(np.asarray(earlier[-WINDOW:], dtype=float))
    scale = max(float(_spread(past)), own_noise / _OF_NORMAL, _MIN_NOISE)
    statistic = (math.log(seconds) - float(np.median(past[-RECENT:]))) / scale
    null = _without_change(len(past))
    above = len(null) - int(np.searchsorted(null, statistic, side="left"))
    return (above + 1) / (len(null) + 1)


def alarms(p_values: Mapping[str, float], rate: float = ALARM_RATE) -> set[str]:
    """Return the names whose p-values are significant together, with one false alarm or more at ``rate`` at most.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    found: set[str] = set()
    for place, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        if p_values[name] > rate / (len(p_values) - place):
            break
        found.add(name)
    return found


@cache
def _without_change(num_earlier: int) -> "np.ndarray[Any, Any]":
    """Return sorted statistics of normal noise without a change."""
    import numpy as np

    drawn = np.random.default_rng(0).standard_normal((_SIMULATED, num_earlier + 1))
    past = drawn[:, :-1]
    new = drawn[:, -1]
    return np.sort((new - np.median(past[:, -RECENT:], axis=1)) / _spread(past))


def _spread(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return the upper quartile of the differences between all pairs of the values along the last axis."""
    import numpy as np

    one, other = np.triu_indices(values.shape[-1], 1)
    place = math.ceil(_QUANTILE * len(one)) - 1
    return np.asarray(np.partition(np.abs(values[..., one] - values[..., other]), place, axis=-1)[..., place])
