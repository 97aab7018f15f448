"""Why a run's job ended: recorded by the worker if it could, else worked out from what the job left behind."""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from llama_core.launch.attempts import (
    Attempt,
    current_attempt,
    is_cancellation_requested,
    missing_ranks,
    own_job,
    own_restart,
    read_rank_exits,
)
from llama_core.launch.places import submission_folders
from llama_core.launch.telling import tell_ending, whom_to_tell
from llama_core.launch.verdict import RESUME, RUN, Verdict, verdict_of_ranks
from llama_core.launchers.registry import LAUNCHERS
from llama_core.records.directory import RunDirectory
from llama_core.records.files import now, read_typed
from llama_core.records.job import AttemptRecord, JobRecord, Outcome, OutcomeStatus
from llama_core.records.metrics import read_heartbeat, read_metrics
from llama_core.records.reserve import write_even_on_full_disk

ALL_ENDED_SECONDS = 10.0
"""How long the first rank's supervisor waits for the records of the others before it tells how the job ended."""


def record_outcome(
    run: RunDirectory, status: OutcomeStatus, *, reason: str, next_action: str, step: int | None = None
) -> Outcome:
    """Write why this process's job ended, keeping the records of earlier attempts.

    Args:
        run: the run the job worked on.
        status: how it ended.
        reason: one sentence with the values that show it.
        next_action: what to try next; empty when the run finished.
        step: last completed step; by default the one of the newest ``StepRecord``.
    """
    verdict = Verdict(status, reason, next_action)
    is_final = status != "cancelled"  # the job may be queued again; its supervisor knows
    return _record(run, own_job(run), own_restart(), verdict, step=step, is_told=is_final)


def record_refusal(run: RunDirectory, reason: str, next_action: str) -> None:
    """Write why a run was refused before its job started; a finished run and a job at work keep their records."""
    if run.job.exists() and concluded(run, read_typed(run.job, JobRecord)) is None:
        return
    if run.outcome.exists() and read_outcome(run).status == "finished":
        return
    _record(run, own_job(run), own_restart(), Verdict("bad-config", reason, next_action), is_told=False)


def record_interruption(run: RunDirectory) -> bool:
    """Write that a new run was interrupted before its job started; any other run keeps its records.

    Returns:
        Whether the run was a new one.
    """
    records = (run.job, run.outcome, run.heartbeat)
    if any(record.exists() for record in records) or submission_folders(run.logs):  # it may have a job
        return False
    record_outcome(run, "cancelled", reason="it was interrupted before its job started", next_action=RESUME)
    return True


def record_requeue(
    run: RunDirectory,
    job: JobRecord,
    attempt: Attempt,
    verdict: Verdict,
    excluded: Sequence[str] = (),
    *,
    in_place: bool = False,
) -> Outcome:
    """Write why ``attempt`` ended, after which ``job`` starts again.

    Args:
        run: the run the job works on.
        job: the job.
        attempt: the one that ended; later steps belong to the next.
        verdict: why it ended; its next action is dropped, since the job is restarted.
        excluded: the nodes that the job is kept off from now on.
        in_place: whether it starts again on its other nodes, without its scheduler's queue.
    """
    again = f"{LAUNCHERS.named(job.launcher).title} has queued the job again"
    next_action = f"nothing to do: {'the job has started again on its other nodes' if in_place else again}"
    waiting = Verdict(verdict.status, verdict.reason, next_action)
    return _record(run, job, attempt.restart, waiting, requeued=True, excluded=excluded)


def record_surrender(run: RunDirectory, job: JobRecord, attempt: Attempt, verdict: Verdict, why: str) -> Outcome:
    """Write why ``attempt`` ended, and why ``job`` does not start again."""
    return _record(run, job, attempt.restart, Verdict(verdict.status, f"{verdict.reason}; {why}", RESUME))


