"""Trackio: the steps are one run there, and the scores of checkpoints another one in the same group.

Where the runs are, in a folder here, on a Space or on a server, is said by Trackio's own variables, since a
configuration may be a stranger's.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from pydantic import Field

from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.redaction import redacted, shell_word
from llama_core.trackers.background import BackgroundTracker, Values
from llama_core.trackers.traits import TrackedRun, TrackerSettings, TrackerType

if TYPE_CHECKING:
    import trackio

NAME = "trackio"
TITLE = "Trackio"
_SPACE = "TRACKIO_SPACE_ID"
_SERVER = "TRACKIO_SERVER_URL"
_TOKEN = "TRACKIO_WRITE_TOKEN"


class TrackioSettings(TrackerSettings):
    """Where Trackio keeps the run."""

    project: str = Field("llama-training-infra", pattern=r"^\w[\w.-]*$", max_length=80)
    """The project there."""


class TrackioService:
    """The run of Trackio that belongs to a run, or to a part of it; the same one when the run is resumed.

    Trackio has a thread and a buffer of its own for what a Space or a server has not taken yet.

    Args:
        run: the run.
        project: the name of Trackio's project.
    """

    def __init__(self, run: TrackedRun, project: str) -> None:
        self._tracked = run
        self._project = project
        self._run: trackio.Run | None = None

    def send(self, values: Sequence[Values]) -> None:
        """Log values; Trackio takes the time itself."""
        for one in values:
            self._begun().log(dict(one.values), step=one.step)

    def keep(self, file: Path) -> None:
        """Log a file as an artifact."""
        self._begun().log_artifact(str(file), name=f"{self._tracked.directory.name}-{file.stem}", type=file.stem)

    def is_away(self, error: Exception) -> bool:
        """Return whether it is an error of a connection or a disk."""
        return isinstance(error, OSError)

    def close(self) -> None:
        """End the run there."""
        if self._run is not None:
            self._run.finish()

    def _begun(self) -> "trackio.Run":
        if self._run is None:
            import trackio

            run = self._tracked
            name = f"{run.directory.name}-{run.part}" if run.part else run.directory.name
            record = _record(run.directory, run.part)
            self._run = trackio.init(
                project=self._project,
                name=name,
                group=run.group,
                config={**run.configuration, **run.records()},
                resume="allow" if record.exists() else "never",
                private=True,
                embed=False,
                auto_log_cpu=False,  # its records have what our ranks measure
                auto_log_gpu=False,
            )
            write_json(record, {"run_id": self._run.id, "project": self._project})
        return self._run


def _record(run: RunDirectory, part: str = "") -> Path:
    """Return the file that says that Trackio has the run, or the part of it."""
    return run.tracker(NAME) / f"{part or 'run'}.json"


def _open(run: TrackedRun, settings: TrackioSettings) -> BackgroundTracker:
    import trackio  # noqa: F401  # so that a missing package refuses the run

    return BackgroundTracker(TrackioService(run, settings.project), TITLE)


def _keep(run: TrackedRun, settings: TrackioSettings, file: Path) -> None:
    if _record(run.directory).exists():  # otherwise it has nothing of the run
        tracker = _open(run, settings)
        tracker.keep(file)
        tracker.close()


def _where(run: RunDirectory, settings: TrackioSettings | None) -> str:
    if settings is None or not _record(run).exists():
        return ""
    if space := os.environ.get(_SPACE):
        return f"https://huggingface.co/spaces/{space}, project {settings.project}"
    if server := os.environ.get(_SERVER):
        return f"{redacted(server.partition('?')[0])}, project {settings.project}"
    return f"trackio show --project {shell_word(settings.project)}"


def _problems(settings: TrackioSettings) -> Iterator[str]:
    server = os.environ.get(_SERVER)
    if not server or os.environ.get(_SPACE) or os.environ.get(_TOKEN):
        return
    if "write_token" not in parse_qs(urlsplit(server).query):
        yield f"tracking.trackers.{NAME}: the server of {_SERVER} needs a token; export {_TOKEN}=..., or do without it"


TRACKIO = TrackerType(
    NAME,
    TITLE,
    settings=TrackioSettings,
    open=_open,
    where=_where,
    package="trackio",
    imports=("trackio",),
    problems=_problems,
    keep=_keep,
    variables=("TRACKIO_DIR", _SPACE, _SERVER, _TOKEN, "HF_TOKEN"),
)
