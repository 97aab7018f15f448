"""Why an attempt ended, worked out from its ranks' exit codes, signals and last log lines."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_core.launch.attempts import (
    RankExit,
    end_of_log,
    flight_recorder,
    log_path,
    missing_ranks,
    read_rank_exits,
    submission_log,
)
from llama_core.launchers.registry import LAUNCHERS
from llama_core.records.directory import RunDirectory
from llama_core.records.job import JobRecord, OutcomeStatus

LOST_PEERS_EXIT = 75
"""Exit code of a rank that ended because other ranks were gone or did not answer; the cause lies with them."""

STOPPED_EXIT = 76
"""Exit code of a rank that was asked to stop and did so after a step that all ranks agreed on, with a checkpoint."""

OTHER_NODES_EXIT = 77
"""Exit code of a rank whose job is to start again without the nodes that fell behind before the first step."""

_MORE_MEMORY = [f"on {row.title} also more {row.more_memory}" for row in LAUNCHERS.built_in() if row.more_memory]
LESS_MEMORY = (
    f"use a smaller parallel.microbatch_size or parallel.recompute=full ({'; '.join(_MORE_MEMORY)}), then --resume"
)
MORE_DISK = "free some space there, or lower training.keep_checkpoints, then --resume"
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
    r"|exceeded memory limit|CUDA error: out of memory|Cuda failure (?:2 )?'out of memory'|Failed to CUDA \w*alloc"
    r"|CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_\w*ALLOC\w*FAILED",
    re.MULTILINE,
)
"""cuBLAS and cuDNN ask the device for a workspace when they start, and name only the call that failed."""
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
_NO_CODE = re.compile(r"no kernel image is available for execution on the device")
"""A program without machine code for this kind of device."""


RUN = "RUN_DIR"
"""Stands for the run's path in a next action, because the run may be moved before somebody reads it."""
_HERE = RunDirectory(Path(RUN))


def read_log(rank: int) -> str:
    """Return the next action after ``rank`` failed in a way that only its output explains."""
    return f"read {log_path(_HERE, rank)}, fix the cause, then --resume"


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended, in one sentence with the values that show it, and what to try next."""

    status: OutcomeStatus
    reason: str
    next_action: str


@dataclass(frozen=True)
class Evidence:
    """What the words of a failed rank prove."""

    status: OutcomeStatus
    line: str
    """The line that proves it."""
    next_action: str


def find_evidence(text: str, *, host: str, job: JobRecord | None) -> Evidence | None:
    """Return what a rank's error or log proves about memory and device; None if it says nothing about them.

    Args:
        text: the rank's words.
        host: the name of its node.
        job: its job; None if it was started by hand.
    """
    kernel = (
        "find the kernel with CUDA_LAUNCH_BLOCKING=1, or with compute-sanitizer on one rank (docs/debugging.md); if "
        "it is another one each time, suspect the device"
    )
    other_build = (
        "install a torch that is built for this device, and other packages with kernels too: python -c 'import torch; "
        "print(torch.cuda.get_device_capability(), torch.cuda.get_arch_list())' shows what this one is built for"
    )
    faults: tuple[tuple[re.Pattern[str], OutcomeStatus, str], ...] = (
        (_BROKEN_DEVICE, "node-failure", on_other_nodes(host, job)),
        (_NO_CODE, "crashed", other_build),
        (_OUT_OF_MEMORY, "oom", LESS_MEMORY),
        (_BAD_ACCESS, "crashed", kernel),
    )
    for pattern, status, next_action in faults:
        if found := pattern.search(text):
            return Evidence(status, _line_around(found), next_action)
    return None


def on_other_nodes(hosts: str, job: JobRecord | None) -> str:
    """Return the next action after a device has failed.

    Args:
        hosts: the names of its node, or of those that it may be in, with commas.
        job: the job; None if it was started by hand.
    """
    other_nodes = LAUNCHERS.named(job.launcher).other_nodes if job else ""
    if other_nodes:
        return f"continue on other nodes: --resume --set {other_nodes.format(host=hosts)}"
    return f"look at the devices of {hosts} (nvidia-smi -q, dmesg), reset or replace the broken one, then --resume"


@dataclass(frozen=True)
class _Ending:
    """How the ranks of an attempt ended, in order of time."""

    run: RunDirectory
    job: JobRecord
    exits: list[RankExit]
    """All ranks that left a record."""
    lost: list[RankExit]
    """Those that ended only because others had ended."""
    failed: list[RankExit]
    """Those that failed by themselves."""

    @property
    def culprit(self) -> RankExit | None:
        """The rank to blame: the first that failed by itself."""
        # Slurm, for one, sends SIGTERM to the others once one has failed, and clocks of nodes may show another order.
        first = self.failed[0] if self.failed else None
        return next((rank_exit for rank_exit in self.failed if rank_exit.signal != signal.SIGTERM), first)


def verdict_of_ranks(run: RunDirectory, job: JobRecord, restart: int) -> Verdict:
    """Return why an attempt ended, from its ranks' records; the first rank that failed by itself is to blame."""
    ending = _ending(run, job, restart)
    found = (explain(ending) for explain in _EXPLANATIONS)
    nothing_wrong = Verdict("crashed", "every rank exited with code 0 but none recorded an outcome", read_log(0))
    return next((verdict for verdict in found if verdict is not None), nothing_wrong)


