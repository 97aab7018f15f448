"""Restarts under Slurm: one job id, several attempts, each of which resumes from the newest checkpoint.

Slurm restarts a job by itself after preemption or a node failure, and on request of the job's first rank once all ranks
have saved a checkpoint ahead of the time limit. A job that fails or is cancelled is not restarted.
"""

import shutil
import time

from llama_core.launch.attempts import (
    Attempt,
    attempt_path,
    current_attempt,
    exit_path,
    is_cancellation_requested,
)
from llama_core.launch.outcome import is_requeued, record_requeue, record_surrender
from llama_core.launch.rank.watchdogs import LOOK_SECONDS
from llama_core.launch.scheduler import JobStatus, earlier_states, failed_nodes, job_status, requeue
from llama_core.launch.verdict import RESUME, VERDICT_OF_STATE, Verdict
from llama_core.records.directory import RunDirectory
from llama_core.records.files import timestamp, write_json
from llama_core.records.job import JobRecord

SUPERSEDED_SECONDS = 1.5 * LOOK_SECONDS
"""How long ranks that Slurm has lost may go on after another attempt has begun: see ``watchdogs.Successor``."""

ANSWER_PATIENCE_SECONDS = 240.0
"""How long a job that should restart waits for a controller that does not answer."""

_RETRY_SECONDS = 5.0

_TIME_LIMIT = Verdict("timeout", "the job neared its time limit and saved a checkpoint", RESUME)
_PREEMPTED = Verdict("preempted", "Slurm gave the job's nodes to another job; a checkpoint was saved first", RESUME)
_QUEUED_AGAIN = Verdict("preempted", "Slurm stopped the job", RESUME)


def begin_attempt(run: RunDirectory, job: JobRecord, restart: int, nodes: str, max_attempts: int) -> bool:
    """Record the start of an attempt and how the one before ended; return whether the attempt may go on.

    Args:
        run: the run the job works on.
        job: the job.
        restart: number of earlier starts of the job.
        nodes: its nodes, as Slurm abbreviates them; empty for a local job.
        max_attempts: starts after which the job gives up.
    """
    attempt = Attempt(job.job_id, job.submitted_at, restart, nodes, timestamp())
    previous = current_attempt(run, job) if restart else None
    if restart >= max_attempts:
        last = previous or attempt
        record_surrender(run, job, last, _interruption(job, last), _too_many(max_attempts))
        return False
    if previous is not None and not is_requeued(run, previous):
        record_requeue(run, job, previous, _interruption(job, previous))
    write_json(attempt_path(run), attempt)
    if previous is not None and not exit_path(run, job, previous.restart, 0).exists():
        time.sleep(SUPERSEDED_SECONDS)
    return True


def _too_many(max_attempts: int) -> str:
    return f"this was the last of {max_attempts} attempts (launch.slurm.max_attempts)"


def _interruption(job: JobRecord, previous: Attempt) -> Verdict:
    """Return why Slurm ended an attempt: from its accounting, else from the state of the attempt's nodes."""
    states = earlier_states(job.job_id, job.name)
    if states and states[-1] in {"NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}:
        return VERDICT_OF_STATE[states[-1]]
    failed = failed_nodes(previous.nodes) if previous.nodes else []
    if failed:
        return Verdict("node-failure", f"Slurm lost {', '.join(failed)}", RESUME)
    return _QUEUED_AGAIN


def start_again(run: RunDirectory, job: JobRecord, restart: int, *, announced: bool, max_attempts: int) -> bool:
    """Queue a job again that was stopped and has saved a checkpoint; return whether Slurm will restart it.

    Args:
        run: the run the job works on.
        job: the job.
        restart: number of earlier starts of the job.
        announced: whether Slurm announced that the job's time was running out.
        max_attempts: starts after which the job gives up.
    """
    attempt = current_attempt(run, job)
    if attempt is None or attempt.restart != restart or is_cancellation_requested(run, job):
        return False
    if shutil.which("scontrol") is None:
        if announced:
            record_surrender(run, job, attempt, _TIME_LIMIT, "the ranks have no scontrol to queue the job again with")
        return False
    status = _answer(job)
    if not (announced if status is None else _is_wanted(status, announced=announced)):
        return False
    verdict = _PREEMPTED if status is not None and status.is_preempted else _TIME_LIMIT
    if restart + 1 >= max_attempts:
        record_surrender(run, job, attempt, verdict, _too_many(max_attempts))
        return False
    record_requeue(run, job, attempt, verdict)
    if not requeue(job.job_id):
        record_surrender(run, job, attempt, verdict, "Slurm did not queue the job again")
        return False
    return True


def _answer(job: JobRecord) -> JobStatus | None:
    """Return the job's status, asking again while Slurm does not answer; None if that takes too long."""
    deadline = time.monotonic() + ANSWER_PATIENCE_SECONDS
    while (status := job_status(job.job_id, job.name)) is None and time.monotonic() < deadline:
        time.sleep(_RETRY_SECONDS)
    return status


def _is_wanted(status: JobStatus, *, announced: bool) -> bool:
    """Return whether to queue a stopped job again: not if it was cancelled, or if Slurm restarts it by itself."""
    return status.state == "RUNNING" and (announced or status.is_preempted)
