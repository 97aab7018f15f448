"""Starting a run's job on this machine or on Slurm, and finding it again from any process that sees the run directory.

Both ways go through submitit and end in the same ``Supervisor`` on every rank. ``job.json`` is written before anyone
waits, and a rank whose job is not recorded there does not start: a run never has a job that nobody can find.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llama_core.artifacts import JobRecord, Outcome, RunDirectory, StepRecord, now, read_json, write_json
from llama_core.config.run import Device, RunConfig
from llama_core.errors import EnvironmentMismatchError, RunDirectoryError
from llama_core.launch.outcome import (
    cancel_path,
    conclude,
    concluded,
    exit_path,
    newest_step,
    read_rank_exits,
    submission_folders,
)
from llama_core.launch.supervisor import Supervisor

if TYPE_CHECKING:
    import psutil

Part = Literal["train", "benchmark"]

WORKER = (sys.executable, "-m", "llama_core.launch.worker")  # a command line, so that submitting needs no torch

CANCEL_GRACE_SECONDS = 120.0
"""Time a job gets to finish its step and save a checkpoint before it is killed."""

POLL_SECONDS = 0.2
SLURM_POLL_SECONDS = 5.0
"""Time between two questions to Slurm's controller, which all its users share."""
SLURM_FILES_SECONDS = 15.0
"""How long records written on a node may take to show on this machine's side of the shared file system."""
KILL_SECONDS = 10.0
"""How long the kernel may take to end a killed process."""
SLURM_KILL_SECONDS = 120.0
"""How long Slurm may take to clear away a job it was told to kill."""
SIGNAL_DELAY_SECONDS = 300
"""How long before its time limit Slurm tells a job to save a checkpoint."""

_NO_TIME_LIMIT_MIN = 10 * 365 * 24 * 60  # submitit's local jobs cannot do without a limit
_SLURM_ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
     "REVOKED", "SPECIAL_EXIT", "TIMEOUT", "UNKNOWN")
)  # fmt: skip


class JobHandle(ABC):
    """A job that has been submitted: watch it, wait for it, stop it. Any process may hold one."""

    def __init__(self, run: RunDirectory, record: JobRecord) -> None:
        self.run = run
        self.record = record

    @abstractmethod
    def is_running(self) -> bool:
        """Return whether the job is queued or has processes at work."""

    @abstractmethod
    def _ask_to_stop(self) -> None:
        """Pass SIGTERM on to every rank; end the job if it has not begun."""

    @abstractmethod
    def _kill(self) -> None:
        """End every process of the job."""

    def _conclude(self) -> Outcome:
        return conclude(self.run, self.record)

    def wait(self, on_progress: Callable[[StepRecord], None] | None = None) -> Outcome:
        """Return why the job ended, as soon as it has; ``on_progress`` is told of each newest step meanwhile.

        Steps that follow each other faster than they are looked for are skipped, except the last.
        """
        newest: StepRecord | None = None
        submitted = datetime.fromisoformat(self.record.submitted_at).timestamp()
        while True:
            running = self.is_running()  # asked first, so that the last step is still reported
            step = newest_step(self.run)
            if on_progress is not None and step is not None and step != newest and step.time >= submitted:
                on_progress(step)
                newest = step
            if not running:
                return self._conclude()
            time.sleep(POLL_SECONDS)

    def cancel(self, grace_seconds: float = CANCEL_GRACE_SECONDS) -> Outcome:
        """Ask the job to finish its step and save a checkpoint, kill what is left of it, and return its outcome.

        Args:
            grace_seconds: time the job gets before it is killed.
        """
        if self.is_running():
            write_json(cancel_path(self.run), {"requested_at": now()})
            self._ask_to_stop()
            if not self._ends_within(grace_seconds):
                self._kill()
        return self._conclude()

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.is_running():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True


