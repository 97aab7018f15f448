"""Restarts of a job: one job id, several attempts, each of which resumes from the newest checkpoint.

A scheduler that can queue a job again does so by itself after preemption or a node failure, and on request of the job's
first rank once all ranks have saved a checkpoint ahead of the time limit. A job that fails or is cancelled is not
restarted.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from llama_core.errors import RunDirectoryError
from llama_core.launch.attempts import (
    Attempt,
    attempt_path,
    current_attempt,
    exit_path,
    is_cancellation_requested,
    missing_ranks,
    read_rank_exits,
)
from llama_core.launch.outcome import (
    concluded,
    excluded_nodes,
    is_requeued,
    record_requeue,
    record_surrender,
    tell_final_ending,
)
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
from llama_core.records.stragglers import Straggler, read_stragglers, still_behind
from llama_core.units import counted, listed

MAX_EXCLUDED_SHARE = 1 / 8
"""The share of its nodes that a job may exclude, and at least one: if more fall behind, the others are the odd ones, or
something that all nodes share is slow."""

MAX_NAMED = 4
"""Most ranks that the reason of an attempt names; ``logs/stragglers.jsonl`` has all."""

SUPERSEDED_SECONDS = 1.5 * LOOK_SECONDS
"""How long ranks that a scheduler has lost may go on after another attempt has begun: see ``watchdogs.Successor``."""

ANSWER_PATIENCE_SECONDS = 240.0
"""How long a job that should restart waits for a controller that does not answer."""

LOSS_PATIENCE_SECONDS = 360.0
"""How long a job with spare nodes waits for its scheduler to notice a dead node: Slurm's ``SlurmdTimeout`` is 300 s by
default."""

_RETRY_SECONDS = 5.0

_TIME_LIMIT = Verdict("timeout", "the job neared its time limit and saved a checkpoint", RESUME)


def most_excluded(num_nodes: int) -> int:
    """Return the most nodes that a job of ``num_nodes`` may leave out for being slow."""
    return max(1, int(MAX_EXCLUDED_SHARE * num_nodes))


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
    max_excluded: int,
    surroundings: Surroundings,
) -> bool:
    """Queue a job again that was stopped and has saved a checkpoint; return whether it will be restarted.

    It is kept off the nodes of the ranks that were behind while they trained, if ``max_excluded`` allows for them.

    Args:
        run: the run the job works on.
        job: the job.
        restart: number of earlier starts of the job.
        announced: whether the ranks were told that the job's time was running out.
        max_attempts: starts after which the job gives up.
        max_excluded: most nodes that the job may be kept off, those of its earlier starts included.
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
    nodes: list[str] = []
    if max_excluded and (behind := _behind(run)):
        slow = list(dict.fromkeys(one.host for one in behind))
        if len(excluded_nodes(run, job).union(slow)) <= max_excluded:
            nodes = slow
        limit = "" if nodes else f", which the job keeps, as it may leave out {counted(max_excluded, 'node')} in all"
        named = listed(behind, MAX_NAMED, between="; ")
        verdict = replace(verdict, reason=f"{verdict.reason}; {named}{limit}")
    return _queued_again(run, job, attempt, verdict, surroundings, without=nodes)


def _behind(run: RunDirectory) -> list[Straggler]:
    """Return the ranks that were behind their peers when the attempt ended."""
    with suppress(RunDirectoryError):  # the record is damaged, as ``doctor`` says
        return still_behind(read_stragglers(run))
    return []


