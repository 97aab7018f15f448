"""Goodput: the share of a run's wall time in which it made progress, and the parts of the rest."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from llama_core.records.activity import Activity, TimePart, read_activities
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_lines
from llama_core.records.metrics import read_metrics
from llama_core.units import format_duration

if TYPE_CHECKING:
    import pyarrow as pa

LABELS: Mapping[TimePart, str] = {
    "steps": "progress",
    "data": "waiting for data",
    "recomputed": "steps done again",
    "checkpoints": "waiting for checkpoints",
    "evaluation": "evaluation",
    "benchmark": "timed steps",
    "startup": "start-up",
    "queue": "queue",
    "stopped": "stopped",
    "other": "other",
}
"""What each part is called. ``steps`` are those that the run's weights come from, without their wait for data.
``recomputed`` are steps after the checkpoint that the run went on from, and the return to it. ``startup`` lasts from
the start of the first rank to its first step, ``queue`` from submission to that start. ``stopped`` is the time between
the last sign of life of an attempt and the next attempt's submission; ``other`` is the time between steps."""

COLUMNS_OF_TIMES = ["time", "step_seconds", "data_seconds"]
"""The columns of the metrics that say where time went."""


@dataclass(frozen=True)
class TakenStep:
    """The time of one optimizer step."""

    ended: float
    """Seconds since the epoch."""
    seconds: float
    data_seconds: float
    """Part of ``seconds`` spent waiting for data."""
    counts: bool
    """Whether the run's weights come from it; False if it was done again, or left out by a rollback."""


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a run went."""

    attempts: tuple[Mapping[TimePart, float], ...]
    """Seconds of each part, by attempt. An attempt's parts add up to the time from the end of the attempt before to its
    own end; the first attempt begins with its submission."""

    @property
    def total(self) -> Mapping[TimePart, float]:
        """Seconds of each part in all attempts."""
        return _added(self.attempts)

    @property
    def seconds(self) -> float:
        """Wall time of the run."""
        return sum(self.total.values())

    @property
    def share(self) -> float:
        """The part of the wall time that became progress, from 0 to 1."""
        return self.total["steps"] / self.seconds if self.seconds else 0.0

    def summary(self) -> str:
        """Return the shares in one line, the largest first; parts below a thousandth are left out."""
        others = sorted(((part, s) for part, s in self.total.items() if part != "steps"), key=lambda item: -item[1])
        shares = [f"{LABELS[part]} {s / self.seconds:.1%}" for part, s in others if s >= 1e-3 * self.seconds > 0]
        attempts = f" in {len(self.attempts)} attempts" if len(self.attempts) > 1 else ""
        progress = f"{self.share:.1%} of {format_duration(self.seconds)}{attempts} was progress"
        return "; ".join([progress, ", ".join(shares)] if shares else [progress])

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as a record, times in seconds."""
        attempts = [dict(parts) for parts in self.attempts]
        return {"goodput": self.share, "seconds": self.seconds, "parts": dict(self.total), "attempts": attempts}


def read_goodput(run: RunDirectory, metrics: "pa.Table | None" = None) -> Goodput | None:
    """Return where the time of ``run`` went until the last sign of life; None if it has taken no step.

    Args:
        run: the run.
        metrics: ``COLUMNS_OF_TIMES`` of what ``read_metrics`` has returned, if it was called already.

    Raises:
        RunDirectoryError: naming a file that is damaged.
    """
    activities = read_activities(run)
    steps = list(taken_steps(run, read_metrics(run) if metrics is None else metrics))
    return Goodput(tuple(split_time(activities, steps))) if activities and steps else None


def split_time(activities: Sequence[Activity], steps: Sequence[TakenStep]) -> list[dict[TimePart, float]]:
    """Return the seconds of each part of a run's time, by attempt.

    Args:
        activities: what the first rank did, in order. An activity with the part ``queue`` begins an attempt. Its time
            is that of the submission, or 0 if the job was already known and has queued since the attempt before. An
            activity with the part ``stopped`` ends the attempt; without one, its last activity or step does. The time
            of an activity with the part ``steps`` is divided among its steps, and the rest is ``other``.
        steps: all steps ever taken, in any order.
    """
    attempts: list[dict[TimePart, float]] = []
    before: float | None = None
    groups = by_attempt(activities)
    starts = [next((a.since for a in group if a.part != "queue"), group[0].since) for group in groups]
    for group, start, following in zip(groups, starts, [*starts[1:], float("inf")], strict=True):
        own = [step for step in steps if start <= step.ended < following]
        parts: dict[TimePart, float] = dict.fromkeys(LABELS, 0.0)
        begin = group[0].since or start
        if before is not None:
            begin = max(before, group[0].since)
            parts["stopped"] = begin - before
        last = group[-1].since
        if group[-1].part != "stopped":
            last = max([last, *(step.ended for step in own)])
        last = max(begin, min(last, following))
        # clocks of two machines may differ: no mark is before the one before it
        marks = [begin]
        for activity in group[1:]:
            marks.append(min(last, max(marks[-1], activity.since)))
        for activity, (since, until) in zip(group, pairwise([*marks, last]), strict=True):
            parts[activity.part] += until - since
        _divide(parts, own)
        attempts.append(parts)
        before = last
    return attempts


def _divide(parts: dict[TimePart, float], steps: Sequence[TakenStep]) -> None:
    """Divide the time in which steps were taken among them; what they do not explain is ``other``."""
    available = parts["steps"]
    explained = sum(step.seconds for step in steps)
    scale = min(1.0, available / explained) if explained else 0.0
    parts["steps"] = 0.0
    for step in steps:
        waited = min(step.seconds, step.data_seconds) if step.counts else 0.0
        parts["data"] += scale * waited
        parts["steps" if step.counts else "recomputed"] += scale * (step.seconds - waited)
    parts["other"] += max(0.0, available - scale * explained)


def by_attempt(activities: Sequence[Activity]) -> list[list[Activity]]:
    """Return what the first rank did, attempt by attempt; an activity with the part ``queue`` begins one."""
    groups: list[list[Activity]] = []
    for activity in activities:
        if activity.part == "queue" or not groups:
            groups.append([])
        groups[-1].append(activity)
    return groups


def _added(attempts: Iterable[Mapping[TimePart, float]]) -> dict[TimePart, float]:
    total: dict[TimePart, float] = dict.fromkeys(LABELS, 0.0)
    for parts in attempts:
        for part, seconds in parts.items():
            total[part] += seconds
    return total


def taken_steps(run: RunDirectory, metrics: "pa.Table") -> Iterable[TakenStep]:
    """Yield the steps that a run has ever taken, those that it has done again last; see ``read_goodput``."""
    for row in metrics.select(COLUMNS_OF_TIMES).drop_null().to_pylist():  # a file of somebody else may lack them
        yield TakenStep(row["time"], row["step_seconds"], row["data_seconds"], counts=True)
    for step in {step.time: step for step in read_lines(run.repeated_steps, _Times, run.path)}.values():
        yield TakenStep(step.time, step.step_seconds, step.data_seconds, counts=False)


@dataclass(frozen=True)
class _Times:
    time: float
    step_seconds: float
    data_seconds: float