def tell_final_ending(
    run: RunDirectory, job: JobRecord, restart: int, num_ranks: int, *, has_spares: bool = False
) -> None:
    """Tell how an attempt ended after which the job does not start again: killed ranks have recorded and told nothing.

    Args:
        run: the run.
        job: its job.
        restart: number of earlier starts of the job.
        num_ranks: ranks of the job.
        has_spares: whether the job goes on if a node was lost. Then nothing is told if a rank left no record, as it may
            have been there; see ``requeue.goes_on``.
    """
    if whom_to_tell(run) is None:
        return
    deadline = time.monotonic() + ALL_ENDED_SECONDS
    while len(read_rank_exits(run, job, restart)) < num_ranks and time.monotonic() < deadline:
        time.sleep(0.2)
    if has_spares and missing_ranks(read_rank_exits(run, job, restart)):
        return
    verdict = _recorded_verdict(run, job, restart) or _verdict(run, job, restart, None)
    tell_ending(run, len(_earlier(run, job, restart)), verdict.status, verdict.reason)


def excluded_nodes(run: RunDirectory, job: JobRecord) -> set[str]:
    """Return the nodes that ``job`` was kept off when it was queued again."""
    return {node for attempt in _attempts(run) if _is_of(attempt, job) for node in attempt["excluded"]}


def is_requeued(run: RunDirectory, attempt: Attempt) -> bool:
    """Return whether the outcome already records that the scheduler restarts the job of ``attempt``."""
    recorded = _of(_attempts(run), attempt.job_id, attempt.submitted_at, attempt.restart)
    return recorded is not None and recorded["requeued"]


def conclude(run: RunDirectory, job: JobRecord, scheduled: Verdict | None = None) -> Outcome:
    """Return why the ended ``job`` ended, and make sure that ``outcome.json`` records it.

    The worker's own record stands, except that the scheduler's reason for stopping the job replaces 'cancelled'.
    Without a record, the reason is worked out from the ranks' exit codes and signals, their logs, and the scheduler.

    Args:
        run: the run the job worked on.
        job: the ended job.
        scheduled: why its scheduler has ended it; None if there is none, or it does not say.
    """
    recorded = concluded(run, job)
    restart = _restart(run, job)
    if recorded is None:
        last = _of(_attempts(run), job.job_id, job.submitted_at, restart)
        if last is not None:  # it was queued again, and ended before its ranks had started
            restart += 1
        return _record(run, job, restart, _verdict(run, job, restart, scheduled))
    if recorded.status == "cancelled" and scheduled is not None and scheduled.status != "cancelled":
        return _record(run, job, restart, scheduled, step=recorded.step)
    return recorded


def concluded(run: RunDirectory, job: JobRecord) -> Outcome | None:
    """Return the run's outcome if it says why ``job`` ended for good; None if that is not recorded yet."""
    of_job = [attempt for attempt in _attempts(run) if _is_of(attempt, job)]
    if not of_job:
        return None
    last = max(of_job, key=lambda attempt: int(attempt["restart"]))
    ended = last["restart"] >= _restart(run, job) and not last["requeued"]
    return read_outcome(run) if ended else None


def read_outcome(run: RunDirectory) -> Outcome:
    """Return why the run's last job ended.

    Raises:
        RunDirectoryError: if no job of it has ended.
    """
    return _placed(run, read_typed(run.outcome, Outcome))


def _placed(run: RunDirectory, outcome: Outcome) -> Outcome:
    """Return an outcome whose next action names the run where it is now."""
    return replace(outcome, next_action=outcome.next_action.replace(RUN, str(run.path)))


def _restart(run: RunDirectory, job: JobRecord | None) -> int:
    """Return the number of starts of ``job`` before its newest attempt."""
    attempt = current_attempt(run, job)
    return attempt.restart if attempt else 0


def _verdict(run: RunDirectory, job: JobRecord, restart: int, scheduled: Verdict | None) -> Verdict:
    if is_cancellation_requested(run, job):
        return Verdict("cancelled", "the job was asked to stop", RESUME)
    return scheduled or verdict_of_ranks(run, job, restart)


def _recorded_verdict(run: RunDirectory, job: JobRecord, restart: int) -> Verdict | None:
    """Return how an attempt ended if that is recorded; it is the run's newest then."""
    recorded = _of(_attempts(run), job.job_id, job.submitted_at, restart)
    if recorded is None:
        return None
    outcome = read_outcome(run)
    return Verdict(outcome.status, outcome.reason, outcome.next_action)