def _ending(run: RunDirectory, job: JobRecord, restart: int) -> _Ending:
    exits = read_rank_exits(run, job, restart)
    lost = [rank_exit for rank_exit in exits if _lost_the_others(run, job, rank_exit)]
    lost_ranks = {rank_exit.rank for rank_exit in lost}
    suspects = [rank_exit for rank_exit in exits if rank_exit.failed and not rank_exit.stopped]
    suspects = [rank_exit for rank_exit in suspects if rank_exit.rank not in lost_ranks]
    failed = [rank_exit for rank_exit in suspects if not _ended_with_the_others(rank_exit, lost)]
    return _Ending(run, job, exits, lost, failed)


def _lost_the_others(run: RunDirectory, job: JobRecord, rank_exit: RankExit) -> bool:
    """Return whether a rank ended only because others had ended: it says so, or NCCL's watchdog ended it."""
    if rank_exit.signal == signal.SIGABRT:
        log = end_of_log(run, rank_exit.rank)
        return _NO_ANSWER.search(log) is not None and _evidence(log, job, rank_exit) is None
    return rank_exit.exit_code == LOST_PEERS_EXIT


def _ended_with_the_others(rank_exit: RankExit, lost: Sequence[RankExit]) -> bool:
    """Return whether a rank was killed because NCCL's watchdogs had ended ``lost``: it had left them waiting."""
    killed = rank_exit.signal in {signal.SIGTERM, signal.SIGKILL} and not rank_exit.oom_killed
    ended = [e.ended_at for e in lost if e.signal == signal.SIGABRT]
    return killed and bool(ended) and rank_exit.ended_at > min(ended) - _SKEW_SECONDS


def _of_culprit(ending: _Ending) -> Verdict | None:
    culprit = ending.culprit
    if culprit is None:
        return None
    if culprit.silent_seconds is not None:
        return _of_hang(culprit.silent_seconds)
    return _of_rank(ending.run, ending.job, culprit)


def _of_lost_ranks(ending: _Ending) -> Verdict | None:
    """Return why ranks lost others that did not fail by themselves."""
    if not ending.lost:
        return None
    logs = {rank_exit.rank: end_of_log(ending.run, rank_exit.rank) for rank_exit in ending.lost}
    silent = _silent_ranks(ending)
    rank = next((rank for rank, log in logs.items() if _NO_ANSWER.search(log)), None)
    if rank is None:
        rank, log = next(iter(logs.items()))
        return Verdict("crashed", f"rank {rank}: {_last_line(log)} (silent ranks: {silent})", RESUME)
    recorded = any(flight_recorder(ending.run).glob("rank-*"))
    where = f"torchfrtrace {flight_recorder(_HERE)} shows what the ranks waited for; " if recorded else ""
    why = f"; {_CUT_OFF}" if silent == "none" else ""
    reason = f"rank {rank} timed out waiting for the other ranks (silent ranks: {silent}{why})"
    return Verdict("hang", reason, where + RESUME)


def _silent_ranks(ending: _Ending) -> str:
    """Return the ranks that neither ended well nor reported that they had lost others."""
    heard = {rank_exit.rank for rank_exit in ending.exits if not rank_exit.failed}
    heard |= {rank_exit.rank for rank_exit in ending.lost}
    return ", ".join(str(rank) for rank in range(ending.lost[0].num_ranks) if rank not in heard) or "none"


def _of_missing_rank(ending: _Ending) -> Verdict | None:
    missing = missing_ranks(ending.exits)
    return _of_vanished_rank(ending.run, ending.job, missing[0]) if missing else None


def _of_ended_ranks(ending: _Ending) -> Verdict | None:
    if any(rank_exit.failed for rank_exit in ending.exits):
        return Verdict("crashed", "the ranks were ended, but none of them had failed", RESUME)
    return None