def start_elsewhere(
    run: RunDirectory, job: JobRecord, restart: int, *, num_nodes: int, surroundings: Surroundings
) -> bool:
    """Start a job again without the nodes that its newest ``PreflightRecord`` excludes; return whether it starts again.

    It goes on on its other nodes if they are enough, and else is queued again.

    Args:
        run: the run the job works on.
        job: the job.
        restart: number of earlier starts of the job.
        num_nodes: the nodes that it needs to go on, if its script starts ranks again; else 0.
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
    if num_nodes and len(set(surroundings.nodes_now(job.job_id)).difference(nodes)) >= num_nodes:
        record_requeue(run, job, attempt, verdict, nodes, in_place=True)
        if surroundings.give_back(job, nodes):
            finish_telling()
            return True
    return _queued_again(run, job, attempt, verdict, surroundings, without=nodes)


def goes_on(
    run: RunDirectory, job: JobRecord, restart: int, *, num_nodes: int, max_attempts: int, surroundings: Surroundings
) -> bool:
    """Return whether a job with spare nodes starts its ranks again, after those of an attempt have ended.

    It does if nodes were lost or given back. It is queued again if too few are left, or its time is nearly over.

    Args:
        run: the run the job works on.
        job: the job.
        restart: number of earlier starts of the job, before the one that has ended.
        num_nodes: the nodes that it needs to go on.
        max_attempts: starts after which the job gives up.
        surroundings: what the ranks of the job find around them.
    """
    attempt = current_attempt(run, job)
    # If no rank began, the attempt is an older one; max_attempts, which counts attempts, would never end the job.
    if attempt is None or attempt.restart != restart:
        return False
    if is_cancellation_requested(run, job) or concluded(run, job) is not None:
        return False
    status = _answer(job, surroundings)
    if status is None or not surroundings.is_running(status):
        return False
    if is_requeued(run, attempt):  # its first rank has given nodes back
        return True
    lost = _lost_nodes(run, job, attempt, surroundings)
    if not lost:
        exits = read_rank_exits(run, job, restart)
        tell_final_ending(run, job, restart, num_ranks=exits[0].num_ranks if exits else 1)
        return False
    launcher = LAUNCHERS.named(job.launcher)
    verdict = Verdict("node-failure", f"{launcher.title} lost {', '.join(lost)}", RESUME)
    is_last = restart + 1 >= max_attempts
    stays = len(surroundings.nodes_now(job.job_id)) >= num_nodes and not surroundings.nears_limit(job)
    if is_last:
        record_surrender(run, job, attempt, verdict, _too_many(launcher, max_attempts))
    elif not stays:
        _queued_again(run, job, attempt, verdict, surroundings)
    else:
        record_requeue(run, job, attempt, verdict, in_place=True)
        finish_telling()
    return stays and not is_last


def _lost_nodes(run: RunDirectory, job: JobRecord, attempt: Attempt, surroundings: Surroundings) -> list[str]:
    """Return the nodes of an attempt that its job no longer has.

    The other ranks may see that a node is dead minutes before the scheduler does, and a rank that left no record of its
    end may have been there: then the scheduler gets ``LOSS_PATIENCE_SECONDS``.
    """
    deadline = time.monotonic() + LOSS_PATIENCE_SECONDS
    while True:
        left = surroundings.nodes_now(job.job_id)
        lost = [node for node in surroundings.hosts(attempt.nodes) if node not in left] if left else []
        is_clear = bool(lost) or not missing_ranks(read_rank_exits(run, job, attempt.restart))
        if is_clear or is_cancellation_requested(run, job) or time.monotonic() >= deadline:
            return lost
        time.sleep(_RETRY_SECONDS)


def _queued_again(
    run: RunDirectory,
    job: JobRecord,
    attempt: Attempt,
    verdict: Verdict,
    surroundings: Surroundings,
    *,
    without: Sequence[str] = (),
) -> bool:
    """Queue a job again, without some nodes, and record why; return whether its scheduler queued it.

    Nodes that it has given back stay excluded: only a job that waits can be kept off nodes.
    """
    without = sorted(excluded_nodes(run, job).union(without))
    record_requeue(run, job, attempt, verdict, without)
    finish_telling()
    title = LAUNCHERS.named(job.launcher).title
    if not surroundings.queue_again(job):
        record_surrender(run, job, attempt, verdict, f"{title} did not queue the job again")
        return False
    if without and not surroundings.exclude(job, without):
        why = f"{title} queued the job again, but did not exclude {', '.join(without)}"
        record_requeue(run, job, attempt, replace(verdict, reason=f"{verdict.reason}; {why}"))
    return True


def _preempted(launcher: LauncherType) -> Verdict:
    reason = f"{launcher.title} gave the job's nodes to another job; a checkpoint was saved first"
    return Verdict("preempted", reason, RESUME)


def _answer(job: JobRecord, surroundings: Surroundings) -> JobStatus | None:
    """Return the job's status, asking again while its scheduler does not answer; None if that takes too long."""
    deadline = time.monotonic() + ANSWER_PATIENCE_SECONDS
    while (status := surroundings.status(job)) is None and time.monotonic() < deadline:
        time.sleep(_RETRY_SECONDS)
    return status
