"""Why a job ended: told by the worker where it could, worked out from what the job left behind where it could not."""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from llama_core.artifacts import (
    JobRecord,
    Outcome,
    OutcomeStatus,
    RunDirectory,
    StepRecord,
    now,
    read_json,
    read_metrics,
    write_json,
)

JOB_ID_VARIABLE = "TRAINING_INFRA_JOB_ID"
"""Environment variable that tells a rank which job it belongs to; unset where a worker was started by hand."""

LOG_HEADER = "=== job "
"""How the line begins that separates the attempts in a rank's log."""

LOST_PEERS_EXIT = 75
"""Exit code of a rank that ended because others were gone, or did not answer: the cause is to be looked for there."""

_TAIL_BYTES = 64 * 1024
_QUOTE_CHARACTERS = 300

LESS_MEMORY = (
    "use a smaller parallel.microbatch_size or parallel.recompute=full (on Slurm also more "
    "launch.slurm.memory_gb_per_node), then --resume"
)
READ_LOG = "read logs/rank-*.log, mend the cause, then --resume"
_LONGER_LIMIT = "raise launch.slurm.time_limit_min, then --resume"
RESUME = "start it again with --resume"

_NO_ANSWER = re.compile(r"timed out|collective operation timeout", re.IGNORECASE)
"""How gloo and NCCL say that the other ranks are there but silent."""
_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|OutOfMemoryError|can't allocate memory|^MemoryError|oom[-_ ]kill|^Killed$", re.MULTILINE
)


@dataclass(frozen=True)
class RankExit:
    """How one rank's worker process ended, as its supervisor saw it."""

    rank: int
    exit_code: int | None
    """Exit code; None where a signal ended it."""
    signal: int | None
    """Signal that ended it; None where it exited."""
    oom_killed: bool
    """Whether the kernel's out-of-memory killer struck on the machine as the process was killed."""
    stopped: bool
    """Whether the supervisor ended it because another rank had failed."""
    num_ranks: int
    """Ranks of the job."""
    ended_at: float
    """Seconds since the epoch."""

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than by exit code 0."""
        return self.exit_code != 0


@dataclass(frozen=True)
class _Verdict:
    status: OutcomeStatus
    reason: str
    next_action: str


_SCHEDULER_VERDICTS = {
    "TIMEOUT": _Verdict("timeout", "Slurm ended the job at its time limit", _LONGER_LIMIT),
    "DEADLINE": _Verdict("timeout", "Slurm ended the job at its deadline", RESUME),
    "PREEMPTED": _Verdict("preempted", "Slurm gave the job's nodes to another job", RESUME),
    "NODE_FAIL": _Verdict("node-failure", "a node of the job failed", RESUME),
    "BOOT_FAIL": _Verdict("node-failure", "a node of the job did not boot", RESUME),
    "OUT_OF_MEMORY": _Verdict("oom", "the job used more host memory than it had asked Slurm for", LESS_MEMORY),
    "CANCELLED": _Verdict("cancelled", "the job was cancelled in Slurm", RESUME),
}  # fmt: skip


def log_path(run: RunDirectory, rank: int) -> Path:
    """Return the file that takes the output of ``rank``, one attempt after another."""
    return run.logs / f"rank-{rank:05d}.log"


def exit_path(run: RunDirectory, rank: int) -> Path:
    """Return the file that holds the ``RankExit`` of ``rank``."""
    return run.logs / f"rank-{rank:05d}.exit.json"


def read_rank_exits(run: RunDirectory) -> list[RankExit]:
    """Return how the ranks of the newest job ended, in order of time; ranks that left no record are missing."""
    exits = [RankExit(**read_json(path)) for path in run.logs.glob("rank-*.exit.json")]
    return sorted(exits, key=lambda rank_exit: rank_exit.ended_at)


def cancel_path(run: RunDirectory) -> Path:
    """Return the file whose presence says that the newest job was asked to stop."""
    return run.logs / "cancel.json"


def newest_step(run: RunDirectory) -> StepRecord | None:
    """Return the record of the last completed step, or None if there is none."""
    return StepRecord(**read_json(run.progress)) if run.progress.exists() else None


def record_outcome(
    run: RunDirectory, status: OutcomeStatus, *, reason: str, next_action: str, step: int | None = None
) -> Outcome:
    """Write why this process's job ended, keeping what is known of earlier attempts.

    Args:
        run: the run the job worked on.
        status: how it ended.
        reason: one sentence with the values that show it.
        next_action: what to try next; empty when the run finished.
        step: last completed step; by default the one of the newest ``StepRecord``.
    """
    return _record(run, _own_job(run), _Verdict(status, reason, next_action), step)


def conclude(run: RunDirectory, job: JobRecord, scheduler_state: str | None = None) -> Outcome:
    """Return why ``job``, which has ended, did so, and see that ``outcome.json`` says it.

    What the worker wrote stands; only its 'cancelled' gives way to the scheduler's reason for stopping it. Otherwise
    the reason is worked out from the ranks' exit codes and signals, their logs, and the scheduler.

    Args:
        run: the run the job worked on.
        job: the ended job.
        scheduler_state: Slurm's name for the state the job ended in, such as ``'NODE_FAIL'``; None on this machine.
    """
    recorded = concluded(run, job)
    scheduled = _SCHEDULER_VERDICTS.get(scheduler_state or "")
    if recorded is None:
        return _record(run, job, _verdict(run, scheduled))
    if recorded.status == "cancelled" and scheduled is not None and scheduled.status != "cancelled":
        return _record(run, job, scheduled, recorded.step)
    return recorded


def concluded(run: RunDirectory, job: JobRecord) -> Outcome | None:
    """Return the run's outcome if ``job`` has its part in it, and None if nobody has yet recorded why it ended."""
    outcome = read_outcome(run) if run.outcome.exists() else None
    return outcome if outcome and any(_is_of(attempt, job) for attempt in outcome.attempts) else None


