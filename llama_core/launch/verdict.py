"""Why an attempt ended, worked out from its ranks' exit codes, signals and last log lines."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llama_core.launch.attempts import RankExit, end_of_log, flight_recorder, log_path, read_rank_exits, submission_log
from llama_core.records.directory import RunDirectory
from llama_core.records.job import JobRecord, OutcomeStatus

LOST_PEERS_EXIT = 75
"""Exit code of a rank that ended because other ranks were gone or did not answer; the cause lies with them."""

STOPPED_EXIT = 76
"""Exit code of a rank that was asked to stop and did so after a step that all ranks agreed on, with a checkpoint."""

LESS_MEMORY = (
    "use a smaller parallel.microbatch_size or parallel.recompute=full (on Slurm also more "
    "launch.slurm.memory_gb_per_node), then --resume"
)
MORE_DISK = "free some space there, or lower training.keep_checkpoints, then --resume"
LONGER_LIMIT = "raise launch.slurm.time_limit_min, then --resume"
RESUME = "start it again with --resume"

_CUT_OFF = "the network between them failed, or each waited for another"
_ERROR = "ERROR "
_QUOTE_CHARACTERS = 300
_SKEW_SECONDS = 30.0
"""How far the clocks of two nodes may be apart; less than ranks wait for others."""
_NO_ANSWER = re.compile(r"timed out|collective operation timeout|watchdog got stuck", re.IGNORECASE)
"""How gloo and NCCL report that the other ranks exist but do not answer."""
_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|OutOfMemoryError|can't allocate memory|^MemoryError|oom[-_ ]kill|^Killed$"
    r"|exceeded memory limit|CUDA error: out of memory|Cuda failure (?:2 )?'out of memory'",
    re.MULTILINE,
)
_BROKEN_DEVICE = re.compile(
    r"uncorrectable (?:ECC|NVLink) error|fallen off the bus"
    r"|NVRM: Xid \([^)]*\): (?:48|63|64|74|79|92|94|95|119|120)\b"
)
"""Faults of a device or its links. Source of the numbers: NVIDIA, XID Errors."""
_BAD_ACCESS = re.compile(
    r"an illegal (?:memory access|instruction) was encountered|unspecified launch failure|misaligned address"
    r"|device-side assert triggered"
)
"""Faults of a kernel, which CUDA reports at a later call."""


def read_log(run: RunDirectory, rank: int) -> str:
    """Return the next action after ``rank`` failed in a way that only its output explains."""
    return f"read {log_path(run, rank)}, fix the cause, then --resume"


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended, in one sentence with the values that show it, and what to try next."""

    status: OutcomeStatus
    reason: str
    next_action: str


class Evidence(NamedTuple):
    """What the words of a failed rank prove."""

    status: OutcomeStatus
    line: str
    """The line that proves it."""
    next_action: str


def find_evidence(text: str, *, host: str, on_slurm: bool) -> Evidence | None:
    """Return what a rank's error or log proves about memory and device; None if it says nothing about them.

    Args:
        text: the rank's words.
        host: the name of its node.
        on_slurm: whether Slurm can give the job other nodes.
    """
    elsewhere = (
        f"continue on other nodes: --resume --set launch.slurm.options.exclude={host}"
        if on_slurm
        else f"look at the devices of {host} (nvidia-smi -q, dmesg), reset or replace the broken one, then --resume"
    )
    kernel = (
        "find the kernel with CUDA_LAUNCH_BLOCKING=1, or with compute-sanitizer on one rank (docs/debugging.md); if "
        "it is another one each time, suspect the device"
    )
    faults: tuple[tuple[re.Pattern[str], OutcomeStatus, str], ...] = (
        (_BROKEN_DEVICE, "node-failure", elsewhere),
        (_OUT_OF_MEMORY, "oom", LESS_MEMORY),
        (_BAD_ACCESS, "crashed", kernel),
    )
    for pattern, status, next_action in faults:
        if found := pattern.search(text):
            return Evidence(status, _line_around(found), next_action)
    return None


