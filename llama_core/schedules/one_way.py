"""Schedules of a single pipeline in one direction: GPipe, 1F1B and interleaved 1F1B."""

from llama_core.errors import PlanError
from llama_core.schedules.actions import Kind, Schedule, one_stage_each
from llama_core.schedules.ordering import passes, pieces, staggered
from llama_core.schedules.traits import ScheduleType


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return GPipe: every rank runs all forwards, then all backwards, and holds every microbatch in between.

    Source: Huang et al. 2019, arXiv:1811.06965, section 2 and figure 2c.
    """
    actions = tuple(
        staggered(
            (0, passes(rank, Kind.FORWARD, range(num_microbatches))),
            (num_microbatches, passes(rank, Kind.BACKWARD, range(num_microbatches))),
        )
        for rank in range(num_ranks)
    )
    return Schedule("gpipe", num_ranks, num_microbatches, actions, one_stage_each(num_ranks))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return 1F1B (PipeDream-Flush).

    A rank runs ``num_ranks - rank - 1`` forwards ahead, then alternates one forward with one backward, so it never
    holds more than ``num_ranks - rank`` microbatches.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1 and figure 4 (top).
    """
    actions = tuple(
        staggered(
            (0, passes(rank, Kind.FORWARD, range(num_microbatches))),
            (num_ranks - rank - 1, passes(rank, Kind.BACKWARD, range(num_microbatches))),
        )
        for rank in range(num_ranks)
    )
    return Schedule("1f1b", num_ranks, num_microbatches, actions, one_stage_each(num_ranks))


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Return interleaved 1F1B: 1F1B over ``num_chunks`` stages per rank, rank r hosting stages r, r + D, r + 2D, ...

    Microbatches go in groups of ``num_ranks``: a rank runs a whole group on one stage before it moves to the next.

    Raises:
        PlanError: if there is only one chunk, or ``num_ranks`` does not divide ``num_microbatches``.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2 and figure 4 (bottom).
    """
    if num_chunks < 2:
        raise PlanError(f"num_chunks={num_chunks} interleaves nothing; use at least 2, or schedule=1f1b")
    groups = pieces(range(num_microbatches), num_ranks)
    if num_microbatches % num_ranks:
        legal = {max(1, len(groups) - 1) * num_ranks, len(groups) * num_ranks}
        raise PlanError(
            f"num_microbatches={num_microbatches} is not a multiple of the {num_ranks} ranks of an interleaved "
            f"pipeline; use {' or '.join(map(str, sorted(legal)))}"
        )
    placement = tuple(tuple(range(rank, num_ranks * num_chunks, num_ranks)) for rank in range(num_ranks))
    actions = tuple(
        staggered(
            (0, [action for group in groups for stage in stages for action in passes(stage, Kind.FORWARD, group)]),
            (
                (num_chunks - 1) * num_ranks + 2 * (num_ranks - rank - 1),
                [
                    action
                    for group in groups
                    for stage in stages[::-1]
                    for action in passes(stage, Kind.BACKWARD, group)
                ],
            ),
        )
        for rank, stages in enumerate(placement)
    )
    return Schedule("interleaved", num_ranks * num_chunks, num_microbatches, actions, placement)


GPIPE = ScheduleType(
    "gpipe",
    lambda ranks, microbatches, _: gpipe(ranks, microbatches),
    idle=lambda ranks, *_, backward: (ranks - 1) * (1 + backward),
    in_flight=lambda _, microbatches, __: microbatches,
    holds_all=True,
)
ONE_F_ONE_B = ScheduleType(
    "1f1b",
    lambda ranks, microbatches, _: one_f_one_b(ranks, microbatches),
    idle=lambda ranks, *_, backward: (ranks - 1) * (1 + backward),
    in_flight=lambda ranks, microbatches, _: min(microbatches, ranks),
)
INTERLEAVED = ScheduleType(
    "interleaved",
    interleaved,
    idle=lambda ranks, _, chunks, *, backward: (ranks - 1) * (1 + backward) / chunks,
    in_flight=lambda ranks, microbatches, chunks: min(microbatches, ((chunks + 1) * ranks - 1) / chunks),
    takes_chunks=True,
)
