"""Files of events that TensorBoard reads.

The package's own SummaryWriter writes from a thread, whose errors end in a traceback on the console. Its record format
and its messages are used here without that thread: every event is flushed as it is written.
"""

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


class EventFile:
    """An event file in a folder.

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
        self.write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, event: "Event") -> None:
        """Add an event; a TensorBoard that is open shows it at once."""
        self._file.write(event.SerializeToString())
        self._file.flush()

    def write_scalars(self, step: int, scalars: Mapping[str, float], wall_time: float) -> None:
        """Add the values of a step, by their tags, as one event."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self.write(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
