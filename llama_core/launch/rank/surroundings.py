"""What the ranks of a job find around them, and how a job is started again: the part of a launcher that runs there."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llama_core.launch.rank.children import die_with_parent
from llama_core.launch.scheduler import JobStatus
from llama_core.launch.verdict import RESUME, Verdict
from llama_core.records.job import JobRecord


@dataclass(frozen=True)
class RankPlace:
    """A rank among those of its job."""

    job_id: str
    rank: int
    num_ranks: int
    ranks_on_node: int
    """Ranks that share its machine."""
    restart: int = 0
    """Number of earlier starts of the job."""
    nodes: str = ""
    """The job's nodes, as its scheduler abbreviates them; empty on this machine."""
    host: str = ""
    """Its node, as the scheduler names it; empty if that is the name of the machine."""
    cores: int | None = None
    """The cores that it was given; None if the ranks share those of the machine."""


@dataclass(frozen=True)
class JobStart:
    """A start of a job, as the programs see it that run on its first node before the ranks."""

    job_id: str
    restart: int
    """Number of earlier starts of the job."""
    num_nodes: int


@dataclass(frozen=True)
class Step:
    """A program that starts ranks on the nodes of the job around this process."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    cores: int
    """Those of each rank."""
    notes: tuple[str, ...] = ()
    """Beginnings of the lines that the program itself writes to standard error."""
    errors: str = ""
    """The beginning of its lines about a rank that has failed."""


class Surroundings(ABC):
    """What the ranks of a job find around them. It is pickled with a ``Supervisor``, so it holds only values.

    The answers here are those of a launcher that starts a job once, and starts nothing inside a job.
    """

    has_one_parent = False
    """Whether all ranks are children of one process, so that they see whether another one is alive."""

    @abstractmethod
    def take_place(self) -> RankPlace:
        """Return the place of this process among the ranks.

        Sets ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, unless the supervisor brings
        the last two as its ``environment``.
        """

    def interruption(self, job: JobRecord, nodes: str) -> Verdict:
        """Return why the attempt before this one ended, on ``nodes`` as the scheduler abbreviates them."""
        return Verdict("preempted", "its job was stopped", RESUME)

    def lacks(self) -> str:
        """Return why the ranks cannot start the job again, as a clause; empty if they can."""
        return ""

    def status(self, job: JobRecord) -> JobStatus | None:
        """Return the job's status; None if its scheduler does not answer."""
        return None

    def is_running(self, status: JobStatus) -> bool:
        """Return whether a job is at work, and has not been cancelled or queued again by its scheduler."""
        return False

    def queue_again(self, job: JobRecord) -> bool:
        """Queue the job again, under the same id; return whether its scheduler agreed."""
        return False

    def exclude(self, job: JobRecord, nodes: Sequence[str]) -> bool:
        """Keep a job that was queued again off some nodes; return whether its scheduler agreed."""
        return False

    def nodes_now(self, job_id: str) -> list[str]:
        """Return the nodes that a running job has by now; empty if that is unknown."""
        return []

    def hosts(self, nodes: str) -> list[str]:
        """Return the names of nodes that the scheduler abbreviates as ``nodes``; empty if that is unknown."""
        return []

    def give_back(self, job: JobRecord, nodes: Sequence[str]) -> bool:
        """Let a running job go on without some of its nodes; return whether its scheduler agreed."""
        return False

    def nears_limit(self, job: JobRecord) -> bool:
        """Return whether the ranks of a running job have been told that its time is nearly over, or soon will be.

        Ranks that start after that would not be told.
        """
        return False

    def started_ranks(self) -> int:
        """Return how many ranks a step of the job around this process has started, this one included; 1 if none has.

        If there are several, it also sets the variables that torchrun sets, and ``NODE_VARIABLE`` if the scheduler has
        another name for this machine.
        """
        return 1

    def nodes_around(self) -> int:
        """Return the number of nodes of the job around this process; 0 if it is in none."""
        return 0

    def step(self, command: Sequence[str], num_ranks: int, num_nodes: int) -> Step:
        """Return what starts ``num_ranks`` ranks on ``num_nodes`` nodes of the job around this process."""
        raise NotImplementedError

    def job_start(self, environment: Mapping[str, str]) -> JobStart:
        """Return the start of a job that may have fewer nodes than it asked for."""
        raise NotImplementedError

    def with_ranks(self, num_ranks: int, num_nodes: int, restart: int) -> Mapping[str, int]:
        """Return the variables that make the job start so many ranks, on so many of its nodes, after other starts."""
        raise NotImplementedError


class BelowSubmitit(Surroundings):
    """Ranks that are children of submitit's controller on this machine."""

    has_one_parent = True

    def take_place(self) -> RankPlace:
        """Return the place that submitit's variables tell; the rank then dies with the controller."""
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        job = JobEnvironment()
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        # The controller starts the ranks from its main thread; the death of the starting thread sends the signal too.
        die_with_parent(int(job.job_id))()
        return RankPlace(job.job_id, job.global_rank, job.num_tasks, job.num_tasks // job.num_nodes)


def rendezvous_port(job_id: int, restart: int) -> int:
    """Return the port where the ranks of an attempt meet, below the ephemeral range.

    Each attempt gets another port, since ranks of an earlier one may still run on a node that was lost.
    """
    return 20000 + (17 * job_id + restart) % 12000


def export_torchrun(rank: int, local_rank: int, num_ranks: int, address: str, port: int) -> None:
    """Set the variables that torchrun sets; an address and a port that are set already stay."""
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))
    os.environ["RANK"] = str(rank)
    os.environ["LOCAL_RANK"] = str(local_rank)
    os.environ["WORLD_SIZE"] = str(num_ranks)
