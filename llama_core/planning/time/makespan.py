"""The time of a pipeline with uneven stages: the plan's own action lists, simulated with a time for every stage."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.kernels import Pass
from llama_core.schedules.actions import Action, Kind, inputs
from llama_core.schedules.registry import build_schedule

EXACT_UNITS = 4
"""Microbatches per rank after which every further unit of microbatches takes as long as the previous one."""


class Span(NamedTuple):
    """One optimizer step of a pipeline, in the same time unit as its passes."""

    makespan: float
    """Time from the first start to the last end."""
    busy: float
    """Work of the busiest rank."""

    @property
    def bubble(self) -> float:
        """Idle time of that rank."""
        return self.makespan - self.busy


class _Step(NamedTuple):
    """One action, in an order where each action comes after those it waits for."""

    rank: int
    stage: int
    kind: Kind
    waits: tuple[tuple[int, bool], ...]
    """The actions that have to end first, by position in the order, and whether another rank runs them."""


def span(plan: ParallelPlan, passes: Sequence[Pass], hop: float = 0.0, *, exact_units: int = EXACT_UNITS) -> Span:
    """Return the time of the schedule of ``plan``.

    Each action starts as soon as its rank is free and its input has arrived. A step of very many microbatches is
    extrapolated from two shorter ones.

    Args:
        plan: the plan.
        passes: the time of one action of every stage: its forward, and its whole backward.
        hop: time to send an output or a gradient to another rank; only the receiver waits for it.
        exact_units: microbatches per rank up to which (and a little beyond) the whole step is simulated.
    """
    count = plan.num_microbatches
    if plan.pp == 1:
        return Span(count * sum(passes[0]), count * sum(passes[0]))
    period = 2 * plan.pp  # Chimera's pairs come in units of this many
    clocked = min(count, exact_units * plan.pp + count % period)
    shorter = _clock(plan, clocked, passes, hop)
    if clocked == count:
        return shorter
    longer = _clock(plan, clocked + period, passes, hop)
    later_periods = (count - clocked) / period - 1
    more_work = longer.busy - shorter.busy
    # Stages of unequal times wait less and less for each other (in interleaved 1F1B still after many units), so that
    # the last period may seem to cost less than its work. Every later one costs at least that.
    pace = max(longer.makespan - shorter.makespan, more_work)
    return Span(longer.makespan + later_periods * pace, longer.busy + later_periods * more_work)


def _clock(plan: ParallelPlan, num_microbatches: int, passes: Sequence[Pass], hop: float) -> Span:
    halves = [backward / 2 for _, backward in passes]
    times = {
        Kind.FORWARD: [forward for forward, _ in passes],
        Kind.BACKWARD: [backward for _, backward in passes],
        Kind.INPUT_GRADIENT: halves,
        Kind.WEIGHT_GRADIENT: halves,
    }
    free = [0.0] * plan.pp
    busy = [0.0] * plan.pp
    ends: list[float] = []
    for rank, stage, kind, waits in _order(plan.schedule, plan.pp, num_microbatches, plan.num_chunks):
        start = max(free[rank], *(ends[place] + hop * elsewhere for place, elsewhere in waits), 0.0)
        free[rank] = start + times[kind][stage]
        busy[rank] += times[kind][stage]
        ends.append(free[rank])
    return Span(max(free), max(busy))


@lru_cache(maxsize=32)
def _order(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[_Step, ...]:
    """Return the actions of all ranks, each after those it waits for."""
    schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    steps: list[_Step] = []
    placed: dict[Action, tuple[int, int]] = {}  # position in the order, and rank
    waiting = [list(reversed(actions)) for actions in schedule.actions]
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions and all(before in placed for before in inputs(actions[-1], schedule.num_stages)):
                action = actions.pop()
                found = [placed[before] for before in inputs(action, schedule.num_stages)]
                waits = tuple((place, other != rank) for place, other in found)
                placed[action] = (len(steps), rank)
                steps.append(_Step(rank, action.stage, action.kind, waits))
    return tuple(steps)
