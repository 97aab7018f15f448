"""Jobs on this machine: submitit's controller and, below it, a supervisor and a worker for each rank."""

import fcntl
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from llama_core.errors import EnvironmentMismatchError
from llama_core.imports import safe_python
from llama_core.launch.jobs import controller
from llama_core.launch.jobs.controller import Request
from llama_core.launch.jobs.handle import JobHandle, Submission
from llama_core.launch.jobs.launcher import Launcher
from llama_core.launch.places import CONTROLLER_LOG, submission_of
from llama_core.launch.rank.surroundings import BelowSubmitit
from llama_core.launchers.local import LOCAL
from llama_core.machine.kernel import lock_domain, process_namespace
from llama_core.records.job import JobRecord, Outcome

if TYPE_CHECKING:
    import psutil


class LocalJobHandle(JobHandle):
    """A job on this machine: submitit's controller and, below it, a supervisor and a worker for each rank."""

    kind = "process"
    listed_by = "ps"

    def is_running(self) -> bool:
        """Return whether the controller is alive; its ranks die with it."""
        return self._controller() is not None

    def _controller(self) -> "psutil.Process | None":
        import psutil

        # Its command line names the job's own folder, which no other process with a reused id does. A start time would
        # change when the machine's clock is set.
        if not self.record.folder:
            return None
        with suppress(psutil.Error, ValueError, OverflowError):  # ValueError: not the number of a process
            process = psutil.Process(int(self.record.job_id))
            # anybody may start a process with that word, until its id is that of a controller that has ended
            is_its_users = process.uids().real in {os.getuid(), self.run.path.stat().st_uid}
            if is_its_users and self.record.folder in process.cmdline():
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
            psutil.wait_procs([controller], timeout=self.kill_seconds)

    def _conclude(self) -> Outcome:
        self._sweep()
        return super()._conclude()

    def _sweep(self) -> None:
        """Kill processes that outlived the controller, such as the data loaders of a killed worker."""
        import psutil

        if submission_of(Path(self.record.folder), self.run) is None:
            return
        left = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                # submitit sets this variable for each rank, and the rank's child processes inherit it.
                if process.environ().get("SUBMITIT_FOLDER") == self.record.folder:
                    process.kill()
                    left.append(process)
        psutil.wait_procs(left, timeout=self.kill_seconds)


def _start(folder: Path, submissions: Sequence[Submission], name: str, lock: IO[str]) -> None:
    """Start a job on this machine and record it.

    Args:
        folder: where submitit keeps the job's files.
        submissions: the run; this machine has no job arrays.
        name: unused, since there is no queue to show it.
        lock: the lock on submitting the run; the child holds it until the job is recorded, even if we are killed.

    Raises:
        EnvironmentMismatchError: if it cannot be started.
    """
    (submission,) = submissions
    config = submission.config.launch
    request = Request(
        str(folder),
        str(submission.run.path),
        submission.command,
        config.device,
        submission.num_ranks,
        config.hang_timeout_s,
        config.save_timeout_s,
        submission.companion,
    )
    log = folder / CONTROLLER_LOG
    # In its own process and session: an interrupt or a hang-up of the terminal must reach the job through
    # JobHandle.cancel, not through submitit's controller, which gives its tasks only one second.
    with log.open("wb") as output:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(output, fcntl.LOCK_EX)  # the controller inherits it: see _is_over
        ended = subprocess.run(
            safe_python("-m", controller.__name__, request.as_json()),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock.fileno(),),
            check=False,
        )
    if ended.returncode:
        last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise EnvironmentMismatchError(f"cannot start a job on this machine: {last_line}; see {log}")


def _out_of_sight(record: JobRecord) -> str:
    """Return where a job was submitted if its processes cannot be seen from here; else ""."""
    if record.host != socket.gethostname():
        return f"on {record.host}"
    if record.process_namespace in {"", process_namespace()} or _is_over(record):
        return ""
    return f"in another container of {record.host}, or on another machine of that name,"


def _is_over(record: JobRecord) -> bool:
    """Return whether a job in another process namespace has ended: its controller held a lock as long as it lived."""
    try:
        log = os.open(Path(record.folder, CONTROLLER_LOG), os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block
    except (OSError, ValueError):
        return False
    try:
        if lock_domain(os.fstat(log)) != record.lock_domain:
            return False
        fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is held, or the file system has no locks
        return False
    else:
        return True
    finally:
        os.close(log)


LAUNCHER = Launcher(
    LOCAL,
    BelowSubmitit(),
    _start,
    handle=lambda run, record, ask: LocalJobHandle(run, record),
    out_of_sight=_out_of_sight,
    find_unrecorded=lambda folder, name, config: None,  # _start holds the lock until the job is recorded
    check=lambda found, config: None,
)
