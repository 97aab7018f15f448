"""Start submitit's controller for a job on this machine: ``python -m llama_core.launch.jobs.controller REQUEST``.

Starting it in a process of its own keeps it out of the session of the terminal. That process imports no configuration,
so that it starts quickly.
"""

import json
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llama_core.launch.places import CONTROLLER_LOG
from llama_core.launch.ports import free_port
from llama_core.launch.rank.start import CONTROLLER_ONLY, python_command
from llama_core.launch.rank.supervisor import Supervisor
from llama_core.launch.rank.surroundings import BelowSubmitit
from llama_core.launchers.local import LOCAL
from llama_core.machine.kernel import lock_domain, process_namespace
from llama_core.records.directory import RunDirectory
from llama_core.records.files import timestamp, write_json
from llama_core.records.job import JobRecord

if TYPE_CHECKING:  # the process starts without the schema of the configuration
    from llama_core.config.settings import Device

_NO_TIME_LIMIT_MIN = 10 * 365 * 24 * 60  # submitit's local jobs must have a limit


@dataclass(frozen=True)
class Request:
    """What the process that starts the controller needs to know of a submission."""

    folder: str
    run_dir: str
    command: tuple[str, ...]
    device: "Device"
    num_ranks: int
    hang_timeout_s: int
    save_timeout_s: int
    companion: tuple[str, ...]

    def as_json(self) -> str:
        """Return the request as the argument of this module's command line."""
        return json.dumps(self.__dict__)


def start_controller(request: Request) -> None:
    """Start submitit's controller, which outlives this process, and write ``job.json``."""
    from submitit import LocalExecutor

    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]  # submitit would count from 0
    run = RunDirectory(Path(request.run_dir))
    executor = LocalExecutor(request.folder, python=python_command())
    executor.update_parameters(
        timeout_min=_NO_TIME_LIMIT_MIN,
        tasks_per_node=request.num_ranks,
        gpus_per_node=request.num_ranks if request.device == "cuda" else 0,
        stderr_to_stdout=True,
    )
    submitted_at = timestamp()
    supervisor = Supervisor(
        run.path,
        tuple(request.command),
        request.device,
        request.hang_timeout_s,
        BelowSubmitit(),
        environment,
        companion=tuple(request.companion),
    )
    log = Path(request.folder, CONTROLLER_LOG).stat()
    os.environ.setdefault("PYTHONSAFEPATH", CONTROLLER_ONLY)
    job = executor.submit(supervisor)
    record = JobRecord(
        LOCAL.name,
        job.job_id,
        socket.gethostname(),
        submitted_at,
        grace_seconds=request.save_timeout_s,
        folder=str(executor.folder),
        process_namespace=process_namespace(),
        lock_domain=lock_domain(log),
    )
    write_json(run.job, record)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background processes with it ignored
    start_controller(Request(**json.loads(sys.argv[1])))
