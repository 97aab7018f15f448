"""The time of a pipeline with uneven stages: the plan's own action lists, simulated with a time for every stage."""

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.kernels import Pass
from llama_core.schedules.actions import COMPUTATIONS

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


def forwards_alone(
    plan: ParallelPlan, forwards: Sequence[float], hop: float = 0.0, *, exact_units: int = EXACT_UNITS
) -> float:
    """Return the time of the forwards of ``plan.num_microbatches`` microbatches without any backward.

    They run as ``Pipeline.evaluate`` orders them: in waves of as many microbatches as there are ranks, of which every
    stage takes the whole wave before its rank goes on to another stage. Those of very many microbatches are
    extrapolated from two shorter runs.

    Args:
        plan: the plan.
        forwards: the time of a forward of every stage.
        hop: time to send an output to another rank; only the receiver waits for it.
        exact_units: microbatches per rank up to which (and a little beyond) all of them are simulated.
    """
    count = plan.num_microbatches
    period = 2 * plan.pp
    clocked = min(count, exact_units * plan.pp + count % period)
    shorter = _clock_forwards(plan, clocked, forwards, hop)
    if clocked == count:
        return shorter
    pace = _clock_forwards(plan, clocked + period, forwards, hop) - shorter
    return shorter + (count - clocked) / period * pace


def _clock_forwards(plan: ParallelPlan, count: int, forwards: Sequence[float], hop: float) -> float:
    """Return the time of this many forwards."""
    schedule = plan.schedule_of(count)
    free = [0.0] * plan.pp
    for first in range(0, count, plan.pp):
        wave = range(first, min(first + plan.pp, count))
        ready = dict.fromkeys(wave, 0.0)
        before: dict[int, int] = {}
        for stage, seconds in enumerate(forwards):
            for microbatch in wave:
                rank = schedule.rank_of(stage, microbatch)
                arrived = ready[microbatch]
                if before.get(microbatch, rank) != rank:
                    arrived += hop
                ready[microbatch] = max(arrived, free[rank]) + seconds
                free[rank] = ready[microbatch]
                before[microbatch] = rank
    return max(free)


def _clock(plan: ParallelPlan, num_microbatches: int, passes: Sequence[Pass], hop: float) -> Span:
    """Return the time of a step of this many microbatches."""
    schedule = plan.schedule_of(num_microbatches)
    seconds = {(stage, kind): own.of(kind) for stage, own in enumerate(passes) for kind in COMPUTATIONS}
    durations = [seconds[action.stage, action.kind] for _, action, _ in schedule.order]
    starts = schedule.starts(durations, hop)
    busy = [0.0] * plan.pp
    for (rank, _, _), duration in zip(schedule.order, durations, strict=True):
        busy[rank] += duration
    return Span(max(map(add, starts, durations)), max(busy))
