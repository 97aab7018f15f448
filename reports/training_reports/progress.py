"""How far a run at work has come, at which pace, and what it does now."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import pandas as pd

from llama_core.errors import RunDirectoryError
from llama_core.launch.attempts import current_attempt
from llama_core.records.activity import read_activity
from llama_core.records.directory import RunDirectory
from llama_core.records.job import JobRecord
from llama_core.records.measurements import StepRecord
from llama_core.units import format_count, format_duration
from training_reports.contents import RunContents
from training_reports.layout import moment

PACE_STEPS = 50
"""Steps over which the pace is the mean: some evaluations and checkpoints are among them."""


@dataclass(frozen=True)
class ShownProgress:
    """How far a run at work is."""

    share: float
    """The part of its steps that is done, from 0 to 1."""
    lines: Sequence[str]
    """Sentences on its newest step, the time left and what it does."""


def progress_of(run: RunDirectory, contents: RunContents) -> ShownProgress:
    """Return the share of the steps that are done, the time left at the present pace, and what the first rank does."""
    newest = contents.heartbeat
    lines = [contents.missing.get("heartbeat", "")] if newest is None else list(_on_steps(run, contents, newest))
    activity = read_activity(run)
    if activity is not None and activity.part != "steps":
        lines.append(f"{activity.doing[:1].upper()}{activity.doing[1:]}, since {moment(activity.since)}.")
    job = contents.job
    if job is not None:
        lines.append(job_sentence(job))
    share = newest.step / newest.total_steps if newest is not None and newest.total_steps > 0 else 0.0
    return ShownProgress(share, lines)


def job_sentence(job: JobRecord) -> str:
    """Return which job it is, and where it comes from."""
    return f"Job {job.job_id} ({job.launcher}) was submitted from {job.host}, {job.submitted_at}."


def _on_steps(run: RunDirectory, contents: RunContents, newest: StepRecord) -> Iterator[str]:
    place = f"Step {newest.step:,} of {newest.total_steps:,} at {moment(newest.time)}"
    yield f"{place}: loss {newest.loss:.4f}, {format_count(newest.tokens)} tokens."
    pace = seconds_per_step(contents.steps, _start_of_attempt(run, contents))
    left = newest.total_steps - newest.step
    if pace is not None and left > 0:
        yield (
            f"About {format_duration(pace * left)} left, until {moment(newest.time + pace * left)}, at {pace:.3g} s "
            "per step with evaluations and checkpoints."
        )
    if contents.expected is not None:
        yield f"Expected: {contents.expected.seconds:.3g} s per step, {contents.expected.told_by}."


def seconds_per_step(steps: pd.DataFrame, since: float) -> float | None:
    """Return the wall time per step over the newest ``PACE_STEPS``, with what is between them; None if unknown.

    Args:
        steps: the run's steps.
        since: when this attempt began: the time before it says nothing on its pace. Seconds since the epoch.
    """
    rows = steps[steps["time"] >= since].tail(PACE_STEPS + 1)
    if len(rows) < 2:
        return None
    first = rows.iloc[0]
    last = rows.iloc[-1]
    seconds = float(last["time"] - first["time"])
    num_steps = float(last["step"] - first["step"])
    return seconds / num_steps if seconds > 0 and num_steps > 0 else None  # a clock may have been set back


def _start_of_attempt(run: RunDirectory, contents: RunContents) -> float:
    with suppress(RunDirectoryError):
        attempt = current_attempt(run, contents.job)
        if attempt is not None:
            return datetime.fromisoformat(attempt.started_at).astimezone(UTC).timestamp()
    return 0.0
