"""One light process beside each rank: it starts the worker, passes signals on, and records exactly how it ended.

submitit pickles functions, installs signal handlers and ends processes as it sees fit. All of that happens to the
supervisor; the worker is a child of its own that only ever meets the run directory and its environment.
"""

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from llama_core.artifacts import JobRecord, RunDirectory, now, read_json, write_json
from llama_core.config.run import Device
from llama_core.launch.environment import available_cores
from llama_core.launch.outcome import (
    JOB_ID_VARIABLE,
    LOG_HEADER,
    RankExit,
    cancel_path,
    exit_path,
    log_path,
    read_rank_exits,
)

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGCONT)

MALLOC_TUNABLES = f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**62}:glibc.malloc.hugetlb=1"
"""Keep freed memory in the process: glibc otherwise maps every large tensor anew, page fault by page fault."""

JOB_RECORD_SECONDS = 120
"""How long a rank waits for its job to be recorded; a shared file system may show a new file after a minute."""

SURVIVOR_SECONDS = 5
"""How long ranks may go on after one has failed, to end by themselves before they are killed."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Supervisor:
    """What submitit runs on every rank: a call starts the worker and returns when it has finished.

    It is pickled, so it holds values only.
    """

    run_dir: Path
    command: tuple[str, ...]
    """The worker's command line."""
    device: Device
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables every worker gets in addition to its own rank's."""

    def __call__(self) -> None:
        """Run the worker of this rank.

        Raises:
            SystemExit: with the worker's exit code, or 1 after a signal, unless it finished.
        """
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        job = JobEnvironment()
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        if job.cluster == "local":
            # Only there: the controller's main thread starts the ranks, and a dying thread would send the signal too.
            die_with_parent(int(job.job_id))()
        environment = worker_environment(
            {**os.environ, **self.environment}, self.device, job.num_tasks // job.num_nodes
        )
        environment[JOB_ID_VARIABLE] = job.job_id
        rank_exit = _Rank(RunDirectory(self.run_dir), job.job_id, job.global_rank, job.num_tasks).run(
            self.command, environment, watch_siblings=job.cluster == "local" and job.num_tasks > 1
        )
        if rank_exit is None or rank_exit.failed:
            sys.exit((rank_exit and rank_exit.exit_code) or 1)


def worker_environment(base: Mapping[str, str], device: Device, ranks_on_node: int) -> dict[str, str]:
    """Return the environment of a worker; a variable that is set already is never changed.

    Args:
        base: the environment to add to.
        device: where the worker computes.
        ranks_on_node: ranks that share the machine's cores.
    """
    # Slurm has divided the cores already; elsewhere the ranks share what the process may use.
    cores = int(base.get("SLURM_CPUS_PER_TASK") or max(1, available_cores() // ranks_on_node))
    defaults = {"OMP_NUM_THREADS": str(cores), "PYTHONUNBUFFERED": "1"}
    if device == "cpu" and platform.libc_ver()[0] == "glibc":
        defaults["GLIBC_TUNABLES"] = MALLOC_TUNABLES
    return defaults | dict(base)


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return a function that ties the life of the process it is called in to that of ``parent``.

    It has no effect but on Linux. Call the outer part before forking: it loads the C library.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the tie
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


class _Rank:
    """The worker of one rank while it runs."""

    def __init__(self, run: RunDirectory, job_id: str, rank: int, num_ranks: int) -> None:
        self.run_directory = run
        self.job_id = job_id
        self.rank = rank
        self.num_ranks = num_ranks
        self.worker: subprocess.Popen[bytes] | None = None
        self.received: list[int] = []
        self.stopped = False

    def run(self, command: tuple[str, ...], environment: Mapping[str, str], *, watch_siblings: bool) -> RankExit | None:
        """Run ``command`` to its end and record how it ended; None if the job was cancelled before it began."""
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._forward)
        if not self._is_recorded() or cancel_path(self.run_directory).exists():
            return None
        with log_path(self.run_directory, self.rank).open("ab", buffering=0) as log:
            log.write(f"{LOG_HEADER}{self.job_id}, rank {self.rank}, {now()} ===\n".encode())
            self.worker = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 (a supervisor has one thread)
            )
        for received in self.received:
            self.worker.send_signal(received)
        oom_killed = self._wait(self.worker, watch_siblings=watch_siblings)
        _kill_group(self.worker.pid)
        code = self.worker.returncode
        rank_exit = RankExit(
            rank=self.rank,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            oom_killed=oom_killed and code == -signal.SIGKILL,
            stopped=self.stopped,
            num_ranks=self.num_ranks,
            ended_at=time.time(),
        )
        write_json(exit_path(self.run_directory, self.rank), rank_exit)
        return rank_exit

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self.worker is None:
            self.received.append(number)
        else:
            self.worker.send_signal(number)

    def _is_recorded(self) -> bool:
        """Wait until ``job.json`` names this job: one that its submitter did not live to record must not run."""
        deadline = time.monotonic() + JOB_RECORD_SECONDS
        while time.monotonic() < deadline:
            if self.run_directory.job.exists() and JobRecord(**read_json(self.run_directory.job)).job_id == self.job_id:
                return True
            time.sleep(0.1)
        return False

    def _wait(self, worker: subprocess.Popen[bytes], *, watch_siblings: bool) -> bool:
        """Wait for the worker; return whether the kernel's out-of-memory killer struck at the end."""
        siblings = _Siblings(self.run_directory, self.num_ranks) if watch_siblings else None
        while True:
            kills_before = _oom_kills()
            try:
                worker.wait(timeout=1)
            except subprocess.TimeoutExpired:
                if siblings is not None and siblings.missing_for_long():
                    self.stopped = True
                    worker.kill()
            else:
                return _oom_kills() > kills_before


class _Siblings:
    """The ranks' supervisors, children of one parent. A rank whose peer is gone may wait for it for ever."""

    def __init__(self, run: RunDirectory, num_ranks: int) -> None:
        self.run = run
        self.num_ranks = num_ranks
        self.complete_at = time.monotonic()

    def missing_for_long(self) -> bool:
        """Return whether for ``SURVIVOR_SECONDS`` a rank has been neither at work nor finished."""
        import psutil

        children = psutil.Process(os.getppid()).children()
        present = sum(child.status() != psutil.STATUS_ZOMBIE for child in children)
        finished = sum(not rank_exit.failed for rank_exit in read_rank_exits(self.run))
        if present + finished >= self.num_ranks:
            self.complete_at = time.monotonic()
        return time.monotonic() - self.complete_at > SURVIVOR_SECONDS


def _kill_group(leader: int) -> None:
    """End what the worker may have left running, such as the processes that load its data."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _oom_kills() -> int:
    """Return how many processes Linux has killed for want of memory since it booted; 0 where it does not tell."""
    try:
        counters = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), 0)
