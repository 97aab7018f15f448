"""The traits of a schedule that planning needs. Each schedule states its own, so no other code asks for its name."""

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
    """Name on the command line."""
    build: Callable[[int, int, int], Schedule]
    """Builds the schedule from ranks, microbatches and stages per rank."""
    idle: _Idle
    """Least idle time of a rank, in forwards of a stage: the closed form of docs/schedules.md, from ranks, microbatches
    per rank, stages per rank, and the ratio of backward to forward time."""
    in_flight: Callable[[int, int, int], float]
    """Least number of microbatches that the fullest rank holds, in full stages: the closed form of docs/schedules.md,
    from ranks, microbatches and stages per rank."""
    holds_all: bool = False
    """Whether a rank holds all microbatches at once."""
    takes_chunks: bool = False
    """Whether the number of stages per rank can be chosen."""
    stages_per_rank: int = 1
    """Stages on each rank, if their number cannot be chosen."""
    replicas: int = 1
    """Ranks that hold the weights of each stage."""
    splits_backward: bool = False
    """Whether each backward is split into input gradient and weight gradient."""
    parts_per_microbatch: int = 1
    """Equal parts, by rows, that a microbatch is cut into."""
    pair: int = 1
    """Microbatches that go forward together."""
    min_microbatches: int = 1
    """Fewest microbatches that use both directions."""
    min_units: int = 0
    """Up to this many microbatches per rank, it does not differ from the schedule that it is a form of."""
    forms: tuple[str, ...] = ()
    """Schedules that it becomes if memory allows, in the order to try them."""

    def is_beaten_by(self, other: "ScheduleType", ranks: int, microbatches: int, *, backward: float) -> bool:
        """Return whether ``other`` idles no longer and holds no more microbatches.

        Args:
            other: the other schedule.
            ranks: ranks of the pipeline.
            microbatches: microbatches of a step.
            backward: ratio of backward to forward time: 2, or 3 with full recomputation.
        """
        units = -(-microbatches // ranks)
        kinds = [(kind, 2 if kind.takes_chunks else 1) for kind in (self, other)]
        own_idle, idle = (kind.idle(ranks, units, chunks, backward=backward) for kind, chunks in kinds)
        own_held, held = (kind.in_flight(ranks, microbatches, chunks) for kind, chunks in kinds)
        return own_idle >= idle and own_held >= held
