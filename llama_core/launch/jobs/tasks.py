"""Jobs that are no run's: each calls one task, such as the evaluation of a checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_core.config.run import RunConfig


@dataclass(frozen=True)
class TaskRequest:
    """Jobs that are about to start."""

    tasks: tuple[Callable[[], None], ...]
    """What each of them calls, which can be pickled."""
    config: RunConfig
    """A configuration whose job would be one of these: it asks for the same."""
    num_ranks: int
    """Ranks that a task starts itself, over all nodes of its job."""
    name: str
    """The name that a queue shows."""
    folder: Path
    """A fresh folder for the files of the jobs."""
    what: str
    """What the folder is, for an error."""
    instead: str
    """What to choose in place of it, for an error."""
    host_bytes: int = 0
    """The host memory that a node needs; 0 if it is unknown."""
    can_repeat: bool = False
    """Whether a task that was stopped may be called again, and then does what is left."""


@dataclass(frozen=True)
class TaskJobs:
    """How a launcher starts such jobs, and finds them again by their ids."""

    submit: Callable[[TaskRequest], list[str]]
    """Start the jobs and return their ids. It raises EnvironmentMismatchError if they are refused."""
    states: Callable[[Sequence[str], str], Sequence[str] | None]
    """Return the states of jobs, by their ids and their name, as far as they are known; None without an answer."""
    ended: frozenset[str]
    """The states of jobs that have ended."""
    cancel: Callable[[Sequence[str]], None]
    """End jobs by their ids."""
    poll_seconds: float
    """Time between two looks at a job."""
    files_seconds: float
    """Time that files of a job may take to appear on this machine after its end."""
    refusal: Callable[[RunConfig], str | None] = lambda config: None
    """Return why a job that asks for what ``config`` says would be refused, without starting one; None if it would not
    be, or if nobody can tell."""
