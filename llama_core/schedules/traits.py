"""What planning has to know of a schedule, said by the schedule itself: nobody else asks for its name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llama_core.schedules.actions import Schedule


class _Idle(Protocol):
    def __call__(self, ranks: int, units: float, chunks: int, /, *, backward: float) -> float: ...


@dataclass(frozen=True)
class ScheduleType:
    """A way to order the forwards and backwards of a pipeline, with its traits."""

    name: str
    """What the command line calls it."""
    build: Callable[[int, int, int], Schedule]
    """From ranks, microbatches and stages per rank to the order."""
    idle: _Idle
    """Least idle time of a rank, in forwards of a stage, from ranks, microbatches per rank, stages per rank, and the
    time of a backward over that of a forward; the closed form of docs/schedules.md."""
    in_flight: Callable[[int, int, int], float]
    """Microbatches that the fullest rank holds at least, in full stages, from ranks, microbatches and stages per rank;
    the closed form of docs/schedules.md."""
    holds_all: bool = False
    """Whether a rank holds every microbatch at once, however many there are."""
    takes_chunks: bool = False
    """Whether the number of stages per rank is chosen."""
    stages_per_rank: int = 1
    """Stages of each rank that the layers have to go into, where it is not chosen."""
    replicas: int = 1
    """Ranks that hold the weights of each stage."""
    splits_backward: bool = False
    """Whether backwards are in two parts, the gradients of weights apart."""
    parts_per_microbatch: int = 1
    """Equal parts, by rows, that a microbatch is cut into."""
    pair: int = 1
    """Microbatches that go forward together."""
    min_microbatches: int = 1
    """Fewest microbatches that fill both of its directions."""
    min_units: int = 0
    """Microbatches per rank of which there have to be more, for it to differ from what it is a form of."""
    forms: tuple[str, ...] = ()
    """Schedules that it becomes where memory allows, the one to try first at the head."""

    def is_beaten_by(self, other: "ScheduleType", ranks: int, microbatches: int, *, backward: float) -> bool:
        """Return whether ``other`` idles no longer and holds no more, whatever is recomputed.

        Args:
            other: the other schedule.
            ranks: ranks of the pipeline.
            microbatches: microbatches of a step.
            backward: time of a backward over that of a forward: 2, or 3 where the forward is computed again.
        """
        units = -(-microbatches // ranks)
        kinds = [(kind, 2 if kind.takes_chunks else 1) for kind in (self, other)]
        own_idle, idle = (kind.idle(ranks, units, chunks, backward=backward) for kind, chunks in kinds)
        own_held, held = (kind.in_flight(ranks, microbatches, chunks) for kind, chunks in kinds)
        return own_idle >= idle and own_held >= held
