"""Jobs, whatever runs them: starting one on a run, following it, stopping it.

``job.json`` is written before anyone waits, and a rank whose job is not recorded there does not start: a run never has
ranks at work that nobody can find.
"""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from llama_core.config.run import RunConfig
from llama_core.errors import TrainingFailedError
from llama_core.launch.attempts import request_cancellation
from llama_core.launch.logs import LogFollower
from llama_core.launch.outcome import conclude
from llama_core.records.directory import RunDirectory
from llama_core.records.job import JobRecord, Outcome
from llama_core.records.measurements import StepRecord
from llama_core.records.metrics import read_heartbeat

WORKER = (sys.executable, "-m", "llama_core.launch.rank.worker")  # a command line, so that submitting needs no torch


@dataclass(frozen=True)
class Submission:
    """A run whose job is to be started."""

    run: RunDirectory
    """The run, by its absolute path."""
    config: RunConfig
    """Its resolved configuration."""
    num_ranks: int
    """Worker processes in all."""
    command: tuple[str, ...]
    """What every rank runs."""


class JobHandle(ABC):
    """A job that has been submitted: watch it, wait for it, stop it. Any process may hold one."""

    poll_seconds = 0.2
    """How often its records are looked at."""
    log_seconds = 0.2
    """How often the logs of all its ranks are looked at."""
    kill_seconds = 10.0
    """How long its processes may take to end once they are killed."""

    def __init__(self, run: RunDirectory, record: JobRecord) -> None:
        self.run = run
        self.record = record
        self.waits_for = ""
        """What keeps it in a queue, in the words of that; empty where nothing does."""

    def describe(self) -> str:
        """Return which job it is, and how to see what it prints."""
        where = "Slurm job" if self.record.launcher == "slurm" else "process"
        return f"{where} {self.record.job_id}; training-infra logs {self.run.path} --follow"

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

    def wait(
        self,
        on_progress: Callable[[StepRecord], None] | None = None,
        on_output: Callable[[int, str], None] | None = None,
        on_waiting: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Return why the job ended, as soon as it has.

        Args:
            on_progress: told of each newest step meanwhile. Steps that follow each other faster than they are looked
                for are skipped, except the last.
            on_output: told of each warning and error that a rank prints, with the rank.
            on_waiting: told what the job waits for in a queue, whenever that changes.
        """
        newest: StepRecord | None = None
        waits_for, looked_at = "", time.monotonic()
        logs = LogFollower(self.run)
        submitted = datetime.fromisoformat(self.record.submitted_at).timestamp()
        while True:
            running = self.is_running()  # asked first, so that the last step is still reported
            step = read_heartbeat(self.run)
            if on_progress is not None and step is not None and step != newest and step.time >= submitted:
                on_progress(step)
                newest = step
            if on_output is not None and (not running or time.monotonic() - looked_at >= self.log_seconds):
                looked_at = time.monotonic()
                for rank, line in logs.notable_lines():
                    on_output(rank, line)
            if on_waiting is not None and self.waits_for != waits_for:
                waits_for = self.waits_for
                on_waiting(waits_for or "nothing: it starts")
            if not running:
                return self._conclude()
            time.sleep(self.poll_seconds)

    def cancel(self, grace_seconds: float | None = None) -> Outcome:
        """Ask the job to finish its step and save a checkpoint, kill what is left of it, and return its outcome.

        Args:
            grace_seconds: time the job gets before it is killed; by default ``launch.save_timeout_s`` of its run.

        Raises:
            TrainingFailedError: if it could not be ended.
        """
        return cancel_all([self], grace_seconds)[0]

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.is_running():
            if time.monotonic() >= deadline:
                return False
            time.sleep(self.poll_seconds)
        return True


def cancel_all(jobs: Sequence[JobHandle], grace_seconds: float | None = None) -> list[Outcome]:
    """Cancel several jobs at once, so that all of them stop within one time of grace; see ``JobHandle.cancel``."""
    alive = [job for job in jobs if job.is_running()]
    for job in alive:
        request_cancellation(job.run, job.record)
    for job in alive:
        job._ask_to_stop()
    asked_at = time.monotonic()
    for job in alive:
        grace = job.record.grace_seconds if grace_seconds is None else grace_seconds
        if not job._ends_within(asked_at + grace - time.monotonic()):
            job._kill()
    for job in alive:
        if not job._ends_within(job.kill_seconds):
            raise TrainingFailedError(
                f"job {job.record.job_id} of {job.run.path} was told to end and has not; look for it with "
                f"{'squeue' if job.record.launcher == 'slurm' else 'ps'}, and cancel again"
            )
    return [job._conclude() for job in jobs]
