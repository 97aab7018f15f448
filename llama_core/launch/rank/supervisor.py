"""One light process beside each rank: it starts the worker, forwards signals, and records exactly how the worker ended.

submitit pickles functions, installs signal handlers and ends processes as it sees fit. All of that affects only the
supervisor; the worker is a separate child process that sees nothing but the run directory and its environment.
"""

import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from llama_core.launch.attempts import (
    JOB_ID_VARIABLE,
    LOG_HEADER,
    RESTART_VARIABLE,
    RankExit,
    exit_path,
    flight_recorder,
    is_cancellation_requested,
    log_path,
)
from llama_core.launch.outcome import tell_final_ending
from llama_core.launch.rank.children import companion, die_with_parent
from llama_core.launch.rank.requeue import begin_attempt, start_again, start_elsewhere
from llama_core.launch.rank.start import HELD_SIGNALS
from llama_core.launch.rank.surroundings import RankPlace, Surroundings
from llama_core.launch.rank.watchdogs import Heartbeat, Siblings, Successor, Watcher
from llama_core.launch.verdict import OTHER_NODES_EXIT, STOPPED_EXIT
from llama_core.launchers.registry import LAUNCHERS
from llama_core.machine.detect import available_cores
from llama_core.machine.node import NODE_VARIABLE, own_host
from llama_core.machine.toolchain import COMPILE_WORKERS
from llama_core.planning.memory.process import KERNELS_KEPT
from llama_core.records.directory import RunDirectory
from llama_core.records.files import cache_directory, now, read_typed
from llama_core.records.job import JobRecord
from llama_core.records.reserve import write_even_on_full_disk

if TYPE_CHECKING:  # a supervisor starts without the schema of the configuration
    from llama_core.config.settings import Device

FORWARDED_SIGNALS = (*HELD_SIGNALS, signal.SIGCONT)

MALLOC_TUNABLES = ":".join(
    (
        "glibc.malloc.mmap_max=0",
        f"glibc.malloc.trim_threshold={2**62}",
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.tcache_count=0",
    )
)
"""Keep freed memory in the process, and whole.

glibc otherwise maps every large tensor anew, page fault by page fault. To align a tensor, it takes up to 96 bytes more
and puts what is left over into a cache of small pieces for the thread, where nothing joins it to its neighbours again:
then the same tensor does not fit into the place that it was freed from, and the heap grows. Without that cache it does.
"""

KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""The limits of oneDNN and of torch to the kernels that they keep, one for each size of product in half precision."""

JOB_RECORD_SECONDS = 120
"""How long a rank waits for its job to be recorded; a shared file system may show a new file after a minute."""

DUMP_SECONDS = 15
"""How long a hanging rank may take to dump its stacks before it is killed."""


@dataclass(frozen=True)
class Supervisor:
    """The callable that runs on every rank: it starts the worker and returns when the worker has finished.

    It is pickled, so it holds only values.
    """

    run_dir: Path
    command: tuple[str, ...]
    """The worker's command line."""
    device: "Device"
    hang_timeout_s: int
    """Seconds without a step, after the first, before the rank is ended."""
    surroundings: Surroundings
    """What the ranks find around them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables every worker gets in addition to its own rank's."""
    max_attempts: int = 1
    """Starts after which the job gives up."""
    max_excluded: int = 0
    """Nodes that the job may be kept off because they were slow while it trained."""
    num_nodes: int = 0
    """The nodes that the job needs to go on if it has spares; 0 if it has none."""
    companion: tuple[str, ...] = ()
    """The command line of a program that runs beside the first rank; empty for none."""

    def __call__(self) -> None:
        """Run the worker of this rank.

        Raises:
            SystemExit: with the worker's exit code, or 1 after a signal, unless it finished or the job starts again.
        """
        place = self.surroundings.take_place()
        os.environ[NODE_VARIABLE] = place.host or socket.gethostname()
        environment = worker_environment(
            {**os.environ, **self.environment}, self.device, place.ranks_on_node, self.run_dir, place.cores
        )
        environment |= {JOB_ID_VARIABLE: place.job_id, RESTART_VARIABLE: str(place.restart)}
        rank = _Rank(self, place)
        if not rank.is_recorded() or is_cancellation_requested(rank.run_directory, rank.job):
            sys.exit(1)
        if place.rank == 0 and not self._begins(rank):
            sys.exit(1)
        rank_exit = rank.run(environment)
        if rank_exit.failed and rank.was_told_to_stop(rank_exit) and self._goes_on(rank):
            return
        if rank_exit.exit_code == OTHER_NODES_EXIT and self._goes_elsewhere(rank):
            return
        if rank_exit.failed:
            if place.rank == 0:
                has_spares = self.num_nodes > 0
                tell_final_ending(rank.run_directory, rank.job, place.restart, place.num_ranks, has_spares=has_spares)
            sys.exit(rank_exit.exit_code or 1)

    def _begins(self, rank: "_Rank") -> bool:
        place = rank.place
        return begin_attempt(
            rank.run_directory,
            rank.job,
            place.restart,
            place.nodes,
            max_attempts=self.max_attempts,
            surroundings=self.surroundings,
        )

    def _goes_on(self, rank: "_Rank") -> bool:
        """Return whether the job starts again; the first rank queues it again, and the others rely on that."""
        launcher = LAUNCHERS.named(rank.job.launcher)
        if not launcher.can_requeue and launcher.announces_end_with is None:
            return False
        if rank.place.rank > 0:
            return launcher.can_requeue and not is_cancellation_requested(rank.run_directory, rank.job)
        return start_again(
            rank.run_directory,
            rank.job,
            rank.place.restart,
            announced=launcher.announces_end_with in rank.received,
            max_attempts=self.max_attempts,
            max_excluded=self.max_excluded,
            surroundings=self.surroundings,
        )

    def _goes_elsewhere(self, rank: "_Rank") -> bool:
        """Return whether the job starts again on other nodes; as with ``_goes_on``, the first rank sees to that."""
        if rank.place.rank > 0:
            return not is_cancellation_requested(rank.run_directory, rank.job)
        return start_elsewhere(
            rank.run_directory,
            rank.job,
            rank.place.restart,
            num_nodes=self.num_nodes,
            surroundings=self.surroundings,
        )


