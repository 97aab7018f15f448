"""Recoveries: what passed between the last step of an attempt and the first of the next one, part by part.

It is read from records that a run has anyway: the first rank's activities, the steps, and how each rank ended.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from llama_core.launch.attempts import RankExit, read_all_rank_exits
from llama_core.records.activity import IN_PLACE, Activity, read_activities
from llama_core.records.directory import RunDirectory
from llama_core.records.goodput import TakenStep, by_attempt, taken_steps

if TYPE_CHECKING:
    import pyarrow as pa

NOTICED = "until a rank ended"
ENDED = "until all ranks had ended"
STOPPED = "until it was submitted again"
AGAIN = "until its job started ranks again"
QUEUED = "in the queue"
FIRST_STEP = "in the first step"
_CACHE = "torch keeps compiled blocks, if TORCHINDUCTOR_CACHE_DIR is on a disk that stays"
SHORTENED_BY: Mapping[str, str] = {
    NOTICED: "launch.collective_timeout_s and launch.hang_timeout_s say how soon a silent rank is noticed",
    QUEUED: "launch.spare_nodes needs no queue, and launch.min_nodes lets a job start on fewer nodes",
    "compiling the blocks": _CACHE,
    FIRST_STEP: _CACHE,
}
"""The setting that shortens a part, by the part's name."""


@dataclass(frozen=True)
class Recovery:
    """The time from the last sign of life of an attempt to the end of the next one's first step."""

    attempt: int
    """The attempt that went on, from 2."""
    parts: Mapping[str, float]
    """Seconds of each part, in order."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts.values())


def read_recoveries(run: RunDirectory, metrics: "pa.Table") -> list[Recovery]:
    """Return the recovery before each attempt but the first, oldest first.

    Args:
        run: the run.
        metrics: ``COLUMNS_OF_TIMES`` of what ``read_metrics`` has returned.

    Raises:
        RunDirectoryError: naming a file that is damaged.
    """
    activities = read_activities(run)
    if len(by_attempt(activities)) < 2:
        return []  # without a look at the exits of thousands of ranks
    steps = sorted(taken_steps(run, metrics), key=lambda step: step.ended)
    return list(recoveries(activities, steps, read_all_rank_exits(run)))


def recoveries(
    activities: Sequence[Activity], steps: Sequence[TakenStep], exits: Iterable[RankExit]
) -> Iterator[Recovery]:
    """Yield the recoveries.

    Args:
        activities: what the first rank did, in order.
        steps: all steps ever taken, in order.
        exits: how each rank of each attempt ended.
    """
    ended = sorted(one.ended_at for one in exits)
    for number, (before, after) in enumerate(pairwise(by_attempt(activities)), 2):
        working = [one for one in after if one.part != "queue"]
        if not working:
            continue  # it never started
        start = working[0].since
        queued = after[0].since
        lost = max([_last_sign(before), *(step.ended for step in steps if step.ended < start)])
        own = [time for time in ended if lost <= time < start]
        marks = [(NOTICED, own[0]), (ENDED, own[-1])] if own else []
        if after[0].doing == IN_PLACE:
            marks.append((AGAIN, start))
        else:
            # A restarted job has queued since its first submission; one submitted by hand was no job in between.
            if queued > max([lost, *own]):
                marks.append((STOPPED, queued))
            marks.append((QUEUED, start))
        until_steps = [one for one in working if one.part == "startup"]
        first = next((one.since for one in working if one.part == "steps"), None)
        marks += [(one.doing, following) for one, following in zip(until_steps, _ends(until_steps, first), strict=True)]
        if first is not None:
            marks.append((FIRST_STEP, next((step.ended for step in steps if step.ended > first), first)))
        yield Recovery(number, _between(lost, marks))


def _last_sign(activities: Sequence[Activity]) -> float:
    """Return when an attempt has last done something else than wait in the queue."""
    return max((one.since for one in activities if one.part != "queue"), default=0.0)


def _ends(activities: Sequence[Activity], first_step: float | None) -> list[float]:
    """Return when each activity of a start ended; the last one at the first step, or when it began if none came."""
    begins = [one.since for one in activities]
    return [*begins[1:], begins[-1] if first_step is None else first_step] if begins else []


def _between(begin: float, marks: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds up to each mark from the one before; clocks of two machines may differ."""
    parts: dict[str, float] = {}
    for name, time in marks:
        parts[name] = parts.get(name, 0.0) + max(0.0, time - begin)
        begin = max(begin, time)
    return parts
