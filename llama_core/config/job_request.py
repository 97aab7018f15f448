"""What a launcher's job asks for: the section of ``launch`` that a launcher reads inherits from it."""

from collections.abc import Iterator
from typing import NamedTuple, Self

from llama_core.config.section import Section

CORES_OF_A_CPU_RANK, CORES_OF_A_CUDA_RANK = 4, 8
"""Cores of a rank if the request names none; those of a CUDA rank if nobody says what a node has."""


class WrongRequest(NamedTuple):
    """A setting of a request that contradicts the run."""

    key: str
    """Its dotted name inside the section."""
    value: object
    text: str
    """Why it is wrong, and what to use; it follows the value."""


class JobRequest(Section):
    """What a job asks for. These are the answers of a launcher that takes no such settings."""

    @property
    def node_memory_gb(self) -> int | None:
        """Host memory that it asks for on each node, in GiB; None if it leaves that open."""
        return None

    @property
    def gpus_of_a_node(self) -> int | None:
        """GPUs that it asks for on each node; None if they follow from the number of ranks."""
        return None

    @property
    def max_starts(self) -> int:
        """How often its job may start under one id."""
        return 1

    def cores_of_a_rank(self, device: str) -> int:
        """Return the cores of a rank on ``device``."""
        return CORES_OF_A_CUDA_RANK if device == "cuda" else CORES_OF_A_CPU_RANK

    def wrong_gpus(self, num_ranks: int) -> Iterator[WrongRequest]:
        """Yield what asks for other GPUs on a node than those of its ``num_ranks`` ranks."""
        yield from ()

    def of_an_evaluation(self, partition: str | None, qos: str | None, time_limit_min: int, *, with_gpus: bool) -> Self:
        """Return what the job of an evaluation asks for.

        Args:
            partition: the part of the cluster that runs it; None for that of the run.
            qos: its quality of service; None for that of the run.
            time_limit_min: its limit, in minutes.
            with_gpus: whether it computes on GPUs.
        """
        return self

    @classmethod
    def runs_programs(cls, key: str) -> bool:
        """Return whether a setting, by its dotted name inside the section, may run programs as this user."""
        return False
