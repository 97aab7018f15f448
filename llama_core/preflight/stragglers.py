"""Which ranks fall behind while all of them train, by what each measures of itself between steps.

How long a rank takes for its part of a step says little: its stage of a pipeline, the experts that many tokens choose
or long documents may give it more to do, and where ranks wait for each other all take the same time. So each rank
measures what does not depend on its work: a product of matrices that is the same on all of them, and how long it
was ready without a core. It is compared with its peers, and, where they are many, also with its own first looks beside
theirs: that shows less of a slowdown, as devices of one kind and places in a rack differ for as long as a run lasts.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple

from llama_core.preflight.checks import PRODUCT
from llama_core.preflight.outliers import FALSE_ALARM, outliers

CORE_WAIT = "core wait"
FIRST_LOOKS = 30
"""Looks whose lower median later ones are compared with."""
MIN_RANKS_FOR_SLOWDOWN = 64
"""The deviations of fewer ranks may be too low by chance, and only floors well above all noise name nobody wrongly."""
MIN_WINDOW = 6
DISTURBED = 0.01
"""The share of a healthy rank's looks that something else on its node may disturb."""


def window(num_ranks: int) -> int:
    """Return by how many looks ranks are judged. Of a rank's last ones the lower median counts: half may be disturbed.

    They are as few as make it improbable, by ``FALSE_ALARM``, that more than half of any rank's looks are disturbed
    though it is healthy: 6 for 2 ranks, 8 for 64, 12 for 8,192.
    """
    looks = MIN_WINDOW
    while num_ranks * _more_than_half_disturbed(looks) > FALSE_ALARM:
        looks += 2
    return looks


def _more_than_half_disturbed(looks: int) -> float:
    """Return the probability, but for terms that are smaller by ``DISTURBED``."""
    more = looks // 2 + 1
    return float(math.comb(looks, more) * DISTURBED**more)


@dataclass(frozen=True)
class Signal:
    """Something that every rank measures of itself."""

    told: str
    """A clause with places for the value of a rank and for that of its peers."""
    share: float
    """How far above its peers a rank must be at least, as a share of what they have."""
    least: float = 0.0
    """The same in the unit of the value."""
    scale: float = 1.0
    """What a value is multiplied by to be told."""
    slowdown: float = 0.0
    """By which share of its first looks a rank must have become slower at least, more than its peers of theirs; 0 if
    first looks do not matter."""


_CORE_WAIT = Signal("it was ready without a core {:.0f} % of the time, and {:.0f} % on its peers", 0.0, 0.4, 100)
_PRODUCT = "a product of matrices takes {:.3g} ms, and {:.3g} ms on its peers"
_SLOWDOWN = "; {:.2f} times as long as when the run began, and {:.2f} times on its peers"
SIGNALS: Mapping[str, Mapping[str, Signal]] = {
    "cuda": {PRODUCT: Signal(_PRODUCT, 0.15, scale=1e3, slowdown=0.08), CORE_WAIT: _CORE_WAIT},
    # other work shares a CPU's caches, and ranks of one machine share its memory
    "cpu": {PRODUCT: Signal(_PRODUCT, 0.6, scale=1e3), CORE_WAIT: _CORE_WAIT},
}
"""By type of device."""


class RankChange(NamedTuple):
    """A rank that begins or ceases to fall behind."""

    rank: int
    signal: str
    """The name of what was measured."""
    text: str
    since_step: int
    is_over: bool


class StragglerJudge:
    """Judges ranks by what they have measured in the last looks.

    Args:
        signals: what they measure, by name.
        num_ranks: how many there are.
    """

    def __init__(self, signals: Mapping[str, Signal], num_ranks: int) -> None:
        self._signals = signals
        self._looks: deque[tuple[int, Mapping[str, Sequence[float]]]] = deque(maxlen=window(num_ranks))
        self._first = {
            name: _FirstLooks()
            for name, signal in signals.items()
            if signal.slowdown and num_ranks >= MIN_RANKS_FOR_SLOWDOWN
        }
        self._behind: set[tuple[str, int]] = set()

    def look(self, step: int, values: Mapping[str, Sequence[float]]) -> Iterator[RankChange]:
        """Yield the ranks that begin or cease to fall behind.

        Args:
            step: the step that the values were measured after.
            values: those of all ranks, in order, by the name of the signal; a signal that any rank cannot measure, for
                which it has 0, is left out.
        """
        self._looks.append((step, values))
        for name, first in self._first.items():
            first.look(values[name])
        if len(self._looks) < (self._looks.maxlen or 0):
            return
        for name, signal in self._signals.items():
            yield from self._changed(name, signal)

    def forget(self) -> None:
        """Forget all looks but the first: the run has gone back to an earlier step."""
        self._looks.clear()

    def _changed(self, name: str, signal: Signal) -> Iterator[RankChange]:
        looks = [values[name] for _, values in self._looks]
        if not all(map(all, looks)):
            return
        usual = [median_low(of_rank) for of_rank in zip(*looks, strict=True)]
        slow = outliers(usual, share=signal.share, least=signal.least)
        first = self._first[name].usual if name in self._first else ()
        slower = [value / own for value, own in zip(usual, first, strict=True)] if first else []
        slowed = outliers(slower, share=signal.slowdown)
        for rank, value in enumerate(usual):
            was_behind = (name, rank) in self._behind
            is_behind = rank in slow or rank in slowed
            if was_behind == is_behind:
                continue
            self._behind ^= {(name, rank)}
            peers = slow[rank] if rank in slow else median([*usual[:rank], *usual[rank + 1 :]])
            limit = peers + max(signal.share * peers, signal.least)
            text = signal.told.format(signal.scale * value, signal.scale * peers)
            if first:
                of_peers = slowed[rank] if rank in slowed else median([*slower[:rank], *slower[rank + 1 :]])
                limit = min(limit, first[rank] * of_peers * (1 + signal.slowdown))
                text += _SLOWDOWN.format(slower[rank], of_peers)
            since = self._since([look[rank] > limit for look in looks], is_behind=is_behind)
            yield RankChange(rank, name, text, since, is_over=was_behind)

    def _since(self, are_slow: Sequence[bool], *, is_behind: bool) -> int:
        """Return the first step of the looks that agree with the newest about a rank, back to back."""
        steps = [step for step, _ in self._looks]
        since = steps[-1]
        for step, is_slow in zip(reversed(steps), reversed(are_slow), strict=True):
            if is_slow != is_behind:
                break
            since = step
        return since


class _FirstLooks:
    """What ranks usually measured when the run began."""

    def __init__(self) -> None:
        self._looks: list[Sequence[float]] = []
        self.usual: Sequence[float] = ()
        """The lower median of each rank's ``FIRST_LOOKS``; empty until then."""

    def look(self, values: Sequence[float]) -> None:
        """Take part of what is usual, if that is not known yet and every rank could measure."""
        if self.usual or not all(values):
            return
        self._looks.append(values)
        if len(self._looks) == FIRST_LOOKS:
            self.usual = [median_low(of_rank) for of_rank in zip(*self._looks, strict=True)]
            self._looks.clear()