class LocalJobHandle(JobHandle):
    """A job on this machine: submitit's controller and, below it, a supervisor and a worker for each rank."""

    def is_running(self) -> bool:
        """Return whether the controller lives; its ranks die with it."""
        return self._controller() is not None

    def _folder(self) -> Path | None:
        """Return the submission folder of this very job, or None if it is gone."""
        holds_job = f"{self.record.job_id}_submitted.pkl"
        folders = reversed(submission_folders(self.run))
        return next((folder.resolve() for folder in folders if (folder / holds_job).exists()), None)

    def _controller(self) -> "psutil.Process | None":
        import psutil

        # Its command line names the job's own folder. No other process with a reused id has that, and unlike a start
        # time it does not move when the machine's clock is set.
        folder = self._folder()
        with suppress(psutil.Error):
            process = psutil.Process(int(self.record.job_id))
            if str(folder) in process.cmdline():
                return process
        return None

    def _ask_to_stop(self) -> None:
        import psutil

        controller = self._controller()
        if controller is not None:
            with suppress(psutil.NoSuchProcess):
                controller.terminate()  # it passes SIGTERM on to the supervisors, and they to the workers

    def _kill(self) -> None:
        import psutil

        controller = self._controller()
        if controller is not None:
            with suppress(psutil.NoSuchProcess):
                controller.kill()
            psutil.wait_procs([controller], timeout=KILL_SECONDS)

    def _conclude(self) -> Outcome:
        self._sweep()
        return super()._conclude()

    def _sweep(self) -> None:
        """Kill what outlived the controller, such as processes that load data for a worker that was killed."""
        import psutil

        folder, left = self._folder(), []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                # submitit sets it for each rank, and whatever a rank starts inherits it.
                if process.environ().get("SUBMITIT_FOLDER") == str(folder):
                    process.kill()
                    left.append(process)
        psutil.wait_procs(left, timeout=KILL_SECONDS)


class SlurmJobHandle(JobHandle):
    """A job that Slurm runs or keeps in its queue."""

    def __init__(self, run: RunDirectory, record: JobRecord) -> None:
        super().__init__(run, record)
        self._state = "PENDING"
        self._asked_at = float("-inf")

    def is_running(self) -> bool:
        """Return whether Slurm has not yet ended the job; no answer counts as no change."""
        if self._state not in _SLURM_ENDED and time.monotonic() - self._asked_at >= SLURM_POLL_SECONDS:
            self._state = slurm_state(self.record.job_id, self.run.name) or self._state
            self._asked_at = time.monotonic()
        return self._state not in _SLURM_ENDED

    def _ask_to_stop(self) -> None:
        waiting = slurm_state(self.record.job_id, self.run.name) in {"PENDING", "CONFIGURING"}
        _slurm("scancel", *(() if waiting else ("--signal=TERM",)), self.record.job_id)

    def _kill(self) -> None:
        _slurm("scancel", self.record.job_id)
        self._ends_within(SLURM_KILL_SECONDS)

    def _conclude(self) -> Outcome:
        deadline = time.monotonic() + SLURM_FILES_SECONDS
        while self._state in {"COMPLETED", "FAILED"} and time.monotonic() < deadline:
            if concluded(self.run, self.record) or read_rank_exits(self.run):
                break
            time.sleep(POLL_SECONDS)
        return conclude(self.run, self.record, self._state)


class Launcher(ABC):
    """A way to start a run's job.

    Args:
        worker: the command line that every rank runs, with the run directory as its next argument.
    """

    name: str

    def __init__(self, worker: tuple[str, ...] = WORKER) -> None:
        self.worker = worker

    def submit(self, run: RunDirectory, config: RunConfig, num_ranks: int, only: Part | None = None) -> JobHandle:
        """Start a job on ``run`` and return at once.

        Args:
            run: the run directory, with its configuration and plan.
            config: the resolved configuration.
            num_ranks: worker processes in all.
            only: leave the other part of the work out.

        Raises:
            RunDirectoryError: if a job of this run is still alive.
            EnvironmentMismatchError: if this machine or Slurm does not take the job.
        """
        run = RunDirectory(run.path.resolve())
        with _only_one_submission(run):
            alive = self.attach(run)
            if alive is not None:
                raise RunDirectoryError(
                    f"job {alive.record.job_id} ({alive.record.launcher}) is still at work on {run.path}; "
                    "wait for it, or cancel it first"
                )
            folder = _fresh_submission_folder(run)
            command = (*self.worker, str(run.path), *(("--only", only) if only else ()))
            self._start(folder, run, config, command, num_ranks)
        return _handle(run, JobRecord(**read_json(run.job)))

    def attach(self, run: RunDirectory) -> JobHandle | None:
        """Return the job at work on ``run``, whoever submitted it, or None if there is none.

        A job that ended while nobody waited is concluded on the way.

        Raises:
            RunDirectoryError: if its job may still be at work where this machine cannot see it.
        """
        if not run.job.exists():
            return None
        record = JobRecord(**read_json(run.job))
        if not _is_visible(record):
            if concluded(run, record) is not None:
                return None
            raise RunDirectoryError(
                f"job {record.job_id} ({record.launcher}) of {run.path} was submitted on {record.host} and cannot be "
                f"seen from here; go on there, or delete {run.job} if it has ended"
            )
        handle = _handle(run, record)
        if handle.is_running():
            return handle
        handle.wait()
        return None

    @abstractmethod
    def _start(
        self, folder: Path, run: RunDirectory, config: RunConfig, command: tuple[str, ...], num_ranks: int
    ) -> None:
        """Start ``command`` on every rank and write ``job.json``."""


