"""What a supervisor looks at while its worker runs, to end one that would go on for nothing."""

import os
import time
from abc import ABC, abstractmethod
from contextlib import suppress

from llama_core.errors import RunDirectoryError
from llama_core.launch.attempts import current_attempt, read_rank_exits
from llama_core.records.directory import RunDirectory
from llama_core.records.job import JobRecord

LOOK_SECONDS = 10.0
"""How often a file on the shared file system is looked at."""

SURVIVOR_SECONDS = 5
"""How long ranks may go on after one has failed, to end by themselves before they are killed."""


class Watcher(ABC):
    """A reason to end a worker."""

    @abstractmethod
    def gives_up(self) -> bool:
        """Return whether the worker has to be ended now; asked every second."""


class Siblings(Watcher):
    """The ranks' supervisors, children of one parent. A rank whose peer is gone may wait for it for ever."""

    def __init__(self, run: RunDirectory, job: JobRecord, restart: int, num_ranks: int) -> None:
        self.run, self.job, self.restart, self.num_ranks = run, job, restart, num_ranks
        self.complete_at = time.monotonic()

    def gives_up(self) -> bool:
        """Return whether for ``SURVIVOR_SECONDS`` a rank has been neither at work nor finished."""
        import psutil

        present = 0
        for child in psutil.Process(os.getppid()).children():
            with suppress(psutil.NoSuchProcess):
                present += child.status() != psutil.STATUS_ZOMBIE
        finished = sum(not rank_exit.failed for rank_exit in read_rank_exits(self.run, self.job, self.restart))
        if present + finished >= self.num_ranks:
            self.complete_at = time.monotonic()
        return time.monotonic() - self.complete_at > SURVIVOR_SECONDS


class Successor(Watcher):
    """A later attempt of the job: Slurm takes a node that does not answer for dead, while its processes may live."""

    def __init__(self, run: RunDirectory, job: JobRecord, restart: int) -> None:
        self.run, self.job, self.restart = run, job, restart
        self.looked_at = time.monotonic()

    def gives_up(self) -> bool:
        """Return whether another attempt has begun, which must be the only one to write to the run's directory."""
        if time.monotonic() - self.looked_at < LOOK_SECONDS:
            return False
        self.looked_at = time.monotonic()
        with suppress(RunDirectoryError):  # what cannot be read now is no news
            attempt = current_attempt(self.run, self.job)
            return attempt is None or attempt.restart != self.restart
        return False


class Heartbeat:
    """The steps that the first rank records, and what else it shows that it is at work by.

    Silence is added up from one look to the next: while the processes of a job are suspended, nobody looks.
    """

    def __init__(self, run: RunDirectory, limit_seconds: float) -> None:
        self.run, self.limit_seconds = run, limit_seconds
        self._newest = self._look()
        self._has_beaten = False
        self._silent = 0.0
        self._looked_at = time.monotonic()

    def silent_seconds(self) -> float | None:
        """Return how long there has been no step, once that is too long; None before the first one."""
        every = min(LOOK_SECONDS, self.limit_seconds)
        now = time.monotonic()
        if now - self._looked_at >= every:
            self._silent += min(now - self._looked_at, 2 * every)
            self._looked_at, found = now, self._look()
            if found and found != self._newest:
                self._newest, self._silent, self._has_beaten = found, 0.0, True
        return self._silent if self._has_beaten and self._silent > self.limit_seconds else None

    def _look(self) -> int:
        try:
            return self.run.heartbeat.stat().st_mtime_ns
        except OSError:
            return 0
