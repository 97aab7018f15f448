"""Chimera: two pipelines in opposite directions over the same ranks, with two stages on each rank.

Source: Li and Hoefler 2021, arXiv:2107.06925.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from llama_core.errors import PlanError
from llama_core.schedules.actions import Action, Kind, Placement, Schedule
from llama_core.schedules.ordering import Slot, first_ready, passes, pieces
from llama_core.schedules.traits import ScheduleType

T = TypeVar("T")


def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return Chimera: two pipelines in opposite directions over the same ranks, which fill each other's bubble.

    Rank p hosts stage p of the down pipeline and stage D-1-p of the up pipeline. Each unit of D microbatches sends the
    first half down and the rest up, through a fixed table of slots for F = B. More microbatches repeat the unit (direct
    concatenation). If the last unit has an odd number, the extra microbatch goes down.

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

    At B = 2F both pipelines then stay in step over any number of units, at twice the activations. A pair is two
    consecutive forwards, each with its own backward; an odd last microbatch goes alone. In every slot a rank prefers a
    ready backward to a forward, and the deeper stage to the shallower. It never holds more than ``2 * num_ranks``
    microbatches.

    Raises:
        PlanError: if ``num_ranks`` is odd.

    Source: Li and Hoefler 2021, arXiv:2107.06925, section 3.5; the rule for a slot is this project's own.
    """
    placement = _both_ways(num_ranks)
    pairs = _down_and_up(pieces(range(num_microbatches), 2), num_ranks)
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

    The lists are those of forward doubling over ``2 * num_microbatches`` halves: one backward takes as long as a pair's
    forward, without the activations of a second microbatch.

    Raises:
        PlanError: if ``num_ranks`` is odd.

    Source: Li and Hoefler 2021, arXiv:2107.06925, section 3.5.
    """
    return replace(chimera_doubling(num_ranks, 2 * num_microbatches), name="chimera_halving", parts_per_microbatch=2)


def _both_ways(num_ranks: int) -> Placement:
    if num_ranks % 2:
        even = {max(2, num_ranks - 1), num_ranks + 1}
        raise PlanError(
            f"num_ranks={num_ranks} is odd, but Chimera pairs its ranks; use {' or '.join(map(str, sorted(even)))}"
        )
    return tuple((rank, num_ranks - 1 - rank) for rank in range(num_ranks))


def _down_and_up(items: Sequence[T], num_ranks: int) -> tuple[list[T], list[T]]:
    """Return the items that go down and those that go up: the first half of each ``num_ranks`` items, and the rest."""
    units = [(unit, (len(unit) + 1) // 2) for unit in pieces(items, num_ranks)]
    down = [item for unit, middle in units for item in unit[:middle]]
    up = [item for unit, middle in units for item in unit[middle:]]
    return down, up


CHIMERA = ScheduleType(
    "chimera",
    lambda ranks, microbatches, _: chimera(ranks, microbatches),
    idle=lambda ranks, units, _, *, backward: (ranks - 2) * (1 + (backward - 1) * units),
    in_flight=lambda ranks, microbatches, _: min(microbatches, ranks),
    replicas=2,
    forms=("chimera_doubling", "chimera_halving"),
)
CHIMERA_DOUBLING = ScheduleType(
    "chimera_doubling",
    lambda ranks, microbatches, _: chimera_doubling(ranks, microbatches),
    idle=lambda ranks, units, _, *, backward: (1.5 if units <= 2 else 2) * (ranks - 2),
    in_flight=lambda ranks, microbatches, _: min(microbatches, ranks),
    replicas=2,
    min_microbatches=3,
    min_units=1,
    pair=2,
)
CHIMERA_HALVING = ScheduleType(
    "chimera_halving",
    lambda ranks, microbatches, _: chimera_halving(ranks, microbatches),
    idle=lambda ranks, units, _, *, backward: (0.75 if units <= 1 else 1) * (ranks - 2),
    in_flight=lambda ranks, microbatches, _: min(microbatches, ranks),
    replicas=2,
    min_units=1,
    parts_per_microbatch=2,
)