class LocalLauncher(Launcher):
    """Runs every rank on this machine."""

    name = "local"

    def _start(
        self, folder: Path, run: RunDirectory, config: RunConfig, command: tuple[str, ...], num_ranks: int
    ) -> None:
        request = _LocalRequest(str(folder), str(run.path), command, config.launch.device, num_ranks)
        log = folder / "controller.log"
        # A process and a session of its own: an interrupt or a hang-up of the terminal must reach the job through
        # JobHandle.cancel, not through submitit's controller, which gives its tasks one second.
        with log.open("wb") as output:
            ended = subprocess.run(
                [sys.executable, "-m", __name__, json.dumps(request.__dict__)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                check=False,
            )
        if ended.returncode:
            last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise EnvironmentMismatchError(f"cannot start a job on this machine: {last_line}; see {log}")


@dataclass(frozen=True)
class _LocalRequest:
    folder: str
    run_dir: str
    command: tuple[str, ...]
    device: Device
    num_ranks: int


def _start_controller(request: _LocalRequest) -> None:
    """Start submitit's controller, which outlives this process, and write ``job.json``."""
    from submitit import LocalExecutor

    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]  # submitit would count from 0
    run = RunDirectory(Path(request.run_dir))
    executor = LocalExecutor(request.folder)
    executor.update_parameters(
        timeout_min=_NO_TIME_LIMIT_MIN,
        tasks_per_node=request.num_ranks,
        gpus_per_node=request.num_ranks if request.device == "cuda" else 0,
        stderr_to_stdout=True,
    )
    submitted_at = _timestamp()
    job = executor.submit(Supervisor(run.path, tuple(request.command), request.device, environment))
    write_json(run.job, JobRecord("local", job.job_id, socket.gethostname(), submitted_at))


class SlurmLauncher(Launcher):
    """Runs every rank as a task of one Slurm job."""

    name = "slurm"

    def _start(
        self, folder: Path, run: RunDirectory, config: RunConfig, command: tuple[str, ...], num_ranks: int
    ) -> None:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError

        if SlurmExecutor.affinity() < 0:
            raise EnvironmentMismatchError(
                "launch.launcher=slurm: this machine has no Slurm commands (srun, sbatch); "
                "log in to a node of the cluster, or use --launcher local"
            )
        executor = SlurmExecutor(folder)
        executor.update_parameters(**slurm_parameters(config, run.name, num_ranks))
        submitted_at = _timestamp()
        try:
            job = executor.submit(Supervisor(run.path, command, config.launch.device))
        except FailedJobError as error:
            raise EnvironmentMismatchError(
                f"Slurm refused the job: {' '.join(str(error).split())}; change launch.slurm or the request"
            ) from None
        write_json(run.job, JobRecord("slurm", job.job_id, socket.gethostname(), submitted_at))


