"""The activities of the first rank besides steps: the current one, for whoever waits, and all of them, for goodput."""

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from llama_core.errors import RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import append_lines, read_lines, read_typed, write_json

TimePart = Literal[
    "steps", "data", "recomputed", "checkpoints", "evaluation", "benchmark", "startup", "queue", "stopped", "other"
]
"""A part of a run's time; see ``goodput.LABELS``."""

QUEUED = "waiting in the queue"
IN_PLACE = "starting ranks again"
"""What a job did before the first rank of an attempt began: the first activity of every attempt, with the part
``queue``."""


@dataclass(frozen=True)
class Activity:
    """What the first rank does, and since when."""

    doing: str
    """Completes "has been", such as ``building the model``."""
    since: float
    """Seconds since the epoch."""
    part: TimePart = "startup"
    """The part of the run's time that it belongs to, until the next activity."""


def record_activity(run: RunDirectory, doing: str, part: TimePart = "startup") -> None:
    """Record what this rank does from now on; only the first rank may call it."""
    activity = Activity(doing, time.time(), part)
    with suppress(OSError):  # a full disk ends the run only where something would be lost
        write_json(run.activity, activity, durable=False)
    append_activities(run, activity)


def append_activities(run: RunDirectory, *activities: Activity) -> None:
    """Add to the first rank's history, and leave its current activity as it is."""
    with suppress(OSError):
        append_lines(run.activities, map(asdict, activities))


def read_activity(run: RunDirectory) -> Activity | None:
    """Return what the first rank has recorded last, or None if it has recorded nothing."""
    with suppress(RunDirectoryError):
        return read_typed(run.activity, Activity, run.path)
    return None


def read_activities(run: RunDirectory) -> list[Activity]:
    """Return what the first rank has done since the run began, without a line that was cut short.

    Raises:
        RunDirectoryError: if the file is damaged.
    """
    return read_lines(run.activities, Activity, run.path)
