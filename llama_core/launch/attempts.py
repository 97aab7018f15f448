"""A job's records in the run's logs: the current attempt, how each of its ranks ended, and their output.

A scheduler may restart a job under the same id on other nodes: after preemption, a time limit, or a node failure. Each
start is an attempt with its own records, so that surviving ranks of an earlier attempt cannot be mistaken for a later
one's.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from llama_core.config.hardware import MAX_DEVICES
from llama_core.errors import RunDirectoryError
from llama_core.launch.places import CONTROLLER_LOG, own_submission
from llama_core.records.directory import RunDirectory
from llama_core.records.files import Time, intact, now, open_file, read_json, read_typed, write_json
from llama_core.records.job import JobRecord

JOB_ID_VARIABLE = "TRAINING_INFRA_JOB_ID"
"""Environment variable with the id of the job that a rank belongs to; unset if a worker is started by hand."""

RESTART_VARIABLE = "TRAINING_INFRA_RESTART"
"""Environment variable with the number of earlier starts of a rank's job."""

IN_PLACE_VARIABLE = "TRAINING_INFRA_IN_PLACE"
"""Environment variable of ranks that their job has started again without being queued."""

LOG_HEADER = "=== job "
"""Start of the line that separates the attempts in a rank's log."""

_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class Attempt:
    """One start of a job."""

    job_id: str
    submitted_at: str
    restart: int
    """Number of earlier starts of the job."""
    nodes: str
    """The nodes of its ranks, as the scheduler abbreviates them; empty on this machine."""
    started_at: Time

    def is_of(self, job: JobRecord) -> bool:
        """Return whether this is an attempt of ``job``; the id alone is not enough, as a fresh cluster reuses ids."""
        return (self.job_id, self.submitted_at) == (job.job_id, job.submitted_at)


@dataclass(frozen=True)
class RankExit:
    """How one rank's worker process ended, as its supervisor saw it."""

    rank: Annotated[int, Field(ge=0, lt=MAX_DEVICES)]
    exit_code: int | None
    """Exit code; None if a signal ended it."""
    signal: int | None
    """Signal that ended it; None if it exited."""
    oom_killed: bool
    """Whether the kernel's out-of-memory killer struck on the machine when the process was killed."""
    stopped: bool
    """Whether the supervisor ended it because another rank had failed, or a later attempt had begun."""
    num_ranks: Annotated[int, Field(ge=1, le=MAX_DEVICES)]
    """Ranks of the job."""
    ended_at: float
    """Seconds since the epoch."""
    silent_seconds: float | None = None
    """Seconds without a step when the supervisor ended it for that; None if it ended otherwise."""
    host: str = ""
    """Its node, as its scheduler names it."""

    @property
    def failed(self) -> bool:
        """Whether it ended with anything but exit code 0."""
        return self.exit_code != 0


def attempt_path(run: RunDirectory) -> Path:
    """Return the file that holds the current ``Attempt``; the first rank's supervisor writes it at its start."""
    return run.logs / "attempt.json"


def current_attempt(run: RunDirectory, job: JobRecord | None) -> Attempt | None:
    """Return the newest attempt of ``job``; None before its ranks have started."""
    path = attempt_path(run)
    attempt = read_typed(path, Attempt, run.path) if path.exists() else None
    return attempt if attempt is not None and job is not None and attempt.is_of(job) else None


def log_path(run: RunDirectory, rank: int) -> Path:
    """Return the file with the output of ``rank``, one attempt after another."""
    return run.logs / f"rank-{rank:05d}.log"


def flight_recorder(run: RunDirectory) -> Path:
    """Return the folder where NCCL's flight recorder writes a file for each rank when a collective times out."""
    return run.logs / "flight-recorder"


def exit_path(run: RunDirectory, job: JobRecord, restart: int, rank: int) -> Path:
    """Return the file that holds the ``RankExit`` of ``rank`` in one attempt."""
    return run.logs / "exits" / f"{job.job_id}-{restart}" / f"rank-{rank:05d}.json"


def read_rank_exits(run: RunDirectory, job: JobRecord, restart: int) -> list[RankExit]:
    """Return how the ranks of an attempt ended, in order of time; ranks that left no record are missing."""
    folder = exit_path(run, job, restart, 0).parent
    exits = [read_typed(path, RankExit, run.path) for path in folder.glob("rank-*.json")]
    return sorted(exits, key=lambda rank_exit: rank_exit.ended_at)


def missing_ranks(exits: Sequence[RankExit]) -> list[int]:
    """Return the ranks of an attempt that are not among its ``exits``, in order; the first rank if there are none."""
    num_ranks = exits[0].num_ranks if exits else 1
    return sorted(set(range(num_ranks)).difference(one.rank for one in exits))


def read_all_rank_exits(run: RunDirectory) -> list[RankExit]:
    """Return how the ranks of all attempts ended, in order of time."""
    paths = (run.logs / "exits").glob("*/rank-*.json")
    return sorted((read_typed(path, RankExit, run.path) for path in paths), key=lambda one: one.ended_at)


def request_cancellation(run: RunDirectory, job: JobRecord) -> None:
    """Tell the ranks of ``job`` to end it for good."""
    write_json(_cancel_path(run), {"job_id": job.job_id, "submitted_at": job.submitted_at, "requested_at": now()})


def is_cancellation_requested(run: RunDirectory, job: JobRecord) -> bool:
    """Return whether ``job`` was asked to end for good."""
    with suppress(RunDirectoryError), intact(_cancel_path(run)):
        asked = read_json(_cancel_path(run), run.path)
        return (asked["job_id"], asked["submitted_at"]) == (job.job_id, job.submitted_at)
    return False


def _cancel_path(run: RunDirectory) -> Path:
    return run.logs / "cancel.json"


def own_job(run: RunDirectory) -> JobRecord | None:
    """Return the job this process belongs to; None if it was started by hand."""
    return recorded_job(run, os.environ.get(JOB_ID_VARIABLE, ""))


def recorded_job(run: RunDirectory, job_id: str) -> JobRecord | None:
    """Return the run's job if it has this id; None if it has another one, or is not recorded yet."""
    job = read_typed(run.job, JobRecord) if job_id and run.job.exists() else None
    return job if job is not None and job.job_id == job_id else None


def own_restart() -> int:
    """Return the number of earlier starts of this process's job."""
    return int(os.environ.get(RESTART_VARIABLE, "0"))


def end_of_log(run: RunDirectory, rank: int) -> str:
    """Return the end of the output of ``rank`` in its newest attempt."""
    return _tail(log_path(run, rank), run.path).rpartition(LOG_HEADER)[2].partition("\n")[2]


def submission_log(run: RunDirectory, job: JobRecord) -> str:
    """Return the end of ``job``'s output outside its ranks: messages of submitit and of the scheduler."""
    own = own_submission(Path(job.folder), run)
    if own is None:
        return ""
    paths = sorted([*own.folder.glob(f"{job.job_id}_*log.*"), *own.folder.glob(CONTROLLER_LOG)])
    return "\n".join(_tail(path, own.below) for path in paths)


def _tail(path: Path, below: Path) -> str:
    """Return the end of a log; "" if it cannot be read."""
    try:
        with open_file(path, below) as file:
            file.seek(-min(_TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