def slurm_parameters(config: RunConfig, run_name: str, num_ranks: int) -> dict[str, Any]:
    """Return what a job of ``num_ranks`` ranks asks of Slurm, in submitit's terms; one task is one rank.

    Args:
        config: the resolved configuration.
        run_name: name of the run, by which people and scripts find the job in the queue.
        num_ranks: ranks over all nodes, a multiple of ``launch.nodes``.
    """
    slurm, nodes = config.launch.slurm, config.launch.nodes
    limit_seconds = slurm.time_limit_min * 60
    asked = {
        "partition": slurm.partition,
        "account": slurm.account,
        "mem": f"{slurm.memory_gb_per_node}G" if slurm.memory_gb_per_node else None,
        "gpus_per_node": num_ranks // nodes if config.launch.device == "cuda" else None,
        "setup": slurm.setup or None,
    }
    return {
        "job_name": slurm_job_name(run_name),
        "comment": f"llama-training-infra:{run_name}",
        "time": slurm.time_limit_min,
        "nodes": nodes,
        "ntasks_per_node": num_ranks // nodes,
        "cpus_per_task": slurm.cpus_per_rank,
        "signal_delay_s": min(SIGNAL_DELAY_SECONDS, limit_seconds // 4),
        "stderr_to_stdout": True,
        "wckey": None,  # submitit's own is refused by clusters that account by it
        # srun no longer takes the cores from sbatch (Slurm 22.05), and leaves the other ranks alone when one fails.
        "srun_args": [f"--cpus-per-task={slurm.cpus_per_rank}", "--kill-on-bad-exit=1"],
        # A second start under the same id would mix two attempts: whoever waits decides on a new job.
        "additional_parameters": {"no-requeue": True},
    } | {name: value for name, value in asked.items() if value is not None}


def slurm_job_name(run_name: str) -> str:
    """Return the name of a run's job: the run's, without the characters that Slurm's commands split at."""
    return re.sub(r"[^\w.-]", "-", run_name)


def slurm_state(job_id: str, run_name: str) -> str | None:
    """Return Slurm's name for the state of a job, or None if Slurm does not answer.

    The state is 'UNKNOWN' for a job that Slurm has forgotten, or whose id is another job's by now.

    Raises:
        EnvironmentMismatchError: if this machine has no Slurm commands.
    """
    shown = _slurm("scontrol", "--oneliner", "show", "job", job_id)
    if shown.returncode == 0:
        fields = dict(re.findall(r"\b(JobName|JobState)=(\S+)", shown.stdout))
        return fields.get("JobState") if fields.get("JobName") == slurm_job_name(run_name) else "UNKNOWN"
    if "Invalid job id" not in shown.stderr:
        return None
    accounted = _slurm(
        "sacct",
        "--noheader",
        "--allocations",
        "--parsable2",
        "--format=State",
        f"--jobs={job_id}",
        f"--name={slurm_job_name(run_name)}",
    )
    words = accounted.stdout.split()
    return words[0] if words else "UNKNOWN"


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise EnvironmentMismatchError(
            f"this machine has no {command[0]}; log in to a node of the cluster that runs the job"
        ) from None


_LAUNCHERS: dict[str, type[Launcher]] = {"local": LocalLauncher, "slurm": SlurmLauncher}


def launcher_for(config: RunConfig) -> Launcher:
    """Return the launcher that ``config`` names."""
    return _LAUNCHERS[config.launch.launcher]()


def _handle(run: RunDirectory, record: JobRecord) -> JobHandle:
    return SlurmJobHandle(run, record) if record.launcher == "slurm" else LocalJobHandle(run, record)


def _is_visible(record: JobRecord) -> bool:
    """Return whether this machine can tell if the job is at work."""
    if record.launcher == "slurm":
        return shutil.which("scontrol") is not None
    return record.host == socket.gethostname()


@contextmanager
def _only_one_submission(run: RunDirectory) -> Iterator[None]:
    """Keep a second process that submits the same run waiting until ``job.json`` is there for it to find."""
    run.logs.mkdir(parents=True, exist_ok=True)
    with (run.logs / "submit.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fresh_submission_folder(run: RunDirectory) -> Path:
    """Make the folder of the next attempt and remove what the last one left for ``conclude``.

    submitit returns the old result of a job id it has seen before, and a fresh cluster counts ids from 1 again.
    """
    for path in (*run.logs.glob(exit_path(run, 0).name.replace("00000", "*")), cancel_path(run)):
        path.unlink(missing_ok=True)
    folder = run.logs / "submitit" / f"attempt-{len(submission_folders(run)):05d}"
    folder.mkdir(parents=True)
    return folder


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job started from a background shell must heed it too
    _start_controller(_LocalRequest(**json.loads(sys.argv[1])))
