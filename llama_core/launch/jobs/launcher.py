"""Everything a run's steps need from a launcher, provided by the launcher itself: no other code asks for its name."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Protocol

from llama_core.config.run import RunConfig
from llama_core.launch.jobs.handle import JobHandle, Submission
from llama_core.launch.jobs.tasks import TaskJobs
from llama_core.launch.rank.surroundings import Surroundings
from llama_core.launch.scheduler import Ask
from llama_core.launchers.registry import LAUNCHERS
from llama_core.launchers.traits import LauncherType
from llama_core.machine.validate import Findings
from llama_core.records.directory import RunDirectory
from llama_core.records.job import JobRecord


class Script(Protocol):
    """Returns the script of a job, without submitting it."""

    def __call__(
        self, config: RunConfig, name: str, folder: Path, num_ranks: int, host_bytes: int, *, run_dir: Path
    ) -> str:
        """Return the script.

        Args:
            config: the resolved configuration.
            name: name of the run.
            folder: where the job's files would be.
            num_ranks: ranks over all nodes.
            host_bytes: the estimated host memory of a node's ranks.
            run_dir: the run's directory.
        """


@dataclass(frozen=True)
class Launcher:
    """One way to start jobs and to find them again.

    What follows ``check`` is for launchers that can say it, or do it.
    """

    kind: LauncherType
    """Its facts."""
    surroundings: Surroundings
    """What the ranks of its jobs find around them."""
    start: Callable[[Path, Sequence[Submission], str, IO[str]], None]
    """Start the jobs of one or, if it has a queue, several runs and write each ``job.json``. Takes a fresh folder for
    their files, the runs, the name that a queue shows, and the lock that keeps others from submitting the runs."""
    handle: Callable[[RunDirectory, JobRecord, Ask], JobHandle]
    """Return the handle of a recorded job; ``Ask`` is how to ask its scheduler about it."""
    out_of_sight: Callable[[JobRecord], str]
    """Return where a job was submitted if nobody here can tell whether it is running, such as "on login2"; else ""."""
    find_unrecorded: Callable[[Path, str, RunConfig], JobRecord | None]
    """Return the job of a submission, by its folder and name, whose submitter died before it wrote ``job.json``."""
    check: Callable[[Findings, RunConfig | None], None]
    """Describe the launcher on this machine; with a run, also check whether it would take the run's job."""
    ask: Ask = lambda job_id, name: None
    """Asks the scheduler about a job."""
    ask_once: Callable[[], Ask] | None = None
    """Return what asks about many jobs at once, whose answers may be some seconds old; None if nothing does."""
    tasks: TaskJobs | None = None
    """Jobs that are no run's; None if it starts none (``LauncherType.runs_tasks``)."""
    script: Script | None = None
    unused: Callable[[RunConfig], str] = lambda config: ""
    """Return how a run leaves the job around this process unused; "" if it does not, or there is none."""
    node_memory: Callable[[RunConfig], tuple[str, int] | None] = lambda config: None
    """Return a name for the memory of a node of a job that asks for none, and its bytes; None if it is unknown."""
    asked_memory: Callable[[RunConfig, int], str] = lambda config, host_bytes: ""
    """Return how much memory a job asks for by default, and why, given the bytes that a node needs; "" if none."""


def launcher_of(name: str) -> Launcher:
    """Return a launcher by its value of ``launch.launcher``.

    Raises:
        ConfigError: if there is none of that name.
    """
    launcher: Launcher = import_module(LAUNCHERS.named(name).module).LAUNCHER
    return launcher


def known_launchers() -> Iterator[Launcher]:
    """Yield the built-in launchers, and those of packages that were asked for."""
    for name in tuple(LAUNCHERS):
        yield launcher_of(name)


def started_ranks() -> int:
    """Return how many processes torchrun or a launcher started, this one included; 1 if none did.

    If a launcher did, also set the environment variables that torchrun sets.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return max(launcher.surroundings.started_ranks() for launcher in known_launchers())
