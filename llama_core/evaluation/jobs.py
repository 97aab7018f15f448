"""Processes that evaluate one checkpoint each: one after another on this machine, or in jobs of their own."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError, TrainingInfraError
from llama_core.evaluation.plan import EvaluationPlan, evaluating_device, evaluating_request, evaluation_plan
from llama_core.launch.jobs.launcher import launcher_of
from llama_core.launch.jobs.tasks import TaskJobs, TaskRequest
from llama_core.launch.places import fresh_folder
from llama_core.launch.rank.children import die_with_parent
from llama_core.planning.inference import EvaluationForward, evaluation_bytes
from llama_core.planning.memory.host import CUDA_PROCESS_BYTES
from llama_core.planning.memory.process import DEFAULT_PROCESS
from llama_core.planning.program.operations import itemsize_of
from llama_core.records.directory import RunDirectory
from llama_core.units import GIB

POLLS = 3
"""Time between two queries about a job, in those of a job that somebody waits for."""
STOP_SECONDS = 10
"""How long an evaluation may take to end when it is told to."""
_TASKS_BYTES = GIB
"""An allowance for lm-evaluation-harness in each rank, with the questions of a task."""
_JOB_BYTES = GIB
"""An allowance for the process that starts the ranks, and for tensors on their way to the model."""
_NICE = 19
"""The lowest priority: ranks on this machine go first."""


class Evaluations(Protocol):
    """Starts evaluations, and tells which have ended."""

    device: str
    """Where they compute: auto, cpu or cuda."""

    def start(self, command: Sequence[str], step: int) -> str | None:
        """Start one, and return its job's id; None if another one has to end first.

        Raises:
            EnvironmentMismatchError: if it cannot be started.
        """

    def is_running(self, job_id: str) -> bool:
        """Return whether one runs, or waits in a queue; also for a while after its end, until its files are here."""

    def stop(self) -> None:
        """End those that nobody else could find again."""


class OnThisMachine:
    """Evaluations as processes, one at a time.

    Args:
        run: the run.
        device: auto, cpu or cuda.
    """

    def __init__(self, run: RunDirectory, device: str) -> None:
        self.device = device
        self._log = run.logs / "evaluations.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], step: int) -> str | None:
        """Start one as a process that dies with this one."""
        if self._process is not None and self._process.poll() is None:
            return None
        tie = die_with_parent(os.getpid())

        def prepare() -> None:
            os.nice(_NICE)
            tie()

        with self._log.open("ab", buffering=0) as log:
            log.write(f"=== evaluation of step {step} ===\n".encode())
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=prepare,  # noqa: PLW1509 (whoever evaluates has one thread)
            )
        return str(self._process.pid)

    def is_running(self, job_id: str) -> bool:
        """Return whether it runs; one that another process has started has died with that."""
        process = self._process
        return process is not None and str(process.pid) == job_id and process.poll() is None

    def stop(self) -> None:
        """End the one that runs."""
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class CommandTask:
    """A command as a job's task: it is pickled, so it holds only values."""

    command: tuple[str, ...]

    def __call__(self) -> None:
        """Run the command.

        Raises:
            SystemExit: with its exit code, unless that is 0.
        """
        code = subprocess.run(self.command, stdin=subprocess.DEVNULL, check=False).returncode
        if code:
            sys.exit(code if code > 0 else 1)


class InJobs:
    """Evaluations in jobs of their own, on as many nodes and devices as ``evaluation`` asks for.

    Args:
        run: the run.
        config: its configuration.
        tasks: starts the jobs.

    Raises:
        ConfigError, PlanError, DoesNotFitError: if the devices cannot evaluate the model.
    """

    def __init__(self, run: RunDirectory, config: RunConfig, tasks: TaskJobs) -> None:
        self.device = evaluating_device(config, while_training=True)
        self._run = run
        self._tasks = tasks
        self._shared = evaluation_plan(config, self.device)
        self._config = evaluating_request(config, self._shared)
        self._name = f"{run.name}-evaluation"
        self._asked_at: dict[str, float] = {}
        self._ended_at: dict[str, float] = {}

    def start(self, command: Sequence[str], step: int) -> str | None:
        """Submit one."""
        request = TaskRequest(
            (CommandTask(tuple(command)),),
            self._config,
            self._shared.plan.world_size,
            self._name,
            fresh_folder(self._run.evaluations),
            "run directory",
            "another --run-dir",
            _host_bytes(self._config, self._shared),
        )
        try:
            (job_id,) = self._tasks.submit(request)
        except EnvironmentMismatchError as error:
            raise EnvironmentMismatchError(f"evaluation of step {step}: {error}") from None
        return job_id

    def is_running(self, job_id: str) -> bool:
        """Ask the scheduler now and then; no answer counts as no change."""
        now = time.monotonic()
        if job_id in self._ended_at:
            return now - self._ended_at[job_id] < self._tasks.files_seconds
        if now - self._asked_at.get(job_id, -math.inf) >= POLLS * self._tasks.poll_seconds:
            self._asked_at[job_id] = now
            states = self._tasks.states([job_id], self._name)
            if states is not None and self._tasks.ended.issuperset(states):
                self._ended_at[job_id] = now
        return True

    def stop(self) -> None:
        """Let the jobs go on: who comes next finds them by their ids."""


def evaluations_of(run: RunDirectory, config: RunConfig, *, while_training: bool) -> Evaluations:
    """Return what evaluates the checkpoints of a run.

    Args:
        run: the run.
        config: its configuration.
        while_training: whether ranks of the run compute at the same time.
    """
    tasks = launcher_of(config.launch.launcher).tasks
    if tasks is None:
        return OnThisMachine(run, evaluating_device(config, while_training=while_training))
    return InJobs(run, config, tasks)


def refusal_of_jobs(config: RunConfig) -> str | None:
    """Return why jobs that evaluate a run's checkpoints would be refused; None if they would not, or there are none.

    Args:
        config: the run, with every default filled in.
    """
    launcher = launcher_of(config.launch.launcher)
    if launcher.tasks is None or not config.evaluation.is_asked_for:
        return None
    try:
        shared = evaluation_plan(config, evaluating_device(config, while_training=True))
    except TrainingInfraError as error:
        return str(error)
    refused = launcher.tasks.refusal(evaluating_request(config, shared))
    if refused is None:
        return None
    return (
        f"{launcher.kind.title} would refuse the evaluations: {refused}; change evaluation.partition or evaluation.gpus"
    )


def _host_bytes(config: RunConfig, shared: EvaluationPlan) -> int:
    """Return the host memory of a node's ranks in an evaluation; weights that are read are in the page cache."""
    asked = config.evaluation
    process = CUDA_PROCESS_BYTES
    if config.launch.device == "cpu":
        tensors = evaluation_bytes(config.spec, shared.plan, itemsize_of(asked.dtype), EvaluationForward.of(config))
        process = DEFAULT_PROCESS.process_bytes + tensors
    return _JOB_BYTES + shared.plan.world_size // shared.nodes * (process + _TASKS_BYTES)
