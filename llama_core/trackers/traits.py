"""The traits of a tracker, and what it is given. Each states its own, so no other code asks for its name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from llama_core.records.directory import RunDirectory
from llama_core.records.files import intact, read_json

EVALUATIONS = "evaluations"
"""The part of a run that the scores of its checkpoints are."""


class TrackerSettings(BaseModel):
    """The settings of a tracker: immutable, and as strict about types and keys as a section of a configuration."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


Settings = TypeVar("Settings", bound=TrackerSettings)


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about the run that it is opened for."""

    directory: RunDirectory
    configuration: Mapping[str, Any]
    """All settings of the run, nested, as JSON without secrets."""
    fingerprint: Callable[[], str]
    """Returns 16 hex digits that the run keeps when it is resumed, unless it gets another number of steps."""
    group: str
    """The name that it has in common with runs beside it: that of its sweep, or else its own."""
    resumed_at: int = 0
    """The last step that is recorded already; 0 at the beginning of a run."""
    part: str = ""
    """What it gets: the steps if empty, or ``EVALUATIONS``, the scores, which another process sends meanwhile."""

    def records(self) -> dict[str, Any]:
        """Return the run's plan, its estimate and its environment (versions, commit, devices), as far as recorded.

        Raises:
            RunDirectoryError: if one of them is damaged.
        """
        run = self.directory
        found: dict[str, Any] = {
            path.stem: read_json(path, run.path) for path in (run.plan, run.estimate) if path.exists()
        }
        if run.environment.exists():
            with intact(run.environment):
                found["environment"] = dict(read_json(run.environment, run.path)["facts"])
        return found


class Tracker(Protocol):
    """A tracker that is open. It may raise whatever it likes: then it is closed and gets nothing more."""

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Take the values of a step by name; ``time`` is in seconds since the epoch. The run waits for it."""

    def write_scores(self, step: int, tokens: int, scores: Mapping[str, float], time: float) -> None:
        """Take the scores of the checkpoint of a step, which was trained on ``tokens``, in whatever order of steps."""

    def flush(self) -> None:
        """Make sure that what was taken survives the process; the run has saved a checkpoint."""

    def close(self) -> None:
        """Flush, and release what is held open, also after a failure."""


@dataclass(frozen=True)
class TrackerType(Generic[Settings]):
    """A kind of tracker, with its traits."""

    name: str
    """What settings call it; its files in a run are below ``logs/<name>``."""
    title: str
    """What people call it."""
    settings: type[Settings]
    """Its settings."""
    open: Callable[[TrackedRun, Settings], Tracker]
    """Opens it for a run. It imports the package.

    Raises EnvironmentMismatchError for what the user has to change before the run can begin.
    """
    where: Callable[[RunDirectory, Settings | None], str]
    """Returns where to look at a run, best as a command; empty if there is nothing. The settings are None if the run
    does not use it any more."""
    package: str = ""
    """The package that it needs; empty if it needs none."""
    imports: tuple[str, ...] = ()
    """The modules that it imports when it is opened; they are then imported before the run's memory is measured."""
    problems: Callable[[Settings], Iterable[str]] = lambda _: ()
    """Returns what it lacks on this machine, such as a key, one line each with the remedy. It is called before a job is
    submitted."""
    keep: Callable[[TrackedRun, Settings, Path], None] = lambda *_: None
    """Keeps a file, the report, with what the tracker has of a run that has ended, if it can; it may raise whatever it
    likes. It is called where the chain of the run is followed, which waits for it for ``guarded.KEEP_SECONDS`` at
    most."""
    variables: tuple[str, ...] = ()
    """Environment variables that it reads; ``validate-environment`` names those that are set."""
    makes_links: bool = False
    """Whether it makes links among its files; a run with other links is not resumed."""


class AskedTracker(NamedTuple):
    """A tracker that a configuration asks for."""

    kind: TrackerType[Any]
    settings: TrackerSettings
    setting: str
    """What asks for it, such as ``tracking.wandb=online``."""