VERDICT_OF_STATE = {
    "TIMEOUT": Verdict("timeout", "Slurm ended the job at its time limit", LONGER_LIMIT),
    "DEADLINE": Verdict("timeout", "Slurm ended the job at its deadline", RESUME),
    "PREEMPTED": Verdict("preempted", "Slurm gave the job's nodes to another job", RESUME),
    "NODE_FAIL": Verdict("node-failure", "a node of the job failed", RESUME),
    "BOOT_FAIL": Verdict("node-failure", "a node of the job did not boot", RESUME),
    "OUT_OF_MEMORY": Verdict("oom", "the job used more host memory than it had asked Slurm for", LESS_MEMORY),
    "CANCELLED": Verdict("cancelled", "the job was cancelled in Slurm", RESUME),
}  # fmt: skip
"""Why a job ended, by Slurm's name for its final state."""


def verdict_of_ranks(run: RunDirectory, job: JobRecord, restart: int) -> Verdict:
    """Return why an attempt ended, from its ranks' records; the first rank that failed by itself is to blame."""
    exits = read_rank_exits(run, job, restart)
    lost = [rank_exit for rank_exit in exits if _lost_the_others(run, job, rank_exit)]
    lost_ranks = {rank_exit.rank for rank_exit in lost}
    failed = [e for e in exits if e.failed and not e.stopped and e.rank not in lost_ranks]
    failed = [e for e in failed if not _ended_with_the_others(e, lost)]
    # Slurm sends SIGTERM to the others once one has failed, and the clocks of two nodes may show another order.
    culprit = next((e for e in failed if e.signal != signal.SIGTERM), failed[0] if failed else None)
    if culprit is not None and culprit.silent_seconds is not None:
        return _of_silence(culprit.silent_seconds)
    if culprit is not None:
        return _of_rank(run, job, culprit)
    if lost:
        return _of_silent_ranks(run, lost, exits)
    missing = set(range(exits[0].num_ranks)) - {rank_exit.rank for rank_exit in exits} if exits else {0}
    if missing:
        return _of_vanished_rank(run, job, min(missing))
    if any(rank_exit.failed for rank_exit in exits):
        return Verdict("crashed", "the ranks were ended, but none of them had failed", RESUME)
    return Verdict("crashed", "every rank exited with code 0 but none recorded an outcome", read_log(run, 0))


def _lost_the_others(run: RunDirectory, job: JobRecord, rank_exit: RankExit) -> bool:
    """Return whether a rank ended only because others had ended: it says so, or NCCL's watchdog ended it."""
    if rank_exit.signal == signal.SIGABRT:
        log = end_of_log(run, rank_exit.rank)
        return _NO_ANSWER.search(log) is not None and _evidence(log, job, rank_exit) is None
    return rank_exit.exit_code == LOST_PEERS_EXIT


def _ended_with_the_others(rank_exit: RankExit, lost: Sequence[RankExit]) -> bool:
    """Return whether Slurm killed a rank because NCCL's watchdogs had ended ``lost``: it had left them waiting."""
    killed = rank_exit.signal in {signal.SIGTERM, signal.SIGKILL} and not rank_exit.oom_killed
    ended = [e.ended_at for e in lost if e.signal == signal.SIGABRT]
    return killed and bool(ended) and rank_exit.ended_at > min(ended) - _SKEW_SECONDS


def _of_silent_ranks(run: RunDirectory, lost: list[RankExit], exits: list[RankExit]) -> Verdict:
    """Return why ranks lost others that did not fail by themselves."""
    ended = {e.rank for e in exits if not e.failed} | {e.rank for e in lost}
    silent = ", ".join(str(rank) for rank in range(lost[0].num_ranks) if rank not in ended) or "none"
    logs = {rank_exit.rank: end_of_log(run, rank_exit.rank) for rank_exit in lost}
    rank = next((rank for rank, log in logs.items() if _NO_ANSWER.search(log)), None)
    if rank is not None:
        recorded = any(flight_recorder(run).glob("rank-*"))
        where = f"torchfrtrace {flight_recorder(run)} shows what the ranks waited for; " if recorded else ""
        why = f"; {_CUT_OFF}" if silent == "none" else ""
        reason = f"rank {rank} timed out waiting for the other ranks (silent ranks: {silent}{why})"
        return Verdict("hang", reason, where + RESUME)
    rank, log = next(iter(logs.items()))
    return Verdict("crashed", f"rank {rank}: {_last_line(log)} (silent ranks: {silent})", RESUME)


