"""The states of a pipeline's rank during one optimizer step, from the schedule alone.

A rank's bytes depend on where it stands in the step: which of its stages have run and have
gradients, and how many microbatches it holds between their forward and their backward. That is the
same for every model, so it is walked once for each schedule.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from llama_core.schedules.actions import Kind
from llama_core.schedules.registry import remembered_schedule
from llama_core.schedules.walk import Held, StepState, walk


class Moment(NamedTuple):
    """A time at which a rank is in some state."""

    number: int
    """The number of its action."""
    held: Held


@lru_cache(maxsize=4096)
def step_states(
    schedule: str, *, num_ranks: int, num_microbatches: int, num_chunks: int, pp_rank: int, num_skipped: int
) -> tuple[tuple[StepState, tuple[Moment, ...]], ...]:
    """Return a rank's states, each with the moments, in order, at which it may hold most.

    Args:
        schedule: the name of the schedule.
        num_ranks: ranks of the pipeline.
        num_microbatches: those to walk.
        num_chunks: stages per rank, for a schedule that takes chunks.
        pp_rank: the rank.
        num_skipped: further microbatches between a stage's first and last one that are held but not
            walked.
    """
    built = remembered_schedule(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
    )
    seen: dict[StepState, dict[Held, int]] = {}
    for number, turn in enumerate(walk(built, pp_rank, num_skipped=num_skipped)):
        seen.setdefault(_representative(turn.state), {}).setdefault(turn.held, number)
    found = []
    for state, numbers in seen.items():
        moments = [Moment(numbers[held], held) for held in _fullest(numbers)]
        found.append((state, tuple(sorted(moments))))
    return tuple(found)


def _representative(state: StepState) -> StepState:
    """Return the state that stands for all in which the estimate has the same bytes."""
    return state._replace(
        is_last=state.is_last and state.kind is not Kind.FORWARD,
        # with several stages, other stages' groups release the buffer of the last reduction
        last_backward=state.last_backward if len(state.progress) == 1 else None,
    )


def _fullest(amounts: Iterable[Held]) -> list[Held]:
    """Return the amounts that no other one covers."""

    def total(held: Held) -> int:
        return sum(held.in_flight) + sum(held.deferred) + held.messages

    kept: list[Held] = []
    # from the largest, because an amount is only covered by one whose total is at least as large
    for held in sorted(amounts, key=total, reverse=True):
        if not any(_covers(other, held) for other in kept):
            kept.append(held)
    return kept


def _covers(one: Held, other: Held) -> bool:
    """Return whether there is at least as much of everything."""
    if one.messages < other.messages:
        return False
    own = one.in_flight + one.deferred
    others = other.in_flight + other.deferred
    return all(amount >= least for amount, least in zip(own, others, strict=True))
