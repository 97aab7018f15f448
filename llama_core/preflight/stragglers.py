"""Which ranks fall behind while all of them train, by what each measures of itself between steps.

How long a rank takes for its part of a step says little: its stage of a pipeline, the experts that many tokens choose
or long documents may give it more to do, and where ranks wait for each other all take the same time. So each rank
measures what does not depend on its work: a product of matrices that is the same on all of them, and how long it
was ready without a core.
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


_CORE_WAIT = Signal("it was ready without a core {:.0f} % of the time, and {:.0f} % on its peers", 0.0, 0.4, 100)
_PRODUCT = "a product of matrices takes {:.3g} ms, and {:.3g} ms on its peers"
SIGNALS: Mapping[str, Mapping[str, Signal]] = {
    "cuda": {PRODUCT: Signal(_PRODUCT, 0.15, scale=1e3), CORE_WAIT: _CORE_WAIT},
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
        self._behind: set[tuple[str, int]] = set()

    def look(self, step: int, values: Mapping[str, Sequence[float]]) -> Iterator[RankChange]:
        """Yield the ranks that begin or cease to fall behind.

        Args:
            step: the step that the values were measured after.
            values: those of all ranks, in order, by the name of the signal; a signal that any rank cannot measure, for
                which it has 0, is left out.
        """
        self._looks.append((step, values))
        if len(self._looks) < (self._looks.maxlen or 0):
            return
        for name, signal in self._signals.items():
            yield from self._changed(name, signal)

    def forget(self) -> None:
        """Forget all looks: the run has gone back to an earlier step."""
        self._looks.clear()

    def _changed(self, name: str, signal: Signal) -> Iterator[RankChange]:
        looks = [values[name] for _, values in self._looks]
        if not all(map(all, looks)):
            return
        usual = [median_low(of_rank) for of_rank in zip(*looks, strict=True)]
        slow = outliers(usual, share=signal.share, least=signal.least)
        for rank, value in enumerate(usual):
            was_behind = (name, rank) in self._behind
            if was_behind == (rank in slow):
                continue
            self._behind ^= {(name, rank)}
            peers = slow.get(rank, median([*usual[:rank], *usual[rank + 1 :]]))
            text = signal.told.format(signal.scale * value, signal.scale * peers)
            yield RankChange(rank, name, text, self._since(looks, rank, slow, peers, signal), is_over=was_behind)

    def _since(
        self, looks: Sequence[Sequence[float]], rank: int, slow: Mapping[int, float], peers: float, signal: Signal
    ) -> int:
        """Return the first step of the looks that agree with the newest about a rank, back to back."""
        limit = peers + max(signal.share * peers, signal.least)
        steps = [step for step, _ in self._looks]
        since = steps[-1]
        for step, values in zip(reversed(steps), reversed(looks), strict=True):
            if (values[rank] > limit) != (rank in slow):
                break
            since = step
        return since