def _of_silence(seconds: float) -> Verdict:
    return Verdict(
        "hang",
        f"no step was completed for {seconds:.0f} s; logs/rank-*.log end with where each rank was",
        "start it again with --resume; if steps take so long, raise launch.hang_timeout_s",
    )


def _of_rank(run: RunDirectory, job: JobRecord, rank_exit: RankExit) -> Verdict:
    rank, log = rank_exit.rank, end_of_log(run, rank_exit.rank)
    quote = f": {_last_line(log)}" if _last_line(log) else ""
    if rank_exit.exit_code == 2:
        return Verdict("bad-config", f"rank {rank} refused the request{quote}", "correct the request and start again")
    if rank_exit.oom_killed:
        return Verdict("oom", f"the kernel ran out of memory and killed rank {rank}", LESS_MEMORY)
    if evidence := _evidence(f"{log}\n{submission_log(job)}", job, rank_exit):
        status, line, next_action = evidence
        said = {
            "oom": f"rank {rank} ran out of memory",
            "node-failure": f"rank {rank} on {rank_exit.host} has a broken device",
        }
        return Verdict(status, f"{said.get(status, f'rank {rank}')}: {line}", next_action)
    if rank_exit.signal is not None:
        return _of_signal(run, rank, rank_exit.signal)
    if "Traceback (most recent call last)" in log and "KeyboardInterrupt" in _last_line(log):
        return Verdict("cancelled", f"rank {rank} was interrupted", RESUME)
    return Verdict("crashed", f"rank {rank} ended with exit code {rank_exit.exit_code}{quote}", read_log(run, rank))


def _evidence(text: str, job: JobRecord, rank_exit: RankExit) -> Evidence | None:
    return find_evidence(text, host=rank_exit.host, on_slurm=job.launcher == "slurm")


def _of_signal(run: RunDirectory, rank: int, number: int) -> Verdict:
    name = next((known.name for known in signal.Signals if known == number), "unknown here")
    match number:
        case signal.SIGTERM | signal.SIGINT | signal.SIGHUP:
            return Verdict("cancelled", f"rank {rank} was stopped by {name} before it could save", RESUME)
        case signal.SIGUSR2:
            return Verdict(
                "preempted", f"rank {rank} was told by {name} that its time was up, and could not save", RESUME
            )
        case signal.SIGKILL:
            return Verdict("crashed", f"rank {rank} was killed by signal 9 (possibly out of memory)", RESUME)
        case signal.SIGBUS:
            reason = (
                f"rank {rank} was killed by signal {number} (SIGBUS): a file that it had mapped, such as the token "
                "cache, was cut short or can no longer be read, or shared memory is full"
            )
            return Verdict("crashed", reason, RESUME)
    return Verdict("crashed", f"rank {rank} was killed by signal {number} ({name})", read_log(run, rank))


def _of_vanished_rank(run: RunDirectory, job: JobRecord, rank: int) -> Verdict:
    last_words = _last_line(end_of_log(run, rank))
    if last_words.startswith(_ERROR):  # nothing but its log could be written, as on a read-only disk
        return Verdict(
            "crashed", last_words.removeprefix(_ERROR), "make sure that the disk can be written, then --resume"
        )
    log = submission_log(job)
    evidence = _OUT_OF_MEMORY.search(log)
    if evidence:
        return Verdict("oom", f"rank {rank} ran out of memory: {_line_around(evidence)}", LESS_MEMORY)
    if "Job credential revoked" in log:  # a lost node came back just as the job was about to start on it again
        return Verdict("node-failure", "a node that Slurm had lost and got back did not accept the job again", RESUME)
    if "Traceback (most recent call last)" in log:
        return Verdict("crashed", f"rank {rank} did not start: {_last_line(log)}", "fix the cause, then --resume")
    return Verdict("crashed", f"rank {rank} vanished without an exit code: it or its supervisor was killed", RESUME)


def _last_line(text: str) -> str:
    lines = text.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_QUOTE_CHARACTERS]


def _line_around(match: re.Match[str]) -> str:
    start = match.string.rfind("\n", 0, match.start()) + 1
    return _last_line(match.string[start:].partition("\n")[0])
