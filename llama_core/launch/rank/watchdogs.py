"""The supervisor's reasons to end a running worker: a lost rank, a later attempt, or no progress."""

import os
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from llama_core.errors import RunDirectoryError
from llama_core.launch.attempts import current_attempt, read_rank_exits
from llama_core.records.directory import RunDirectory
from llama_core.records.job import JobRecord

LOOK_SECONDS = 10.0
"""Seconds between checks of a file on the shared file system."""

SURVIVOR_SECONDS = 5
"""How long ranks have to end by themselves after one has failed, before they are killed."""


class Watcher(ABC):
    """A reason to end a worker."""

    @abstractmethod
    def gives_up(self) -> bool:
        """Return whether the worker must be ended now; called every second."""


class Siblings(Watcher):
    """Watches the ranks' supervisors, children of one parent: a rank may wait for a lost peer forever."""

    def __init__(self, run: RunDirectory, job: JobRecord, restart: int, num_ranks: int) -> None:
        self.run = run
        self.job = job
        self.restart = restart
        self.num_ranks = num_ranks
        self.complete_at = time.monotonic()

    def gives_up(self) -> bool:
        """Return whether some rank has been neither running nor finished for ``SURVIVOR_SECONDS``."""
        missing = self.num_ranks - _num_children(os.getppid())
        now = time.monotonic()
        if missing > 0 and now - self.complete_at <= SURVIVOR_SECONDS:
            return False  # the ranks' records are read once, and not every second by all of them
        if missing > 0:
            exits = read_rank_exits(self.run, self.job, self.restart)
            missing -= sum(not rank_exit.failed for rank_exit in exits)
        if missing <= 0:
            self.complete_at = now
        return missing > 0


def _num_children(pid: int) -> int:
    """Return how many children a process has; Linux lists those that its main thread started in one file."""
    with suppress(OSError):
        return len(Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split())
    import psutil

    return len(psutil.Process(pid).children())


class Successor(Watcher):
    """Watches for a later attempt of the job: a node that its scheduler takes for dead may still run its processes."""

    def __init__(self, run: RunDirectory, job: JobRecord, restart: int) -> None:
        self.run = run
        self.job = job
        self.restart = restart
        self.looked_at = time.monotonic()

    def gives_up(self) -> bool:
        """Return whether another attempt has begun; only that one may write to the run's directory."""
        if time.monotonic() - self.looked_at < LOOK_SECONDS:
            return False
        self.looked_at = time.monotonic()
        with suppress(RunDirectoryError):  # an unreadable record says nothing yet
            attempt = current_attempt(self.run, self.job)
            return attempt is None or attempt.restart != self.restart
        return False


class Heartbeat:
    """Watches the heartbeat file, which the first rank updates with every step that it trains or times.

    Silence is added up from one check to the next, so that time in which the job is suspended hardly counts.
    """

    def __init__(self, run: RunDirectory, limit_seconds: float) -> None:
        self.run = run
        self.limit_seconds = limit_seconds
        self._newest = self._look()
        self._has_beaten = False
        self._silent = 0.0
        self._looked_at = time.monotonic()

    def silent_seconds(self) -> float | None:
        """Return the seconds without a step once they exceed the limit; None until then, and before the first step."""
        every = min(LOOK_SECONDS, self.limit_seconds)
        now = time.monotonic()
        if now - self._looked_at >= every:
            self._silent += min(now - self._looked_at, 2 * every)
            self._looked_at, found = now, self._look()
            if found and found != self._newest:
                self._newest = found
                self._silent = 0.0
                self._has_beaten = True
        return self._silent if self._has_beaten and self._silent > self.limit_seconds else None

    def _look(self) -> int:
        try:
            return self.run.heartbeat.stat().st_mtime_ns
        except OSError:
            return 0
