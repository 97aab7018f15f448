"""TensorBoard, and the files of events that it reads.

The package's own SummaryWriter writes from a thread, whose errors end in a traceback on the console. Its record format
and its messages are used here without that thread: every event is flushed as it is written.
"""

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llama_core.records.directory import RunDirectory
from llama_core.redaction import shell_word
from llama_core.trackers.traits import TrackedRun, TrackerSettings, TrackerType

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

NAME = "tensorboard"


class TensorBoardSettings(TrackerSettings):
    """TensorBoard has no settings."""


class EventFile:
    """An event file in a folder, as a tracker.

    Args:
        folder: made if it is missing.

    Raises:
        OSError: also from each method, if the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = RecordWriter((folder / name).open("xb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def begin_after(self, step: int) -> None:
        """Hide whatever other files of the folder have of later steps, so that each step shows once."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add the values of a step, by their tags, as one event; a TensorBoard that is open shows them at once."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        tagged = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(wall_time=time, step=step, summary=Summary(value=tagged)))

    def write_scores(self, step: int, tokens: int, scores: Mapping[str, float], time: float) -> None:
        """Add the scores of a checkpoint, as ``write``."""
        self.write(step, scores, time)

    def flush(self) -> None:
        """Do nothing: every event is flushed as it is written."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: "Event") -> None:
        self._file.write(event.SerializeToString())
        self._file.flush()


def _open(run: TrackedRun, settings: TensorBoardSettings) -> EventFile:
    events = EventFile(run.directory.tracker(NAME) / run.part)
    if not run.part:
        events.begin_after(run.resumed_at)
    return events


def _where(run: RunDirectory, settings: TensorBoardSettings | None) -> str:
    folder = run.tracker(NAME)
    return f"tensorboard --logdir {shell_word(folder)}" if folder.exists() else ""


TENSORBOARD = TrackerType(
    NAME,
    "TensorBoard",
    settings=TensorBoardSettings,
    open=_open,
    where=_where,
    package="tensorboard",
    imports=("tensorboard.compat.proto.event_pb2", "tensorboard.summary.writer.record_writer"),
)
