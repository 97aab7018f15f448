"""Everything a run's steps need from a launcher, provided by the launcher itself: no other code asks for its name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from llama_core.config.run import RunConfig
from llama_core.config.settings import LauncherName
from llama_core.launch.jobs.handle import JobHandle, Submission
from llama_core.launch.scheduler import Ask
from llama_core.machine.validate import Findings
from llama_core.records.directory import RunDirectory
from llama_core.records.job import JobRecord


@dataclass(frozen=True)
class Launcher:
    """One way to start jobs and to find them again."""

    name: LauncherName
    """Its value of ``launch.launcher``."""
    start: Callable[[Path, Sequence[Submission], str, IO[str]], None]
    """Start the jobs of one or several runs and write each ``job.json``. Takes submitit's folder, the runs, the name
    that a queue shows, and the lock that keeps others from submitting the runs."""
    handle: Callable[[RunDirectory, JobRecord, Ask], JobHandle]
    """Return the handle of a recorded job; ``Ask`` is how to ask a scheduler about it."""
    out_of_sight: Callable[[JobRecord], str]
    """Return where a job was submitted if nobody here can tell whether it is running, such as "on login2"; else ""."""
    find_unrecorded: Callable[[Path, str, RunConfig], JobRecord | None]
    """Return the job of a submission, by its folder and name, whose submitter died before it wrote ``job.json``."""
    check: Callable[[Findings, RunConfig | None], None]
    """Describe the launcher on this machine; with a run, also check whether it would take the run's job."""