def worker_environment(
    base: Mapping[str, str], device: "Device", ranks_on_node: int, run_dir: Path | None, cores: int | None = None
) -> dict[str, str]:
    """Return the environment of a worker; a variable that is set already is never changed.

    Args:
        base: the environment to add to.
        device: where the worker computes.
        ranks_on_node: ranks that share the machine's cores.
        run_dir: the run directory; None if the worker belongs to no run that trains.
        cores: the worker's cores; by default its share of those that the process may use.
    """
    cores = cores or max(1, available_cores() // ranks_on_node)
    # Compiled code is kept from run to run, and apart for each machine, as homes are often shared. torch keeps it in
    # /tmp, where somebody else could make the folder first, and put code into it.
    cache = cache_directory(None)
    host = socket.gethostname()
    defaults = {
        "OMP_NUM_THREADS": str(cores),
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor" / host),
        "TRITON_CACHE_DIR": str(cache / "triton" / host),
    }
    if device == "cpu":
        defaults |= dict.fromkeys(KERNEL_CACHES, str(KERNELS_KEPT))
        if platform.libc_ver()[0] == "glibc":
            defaults["GLIBC_TUNABLES"] = MALLOC_TUNABLES
    if device == "cuda":
        own = cuda_defaults(run_dir, cores)
        defaults |= {name: value for name, value in own.items() if _OLD_NAMES.get(name, name) not in base}
    return defaults | dict(base)


def cuda_defaults(run_dir: Path | None, cores: int) -> dict[str, str]:
    """Return the variables of a worker on CUDA with its share of the cores, read by torch 2.11 and newer."""
    defaults = {
        # less fragmentation: freed memory is remapped instead of kept in blocks of one size
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        # a warning against what ``Mesh.transfers`` avoids
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
        # Some 20 streams would share 8 queues of the device, in which work waits for unrelated work before it: a
        # receive that was posted early could keep back what its sender waits for.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # each of up to eight ranks of a machine would start a process for every core
        "TORCHINDUCTOR_COMPILE_THREADS": str(min(COMPILE_WORKERS, cores)),
    }
    if run_dir is None:
        return defaults
    return defaults | {
        # what every rank sent and waited for, in a file, when a collective times out
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "20000",
        "TORCH_FR_DUMP_TEMP_FILE": str(flight_recorder(RunDirectory(run_dir)) / "rank-"),
    }


_OLD_NAMES = {
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""Names that torch still reads, but only if the new one is unset."""


class _Rank:
    """The worker of one rank while it runs."""

    def __init__(self, supervisor: Supervisor, place: RankPlace) -> None:
        self.supervisor = supervisor
        self.run_directory = RunDirectory(supervisor.run_dir)
        self.place = place
        self.worker: subprocess.Popen[bytes] | None = None
        self.received: list[int] = []
        self._unsent: deque[int] = deque()
        self.stopped = False
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)  # those that came since the process began come now

    @property
    def job(self) -> JobRecord:
        """The job, as its submitter recorded it."""
        return read_typed(self.run_directory.job, JobRecord)

    def is_recorded(self) -> bool:
        """Wait until ``job.json`` names this job; False after a timeout, since an unrecorded job must not run."""
        deadline = time.monotonic() + JOB_RECORD_SECONDS
        while time.monotonic() < deadline:
            if self.run_directory.job.exists() and self.job.job_id == self.place.job_id:
                return True
            time.sleep(0.1)
        return False

    def was_told_to_stop(self, rank_exit: RankExit) -> bool:
        """Return whether the worker ended because its job was told to stop: after a step, or before it could react."""
        return rank_exit.exit_code == STOPPED_EXIT or not {signal.SIGTERM, signal.SIGUSR2}.isdisjoint(self.received)

    def run(self, environment: Mapping[str, str]) -> RankExit:
        """Run the worker to its end and record how it ended."""
        job = self.job
        rank = self.place.rank
        restart = self.place.restart
        if self.supervisor.device == "cuda":
            flight_recorder(self.run_directory).mkdir(exist_ok=True)  # torch does not make it
        with log_path(self.run_directory, rank).open("ab", buffering=0) as log:
            start = f", start {restart + 1}" if restart else ""
            log.write(f"{LOG_HEADER}{self.place.job_id}{start}, rank {rank}, {now()} ===\n".encode())
            self.worker = subprocess.Popen(
                self.supervisor.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 (a supervisor has one thread)
            )
        self._send()
        watchers: list[Watcher] = []
        if self.supervisor.surroundings.has_one_parent and self.place.num_ranks > 1:
            watchers.append(Siblings(self.run_directory, job, restart, self.place.num_ranks))
        if rank == 0:
            watchers.append(Successor(self.run_directory, job, restart))
        heartbeat = Heartbeat(self.run_directory, self.supervisor.hang_timeout_s)
        with companion(self.supervisor.companion if rank == 0 else (), self.run_directory):
            oom_killed, silent_seconds = self._wait(self.worker, heartbeat, watchers)
        _kill_group(self.worker.pid)
        code = self.worker.returncode
        rank_exit = RankExit(
            rank=rank,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            oom_killed=oom_killed and code == -signal.SIGKILL,
            stopped=self.stopped,
            num_ranks=self.place.num_ranks,
            ended_at=time.time(),
            silent_seconds=silent_seconds,
            host=own_host(),
        )
        path = exit_path(self.run_directory, job, restart, rank)
        write_even_on_full_disk(self.run_directory, path, rank_exit)
        return rank_exit

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self._unsent.append(number)
        self._send()

    def _send(self) -> None:
        """Pass on each signal once; another may come, and be sent, in the middle of this."""
        with suppress(IndexError):
            while self.worker is not None:
                self.worker.send_signal(self._unsent.popleft())

    def _wait(
        self, worker: "subprocess.Popen[bytes]", heartbeat: Heartbeat, watchers: Sequence[Watcher]
    ) -> tuple[bool, float | None]:
        """Wait for the worker, ending it if necessary; return whether the kernel's out-of-memory killer struck.

        The second value is the seconds without a step if the worker was ended for that, else None.
        """
        silent_seconds = None
        while True:
            kills_before = _oom_kills()
            with suppress(subprocess.TimeoutExpired):
                worker.wait(timeout=1)
                return _oom_kills() > kills_before, silent_seconds
            silent_seconds = heartbeat.silent_seconds()
            if silent_seconds is not None:
                _kill_after_dump(worker)
            elif any(watcher.gives_up() for watcher in watchers):
                self.stopped = True
                worker.kill()


def _kill_after_dump(worker: "subprocess.Popen[bytes]") -> None:
    """Make a hanging worker dump the stacks of its threads, then kill it."""
    worker.send_signal(signal.SIGUSR1)
    worker.send_signal(signal.SIGCONT)  # a process that somebody has stopped cannot dump
    with suppress(subprocess.TimeoutExpired):  # this gives the other ranks time to dump before they lose this one
        worker.wait(timeout=DUMP_SECONDS)
    worker.kill()


def _kill_group(leader: int) -> None:
    """Kill processes that the worker may have left running, such as its data loaders."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _oom_kills() -> int:
    """Return the number of processes that Linux has killed for lack of memory since boot; 0 if it does not say."""
    try:
        counters = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), 0)
