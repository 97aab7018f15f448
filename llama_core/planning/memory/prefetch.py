"""Which weights ``fully_shard`` fetches for a stage that is not at work, where it drops every layer's after use.

In stage 3 a backward fetches each group of weights while the one after it computes, and finds it by going back through
the forwards of the step from the newest one of the group at work. With several forwards under way that forward is of
another microbatch. Within a stage it leads to the right layer all the same; out of a stage, to the last layer of the
stage that ran before, whose turn is not now: it then waits until that stage runs.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from llama_core.schedules.actions import Kind


class Prefetch(NamedTuple):
    """The stages whose last layer has been fetched, or will be, for no use at once."""

    waiting: frozenset[int] = frozenset()
    """As a forward or backward begins."""
    ahead: int | None = None
    """By the backward itself, as it leaves its stage."""


class Prefetches:
    """One rank's, over the forwards and backwards of a step.

    Args:
        has_root: whether the rank holds weights outside the layers and the untied embedding. They are gathered in every
            stage's forward, and the backward of that is where the search for the last layer begins; out of a stage
            it leads back to them, which are there.
        single_groups: stages of one layer alone, which is at work when it would be fetched.
        closed: stages out of which nothing leads: those that begin with a frozen embedding, which no backward needs.
    """

    def __init__(self, *, has_root: bool, single_groups: Collection[int], closed: Collection[int]) -> None:
        self.has_root, self.single_groups, self.closed = has_root, single_groups, closed
        self._last_forward: int | None = None
        self._before: dict[int, list[int | None]] = defaultdict(list)  # what ran before each forward of a stage
        self._forwards: list[int] = []
        self._waiting: frozenset[int] = frozenset()

    def enter(self, stage: int, kind: Kind) -> Prefetch:
        """Begin a forward or backward of a stage, and return what it finds and fetches."""
        found, self._waiting = self._waiting, self._waiting - {stage}
        if kind is Kind.FORWARD:
            self._before[stage].append(self._last_forward)
            self._forwards.append(stage)
            self._last_forward = stage
            return Prefetch(found)
        before, newest = self._before[stage].pop(), self._forwards.pop()
        if self.has_root:  # the search begins before the layers, where the stage at work has a use for its last one
            self._waiting |= {newest} - {stage}
            return Prefetch(found | self._waiting)
        at_work = (before == stage and stage in self.single_groups) or stage in self.closed
        ahead = None if before is None or at_work or before in self._waiting else before
        if ahead is not None:
            self._waiting |= {ahead}
        return Prefetch(found, ahead)
