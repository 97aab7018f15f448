"""Pipeline schedules as data: pure functions from sizes to the order in which every rank computes.

Symbols: D ranks, N microbatches, F and B the times of one stage's forward and backward. What each schedule costs and
holds is in ``docs/schedules.md``, as ``simulate.py`` clocks it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, get_args

from llama_core.config.run import ScheduleName
from llama_core.errors import PlanError, did_you_mean
from llama_core.planning.actions import Action, Kind, Schedule
from llama_core.planning.ordering import Slot, first_ready, passes, staggered

__all__ = [
    "Action",
    "Kind",
    "Schedule",
    "ScheduleName",
    "build_schedule",
    "chimera",
    "chimera_doubling",
    "chimera_halving",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "schedule_names",
    "zb_h1",
    "zbv",
]

Placement = tuple[tuple[int, ...], ...]
T = TypeVar("T")


def schedule_names() -> tuple[ScheduleName, ...]:
    """Return the name of every schedule."""
    return get_args(ScheduleName)


def build_schedule(name: ScheduleName, *, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule called ``name``.

    Args:
        name: one of ``schedule_names()``.
        num_ranks: ranks of the pipeline.
        num_microbatches: microbatches of one optimizer step, before ``chimera_halving`` cuts each in two.
        num_chunks: stages on each rank under ``interleaved``; 1 for the others, which place their own.

    Raises:
        PlanError: naming the value that is not legal and those that are.
    """
    if name not in schedule_names():
        near = did_you_mean(name, schedule_names())
        raise PlanError(f"schedule={name!r} is not one of {', '.join(schedule_names())}{near}")
    for size, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches), ("num_chunks", num_chunks)):
        if value < 1:
            raise PlanError(f"{size}={value} is not at least 1")
    if name == "interleaved":
        return interleaved(num_ranks, num_microbatches, num_chunks)
    if num_chunks > 1:
        raise PlanError(f"num_chunks={num_chunks} goes with schedule=interleaved alone; use 1 with {name}")
    return _BUILDERS[name](num_ranks, num_microbatches)


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
    return Schedule("gpipe", num_ranks, num_microbatches, actions, _one_stage_each(num_ranks))


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
    return Schedule("1f1b", num_ranks, num_microbatches, actions, _one_stage_each(num_ranks))


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Return interleaved 1F1B: 1F1B over ``num_chunks`` stages per rank, rank r hosting stages r, r + D, r + 2D, ...

    Microbatches go in groups of ``num_ranks``: a rank takes a whole group through one of its stages before it turns to
    the next stage.

    Raises:
        PlanError: if there is only one chunk, or ``num_ranks`` does not divide ``num_microbatches``.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2 and figure 4 (bottom).
    """
    if num_chunks < 2:
        raise PlanError(f"num_chunks={num_chunks} interleaves nothing; use at least 2, or schedule=1f1b")
    groups = _pieces(range(num_microbatches), num_ranks)
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


def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return Chimera: two pipelines in opposite directions over the same ranks, so that one fills the other's bubble.

    Rank p hosts stage p of the down pipeline and stage D-1-p of the up pipeline. Each unit of D microbatches sends the
    first half down and the rest up, through a fixed table of slots for F = B. More microbatches repeat the unit (direct
    concatenation); of an odd number in the last one, one more goes down.

    Raises:
        PlanError: if ``num_ranks`` is odd.

    Source: Li and Hoefler 2021, arXiv:2107.06925, sections 3.1 and 3.5.
    """
    placement = _both_ways(num_ranks)
    table: list[list[tuple[int, Action]]] = [[] for _ in placement]
    for direction, microbatches in enumerate(_down_and_up(range(num_microbatches), num_ranks)):
        for number, microbatch in enumerate(microbatches):
            unit, place = divmod(number, num_ranks // 2)
            entry = 2 * (num_ranks * unit + place)
            for slots, stages in zip(table, placement, strict=True):
                stage = stages[direction]
                slots.append((entry + stage, Action(stage, Kind.FORWARD, microbatch)))
                slots.append((entry + 2 * num_ranks - 1 - stage, Action(stage, Kind.BACKWARD, microbatch)))
    actions = tuple(tuple(action for _, action in sorted(slots)) for slots in table)
    return Schedule("chimera", num_ranks, num_microbatches, actions, placement)


def chimera_doubling(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return Chimera with forward doubling: microbatches go forward in pairs, which take as long as one backward.

    At B = 2F both pipelines then keep step over any number of units, for twice the activations. A pair is two forwards
    one after the other, so that each has a backward of its own; an odd last microbatch goes alone. In every slot a rank
    runs a backward that is ready before a forward, and of two the one of the deeper stage; it never holds more than
    ``2 * num_ranks`` microbatches.

    Raises:
        PlanError: if ``num_ranks`` is odd.

    Source: Li and Hoefler 2021, arXiv:2107.06925, section 3.5; the rule for a slot is this project's own.
    """
    placement = _both_ways(num_ranks)
    pairs = _down_and_up(_pieces(range(num_microbatches), 2), num_ranks)
    queues: list[list[list[Slot]]] = []
    for stages in placement:
        hosted = sorted(zip(stages, pairs, strict=True), reverse=True)
        backwards = [[[b] for pair in way for b in passes(stage, Kind.BACKWARD, pair)] for stage, way in hosted]
        forwards = [[passes(stage, Kind.FORWARD, pair) for pair in way] for stage, way in hosted]
        queues.append([*backwards, *forwards])
    actions = first_ready(queues, num_ranks, most_held=2 * num_ranks)
    return Schedule("chimera_doubling", num_ranks, num_microbatches, actions, placement)


def chimera_halving(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return Chimera with backward halving: every microbatch is cut in two, and its halves go forward as a pair.

    These are the lists of forward doubling over ``2 * num_microbatches`` halves: a backward takes as long as the pair's
    forward without the activations of a second microbatch.

    Raises:
        PlanError: if ``num_ranks`` is odd.

    Source: Li and Hoefler 2021, arXiv:2107.06925, section 3.5.
    """
    return replace(chimera_doubling(num_ranks, 2 * num_microbatches), name="chimera_halving", parts_per_microbatch=2)


def _one_stage_each(num_ranks: int) -> Placement:
    return tuple((rank,) for rank in range(num_ranks))


def _both_ways(num_ranks: int) -> Placement:
    if num_ranks % 2:
        even = {max(2, num_ranks - 1), num_ranks + 1}
        raise PlanError(
            f"num_ranks={num_ranks} is odd, and Chimera pairs its ranks; use {' or '.join(map(str, sorted(even)))}"
        )
    return tuple((rank, num_ranks - 1 - rank) for rank in range(num_ranks))


def _down_and_up(items: Sequence[T], num_ranks: int) -> tuple[list[T], list[T]]:
    """Return what goes down and what goes up: of each ``num_ranks`` items the first half and the rest."""
    units = [(unit, (len(unit) + 1) // 2) for unit in _pieces(items, num_ranks)]
    down = [item for unit, middle in units for item in unit[:middle]]
    up = [item for unit, middle in units for item in unit[middle:]]
    return down, up


def _pieces(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B with every backward in two, the weight gradients put off into the bubble at the end.

    They are put off on each rank by as much as makes it hold what the first rank of 1F1B holds.

    Source: Qi et al. 2023, arXiv:2401.10241, section 2; the order within a rank is this project's own.
    """
    microbatches = range(num_microbatches)
    actions = tuple(
        staggered(
            (0, passes(rank, Kind.FORWARD, microbatches)),
            (num_ranks - rank - 1, passes(rank, Kind.INPUT_GRADIENT, microbatches)),
            (num_ranks - 1, passes(rank, Kind.WEIGHT_GRADIENT, microbatches)),
        )
        for rank in range(num_ranks)
    )
    return Schedule("zb_h1", num_ranks, num_microbatches, actions, _one_stage_each(num_ranks))


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZBV: two stages per rank, one on the way there and one on the way back, and every backward in two.

    Rank r hosts stages r and 2D-1-r, so the last rank turns a microbatch round without communication. In every slot a
    rank runs the first of these that is ready: a forward, of the deeper stage first, as long as it holds less than D
    full stages; an input gradient, of the shallower stage first; a weight gradient.

    Source: Qi et al. 2023, arXiv:2401.10241, section 6; the rule for a slot is this project's own.
    """
    placement = tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))
    queues = [
        [
            [[action] for action in passes(stage, kind, range(num_microbatches))]
            for kind, stages in (
                (Kind.FORWARD, (deep, shallow)),
                (Kind.INPUT_GRADIENT, (shallow, deep)),
                (Kind.WEIGHT_GRADIENT, (shallow, deep)),
            )
            for stage in stages
        ]
        for shallow, deep in placement
    ]
    actions = first_ready(queues, 2 * num_ranks, most_held=2 * num_ranks)
    return Schedule("zbv", 2 * num_ranks, num_microbatches, actions, placement)


_BUILDERS: Mapping[ScheduleName, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "chimera": chimera,
    "chimera_doubling": chimera_doubling,
    "chimera_halving": chimera_halving,
    "zb_h1": zb_h1,
    "zbv": zbv,
}
