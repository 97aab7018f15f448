"""The job of a run, and why it ended."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import StringConstraints
from typing_extensions import TypedDict

from llama_core.records.files import Time

OutcomeStatus = Literal[
    "finished",
    "oom",
    "non-finite",
    "loss-spike",
    "preempted",
    "timeout",
    "node-failure",
    "hang",
    "cancelled",
    "crashed",
    "bad-config",
]


JobId = Annotated[str, StringConstraints(pattern=r"^\w[\w.+-]*$")]
"""Part of the names of files, so it holds no separator."""
Part = Literal["train", "benchmark"]
"""The part of its work that a job does, if it does not do all."""


@dataclass(frozen=True)
class JobRecord:
    """The current or last job of a run: enough to find it again."""

    launcher: str
    job_id: JobId
    """The scheduler's id of it, or the process id of what started its ranks."""
    host: str
    """Machine it was submitted from."""
    submitted_at: Time
    name: str = ""
    """Its name in the queue; empty without one."""
    cluster: str = ""
    """The name of the cluster; empty on this machine."""
    grace_seconds: float = 120.0
    """Time the job gets to finish its step and save a checkpoint before it is killed."""
    folder: str = ""
    """submitit's folder: the files that the job starts from, and its output before the ranks start."""
    process_namespace: str = ""
    """Names the processes among which a local job's is one; empty for other jobs."""
    lock_domain: str = ""
    """The kernel and file system that know whether a local job still holds its lock; empty likewise."""


class AttemptRecord(TypedDict):
    """How one attempt at a run ended."""

    job_id: str | None
    """None if no job of ours ran it."""
    submitted_at: str | None
    restart: int
    """Number of earlier starts by the scheduler."""
    status: str
    reason: str
    requeued: bool
    """Whether its job started again: its scheduler queued it, or it had spare nodes."""
    excluded: list[str]
    """The nodes that the job was kept off from then on."""
    first_step: int | None
    last_step: int | None
    started_at: Time | None
    ended_at: Time


@dataclass(frozen=True)
class Outcome:
    """Why a job ended."""

    status: OutcomeStatus
    reason: str
    """One sentence: what happened, with the values that show it."""
    step: int
    """Last completed optimizer step."""
    next_action: str
    """What to try next; empty when the run finished."""
    ended_at: Time
    attempts: tuple[AttemptRecord, ...] = ()
    """Every attempt at this run, oldest first."""
