"""The situations in which a rank of a pipeline computes during one optimizer step, from the schedule alone.

A rank's bytes depend on where it stands in the step: which of its stages have run and have gradients, and how many
microbatches it holds between their forward and their backward. That is the same for every model, so it is walked once
for each schedule.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from llama_core.planning.plan import remembered_schedule
from llama_core.schedules.actions import Kind
from llama_core.schedules.walk import Held, Situation, walk


class Moment(NamedTuple):
    """A time at which a rank is in some situation."""

    number: int
    """The number of its action."""
    held: Held


@lru_cache(maxsize=4096)
def situations(
    schedule: str, *, num_ranks: int, num_microbatches: int, num_chunks: int, pp_rank: int, num_skipped: int
) -> tuple[tuple[Situation, tuple[Moment, ...]], ...]:
    """Return a rank's situations in a step, each with the moments, in order, at which it may hold most.

    Args:
        schedule: the name of the schedule.
        num_ranks: ranks of the pipeline.
        num_microbatches: those to walk.
        num_chunks: stages per rank, for a schedule that takes chunks.
        pp_rank: the rank.
        num_skipped: further microbatches between a stage's first and last one that are held but not walked.
    """
    built = remembered_schedule(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    seen: dict[Situation, dict[Held, int]] = {}
    for number, turn in enumerate(walk(built, pp_rank, num_skipped=num_skipped)):
        seen.setdefault(_representative(turn.situation), {}).setdefault(turn.held, number)
    return tuple(
        (situation, tuple(sorted(Moment(numbers[held], held) for held in _fullest(numbers))))
        for situation, numbers in seen.items()
    )


def _representative(situation: Situation) -> Situation:
    """Return the situation that stands for all in which the estimate has the same bytes."""
    return situation._replace(
        is_last=situation.is_last and situation.kind is not Kind.FORWARD,
        # with several stages, other stages' groups release the buffer of the last reduction
        last_backward=situation.last_backward if len(situation.progress) == 1 else None,
    )


def _fullest(amounts: Iterable[Held]) -> list[Held]:
    """Return the amounts that no other one covers."""
    kept: list[Held] = []
    for held in sorted(amounts, key=lambda held: -sum(held.in_flight) - sum(held.deferred) - held.messages):
        if not any(_covers(other, held) for other in kept):
            kept.append(held)
    return kept


def _covers(one: Held, other: Held) -> bool:
    """Return whether there is at least as much of everything."""
    return one.messages >= other.messages and all(
        own >= others
        for own, others in zip(one.in_flight + one.deferred, other.in_flight + other.deferred, strict=True)
    )
