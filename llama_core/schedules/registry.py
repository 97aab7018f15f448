"""All schedules by name.

To add one, add its ``ScheduleType`` here, or bring it in a package of your own.

Costs are in ``docs/schedules.md``.

Symbols there and in the schedules' files: D ranks, N microbatches, F and B the times of one stage's
forward and backward.
"""

from functools import lru_cache

from llama_core.errors import PlanError, not_one_of
from llama_core.registry import Registry
from llama_core.schedules.actions import Schedule
from llama_core.schedules.chimera import CHIMERA, CHIMERA_DOUBLING, CHIMERA_HALVING
from llama_core.schedules.one_way import GPIPE, INTERLEAVED, ONE_F_ONE_B
from llama_core.schedules.traits import ScheduleType
from llama_core.schedules.zero_bubble import ZB_H1, ZBV

SCHEDULES = Registry(
    "schedules",
    ScheduleType,
    "parallel.schedule",
    *(GPIPE, ONE_F_ONE_B, INTERLEAVED, CHIMERA, CHIMERA_DOUBLING, CHIMERA_HALVING, ZB_H1, ZBV),
)

DEFAULT_SCHEDULE = ONE_F_ONE_B.name


def schedule_names() -> tuple[str, ...]:
    """Return the name of every schedule that can be asked for."""
    return SCHEDULES.names()


def searched_schedules() -> tuple[ScheduleType, ...]:
    """Return the schedules among which a search chooses; one of a package runs only if asked for."""
    return SCHEDULES.built_in()


def schedule_type(name: str) -> ScheduleType:
    """Return the schedule called ``name``, with its traits.

    Raises:
        PlanError: if there is no such schedule; the message names the nearest ones.
    """
    schedule = SCHEDULES.find(name)
    if schedule is None:
        raise PlanError(f"schedule={name!r}{not_one_of(name, SCHEDULES.names())}")
    return schedule


def build_schedule(name: str, *, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule called ``name`` for one optimizer step.

    Args:
        name: one of ``schedule_names()``.
        num_ranks: ranks of the pipeline.
        num_microbatches: microbatches of one optimizer step, before they are cut into
            ``parts_per_microbatch``.
        num_chunks: stages on each rank, for a schedule that takes chunks; 1 for the others, which
            set their own number.

    Raises:
        PlanError: naming the illegal value and the legal ones.
    """
    schedule = schedule_type(name)
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for size, value in sizes.items():
        if value < 1:
            raise PlanError(f"{size}={value} is not at least 1")
    if num_chunks > 1 and not schedule.takes_chunks:
        takers = ", ".join(other.name for other in SCHEDULES.values() if other.takes_chunks)
        raise PlanError(f"num_chunks={num_chunks} needs schedule={takers}; use 1 with {name}")
    return schedule.build(num_ranks, num_microbatches, num_chunks)


remembered_schedule = lru_cache(maxsize=64)(build_schedule)
"""The same, kept for the next call, because plans look up their stages many times."""
