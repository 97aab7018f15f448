"""Runs side by side: where their settings differ, and their losses, speed, memory and cost."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from llama_core.errors import ConfigError, RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import by_dotted_key
from llama_core.sweep.directory import SweepDirectory
from llama_core.sweep.grid import HELD_OUT
from llama_core.units import format_bytes, format_count, format_duration
from training_reports.contents import RunContents
from training_reports.layout import NOTHING

AVERAGED = 0.05
"""A loss at a number of tokens, or after a time, is the mean over this last share of them."""
_SOFTWARE = ("commit", "torch", "python")
_FOUND = (*_SOFTWARE, "device")
"""What was found on the machines, if a record says it."""
_NO_SETTING = {"plan.notes", "tracking.run_name"}


@dataclass(frozen=True)
class ComparedRun:
    """One run, with its records."""

    name: str
    """Its directory's name, or the path if two runs share the name."""
    path: Path
    contents: RunContents

    @property
    def settings(self) -> dict[str, Any]:
        """Its configuration, its plan below ``plan``, and its software and device, by dotted key."""
        contents = self.contents
        facts = (contents.environment or {}).get("facts", {})
        software = {name: facts[name] for name in _SOFTWARE if name in facts}
        device = {"device": contents.benchmark.device} if contents.benchmark else {}
        return by_dotted_key({**(contents.config or {}), "plan": contents.plan or {}} | software | device)

    @property
    def seconds(self) -> "pd.Series[float]":
        """Time in steps up to each step."""
        return self.contents.steps["step_seconds"].astype(float).cumsum()

    @property
    def tokens(self) -> "pd.Series[float]":
        """Tokens up to each step."""
        return self.contents.steps["tokens"].astype(float)

    @property
    def num_devices(self) -> int:
        """Devices, or processes on a CPU."""
        return int(self.contents.number("parallel", "gpus") or 1)

    @property
    def device_hours(self) -> float | None:
        """Time in steps on all devices."""
        return None if self.contents.steps.empty else self.seconds.iloc[-1] * self.num_devices / 3600

    @property
    def dollars(self) -> float | None:
        """The price of the time in steps at ``launch.dollars_per_gpu_hour``; None without GPUs."""
        hours, price = self.device_hours, self.contents.number("launch", "dollars_per_gpu_hour")
        if hours is None or price is None or self.contents.setting("launch", "device") != "cuda":
            return None
        return float(hours * price)

    def loss_at(self, at: float, along: "pd.Series[float]") -> float | None:
        """Return the mean training loss of the last steps before ``at``, measured along tokens or seconds."""
        loss = self.contents.steps["loss"][(along > (1 - AVERAGED) * at) & (along <= at)]
        if loss.empty:
            loss = self.contents.steps["loss"][along <= at].tail(1)
        return None if loss.empty else _number(loss.mean())


@dataclass(frozen=True)
class Measure:
    """A result of every run."""

    name: str
    values: tuple[float | None, ...]
    text: Callable[[float], str]
    best: str = ""
    """``low`` or ``high``, if one of them is better."""
    by_difference: bool = False
    """Whether a run is compared with the first by difference, not by ratio."""
    ranges: tuple[tuple[float, float] | None, ...] = ()
    """The middle half of the samples of each value, if there are any."""

    @property
    def winner(self) -> int | None:
        """The place of the best run; None if it equals the next, or their ranges overlap."""
        known = {place: value for place, value in enumerate(self.values) if value is not None}
        if not self.best or len(known) < 2:
            return None
        order = sorted(known, key=lambda place: known[place], reverse=self.best == "high")
        first, second = order[:2]
        return None if known[first] == known[second] or self._overlap(first, second) else first

    def _overlap(self, one: int, other: int) -> bool:
        first, second = (self.ranges[place] if self.ranges else None for place in (one, other))
        return first is not None and second is not None and max(first[0], second[0]) <= min(first[1], second[1])

    def cells(self) -> list[str]:
        """Return the values as text; those after the first with their change against it."""
        first = self.values[0]
        return [self._cell(value, None if place == 0 else first) for place, value in enumerate(self.values)]

    def _cell(self, value: float | None, first: float | None) -> str:
        if value is None:
            return NOTHING
        if not first or not self.best:
            return self.text(value)
        change = f"{value - first:+.4f}" if self.by_difference else f"{value / first - 1:+.1%}"
        return f"{self.text(value)} ({change})"


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side."""

    runs: tuple[ComparedRun, ...]
    differences: tuple[tuple[str, tuple[str, ...]], ...]
    """Each setting that is not the same in all runs, with its values."""
    measures: tuple[Measure, ...]
    notes: tuple[str, ...]
    """Why some of the results cannot be compared."""

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as a record."""
        names = [run.name for run in self.runs]
        return {
            "runs": {run.name: str(run.path) for run in self.runs},
            "differences": {key: dict(zip(names, values, strict=True)) for key, values in self.differences},
            "measures": {one.name: dict(zip(names, one.values, strict=True)) for one in self.measures},
            "notes": list(self.notes),
        }


