"""Zero-bubble schedules: every backward is split, and the part that no other stage waits for fills idle time.

Source: Qi et al. 2023, arXiv:2401.10241.
"""

from llama_core.schedules.actions import Kind, Schedule, one_stage_each
from llama_core.schedules.ordering import first_ready, passes, staggered
from llama_core.schedules.traits import ScheduleType


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B with split backwards, whose weight gradients are delayed into the bubble at the end.

    Each rank delays them until it holds as much as the first rank of 1F1B.

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
    return Schedule("zb_h1", num_ranks, num_microbatches, actions, one_stage_each(num_ranks))


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZBV: two stages per rank, in a V down the ranks and back up, with split backwards.

    Rank r hosts stages r and 2D-1-r, so a microbatch turns round on the last rank without communication. In every slot
    a rank runs the first of these that is ready: a forward (deeper stage first) while it holds less than D full stages;
    an input gradient (shallower stage first); a weight gradient.

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


ZB_H1 = ScheduleType(
    "zb_h1",
    lambda ranks, microbatches, _: zb_h1(ranks, microbatches),
    idle=lambda ranks, *_, backward: ranks - 1,
    in_flight=lambda ranks, microbatches, _: min(microbatches, ranks),
    splits_backward=True,
)
ZBV = ScheduleType(
    "zbv",
    lambda ranks, microbatches, _: zbv(ranks, microbatches),
    idle=lambda ranks, *_, backward: (ranks - 1) / 2,
    in_flight=lambda ranks, microbatches, _: min(microbatches, ranks),
    splits_backward=True,
    stages_per_rank=2,
)
