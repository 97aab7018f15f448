"""The attempts at a run: when each ran, why it ended, its steps, and the time that was lost between them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pandas as pd

from llama_core.units import format_duration
from training_reports.contents import RunContents

COLUMNS = (
    "Attempt", "Job", "Started", "Ended", "Outcome", "Steps", "Waited", "Starting", "In steps", "After them", "Reason",
)  # fmt: skip


@dataclass(frozen=True)
class Spent:
    """How long each part of an attempt took, in seconds; None if a time is unknown."""

    waited: float | None
    """From the end of the attempt before, or from the submission of the first, to its start."""
    starting: float | None
    """From its start to its first step that counts, or to its end if none does."""
    in_steps: float | None
    """From there to the end of its last step that counts."""
    after: float | None
    """From there to its end: steps that the next attempt repeated, checkpoints, timed steps."""
    repeated: int
    """Steps that a later attempt repeated."""


def attempts_table(contents: RunContents) -> tuple[list[tuple[object, ...]], str] | None:
    """Return a row of ``COLUMNS`` for every attempt, and a sentence on the time lost; None if no attempt has ended."""
    attempts = contents.outcome.attempts if contents.outcome else ()
    if not attempts:
        return None
    spent = list(time_spent(attempts, contents.steps))
    rows: list[tuple[object, ...]] = [
        (
            number,
            attempt["job_id"],
            attempt["started_at"],
            attempt["ended_at"],
            attempt["status"],
            _steps(attempt, own.repeated),
            *(
                None if seconds is None else format_duration(seconds)
                for seconds in (own.waited, own.starting, own.in_steps, own.after)
            ),
            attempt["reason"],
        )
        for number, (attempt, own) in enumerate(zip(attempts, spent, strict=True), 1)
    ]
    return rows, _lost(spent)


def time_spent(attempts: Sequence[Mapping[str, Any]], steps: pd.DataFrame) -> Iterator[Spent]:
    """Yield the parts of every attempt's time.

    Args:
        attempts: those of an ``Outcome``.
        steps: the run's steps, each once: as the last attempt that took it recorded it.
    """
    before: float | None = None
    for place, attempt in enumerate(attempts):
        first = attempt["first_step"]
        last = attempt["last_step"]
        later = [other["first_step"] for other in attempts[place + 1 :] if other["first_step"]]
        counts = steps.iloc[0:0]
        repeated = 0
        if first is not None and last is not None:
            kept = min([last, *(step - 1 for step in later)])
            counts = steps[steps["step"].between(first, kept)]
            repeated = last - max(kept, first - 1)
        start = epoch_seconds(attempt["started_at"])
        end = epoch_seconds(attempt["ended_at"])
        asked = epoch_seconds(attempt["submitted_at"]) if before is None else before
        begun = end
        done = end
        if not counts.empty:
            begun = float(counts["time"].iloc[0] - counts["step_seconds"].iloc[0])
            done = float(counts["time"].iloc[-1])
        yield Spent(
            waited=_between(asked, start),
            starting=_between(start, begun),
            in_steps=_between(begun, done),
            after=_between(done, end),
            repeated=repeated,
        )
        before = end


def _lost(spent: Sequence[Spent]) -> str:
    """Return a sentence on the time that one attempt alone would not have taken; empty with one attempt."""
    if len(spent) < 2:
        return ""
    parts = {
        "waiting to start again": [own.waited for own in spent[1:]],
        "starting again": [own.starting for own in spent[1:]],
        "after the last step that counts in each earlier attempt": [own.after for own in spent[:-1]],
    }
    known = {name: sum(seconds for seconds in values if seconds is not None) for name, values in parts.items()}
    told = ", ".join(f"{format_duration(seconds)} {name}" for name, seconds in known.items())
    unknown = any(seconds is None for values in parts.values() for seconds in values)
    return (
        f"Lost to interruptions: {'at least ' if unknown else ''}{format_duration(sum(known.values()))} ({told}); "
        f"steps taken twice: {sum(own.repeated for own in spent)}."
    )


def _steps(attempt: Mapping[str, Any], repeated: int) -> str | None:
    first = attempt["first_step"]
    last = attempt["last_step"]
    if first is None or last is None:
        return None
    return f"{first} to {last}" + (f" ({repeated} repeated later)" if repeated else "")


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


def epoch_seconds(moment: object) -> float | None:
    """Return an ISO 8601 time in seconds since the epoch; None for anything else."""
    try:
        return datetime.fromisoformat(str(moment)).timestamp()
    except ValueError:
        return None
