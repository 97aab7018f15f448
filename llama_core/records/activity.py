"""What the first rank does while it completes no step: a small file for someone who waits."""

import time
from contextlib import suppress
from dataclasses import dataclass

from llama_core.errors import RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed, write_json


@dataclass(frozen=True)
class Activity:
    """What the first rank does, and since when."""

    doing: str
    """What follows "has been", such as ``building the model``."""
    since: float
    """Seconds since the epoch."""


def record_activity(run: RunDirectory, doing: str) -> None:
    """Record what this rank does from now on; only the first rank may call it."""
    with suppress(OSError):  # a full disk ends a run where it loses something
        write_json(run.activity, Activity(doing, time.time()), durable=False)


def read_activity(run: RunDirectory) -> Activity | None:
    """Return what the first rank has recorded last, or None if it has recorded nothing."""
    with suppress(RunDirectoryError):
        return read_typed(run.activity, Activity)
    return None
