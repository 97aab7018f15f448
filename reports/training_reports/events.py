"""The table of what has happened to a run: starts, ends, checkpoints, evaluations, bad steps, slow ranks, changes."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pandas as pd

from llama_core.records.checkpoints import checkpoint_step, list_checkpoints
from llama_core.records.directory import RunDirectory
from training_reports.attempts import epoch_seconds
from training_reports.contents import RunContents
from training_reports.layout import moment

COLUMNS = ("Time", "Step", "Event")
MAX_EVENTS = 30
"""Most rows of the table."""


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run."""

    time: float
    """Seconds since the epoch."""
    step: int | None
    """The step after or at which it happened; None if it belongs to none."""
    what: str


def events_table(run: RunDirectory, contents: RunContents) -> tuple[list[tuple[object, ...]], str] | None:
    """Return a row of ``COLUMNS`` for each of the newest events, and a sentence on those left out; None without any."""
    events = sorted(_events(run, contents), key=lambda event: event.time, reverse=True)
    if not events:
        return None
    rows: list[tuple[object, ...]] = [(moment(one.time), one.step, one.what) for one in events[:MAX_EVENTS]]
    left_out = len(events) - len(rows)
    return rows, f"{left_out:,} earlier ones are left out." if left_out else ""


def _events(run: RunDirectory, contents: RunContents) -> Iterator[RunEvent]:
    yield from _attempts(contents)
    yield from _of_steps(contents.steps)
    for back in contents.rollbacks:
        yield RunEvent(back.time, back.bad_step, str(back))
    for path in list_checkpoints(run):
        with suppress(OSError):  # deleted meanwhile, since newer ones are kept
            yield RunEvent(os.lstat(path).st_mtime, checkpoint_step(path), "checkpoint")
    for check in contents.preflights:
        began = epoch_seconds(check.started_at) or 0.0  # the record was checked to have a time
        for found in (*check.named, *check.unmeasured):
            yield RunEvent(began, None, f"before the first step: {found}")
    for straggler in contents.stragglers:
        yield from _change(contents.steps, straggler.step, str(straggler))
    for change in contents.data_changes:
        yield from _change(contents.steps, change.step, str(change))
    for later in contents.settings_changes:
        yield from _change(contents.steps, later.step, str(later))


def _change(steps: pd.DataFrame, step: int, what: str) -> Iterator[RunEvent]:
    """Yield what happened after ``step`` at the time when the next step began; nothing before it has been taken."""
    for row in steps[steps["step"] > step].head(1).to_dict("records"):
        yield RunEvent(row["time"] - row["step_seconds"], step, what)


def _attempts(contents: RunContents) -> Iterator[RunEvent]:
    starts = [one.since for one in contents.activities if one.doing == "starting"]
    for number, start in enumerate(starts, 1):
        yield RunEvent(start, None, f"attempt {number} started" if len(starts) > 1 else "started")
    for number, attempt in enumerate(contents.outcome.attempts if contents.outcome else (), 1):
        ended = epoch_seconds(attempt["ended_at"])
        if ended is not None:
            what = f"attempt {number} ended as {attempt['status']}: {attempt['reason']}"
            yield RunEvent(ended, attempt["last_step"], what)


def _of_steps(steps: pd.DataFrame) -> Iterator[RunEvent]:
    for row in steps.loc[steps["eval_loss"].notna(), ["time", "step", "eval_loss"]].to_dict("records"):
        yield RunEvent(row["time"], row["step"], f"held-out loss {row['eval_loss']:.4f}")
    bad = steps[steps["spike"].astype(bool) | steps["skipped"].astype(bool)]
    for row in bad[["time", "step", "spike", "loss", "grad_norm"]].to_dict("records"):
        kind = "far above the steps before" if row["spike"] else "not finite, update skipped"
        values = f"loss {row['loss']:.4f}, gradient norm {row['grad_norm']:.4g}"
        yield RunEvent(row["time"], row["step"], f"{kind}: {values}")
