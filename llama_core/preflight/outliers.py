"""Which of several values are far above the others: a test that a few bad values do not upset."""

from bisect import bisect_left
from collections.abc import Sequence
from statistics import NormalDist

FALSE_ALARM = 1e-6
"""How likely noise may make an outlier of any of the values. A job that looks at its ranks every minute then has one
false alarm in two years, whatever their number."""
SIGMA_OF_MAD = 1.4826
"""The standard deviation of normal noise over its median absolute deviation."""


def deviations(num_values: int) -> float:
    """Return from how many standard deviations above the median one of ``num_values`` values is an outlier.

    Normal noise makes any of them exceed these with a probability of at most ``FALSE_ALARM`` (Bonferroni's
    correction): 5.2 for 8 values, 6.4 for 8,192.
    """
    return -NormalDist().inv_cdf(FALSE_ALARM / num_values)


def outliers(values: Sequence[float], *, share: float, least: float = 0.0) -> dict[int, float]:
    """Return the places of values far above the others, each with the median of the others.

    A value is far above the others if it exceeds their median by ``deviations(len(values))``, by ``share`` of the
    median, and by ``least``. Among two values, and among many that hardly differ, the deviations say nothing, and the
    floors decide. The median is that of the others alone, so that one of two values can be an outlier, and one slow
    node of two.

    Args:
        values: at least none; a single one has no others.
        share: the floor as a share of the median: 1 for twice as much.
        least: the floor in the unit of the values.
    """
    if len(values) < 2:
        return {}
    ordered = sorted(values)
    # no median of others is below this one, so that most values need no look at all the others
    lowest = ordered[(len(ordered) - 2) // 2]
    limit = deviations(len(values))
    # Half of the ranks may be slow. Without one of them the median is one of very few values, so this stays small.
    distances: dict[float, list[float]] = {}
    found = {}
    for place, value in enumerate(values):
        if value <= lowest + max(share * lowest, least):
            continue
        usual = _median_without(ordered, value)
        if usual not in distances:
            distances[usual] = sorted(abs(other - usual) for other in ordered)
        sigma = SIGMA_OF_MAD * _median_without(distances[usual], abs(value - usual))
        if value > usual + max(limit * sigma, share * usual, least):
            found[place] = usual
    return found


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of at least two ``ordered`` values but one, which is among them."""
    place = bisect_left(ordered, value)
    half, is_odd = divmod(len(ordered) - 1, 2)
    upper = ordered[half + (half >= place)]
    if is_odd:
        return upper
    return (ordered[half - 1 + (half - 1 >= place)] + upper) / 2
