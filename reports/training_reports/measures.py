"""The results by which runs are compared, each with the value of every run."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from llama_core.records.evaluations import Score
from llama_core.units import format_bytes, format_count, format_duration
from training_reports.compared_run import ComparedRun
from training_reports.layout import NOTHING

Best = Literal["low", "high", ""]


@dataclass(frozen=True)
class ComparedMeasure:
    """A result of every run."""

    name: str
    values: tuple[float | None, ...]
    """One for each run; None if it is unknown."""
    text: Callable[[float], str]
    """How a value is written."""
    best: Best = ""
    """Which value is better; empty if neither is."""
    by_difference: bool = False
    """Whether a run is compared with the first by difference, not by ratio."""
    is_told_apart: Callable[[int, int], bool] = lambda one, other: True
    """Whether the values of two runs, given by their places, the better one first, differ by more than their noise."""

    @property
    def is_known(self) -> bool:
        """Whether the value of any run is known."""
        return any(value is not None for value in self.values)

    @property
    def winner(self) -> int | None:
        """The place of the best run; None if it equals the next, or differs from it by no more than their spread."""
        known = {place: value for place, value in enumerate(self.values) if value is not None}
        if not self.best or len(known) < 2:
            return None
        best_first = sorted(known, key=lambda place: known[place], reverse=self.best == "high")
        best, second = best_first[:2]
        if known[best] == known[second] or not self.is_told_apart(best, second):
            return None
        return best

    def cells(self) -> list[str]:
        """Return the values as text; those after the first with their change against it."""
        first, *others = self.values
        changes = [self._change(place, value, first) for place, value in enumerate(others, start=1)]
        return [self._cell(first), *(self._cell(value) + change for value, change in zip(others, changes, strict=True))]

    def _is_better(self, value: float, other: float) -> bool:
        return value > other if self.best == "high" else value < other

    def _cell(self, value: float | None) -> str:
        return NOTHING if value is None else self.text(value)

    def _change(self, place: int, value: float | None, first: float | None) -> str:
        if value is None or not first or not self.best:
            return ""
        if value != first and not self.is_told_apart(*((place, 0) if self._is_better(value, first) else (0, place))):
            return " (within the noise)"
        if self.by_difference:
            return f" ({value - first:+.4f})"
        return f" ({value / first - 1:+.1%})"


def measures(runs: Sequence[ComparedRun]) -> list[ComparedMeasure]:
    """Return the results of which that of any run is known, in the order of the table."""
    return [measure for measure in _every(runs) if measure.is_known]


def _every(runs: Sequence[ComparedRun]) -> Iterator[ComparedMeasure]:
    def measure(
        name: str,
        value: Callable[[ComparedRun], float | None],
        text: Callable[[float], str],
        best: Best = "",
    ) -> ComparedMeasure:
        return ComparedMeasure(name, tuple(map(value, runs)), text, best)

    yield measure("steps", lambda run: run.num_steps, "{:,.0f}".format)
    yield measure("tokens", lambda run: run.num_tokens, format_count)
    yield measure("time in steps", lambda run: run.num_seconds, format_duration)
    yield from _losses(runs)
    yield from _scores(runs)
    rate = measure("tokens/s", lambda run: run.tokens_per_second, "{:,.0f}".format, "high")
    mfu = measure("MFU", lambda run: run.mfu, "{:.1%}".format, "high")
    for speed in (rate, mfu):
        yield replace(speed, is_told_apart=partial(_is_faster, runs, speed.values))
    yield measure("peak memory", lambda run: run.memory_peak_bytes, format_bytes, "low")
    hours = measure("device hours", lambda run: run.device_hours, "{:,.3g}".format, "low")
    cost = measure("cost", lambda run: run.dollars, "${:,.2f}".format, "low")
    of_tokens = measure("cost of 1B tokens", lambda run: run.dollars_per_billion_tokens, "${:,.0f}".format, "low")
    for time_taken in (hours, cost, of_tokens):
        yield replace(time_taken, is_told_apart=partial(_had_own_machines, runs))


def _losses(runs: Sequence[ComparedRun]) -> Iterator[ComparedMeasure]:
    """Yield training losses at half and all of the tokens that every run has reached, and after the shortest time."""

    def loss(name: str, value: Callable[[ComparedRun], float | None]) -> ComparedMeasure:
        return ComparedMeasure(name, tuple(map(value, runs)), "{:.4f}".format, "low", by_difference=True)

    def held_out(part: str = "") -> ComparedMeasure:
        def differ(one: int, other: int) -> bool:
            first = runs[one].contents.training
            second = runs[other].contents.training
            if first is None or second is None:
                return True
            return first.of_part(part).eval_above(second.of_part(part)).is_told_apart is not False

        if part:
            measured = loss(f"held-out loss of {part}", lambda run: run.named_losses.get(part))
        else:
            measured = loss("held-out loss", lambda run: run.held_out_loss)
        return replace(measured, is_told_apart=differ)

    trained = [run for run in runs if run.is_trained]
    if trained:
        tokens = min(run.tokens.iloc[-1] for run in trained)
        half = 0.5 * tokens
        seconds = min(run.seconds.iloc[-1] for run in trained)
        yield loss(f"loss at {format_count(half)} tokens", lambda run: run.loss_at(half, run.tokens))
        yield loss(f"loss at {format_count(tokens)} tokens", lambda run: run.loss_at(tokens, run.tokens))
        yield loss(f"loss after {format_duration(seconds)}", lambda run: run.loss_at(seconds, run.seconds))
    yield held_out()
    for part in held_out_names(runs):
        yield held_out(part)


def _scores(runs: Sequence[ComparedRun]) -> Iterator[ComparedMeasure]:
    """Yield the newest score of each task and metric."""
    for name in dict.fromkeys(name for run in runs for name in run.scores):
        scores = [run.scores.get(name) for run in runs]

        def differ(one: int, other: int, scores: Sequence[Score | None] = scores) -> bool:
            first = scores[one]
            second = scores[other]
            if first is None or second is None or first.spread is None or second.spread is None:
                return True
            return abs(first.value - second.value) > math.hypot(first.spread, second.spread)

        yield ComparedMeasure(
            f"evaluated: {name}",
            tuple(None if score is None else score.value for score in scores),
            "{:.4f}".format,
            "high" if next(filter(None, scores)).higher_is_better else "low",
            by_difference=True,
            is_told_apart=differ,
        )


def held_out_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the names of the held-out losses of any run, each once."""
    return list(dict.fromkeys(name for run in runs for name in run.named_losses))