def read_outcome(run: RunDirectory) -> Outcome:
    """Return why the run's last job ended.

    Raises:
        RunDirectoryError: if no job of it has ended.
    """
    record = read_json(run.outcome)
    return Outcome(**record | {"attempts": tuple(record["attempts"])})


def _is_of(attempt: Mapping[str, Any], job: JobRecord | None) -> bool:
    # A fresh cluster and a rebooted machine count job ids from the start again: the id alone is not enough.
    return job is not None and (attempt["job_id"], attempt["submitted_at"]) == (job.job_id, job.submitted_at)


def _own_job(run: RunDirectory) -> JobRecord | None:
    """Return the job this process belongs to; None if it was started by hand."""
    job_id = os.environ.get(JOB_ID_VARIABLE)
    if job_id is None or not run.job.exists():
        return None
    job = JobRecord(**read_json(run.job))
    return job if job.job_id == job_id else None


def _record(run: RunDirectory, job: JobRecord | None, verdict: _Verdict, step: int | None = None) -> Outcome:
    previous = read_outcome(run) if run.outcome.exists() else None
    earlier = tuple(attempt for attempt in (previous.attempts if previous else ()) if not _is_of(attempt, job))
    newest = newest_step(run)
    if step is None:
        step = newest.step if newest else 0
    ended_at = now()
    first, last = _steps_since(run, _start_of_attempt(job, earlier))
    attempt = {
        "job_id": job.job_id if job else None,
        "submitted_at": job.submitted_at if job else None,
        "status": verdict.status,
        "first_step": first,
        "last_step": last,
        "ended_at": ended_at,
    }
    outcome = Outcome(verdict.status, verdict.reason, step, verdict.next_action, ended_at, (*earlier, attempt))
    write_json(run.outcome, outcome)
    return outcome


def _start_of_attempt(job: JobRecord | None, earlier: tuple[Mapping[str, Any], ...]) -> float:
    """Return the time, in seconds since the epoch, after which every step is of this attempt."""
    if job is not None:
        return datetime.fromisoformat(job.submitted_at).timestamp()
    return datetime.fromisoformat(earlier[-1]["ended_at"]).timestamp() if earlier else 0.0


def _steps_since(run: RunDirectory, start: float) -> tuple[int | None, int | None]:
    """Return the first and last step completed after ``start``; a pair of None if there were none."""
    newest = newest_step(run)
    if newest is None or newest.time < start:
        return None, None
    records = read_metrics(run).select(["step", "time"]).to_pylist()
    return 1 + max((record["step"] for record in records if record["time"] < start), default=0), newest.step


def _verdict(run: RunDirectory, scheduled: _Verdict | None) -> _Verdict:
    if cancel_path(run).exists():
        return _Verdict("cancelled", "the job was asked to stop", RESUME)
    if scheduled is not None:
        return scheduled
    exits = read_rank_exits(run)
    lost = [rank_exit for rank_exit in exits if _lost_the_others(run, rank_exit)]
    culprit = next((e for e in exits if e.failed and not e.stopped and e not in lost), None)
    if culprit is not None:
        return _verdict_of_rank(run, culprit)
    if lost:
        return _verdict_of_silent_ranks(run, lost, exits)
    missing = set(range(exits[0].num_ranks)) - {rank_exit.rank for rank_exit in exits} if exits else {0}
    if missing:
        return _verdict_of_vanished_rank(run, min(missing))
    return _Verdict("crashed", "every rank exited with code 0 but none recorded an outcome", READ_LOG)


