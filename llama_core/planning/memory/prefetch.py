"""The weights that ``fully_shard`` fetches for a stage that is not at work, under ZeRO 3, which drops them after use.

A backward fetches the next group of weights while the current one computes. It finds that group by going back through
the step's forwards, from the newest one of the current group. With several forwards under way, that forward belongs to
another microbatch. Within a stage it still leads to the right layer. Out of a stage it leads to the last layer of the
stage that ran before, which is not next: the fetched layer then waits until that stage runs.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from llama_core.schedules.actions import Kind


class Prefetch(NamedTuple):
    """The stages whose last layer is fetched before it is needed."""

    waiting: frozenset[int] = frozenset()
    """Fetched as a forward or backward begins."""
    ahead: int | None = None
    """Fetched by the backward itself as it leaves its stage."""


class Prefetches:
    """The prefetches of one rank over the forwards and backwards of a step.

    Args:
        has_root: whether the rank holds weights outside the layers and the untied embedding. Every stage's forward
            gathers them, and the search for the last layer begins at their backward; out of a stage the search
            leads back to them, and they are there.
        single_groups: stages of a single layer, which is at work when it would be fetched.
        closed: stages out of which no search leads: those that begin with a frozen embedding, which no backward needs.
    """

    def __init__(self, *, has_root: bool, single_groups: Collection[int], closed: Collection[int]) -> None:
        self.has_root, self.single_groups, self.closed = has_root, single_groups, closed
        self._last_forward: int | None = None
        self._before: dict[int, list[int | None]] = defaultdict(list)  # what ran before each forward of a stage
        self._forwards: list[int] = []
        self._waiting: frozenset[int] = frozenset()

    def enter(self, stage: int, kind: Kind) -> Prefetch:
        """Begin a forward or backward of a stage, and return the prefetches it finds and makes."""
        found, self._waiting = self._waiting, self._waiting - {stage}
        if kind is Kind.FORWARD:
            self._before[stage].append(self._last_forward)
            self._forwards.append(stage)
            self._last_forward = stage
            return Prefetch(found)
        before, newest = self._before[stage].pop(), self._forwards.pop()
        if self.has_root:  # the search begins before the layers, where the stage at work needs its last layer
            self._waiting |= {newest} - {stage}
            return Prefetch(found | self._waiting)
        at_work = (before == stage and stage in self.single_groups) or stage in self.closed
        ahead = None if before is None or at_work or before in self._waiting else before
        if ahead is not None:
            self._waiting |= {ahead}
        return Prefetch(found, ahead)
