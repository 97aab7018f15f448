"""Job handles: follow and stop the job of a run, on this machine or elsewhere.

``job.json`` is written before anyone waits for the job, and a rank whose job is not recorded there does not start. So a
run never has running ranks that nobody can find.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from llama_core.config.run import RunConfig
from llama_core.errors import RunDirectoryError, TrainingFailedError
from llama_core.imports import safe_python
from llama_core.launch.attempts import request_cancellation
from llama_core.launch.jobs.notices import SchedulerNotices, StallNotices
from llama_core.launch.logs import LogFollower
from llama_core.launch.outcome import conclude
from llama_core.launch.places import own_submission
from llama_core.launchers.registry import LAUNCHERS
from llama_core.launchers.traits import LauncherType
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import refuse_foreign
from llama_core.records.job import JobRecord, Outcome
from llama_core.records.measurements import StepRecord
from llama_core.records.metrics import read_heartbeat
from llama_core.redaction import shell_word

# Command lines, so that submitting needs no torch.
WORKER = safe_python("-m", "llama_core.launch.rank.worker")
EVALUATOR = safe_python("-m", "llama_core.evaluation.evaluator")
PLANNER = safe_python("-m", "llama_core.chain.elastic")  # planning a run again is the chain's work

LOOKING_SHARE = 0.05
"""Most of the time that is spent looking at logs."""


@dataclass(frozen=True)
class Submission:
    """A run whose job is about to start."""

    run: RunDirectory
    """The run, with an absolute path."""
    config: RunConfig
    """Its resolved configuration."""
    num_ranks: int
    """Total number of worker processes."""
    command: tuple[str, ...]
    """The command line that every rank runs."""
    companion: tuple[str, ...] = ()
    """The command line of a program that runs beside the first rank; empty for none."""
    is_elastic: bool = False
    """Whether its job may start with fewer nodes than ``launch.nodes``; the run is then planned at each start."""


class JobHandle(ABC):
    """A submitted job: watch it, wait for it, stop it. Any process may hold a handle."""

    kind: str
    """What people call its id: a process, or a job of a scheduler."""
    listed_by: str
    """The command that shows whether it still runs."""
    poll_seconds = 0.2
    """Seconds between checks of its records."""
    log_seconds = 0.2
    """Seconds between looks at the logs of its ranks, or more if a look takes long."""
    kill_seconds = 10.0
    """Seconds that its processes may take to end once they are killed."""

    def __init__(self, run: RunDirectory, record: JobRecord) -> None:
        self.run = run
        self.record = record
        self.waits_for = ""
        """Why it waits in a queue, in the queue's own words; empty if it does not wait."""
        self.is_answered = True
        """Whether its scheduler answered the last question about it."""

    @property
    def launcher(self) -> LauncherType:
        """What has started it, with its facts."""
        return LAUNCHERS.named(self.record.launcher)

    @property
    def is_queued(self) -> bool:
        """Whether it waits in a queue, as far as its scheduler has said."""
        return self.waits_for != ""

    @property
    def state(self) -> str:
        """What it is doing, as far as its scheduler has said, for a line about a job that has not ended."""
        if self.is_queued:
            return f"queued, for {self.waits_for}"
        return "running" if self.is_answered else "queued or running (its scheduler does not answer)"

    def describe(self) -> str:
        """Return the job's id, and the command that shows its output."""
        return f"{self.kind} {self.record.job_id}; training-infra logs {shell_word(self.run.path)} --follow"

    @abstractmethod
    def is_running(self) -> bool:
        """Return whether the job is queued or running."""

    @abstractmethod
    def _ask_to_stop(self) -> None:
        """Send SIGTERM to every rank; end the job if it has not started."""

    @abstractmethod
    def _kill(self) -> None:
        """End every process of the job."""

    def _why_not_own(self) -> str:
        """Return what the record names that is no job of this run, as a clause; "" if the job is its own."""
        if own_submission(Path(self.record.folder), self.run):
            return ""
        return f"the files of another run ({self.record.folder}); cancel that one"

    def _conclude(self) -> Outcome:
        return conclude(self.run, self.record)

    def wait(
        self,
        on_progress: Callable[[StepRecord], None] | None = None,
        on_output: Callable[[int, str], None] | None = None,
        on_waiting: Callable[[str], None] = lambda line: None,
        expected: Callable[[], str] = str,
    ) -> Outcome:
        """Wait until the job ends, and return why it ended.

        Args:
            on_progress: called with each newest step meanwhile. If steps are faster than ``poll_seconds``, some are
                skipped, but never the last.
            on_output: called with the rank and the line of each warning and error that a rank prints.
            on_waiting: called with a line on the queue whenever the reason that the job waits there changes or its
                scheduler stops or begins to answer, and with a line on the first rank when no step has come for long.
            expected: returns a clause on how long a step should take, for such a line.
        """
        newest: StepRecord | None = None
        before = read_heartbeat(self.run)
        looked_at = time.monotonic()
        pause = self.log_seconds
        logs = LogFollower(self.run)
        notices = SchedulerNotices(self.launcher.title)
        submitted = datetime.fromisoformat(self.record.submitted_at).timestamp()
        stall = StallNotices(self.run, submitted, expected)
        while True:
            running = self.is_running()  # asked first, so that the last step is still reported
            step = read_heartbeat(self.run)
            if step not in (None, newest, before):
                self.waits_for = ""  # the job has started since its scheduler was asked
            for line in notices.lines(self.waits_for, is_answered=self.is_answered):
                on_waiting(line)
            # a step of an earlier job is as old as its time says; one that comes meanwhile is new whatever it says
            if step is not None and step != newest and (step != before or step.time >= submitted):
                newest = step
                if on_progress is not None:
                    on_progress(step)
            if on_output is not None and (not running or time.monotonic() - looked_at >= pause):
                began = time.monotonic()
                for rank, line in logs.notable_lines(of_all=not running):
                    on_output(rank, line)
                looked_at = time.monotonic()
                pause = max(self.log_seconds, (looked_at - began) / LOOKING_SHARE)
            if not running:
                return self._conclude()
            if word := stall.line(newest, self.waits_for):
                on_waiting(word)
            time.sleep(self.poll_seconds)

    def cancel(
        self, grace_seconds: float | None = None, on_second: Callable[[float], None] = lambda left: None
    ) -> Outcome:
        """Ask the job to finish its step and save a checkpoint, kill what is left of it, and return its outcome.

        Args:
            grace_seconds: time the job gets before it is killed; by default ``launch.save_timeout_s`` of its run.
            on_second: called with the seconds left until then, at least every second.

        Raises:
            RunDirectoryError: if the run belongs to somebody else, or its record names the job of another run.
            TrainingFailedError: if it could not be ended.
        """
        return cancel_all([self], grace_seconds, on_second)[0]

    def _ends_within(self, seconds: float, on_second: Callable[[float], None] = lambda left: None) -> bool:
        deadline = time.monotonic() + seconds
        while self.is_running():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            on_second(left)
            time.sleep(self.poll_seconds)
        return True


def cancel_all(
    jobs: Sequence[JobHandle],
    grace_seconds: float | None = None,
    on_second: Callable[[float], None] = lambda left: None,
) -> list[Outcome]:
    """Cancel several jobs at once, so that all of them share one grace period; see ``JobHandle.cancel``."""
    for job in jobs:
        refuse_foreign(job.run, "cancel its job")
    alive = [job for job in jobs if job.is_running()]
    for job in alive:
        if problem := job._why_not_own():
            raise RunDirectoryError(f"{job.run.job} names {problem}")
    for job in alive:
        request_cancellation(job.run, job.record)
    for job in alive:
        job._ask_to_stop()
    asked_at = time.monotonic()
    for job in alive:
        grace = job.record.grace_seconds if grace_seconds is None else grace_seconds
        if not job._ends_within(asked_at + grace - time.monotonic(), on_second):
            job._kill()
    for job in alive:
        if not job._ends_within(job.kill_seconds):
            raise TrainingFailedError(
                f"job {job.record.job_id} of {job.run.path} was killed but has not ended; look for it with "
                f"{job.listed_by}, and cancel again"
            )
    return [job._conclude() for job in jobs]