def _had_own_machines(runs: Sequence[ComparedRun], one: int, other: int) -> bool:
    """Return whether neither of two runs is known to have been on a shared machine."""
    return not (runs[one].was_disturbed or runs[other].was_disturbed)


def _is_faster(runs: Sequence[ComparedRun], speeds: Sequence[float | None], fast: int, slow: int) -> bool:
    """Return whether a run is faster than another by more than the noise of their steps; so is one of a single step.

    Args:
        runs: the runs.
        speeds: what is compared, proportional to a run's tokens/s by a factor of its own, as MFU is.
        fast: the place of the faster run.
        slow: that of the slower one.
    """
    best = _middle_half(runs[fast], speeds[fast])
    worst = _middle_half(runs[slow], speeds[slow])
    overlap = best is not None and worst is not None and best[0] <= worst[1]
    return not overlap and _had_own_machines(runs, fast, slow)


def _middle_half(run: ComparedRun, speed: float | None) -> tuple[float, float] | None:
    """Return the lower and upper quartile over the steps of what is ``speed`` in their median; None if unknown."""
    quartiles = run.throughput_quartiles
    if quartiles is None or speed is None or not run.tokens_per_second:
        return None
    slow, fast = (speed * rate / run.tokens_per_second for rate in quartiles)
    return slow, fast