_EXPLANATIONS = (_of_culprit, _of_lost_ranks, _of_missing_rank, _of_ended_ranks)
"""What may explain the end of an attempt; the first that does counts."""


def _of_hang(seconds: float) -> Verdict:
    return Verdict(
        "hang",
        f"no step was completed for {seconds:.0f} s; logs/rank-*.log end with where each rank was",
        "start it again with --resume; if steps take so long, raise launch.hang_timeout_s",
    )


@dataclass(frozen=True)
class _Failure:
    """A rank that failed by itself."""

    run: RunDirectory
    job: JobRecord
    exit: RankExit
    log: str
    """The end of its log."""

    @property
    def name(self) -> str:
        """The rank in a sentence."""
        return f"rank {self.exit.rank}"

    @property
    def quote(self) -> str:
        """Its last line, as the end of a sentence."""
        line = _last_line(self.log)
        return f": {line}" if line else ""


def _of_rank(run: RunDirectory, job: JobRecord, rank_exit: RankExit) -> Verdict:
    failure = _Failure(run, job, rank_exit, end_of_log(run, rank_exit.rank))
    found = (explain(failure) for explain in _CAUSES)
    reason = f"{failure.name} ended with exit code {rank_exit.exit_code}{failure.quote}"
    unexplained = Verdict("crashed", reason, read_log(rank_exit.rank))
    return next((verdict for verdict in found if verdict is not None), unexplained)


def _refused(failure: _Failure) -> Verdict | None:
    if failure.exit.exit_code != 2:
        return None
    reason = f"{failure.name} refused the request{failure.quote}"
    return Verdict("bad-config", reason, "correct the request and start again")


def _killed_by_the_kernel(failure: _Failure) -> Verdict | None:
    if not failure.exit.oom_killed:
        return None
    return Verdict("oom", f"the kernel ran out of memory and killed {failure.name}", LESS_MEMORY)


def _said_so(failure: _Failure) -> Verdict | None:
    words = f"{failure.log}\n{submission_log(failure.run, failure.job)}"
    evidence = _evidence(words, failure.job, failure.exit)
    if evidence is None:
        return None
    said = {
        "oom": f"{failure.name} ran out of memory",
        "node-failure": f"{failure.name} on {failure.exit.host} has a broken device",
    }
    reason = f"{said.get(evidence.status, failure.name)}: {evidence.line}"
    return Verdict(evidence.status, reason, evidence.next_action)


def _signalled(failure: _Failure) -> Verdict | None:
    return None if failure.exit.signal is None else _of_signal(failure.exit.rank, failure.exit.signal)


def _interrupted(failure: _Failure) -> Verdict | None:
    if "Traceback (most recent call last)" in failure.log and "KeyboardInterrupt" in _last_line(failure.log):
        return Verdict("cancelled", f"{failure.name} was interrupted", RESUME)
    return None


_CAUSES = (_refused, _killed_by_the_kernel, _said_so, _signalled, _interrupted)
"""What may have ended a rank that failed by itself; the first that did counts."""


def _evidence(text: str, job: JobRecord, rank_exit: RankExit) -> Evidence | None:
    return find_evidence(text, host=rank_exit.host, job=job)


def _of_signal(rank: int, number: int) -> Verdict:
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
    return Verdict("crashed", f"rank {rank} was killed by signal {number} ({name})", read_log(rank))


def _of_vanished_rank(run: RunDirectory, job: JobRecord, rank: int) -> Verdict:
    last_line = _last_line(end_of_log(run, rank))
    if last_line.startswith(_ERROR):  # nothing but its log could be written, as on a read-only disk
        return Verdict(
            "crashed", last_line.removeprefix(_ERROR), "make sure that the disk can be written, then --resume"
        )
    log = submission_log(run, job)
    evidence = _OUT_OF_MEMORY.search(log)
    if evidence:
        return Verdict("oom", f"rank {rank} ran out of memory: {_line_around(evidence)}", LESS_MEMORY)
    for cause in LAUNCHERS.named(job.launcher).kept_from_starting:
        if cause.words in log:
            return Verdict("node-failure", cause.reason, RESUME)
    if "Traceback (most recent call last)" in log:
        return Verdict("crashed", f"rank {rank} did not start: {_last_line(log)}", "fix the cause, then --resume")
    return Verdict("crashed", f"rank {rank} vanished without an exit code: it or its supervisor was killed", RESUME)


def _last_line(text: str) -> str:
    lines = text.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_QUOTE_CHARACTERS]


def _line_around(match: re.Match[str]) -> str:
    start = match.string.rfind("\n", 0, match.start()) + 1
    return _last_line(match.string[start:].partition("\n")[0])