def _attempts(run: RunDirectory) -> tuple[AttemptRecord, ...]:
    return read_outcome(run).attempts if run.outcome.exists() else ()


def _earlier(run: RunDirectory, job: JobRecord | None, restart: int) -> tuple[AttemptRecord, ...]:
    """Return all attempts but one of ``job``."""
    return tuple(a for a in _attempts(run) if not (_is_of(a, job) and a["restart"] == restart))


def _is_of(attempt: AttemptRecord, job: JobRecord | None) -> bool:
    # A fresh cluster and a rebooted machine count job ids from the start again: the id alone is not enough.
    return job is not None and (attempt["job_id"], attempt["submitted_at"]) == (job.job_id, job.submitted_at)


def _of(attempts: tuple[AttemptRecord, ...], job_id: str, submitted_at: str, restart: int) -> AttemptRecord | None:
    key = (job_id, submitted_at, restart)
    return next((a for a in attempts if (a["job_id"], a["submitted_at"], a["restart"]) == key), None)


def _record(
    run: RunDirectory,
    job: JobRecord | None,
    restart: int,
    verdict: Verdict,
    *,
    step: int | None = None,
    requeued: bool = False,
    excluded: Sequence[str] = (),
    is_told: bool = True,
) -> Outcome:
    """Write the outcome of one attempt, replacing an earlier record of it, and tell whom the run asks to tell."""
    earlier = _earlier(run, job, restart)
    newest = read_heartbeat(run)
    if step is None:
        step = newest.step if newest else 0
    ended_at = now()
    first, last = _steps_since(run, _start_of_attempt(run, job, restart, earlier))
    attempt: AttemptRecord = {
        "job_id": job.job_id if job else None,
        "submitted_at": job.submitted_at if job else None,
        "restart": restart,
        "status": verdict.status,
        "reason": verdict.reason,
        "requeued": requeued,
        "excluded": list(excluded),
        "first_step": first,
        "last_step": last,
        "started_at": _started_at(run, job, restart),
        "ended_at": ended_at,
    }
    outcome = Outcome(verdict.status, verdict.reason, step, verdict.next_action, ended_at, (*earlier, attempt))
    write_even_on_full_disk(run, run.outcome, outcome)
    if is_told:
        tell_ending(run, len(earlier), verdict.status, verdict.reason, requeued=requeued)
    return _placed(run, outcome)


def _started_at(run: RunDirectory, job: JobRecord | None, restart: int) -> str | None:
    """Return when the ranks of an attempt started; None if that is not recorded."""
    attempt = current_attempt(run, job)
    return attempt.started_at if attempt is not None and attempt.restart == restart else None


def _start_of_attempt(
    run: RunDirectory, job: JobRecord | None, restart: int, earlier: tuple[AttemptRecord, ...]
) -> float:
    """Return the time, in seconds since the epoch, after which steps belong to this attempt.

    Once the first rank has started, it comes from the clock of that rank's machine, like the times of the steps.
    """
    started_at = _started_at(run, job, restart)
    if started_at is not None:
        return datetime.fromisoformat(started_at).timestamp()
    if job is not None and restart == 0:
        return datetime.fromisoformat(job.submitted_at).timestamp()
    return datetime.fromisoformat(earlier[-1]["ended_at"]).timestamp() if earlier else 0.0


def _steps_since(run: RunDirectory, start: float) -> tuple[int | None, int | None]:
    """Return the first and last step completed after ``start``; a pair of None if there were none."""
    newest = read_heartbeat(run)
    if newest is None:
        return None, None
    records = read_metrics(run, sets_aside=True).select(["step", "time"]).to_pylist()
    since = [record["step"] for record in records if record["time"] >= start]
    if not since and newest.time < start:
        return None, None
    before = max((record["step"] for record in records if record["time"] < start), default=0)
    return min([before + 1, *since]), newest.step  # a clock set back makes later steps look earlier
