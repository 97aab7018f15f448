"""The job of a run, and why it ended."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import StringConstraints

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
    """Slurm's job id, or the process id of the local controller."""
    host: str
    """Machine it was submitted from."""
    submitted_at: Time
    name: str = ""
    """Its name in Slurm's queue."""
    cluster: str = ""
    """The name of the Slurm cluster; empty on this machine."""
    grace_seconds: float = 120.0
    """Time the job gets to finish its step and save a checkpoint before it is killed."""
    folder: str = ""
    """submitit's folder: the files that the job starts from, and its output before the ranks start."""


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
    attempts: tuple[Mapping[str, Any], ...] = ()
    """Every attempt at this run, oldest first: job id, number of earlier starts by Slurm, status, reason, first and
    last step, whether the job was requeued, and when it was submitted, started and ended."""