def compare_runs(paths: Sequence[Path]) -> RunComparison:
    """Compare two runs or more, in the order given.

    Raises:
        ConfigError: if there is only one, or one is given twice.
        RunDirectoryError: if a directory holds no run, or its run has neither metrics nor timed steps.
    """
    _refuse_repeats(paths)
    names = [path.resolve().name for path in paths]
    runs = tuple(
        ComparedRun(name if names.count(name) == 1 else str(path), path, _contents(path))
        for name, path in zip(names, paths, strict=True)
    )
    measured = tuple(one for one in _measures(runs) if any(value is not None for value in one.values))
    return RunComparison(runs, tuple(_differences(runs)), measured, tuple(_notes(runs)))


def _refuse_repeats(paths: Sequence[Path]) -> None:
    if len(paths) < 2:
        raise ConfigError(f"{paths[0]} is only one run; name at least two to compare")
    order = sorted(paths, key=lambda path: str(path.resolve()))
    twice = [other for one, other in pairwise(order) if one.resolve() == other.resolve()]
    if twice:
        raise ConfigError(*(f"{path} is given twice; name each run once" for path in dict.fromkeys(twice)))


def _contents(path: Path) -> RunContents:
    run = RunDirectory(path)
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is not a directory; give the directory of a run, such as runs/mine")
    if SweepDirectory(path).record.exists():
        elements = sorted((path / "runs").glob("*"))
        such_as = f", such as {elements[0]}" if elements else ""
        raise RunDirectoryError(f"{path} is a sweep, which has a report of its own; give runs of it{such_as}")
    if not run.config.exists():
        raise RunDirectoryError(f"{path} holds no run (no {run.config.name})")
    contents = RunContents.read(run)
    if contents.steps.empty and contents.benchmark is None:
        raise RunDirectoryError(f"{path} has no metrics: no step was completed; train it first, or leave it out")
    return contents


def _differences(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, tuple[str, ...]]]:
    settings = [run.settings for run in runs]
    for key in dict.fromkeys(key for one in settings for key in one):
        if key not in _NO_SETTING and _differ(settings, key):
            yield key, tuple(_text(one.get(key)) for one in settings)


def _differ(settings: Sequence[Mapping[str, Any]], key: str) -> bool:
    values = [_text(one.get(key)) for one in settings]
    if key in _FOUND:  # an unknown value is not a difference
        values = [value for value in values if value != NOTHING]
    return len(set(values)) > 1


def _text(value: object) -> str:
    match value:
        case None:
            return NOTHING
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ", ".join(map(str, value)) or NOTHING
    return str(value)


def _measures(runs: Sequence[ComparedRun]) -> Iterator[Measure]:
    yield from _progress(runs)
    yield from _losses(runs)
    timed = [run.contents.benchmark for run in runs]
    rates = [
        benchmark.tokens_per_second if benchmark else _median(run, "tokens_per_second")
        for run, benchmark in zip(runs, timed, strict=True)
    ]
    mfus = [benchmark.mfu if benchmark else _median(run, "mfu") for run, benchmark in zip(runs, timed, strict=True)]
    ranges = tuple(benchmark.throughput_quartiles if benchmark else None for benchmark in timed)
    yield Measure("tokens/s", tuple(rates), "{:,.0f}".format, "high", ranges=ranges)
    yield Measure("MFU", tuple(mfus), "{:.1%}".format, "high")
    yield Measure("peak memory", tuple(map(_memory, runs)), format_bytes, "low")
    yield from _costs(runs)


