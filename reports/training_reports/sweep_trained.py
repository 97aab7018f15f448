"""The elements of a sweep ranked by how good their models are: by a held-out loss, or by a score."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import pandas as pd

from llama_core.records.held_out import TOLD_APART
from llama_core.records.measurements import TrainingSummary
from llama_core.sweep.best import chance
from llama_core.sweep.objective import SweepObjective
from llama_core.sweep.quality import Quality, best_first
from llama_core.units import format_count
from training_reports import sweep_figures
from training_reports.figures import LEGEND_LINE_PX
from training_reports.layout import Card, Panel
from training_reports.sweep_rows import Ranking, SweepRow, ordered
from training_reports.sweep_settings import settings_panels
from training_reports.sweep_table import UNKNOWN, Cell, number

X_TITLES = {"step": "optimizer step", "tokens": "tokens"}
"""The title of an x axis, by the column that curves are drawn by."""
SMOOTHED_POINTS = 50
"""Fewest points of a smoothed line that have no step in common."""
MAX_POINTS = 500
"""Most points of a line."""


def rank(rows: Sequence[SweepRow], objective: SweepObjective) -> Ranking:
    """Return the elements by their quality after the last step, the best first, and those that diverged.

    Args:
        rows: all elements that can run.
        objective: what ranks them, not their throughput.
    """
    qualities = {row.name: row.quality for row in rows if row.quality is not None}
    trained = {row.name: row.training for row in rows if row.training is not None}
    unsound = {row.name for row in rows if row.style == "bad"}
    order = best_first(qualities)
    sound = [name for name in order if name not in unsound]
    diverged = [name for name in order if name in unsound]
    ranked = ordered(rows, [*sound, *diverged])
    steps = {row.name: row.steps for row in ranked if not row.steps.empty}
    best = qualities[sound[0]] if sound else None
    by = _x_axis(steps)
    loss_unit = " or ".join(dict.fromkeys(row.loss_unit for row in rows))
    unit = "" if objective.kind == "score" else loss_unit
    held_out = "Held-out loss" if objective.kind == "score" else objective.title
    return Ranking(
        title=f"Every element, {objective.superlative} {objective.name} first",
        order="descending" if best is not None and best.higher_is_better else "ascending",
        columns=(
            objective.title,
            f"{objective.behind.capitalize()} the best",
            "Training loss",
            "Steps",
            "Tokens",
            "Tokens/s",
        ),
        rows=ranked,
        results={name: _cells(qualities[name], trained[name], best, steps.get(name)) for name in sound},
        diverged={name: _cells(qualities[name], trained[name], None, steps.get(name)) for name in diverged},
        cards=_best({name: qualities[name] for name in sound}, objective, unit),
        panels=[
            *settings_panels(rows, sound, objective, unit),
            *_held_out(steps, by, held_out, loss_unit, unsound),
            _training(steps, by, loss_unit, unsound),
        ],
    )


def _cells(quality: Quality, summary: TrainingSummary, best: Quality | None, steps: pd.DataFrame | None) -> list[Cell]:
    rate = None if steps is None else float(steps["tokens_per_second"].median())
    return [
        number(quality.value, "{:.4f}"),
        _behind(quality, best),
        number(summary.train_loss, "{:.4f}"),
        number(summary.steps, "{:,}"),
        Cell(format_count(summary.tokens), summary.tokens),
        number(rate, "{:,.0f}"),
    ]


def _behind(quality: Quality, best: Quality | None) -> Cell:
    if best is None:
        return UNKNOWN
    if quality is best:
        return number(0.0, "{:.4f}")
    behind = quality.behind(best)
    return Cell(str(behind), behind.amount)


def _best(qualities: Mapping[str, Quality], objective: SweepObjective, unit: str) -> list[Card]:
    title = f"{objective.superlative.capitalize()} {objective.name}"
    if not qualities:
        return [Card(title, None, "", [f"No element has been {objective.ranked} yet."])]
    best, *others = qualities
    quality = qualities[best]
    lines = [best]
    if others:
        ahead = qualities[others[0]].behind(quality)
        lines.append(f"{ahead} {objective.ahead} the next{chance(ahead.is_told_apart, objective)}.")
    lines.append(_sampled(quality))
    return [Card(title, f"{quality.value:.4f}", unit, lines)]


def _sampled(quality: Quality) -> str:
    if quality.standard_error is None:
        return f"Over {quality.sample} after the last step."
    return f"± {TOLD_APART * quality.standard_error:.4f}: {TOLD_APART:.0f} standard errors over {quality.sample}."


def _curves(
    title: str,
    losses: "Mapping[str, pd.Series[float]]",
    notes: Sequence[str],
    *,
    x_title: str,
    unit: str,
    unsound: Collection[str],
    marked: bool = False,
) -> Panel:
    ends = "; ".join(f"{name}: {loss.iloc[-1]:.4f}" for name, loss in losses.items())
    said = [*notes, *sweep_figures.cut_off(losses, unsound)]
    if len(losses) > len(sweep_figures.CURVE_COLORS):
        said.append(f"All but the {len(sweep_figures.CURVE_COLORS)} best are grey.")
    figure = sweep_figures.loss_curves(losses, x_title=x_title, unit=unit, marked=marked, unsound=unsound)
    summary = f"At the end: {ends} {unit}."
    return Panel(title, figure, summary, said, wide=True, height_px=300 + LEGEND_LINE_PX * len(losses))


def _training(steps: Mapping[str, pd.DataFrame], by: str, unit: str, unsound: Collection[str]) -> Panel:
    title = "Training loss"
    if not steps:
        return Panel(title, None, "", ["No element has taken a step yet."], wide=True)
    longest = max(map(len, steps.values()))
    span = max(1, longest // SMOOTHED_POINTS)
    stride = max(1, longest // MAX_POINTS)
    losses = {
        # from the end, so that the last step is a point
        name: _by(table, "loss", by).rolling(span, min_periods=1).mean()[::-stride][::-1]
        for name, table in sweep_figures.first_drawn(steps).items()
    }
    notes = [*sweep_figures.not_drawn(steps)]
    notes += ["The best element comes first. A click on a name hides its line; a double click hides all others."]
    if span > 1:
        notes.append(f"Each point is the mean of the last {span} steps.")
    return _curves(title, losses, notes, x_title=X_TITLES[by], unit=unit, unsound=unsound)


def _held_out(
    steps: Mapping[str, pd.DataFrame], by: str, title: str, unit: str, unsound: Collection[str]
) -> Iterator[Panel]:
    """Yield a panel if an element was evaluated more than once."""
    evaluated = {name: _by(table[table["eval_loss"].notna()], "eval_loss", by) for name, table in steps.items()}
    evaluated = {name: losses for name, losses in evaluated.items() if not losses.empty}
    if max(map(len, evaluated.values()), default=0) > 1:
        drawn = sweep_figures.first_drawn(evaluated)
        notes = list(sweep_figures.not_drawn(evaluated))
        yield _curves(title, drawn, notes, x_title=X_TITLES[by], unit=unit, unsound=unsound, marked=True)


def _by(table: pd.DataFrame, column: str, by: str) -> "pd.Series[float]":
    return table.set_index(by)[column]


def _x_axis(steps: Mapping[str, pd.DataFrame]) -> str:
    """Return the column that curves are drawn by: tokens, if the elements' steps differ in tokens."""
    sizes = {round(table["tokens"].iloc[0] / table["step"].iloc[0]) for table in steps.values()}
    return "step" if len(sizes) < 2 else "tokens"
