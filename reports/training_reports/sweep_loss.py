"""The elements of a sweep ranked by their held-out loss."""

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from llama_core.records.measurements import TrainingSummary
from llama_core.units import format_count
from training_reports import sweep_figures
from training_reports.layout import Card, Panel
from training_reports.sweep_rows import Ranking, Row, ordered
from training_reports.sweep_table import Cell, number

HELD_OUT = "Held-out loss"
X_TITLES = {"step": "optimizer step", "tokens": "tokens"}
"""The title of an x axis, by the column that curves are drawn by."""
SMOOTHED_POINTS = 50
"""Fewest points of a smoothed line that have no step in common."""
MOST_POINTS = 500
"""Most points of a line."""


def rank(rows: Sequence[Row]) -> Ranking:
    """Return the elements by the held-out loss after their last step, the lowest first."""
    losses = {
        row.name: (summary.eval_loss, summary)
        for row in rows
        if row.status == "finished" and (summary := row.training) and summary.eval_loss is not None
    }
    order = sorted(losses, key=lambda name: losses[name][0])
    ranked = ordered(rows, order)
    steps = {row.name: row.steps for row in ranked if not row.steps.empty}
    lowest = losses[order[0]][0] if order else 0.0
    by = _x_axis(steps)
    unit = " or ".join(dict.fromkeys(row.loss_unit for row in rows))
    return Ranking(
        title="Every element, lowest held-out loss first",
        order="ascending",
        columns=("Held-out loss", "Above the best", "Training loss", "Steps", "Tokens", "Tokens/s"),
        rows=ranked,
        results={name: _cells(*losses[name], lowest, steps.get(name)) for name in order},
        cards=_best({name: losses[name] for name in order}, unit),
        panels=[_training(steps, by, unit), *_held_out(steps, by, unit)],
    )


def _cells(loss: float, summary: TrainingSummary, lowest: float, steps: pd.DataFrame | None) -> list[Cell]:
    rate = None if steps is None else float(steps["tokens_per_second"].median())
    return [
        number(loss, "{:.4f}"),
        number(loss - lowest, "{:.4f}"),
        number(summary.train_loss, "{:.4f}"),
        number(summary.steps, "{:,}"),
        Cell(format_count(summary.tokens), summary.tokens),
        number(rate, "{:,.0f}"),
    ]


def _best(losses: Mapping[str, tuple[float, TrainingSummary]], unit: str) -> list[Card]:
    title = "Lowest held-out loss"
    if not losses:
        return [Card(title, None, "", ["No element has been trained yet."])]
    (best, (lowest, _)), *others = losses.items()
    num_tokens = sorted({summary.eval_tokens for _, summary in losses.values()})
    lines = [
        best,
        *(f"{loss - lowest:.4f} below the next, {name}." for name, (loss, _) in others[:1]),
        f"Mean over {' or '.join(map(format_count, num_tokens))} held-out tokens after the last step.",
    ]
    return [Card(title, f"{lowest:.4f}", unit, lines)]


def _curves(
    title: str, losses: "Mapping[str, pd.Series[float]]", x_title: str, unit: str, notes: Sequence[str]
) -> Panel:
    ends = ", ".join(f"{name} {loss.iloc[-1]:.4f}" for name, loss in losses.items())
    highest = sweep_figures.highest_shown(losses.values())
    said = list(notes)
    if highest is not None and any((loss > highest).any() for loss in losses.values()):
        said.append(f"Losses above {highest:.3g} are cut off.")
    if len(losses) > len(sweep_figures.CURVE_COLORS):
        said.append(f"All but the {len(sweep_figures.CURVE_COLORS)} best are grey.")
    figure = sweep_figures.loss_curves(losses, x_title=x_title, unit=unit, marked=title == HELD_OUT)
    summary = f"At the end: {ends} {unit}."
    return Panel(title, figure, summary, said, wide=True, height_px=300 + sweep_figures.LEGEND_LINE_PX * len(losses))


def _training(steps: Mapping[str, pd.DataFrame], by: str, unit: str) -> Panel:
    title = "Training loss"
    if not steps:
        return Panel(title, None, "", ["No element has taken a step yet."], wide=True)
    longest = max(map(len, steps.values()))
    span = max(1, longest // SMOOTHED_POINTS)
    stride = max(1, longest // MOST_POINTS)
    losses = {
        # from the end, so that the last step is a point
        name: _by(table, "loss", by).rolling(span, min_periods=1).mean()[::-stride][::-1]
        for name, table in sweep_figures.first_drawn(steps).items()
    }
    notes = [*sweep_figures.not_drawn(steps)]
    notes += ["The best element comes first. A click on a name hides its line; a double click hides all others."]
    if span > 1:
        notes.append(f"Each point is the mean of the last {span} steps.")
    return _curves(title, losses, X_TITLES[by], unit, notes)


def _held_out(steps: Mapping[str, pd.DataFrame], by: str, unit: str) -> Iterator[Panel]:
    """Yield a panel if an element was evaluated more than once."""
    evaluated = {name: _by(table[table["eval_loss"].notna()], "eval_loss", by) for name, table in steps.items()}
    evaluated = {name: losses for name, losses in evaluated.items() if not losses.empty}
    if max(map(len, evaluated.values()), default=0) > 1:
        drawn = sweep_figures.first_drawn(evaluated)
        notes = list(sweep_figures.not_drawn(evaluated))
        yield _curves(HELD_OUT, drawn, X_TITLES[by], unit, notes)


def _by(table: pd.DataFrame, column: str, by: str) -> "pd.Series[float]":
    return table.set_index(by)[column]


def _x_axis(steps: Mapping[str, pd.DataFrame]) -> str:
    """Return the column that curves are drawn by: tokens, if the elements' steps differ in tokens."""
    sizes = {round(table["tokens"].iloc[0] / table["step"].iloc[0]) for table in steps.values()}
    return "step" if len(sizes) < 2 else "tokens"