def _progress(runs: Sequence[ComparedRun]) -> Iterator[Measure]:
    yield Measure("steps", tuple(_last(run.contents.steps["step"]) for run in runs), "{:,.0f}".format)
    yield Measure("tokens", tuple(_last(run.tokens) for run in runs), format_count)
    yield Measure("time in steps", tuple(_last(run.seconds) for run in runs), format_duration)


def _losses(runs: Sequence[ComparedRun]) -> Iterator[Measure]:
    """Yield training losses at half and all of the tokens that every run has reached, and after the shortest time."""
    trained = [run for run in runs if not run.contents.steps.empty]

    def losses(name: str, at: float, along: Callable[[ComparedRun], "pd.Series[float]"]) -> Measure:
        values = tuple(run.loss_at(at, along(run)) if run in trained else None for run in runs)
        return Measure(name, values, "{:.4f}".format, "low", by_difference=True)

    if trained:
        tokens = min(run.tokens.iloc[-1] for run in trained)
        seconds = min(run.seconds.iloc[-1] for run in trained)
        for share in (0.5, 1.0):
            at = share * tokens
            yield losses(f"loss at {format_count(at)} tokens", at, lambda run: run.tokens)
        yield losses(f"loss after {format_duration(seconds)}", seconds, lambda run: run.seconds)
    yield Measure("held-out loss", tuple(map(_held_out, runs)), "{:.4f}".format, "low", by_difference=True)


def _held_out(run: ComparedRun) -> float | None:
    training, steps = run.contents.training, run.contents.steps
    return training.eval_loss if training else _last(steps["eval_loss"].dropna())


def _memory(run: ComparedRun) -> float | None:
    measured = run.contents.training or run.contents.benchmark
    return measured.memory_peak_bytes if measured else _last(run.contents.steps["memory_peak_bytes"])


def _costs(runs: Sequence[ComparedRun]) -> Iterator[Measure]:
    hours, dollars = tuple(run.device_hours for run in runs), tuple(run.dollars for run in runs)
    yield Measure("device hours", hours, "{:,.3g}".format, "low")
    if any(value is not None for value in dollars):
        yield Measure("cost", dollars, "${:,.2f}".format, "low")
        tokens = [_last(run.tokens) for run in runs]
        each = [one / count * 1e9 if one and count else None for one, count in zip(dollars, tokens, strict=True)]
        yield Measure("cost of 1B tokens", tuple(each), "${:,.0f}".format, "low")


def _notes(runs: Sequence[ComparedRun]) -> Iterator[str]:
    settings = [run.settings for run in runs]
    if _differ(settings, "data.tokenizer"):
        yield "The tokenizers differ: losses per token cannot be compared."
    elif other := [key for key in sorted(HELD_OUT | {"data.source"}) if _differ(settings, key)]:
        yield f"Held-out losses are not over the same tokens: {', '.join(other)} differ."
    if _differ(settings, "device") or _differ(settings, "launch.device"):
        yield "The devices differ: so do tokens/s and memory, whatever the settings."
    untimed = [run.name for run in runs if run.contents.benchmark is None]
    if untimed and len(untimed) < len(runs):
        yield f"Tokens/s come from timed steps, but from training steps for {', '.join(untimed)}."
    for run in runs:
        if run.contents.outcome is None or run.contents.outcome.status != "finished":
            status = run.contents.outcome.status if run.contents.outcome else "no outcome yet"
            yield f"{run.name} has not finished: {status}."


def _median(run: ComparedRun, column: str) -> float | None:
    return _number(run.contents.steps[column].astype(float).median())


def _last(values: "pd.Series[Any]") -> float | None:
    return None if values.empty else _number(values.iloc[-1])


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
