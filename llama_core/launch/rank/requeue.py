"""Restarts of a job: one job id, several attempts, each of which resumes from the newest checkpoint.

A scheduler that can queue a job again does so by itself after preemption or a node failure, and on request of the job's
first rank once all ranks have saved a checkpoint ahead of the time limit. A job that fails or is cancelled is not
restarted.
"""

import time
from dataclasses import replace

from llama_core.launch.attempts import (
    Attempt,
    attempt_path,
    current_attempt,
    exit_path,
    is_cancellation_requested,
)
from llama_core.launch.outcome import is_requeued, record_requeue, record_surrender
from llama_core.launch.rank.surroundings import Surroundings
from llama_core.launch.rank.watchdogs import LOOK_SECONDS
from llama_core.launch.scheduler import JobStatus
from llama_core.launch.telling import finish_telling
from llama_core.launch.verdict import RESUME, Verdict
from llama_core.launchers.registry import LAUNCHERS
from llama_core.launchers.traits import LauncherType
from llama_core.records.directory import RunDirectory
from llama_core.records.files import timestamp, write_json
from llama_core.records.job import JobRecord
from llama_core.records.preflight import read_preflights

SUPERSEDED_SECONDS = 1.5 * LOOK_SECONDS
"""How long ranks that a scheduler has lost may go on after another attempt has begun: see ``watchdogs.Successor``."""

ANSWER_PATIENCE_SECONDS = 240.0
"""How long a job that should restart waits for a controller that does not answer."""

_RETRY_SECONDS = 5.0

_TIME_LIMIT = Verdict("timeout", "the job neared its time limit and saved a checkpoint", RESUME)


def begin_attempt(
    run: RunDirectory, job: JobRecord, restart: int, nodes: str, *, max_attempts: int, surroundings: Surroundings
) -> bool:
    """Record the start of an attempt and how the one before ended; return whether the attempt may go on.

    Args:
        run: the run the job works on.
        job: the job.
        restart: number of earlier starts of the job.
        nodes: its nodes, as its scheduler abbreviates them; empty on this machine.
        max_attempts: starts after which the job gives up.
        surroundings: what the ranks of the job find around them.
    """
    attempt = Attempt(job.job_id, job.submitted_at, restart, nodes, timestamp())
    previous = current_attempt(run, job) if restart else None
    if restart >= max_attempts:
        last = previous or attempt
        why = surroundings.interruption(job, last.nodes)
        record_surrender(run, job, last, why, _too_many(LAUNCHERS.named(job.launcher), max_attempts))
        return False
    if previous is not None and not is_requeued(run, previous):
        record_requeue(run, job, previous, surroundings.interruption(job, previous.nodes))
    write_json(attempt_path(run), attempt)
    if previous is not None and not exit_path(run, job, previous.restart, 0).exists():
        time.sleep(SUPERSEDED_SECONDS)
    return True


def _too_many(launcher: LauncherType, max_attempts: int) -> str:
    return f"this was the last of {max_attempts} attempts ({launcher.prefix}max_attempts)"


def start_again(
    run: RunDirectory,
    job: JobRecord,
    restart: int,
    *,
    announced: bool,
    max_attempts: int,
    surroundings: Surroundings,
) -> bool:
    """Queue a job again that was stopped and has saved a checkpoint; return whether it will be restarted.

    Args:
        run: the run the job works on.
        job: the job.
        restart: number of earlier starts of the job.
        announced: whether the ranks were told that the job's time was running out.
        max_attempts: starts after which the job gives up.
        surroundings: what the ranks of the job find around them.
    """
    launcher = LAUNCHERS.named(job.launcher)
    attempt = current_attempt(run, job)
    if attempt is None or attempt.restart != restart or is_cancellation_requested(run, job):
        return False
    lacks = surroundings.lacks() if launcher.can_requeue else f"{launcher.title} does not start a job again"
    if lacks:
        if announced:
            record_surrender(run, job, attempt, _TIME_LIMIT, lacks)
        return False
    status = _answer(job, surroundings)
    is_preempted = status is not None and status.is_preempted
    # not if it was cancelled, or if its scheduler restarts it by itself
    is_wanted = announced if status is None else surroundings.is_running(status) and (announced or is_preempted)
    if not is_wanted:
        return False
    verdict = _preempted(launcher) if is_preempted else _TIME_LIMIT
    if restart + 1 >= max_attempts:
        record_surrender(run, job, attempt, verdict, _too_many(launcher, max_attempts))
        return False
    return _queued_again(run, job, attempt, verdict, surroundings)


def start_elsewhere(run: RunDirectory, job: JobRecord, restart: int, *, surroundings: Surroundings) -> bool:
    """Queue a job again without the nodes that its newest ``PreflightRecord`` excludes; return whether it starts again.

    Args:
        run: the run the job works on.
        job: the job.
        restart: number of earlier starts of the job.
        surroundings: what the ranks of the job find around them.
    """
    attempt = current_attempt(run, job)
    checks = read_preflights(run)
    if attempt is None or attempt.restart != restart or is_cancellation_requested(run, job) or not checks:
        return False
    nodes = checks[-1].excluded
    fell_behind = "; ".join(str(named) for named in checks[-1].named if named.host in nodes)
    verdict = Verdict("node-failure", f"before the first step, {fell_behind}", RESUME)
    if lacks := surroundings.lacks():
        record_surrender(run, job, attempt, verdict, lacks)
        return False
    status = _answer(job, surroundings)
    if status is not None and not surroundings.is_running(status):  # somebody has cancelled it, or queued it again
        return False
    if not _queued_again(run, job, attempt, verdict, surroundings):
        return False
    if not surroundings.exclude(job, nodes):
        why = f"{LAUNCHERS.named(job.launcher).title} queued the job again, but did not exclude {', '.join(nodes)}"
        record_requeue(run, job, attempt, replace(verdict, reason=f"{verdict.reason}; {why}"))
    return True


def _queued_again(
    run: RunDirectory, job: JobRecord, attempt: Attempt, verdict: Verdict, surroundings: Surroundings
) -> bool:
    """Queue a job again and record why; return whether its scheduler did."""
    record_requeue(run, job, attempt, verdict)
    finish_telling()
    if surroundings.queue_again(job):
        return True
    title = LAUNCHERS.named(job.launcher).title
    record_surrender(run, job, attempt, verdict, f"{title} did not queue the job again")
    return False


def _preempted(launcher: LauncherType) -> Verdict:
    reason = f"{launcher.title} gave the job's nodes to another job; a checkpoint was saved first"
    return Verdict("preempted", reason, RESUME)


def _answer(job: JobRecord, surroundings: Surroundings) -> JobStatus | None:
    """Return the job's status, asking again while its scheduler does not answer; None if that takes too long."""
    deadline = time.monotonic() + ANSWER_PATIENCE_SECONDS
    while (status := surroundings.status(job)) is None and time.monotonic() < deadline:
        time.sleep(_RETRY_SECONDS)
    return status
