"""All schedules by name. To add one, add its ``ScheduleType`` here; costs are in ``docs/schedules.md``.

Symbols there and in the schedules' files: D ranks, N microbatches, F and B the times of one stage's forward and
backward.
"""

from llama_core.errors import PlanError, not_one_of
from llama_core.schedules.actions import Schedule
from llama_core.schedules.chimera import CHIMERA, CHIMERA_DOUBLING, CHIMERA_HALVING
from llama_core.schedules.one_way import GPIPE, INTERLEAVED, ONE_F_ONE_B
from llama_core.schedules.traits import ScheduleType
from llama_core.schedules.zero_bubble import ZB_H1, ZBV

_SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED, CHIMERA, CHIMERA_DOUBLING, CHIMERA_HALVING, ZB_H1, ZBV)
_BY_NAME = {schedule.name: schedule for schedule in _SCHEDULES}

DEFAULT_SCHEDULE = ONE_F_ONE_B.name


def schedule_names() -> tuple[str, ...]:
    """Return the name of every schedule."""
    return tuple(_BY_NAME)


def schedule_type(name: str) -> ScheduleType:
    """Return the schedule called ``name``, with its traits.

    Raises:
        PlanError: if there is no such schedule; the message names the nearest ones.
    """
    if name not in _BY_NAME:
        raise PlanError(f"schedule={name!r}{not_one_of(name, _BY_NAME)}")
    return _BY_NAME[name]


def build_schedule(name: str, *, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule called ``name`` for one optimizer step.

    Args:
        name: one of ``schedule_names()``.
        num_ranks: ranks of the pipeline.
        num_microbatches: microbatches of one optimizer step, before they are cut into ``parts_per_microbatch``.
        num_chunks: stages on each rank, for a schedule that takes chunks; 1 for the others, which set their own number.

    Raises:
        PlanError: naming the illegal value and the legal ones.
    """
    schedule = schedule_type(name)
    for size, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches), ("num_chunks", num_chunks)):
        if value < 1:
            raise PlanError(f"{size}={value} is not at least 1")
    if num_chunks > 1 and not schedule.takes_chunks:
        takers = ", ".join(other.name for other in _SCHEDULES if other.takes_chunks)
        raise PlanError(f"num_chunks={num_chunks} needs schedule={takers}; use 1 with {name}")
    return schedule.build(num_ranks, num_microbatches, num_chunks)
