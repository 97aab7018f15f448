"""The page that compares runs: settings that differ, losses by tokens and by time, speed, memory and cost."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from llama_core.sweep.divergence import divergence
from llama_core.units import format_bytes
from training_reports import sweep_figures
from training_reports.compared_run import ComparedRun
from training_reports.figures import LEGEND_LINE_PX
from training_reports.layout import Card, Panel, ReportPage
from training_reports.measures import ComparedMeasure, held_out_names
from training_reports.run_comparison import RunComparison
from training_reports.sweep_trained import SMOOTHED_POINTS

HEADLINES = {
    "held-out loss": ("Lowest held-out loss", ""),
    "tokens/s": ("Fastest", "tokens/s"),
    "peak memory": ("Least memory", ""),
    "cost": ("Cheapest", ""),
    "device hours": ("Least device time", "hours"),
}
"""Title and unit of the cards, by measure; the unit of a loss is that of the runs' objective."""
_UNITS = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
"""Seconds of each unit of time; an axis has the largest unit of which the longest run takes two."""


def write_comparison(path: Path, comparison: RunComparison) -> Path:
    """Write the page and return its path.

    Raises:
        RunDirectoryError: if the page cannot be written.
    """
    runs = comparison.runs
    models = dict.fromkeys(str((run.contents.config or {}).get("model")) for run in runs)
    page = ReportPage(
        "compare.html",
        name=" and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        source=", ".join(str(run.path) for run in runs),
        status=f"{len(runs)} runs",
        style="idle",
        facts={"Model": ", ".join(models), "Settings that differ": len(comparison.differences)},
        names=[run.name for run in runs],
        differences=[(key, *values) for key, values in comparison.differences],
        notes=comparison.notes,
        cards=list(_cards(comparison)),
        panels=[*_loss_panels(runs), *_bars(comparison)],
        step_rows=[(name, *cells) for name, cells in comparison.step_rows],
        step_sentences=comparison.step_sentences,
        measures=[(one.name, list(enumerate(one.cells())), one.winner) for one in comparison.measures],
    )
    return page.write(path)


def _cards(comparison: RunComparison) -> Iterator[Card]:
    measures = {one.name: one for one in comparison.measures}
    if "cost" in measures:
        del measures["device hours"]
    for name, (title, unit) in HEADLINES.items():
        measure = measures.get(name)
        if measure is not None:
            yield _card(
                title, _loss_unit(comparison.runs) if name == "held-out loss" else unit, measure, comparison.runs
            )


def _card(title: str, unit: str, measure: ComparedMeasure, runs: Sequence[ComparedRun]) -> Card:
    place = measure.winner
    if place is None:
        return Card(title, None, "", ["No run is better than the others."])
    value = measure.values[place] or 0.0
    others = [other for at, other in enumerate(measure.values) if at != place and other is not None]
    nearest = min(others, key=lambda other: abs(other - value))
    gap = f"{abs(value - nearest):.4f}" if measure.by_difference else f"{abs(value / nearest - 1):.1%}"
    where = "above" if value > nearest else "below"
    return Card(title, measure.text(value), unit, [runs[place].name, f"{gap} {where} the next."])


def _loss_unit(runs: Sequence[ComparedRun]) -> str:
    return " or ".join(dict.fromkeys(run.contents.loss_unit for run in runs))


def _loss_panels(runs: Sequence[ComparedRun]) -> Iterator[Panel]:
    trained = [run for run in runs if run.is_trained]
    if not trained:
        yield Panel("Loss", None, "", ["No run has taken a training step: they only timed steps."], wide=True)
        return
    diverged = [run.name for run in trained if divergence(run.contents.steps["loss"].tolist())]
    curves = partial(_curves, loss_unit=_loss_unit(trained), diverged=diverged)
    longest = max(run.seconds.iloc[-1] for run in trained)
    unit = next(unit for unit, seconds in _UNITS.items() if longest >= 2 * seconds or unit == "seconds")
    window = max(1, max(len(run.contents.steps) for run in trained) // SMOOTHED_POINTS)
    notes = [f"Each point is the mean of the last {window} steps."] if window > 1 else []
    by_tokens = {run.name: _smoothed(run, run.tokens, window) for run in trained}
    by_time = {run.name: _smoothed(run, run.seconds / _UNITS[unit], window) for run in trained}
    yield curves("Training loss by tokens", by_tokens, "tokens", "~s", notes)
    idle = "Time in steps, without checkpoints, evaluations and restarts."
    yield curves("Training loss by time", by_time, unit, "~r", [*notes, idle])
    for part in ("", *held_out_names(trained)):
        held_out = {run.name: losses for run in trained if not (losses := _held_out(run, part)).empty}
        if any(len(losses) > 1 for losses in held_out.values()):
            title = f"Held-out loss of {part} by tokens" if part else "Held-out loss by tokens"
            yield curves(title, held_out, "tokens", "~s", [], marked=True)


def _held_out(run: ComparedRun, part: str) -> "pd.Series[float]":
    """Return the held-out loss by tokens: of a named part, or of all if it is empty."""
    losses = run.contents.steps_of_part(part)["eval_loss"].astype(float).dropna()
    return pd.Series(losses.to_numpy(), index=run.tokens[losses.index])


def _smoothed(run: ComparedRun, along: "pd.Series[float]", window: int) -> "pd.Series[float]":
    loss = run.contents.steps["loss"].astype(float).dropna()
    return pd.Series(loss.rolling(window, min_periods=1).mean().to_numpy(), index=along[loss.index])


def _curves(
    title: str,
    losses: "dict[str, pd.Series[float]]",
    x_title: str,
    tick_format: str,
    notes: Sequence[str],
    *,
    loss_unit: str,
    diverged: Collection[str],
    marked: bool = False,
) -> Panel:
    figure = sweep_figures.loss_curves(losses, x_title=x_title, unit=loss_unit, marked=marked, unsound=diverged)
    figure.update_xaxes(tickformat=tick_format)
    ends = "; ".join(f"{name}: {loss.iloc[-1]:.4f} {loss_unit}" for name, loss in losses.items())
    return Panel(
        title,
        figure,
        f"At the end: {ends}.",
        [*notes, *sweep_figures.cut_off(losses, diverged)],
        wide=True,
        height_px=300 + LEGEND_LINE_PX * len(losses),
    )


def _bars(comparison: RunComparison) -> Iterator[Panel]:
    runs = comparison.runs
    rates = {run.name: rate for run in runs if (rate := run.tokens_per_second) is not None}
    if rates:
        yield Panel(
            "Throughput",
            sweep_figures.throughput_bars(rates),
            "; ".join(f"{name}: {rate:,.0f} tokens/s" for name, rate in rates.items()),
            ["All devices together."],
            height_px=sweep_figures.height_px(rates),
        )
    measured = {run.name: int(peak) for run in runs if (peak := run.memory_peak_bytes) is not None}
    if measured:
        peaks = {run.name: _predicted(run) | {"measured": measured[run.name]} for run in runs if run.name in measured}
        yield Panel(
            "Peak memory",
            sweep_figures.memory_by_element(peaks),
            "; ".join(f"{name}: {format_bytes(peak)}" for name, peak in measured.items()),
            ["Peak of the fullest rank. Measurements include the memory held before the model was built."],
            height_px=sweep_figures.height_px(peaks, extra_lines=2),
        )


def _predicted(run: ComparedRun) -> dict[str, int | None]:
    return {how: profile["peak_bytes"] if profile else None for how, _, profile in run.contents.predictions}
