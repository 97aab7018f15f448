"""What a supervisor looks at while its worker runs, to end one that would go on for nothing."""

import os
import time
from abc import ABC, abstractmethod

from llama_core.artifacts import JobRecord, RunDirectory
from llama_core.launch.attempts import current_attempt, read_rank_exits

LOOK_SECONDS = 10.0
"""How often a file is looked at that the supervisors of all ranks look at."""

SURVIVOR_SECONDS = 5
"""How long ranks may go on after one has failed, to end by themselves before they are killed."""


class Watcher(ABC):
    """A reason to end a worker."""

    @abstractmethod
    def gives_up(self) -> bool:
        """Return whether the worker has to be ended now; asked every second."""


class Siblings(Watcher):
    """The ranks' supervisors, children of one parent. A rank whose peer is gone may wait for it for ever."""

    def __init__(self, run: RunDirectory, job: JobRecord, num_ranks: int) -> None:
        self.run, self.job, self.num_ranks = run, job, num_ranks
        self.complete_at = time.monotonic()

    def gives_up(self) -> bool:
        """Return whether for ``SURVIVOR_SECONDS`` a rank has been neither at work nor finished."""
        import psutil

        children = psutil.Process(os.getppid()).children()
        present = sum(child.status() != psutil.STATUS_ZOMBIE for child in children)
        finished = sum(not rank_exit.failed for rank_exit in read_rank_exits(self.run, self.job, 0))
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
        attempt = current_attempt(self.run, self.job)
        return attempt is None or attempt.restart != self.restart


class Heartbeat:
    """The steps that the first rank records. They are timed by this machine's own clock."""

    def __init__(self, run: RunDirectory, limit_seconds: float) -> None:
        self.run, self.limit_seconds = run, limit_seconds
        self._newest = self._look()
        self._has_beaten = False
        self._changed_at = self._looked_at = time.monotonic()

    def silent_seconds(self) -> float | None:
        """Return how long there has been no step, once that is too long; None before the first one."""
        now = time.monotonic()
        if now - self._looked_at >= min(LOOK_SECONDS, self.limit_seconds):
            self._looked_at, found = now, self._look()
            if found != self._newest:
                self._newest, self._changed_at, self._has_beaten = found, now, True
        silent = now - self._changed_at
        return silent if self._has_beaten and silent > self.limit_seconds else None

    def _look(self) -> int:
        try:
            return self.run.progress.stat().st_mtime_ns
        except OSError:
            return 0
