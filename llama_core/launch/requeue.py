"""Starting again under Slurm: one job id, several attempts, each of which goes on from the newest checkpoint.

A job is started again by Slurm itself, after preemption or the failure of a node, or because its first rank asks for it
once all ranks have saved a checkpoint ahead of the time limit. A job that fails or is cancelled is not.
"""

from llama_core.artifacts import JobRecord, RunDirectory, write_json
from llama_core.launch.attempts import Attempt, attempt_path, cancel_path, current_attempt
from llama_core.launch.jobs import timestamp
from llama_core.launch.outcome import is_requeued, record_requeue, record_surrender
from llama_core.launch.scheduler import JobStatus, earlier_states, failed_nodes, job_status, requeue
from llama_core.launch.verdict import RESUME, VERDICT_OF_STATE, Verdict

_TIME_LIMIT = Verdict("timeout", "the job neared its time limit and saved a checkpoint", RESUME)
_PREEMPTED = Verdict("preempted", "Slurm gave the job's nodes to another job; it saved a checkpoint first", RESUME)
_QUEUED_AGAIN = Verdict("preempted", "Slurm stopped the job and queued it again", RESUME)


def begin_attempt(run: RunDirectory, job: JobRecord, restart: int, nodes: str, max_attempts: int) -> bool:
    """Record that an attempt begins, and how the one before ended; return whether it may go on.

    Args:
        run: the run the job works on.
        job: the job.
        restart: how often Slurm had started it before.
        nodes: its nodes, as Slurm abbreviates them; empty on this machine.
        max_attempts: starts after which it is given up.
    """
    attempt = Attempt(job.job_id, job.submitted_at, restart, nodes, timestamp())
    previous = current_attempt(run, job)
    if previous is not None and previous.restart < restart:
        verdict = _interruption(job, previous)
        if restart >= max_attempts:
            record_surrender(run, job, previous, verdict, max_attempts)
            return False
        if not is_requeued(run, previous):
            record_requeue(run, job, previous, verdict)
    write_json(attempt_path(run), attempt)
    return True


def _interruption(job: JobRecord, previous: Attempt) -> Verdict:
    """Return why Slurm took the nodes of an attempt: by its accounting, else by what has become of the nodes."""
    states = earlier_states(job.job_id, job.name)
    if states and states[-1] in {"NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}:
        return VERDICT_OF_STATE[states[-1]]
    failed = failed_nodes(previous.nodes) if previous.nodes else []
    if failed:
        return Verdict("node-failure", f"Slurm lost {', '.join(failed)}", RESUME)
    return _QUEUED_AGAIN


def start_again(run: RunDirectory, job: JobRecord, *, announced: bool, max_attempts: int) -> bool:
    """Have a job that was stopped, and has saved a checkpoint, start again; return whether Slurm will.

    Args:
        run: the run the job works on.
        job: the job.
        announced: whether Slurm had said that the job's time was running out.
        max_attempts: starts after which it is given up.
    """
    attempt, status = current_attempt(run, job), job_status(job.job_id, job.name)
    if attempt is None or cancel_path(run).exists() or not _is_wanted(status, announced=announced):
        return False
    verdict = _PREEMPTED if status is not None and status.is_preempted else _TIME_LIMIT
    if attempt.restart + 1 < max_attempts:
        record_requeue(run, job, attempt, verdict)
        if requeue(job.job_id):
            return True
    record_surrender(run, job, attempt, verdict, max_attempts)
    return False


def _is_wanted(status: JobStatus | None, *, announced: bool) -> bool:
    """Return whether a stopped job should go on: not one that was cancelled, or that Slurm starts again by itself."""
    return status is not None and status.state == "RUNNING" and (announced or status.is_preempted)