def _lost_the_others(run: RunDirectory, rank_exit: RankExit) -> bool:
    """Return whether a rank ended only because others had: it says so itself, or NCCL's watchdog ended it."""
    if rank_exit.signal == signal.SIGABRT:
        return _NO_ANSWER.search(_end_of_log(run, rank_exit.rank)) is not None
    return rank_exit.exit_code == LOST_PEERS_EXIT


def _verdict_of_silent_ranks(run: RunDirectory, lost: list[RankExit], exits: list[RankExit]) -> _Verdict:
    """Return why ranks have lost others that did not fail by themselves."""
    ended = {rank_exit.rank for rank_exit in exits if not rank_exit.stopped}
    silent = ", ".join(str(rank) for rank in range(lost[0].num_ranks) if rank not in ended) or "none"
    logs = {rank_exit.rank: _end_of_log(run, rank_exit.rank) for rank_exit in lost}
    rank = next((rank for rank, log in logs.items() if _NO_ANSWER.search(log)), None)
    if rank is not None:
        return _Verdict("hang", f"rank {rank} waited for the others in vain (silent ranks: {silent})", RESUME)
    rank, log = next(iter(logs.items()))
    return _Verdict("crashed", f"rank {rank} {_last_line(log)} (silent ranks: {silent})", RESUME)


def _verdict_of_rank(run: RunDirectory, rank_exit: RankExit) -> _Verdict:
    rank, log = rank_exit.rank, _end_of_log(run, rank_exit.rank)
    quote = f": {_last_line(log)}" if _last_line(log) else ""
    if rank_exit.exit_code == 2:
        return _Verdict("bad-config", f"rank {rank} refused the request{quote}", "correct the request and start again")
    if rank_exit.oom_killed:
        return _Verdict("oom", f"the kernel ran out of memory and killed rank {rank}", LESS_MEMORY)
    evidence = _OUT_OF_MEMORY.search(log) or _OUT_OF_MEMORY.search(_submission_log(run))
    if evidence:
        return _Verdict("oom", f"rank {rank} ran out of memory: {_line_around(evidence)}", LESS_MEMORY)
    if rank_exit.signal is not None:
        return _verdict_of_signal(rank, rank_exit.signal)
    if "Traceback (most recent call last)" in log and "KeyboardInterrupt" in _last_line(log):
        return _Verdict("cancelled", f"rank {rank} was interrupted", RESUME)
    return _Verdict("crashed", f"rank {rank} ended with exit code {rank_exit.exit_code}{quote}", READ_LOG)


def _verdict_of_signal(rank: int, number: int) -> _Verdict:
    name = signal.Signals(number).name
    match number:
        case signal.SIGTERM | signal.SIGINT | signal.SIGHUP:
            return _Verdict("cancelled", f"rank {rank} was stopped by {name} before it could save", RESUME)
        case signal.SIGUSR2:
            return _Verdict("preempted", f"rank {rank} was stopped by {name} before it could save", RESUME)
        case signal.SIGKILL:
            return _Verdict("crashed", f"rank {rank} was killed by signal 9 (possibly out of memory)", RESUME)
    return _Verdict("crashed", f"rank {rank} was killed by signal {number} ({name})", READ_LOG)


def _verdict_of_vanished_rank(run: RunDirectory, rank: int) -> _Verdict:
    log = _submission_log(run)
    evidence = _OUT_OF_MEMORY.search(log)
    if evidence:
        return _Verdict("oom", f"rank {rank} ran out of memory: {_line_around(evidence)}", LESS_MEMORY)
    if "Traceback (most recent call last)" in log:
        return _Verdict("crashed", f"rank {rank} did not start: {_last_line(log)}", "mend the cause, then --resume")
    return _Verdict("crashed", f"rank {rank} vanished without an exit code: it or its supervisor was killed", RESUME)


def _end_of_log(run: RunDirectory, rank: int) -> str:
    """Return what ``rank`` wrote last in its newest attempt."""
    return _tail(log_path(run, rank)).rpartition(LOG_HEADER)[2].partition("\n")[2]


def _submission_log(run: RunDirectory) -> str:
    """Return the end of what the newest submission itself wrote: submitit's, srun's and slurmstepd's messages."""
    folders = sorted(submission_folders(run))
    return "\n".join(_tail(path) for path in _logs_in(folders[-1])) if folders else ""


def submission_folders(run: RunDirectory) -> list[Path]:
    """Return the folders that submitit was given, one for each attempt, oldest first."""
    return sorted((run.logs / "submitit").glob("attempt-*"))


def _logs_in(folder: Path) -> Iterator[Path]:
    yield from sorted([*folder.glob("*_log.*"), *folder.glob("controller.log")])


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _last_line(text: str) -> str:
    lines = text.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_QUOTE_CHARACTERS]


def _line_around(match: re.Match[str]) -> str:
    start = match.string.rfind("\n", 0, match.start()) + 1
    return _last_line(match.string[start:].partition("\n")[0])
