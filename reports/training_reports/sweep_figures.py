"""Figures of a sweep: a bar, a point or a line for each element, labelled with its settings."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from llama_core.records.measurements import BenchmarkRecord
from training_reports.figures import (
    BLUE,
    GREY,
    OLIVE,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    TEAL,
    memory_unit,
    styled_figure,
    throughput_quartiles,
)

PEAK_COLORS = {"estimated": BLUE, "rehearsed": TEAL, "measured": ORANGE}
"""Colour of each kind of peak, in drawing order."""

CURVE_COLORS = (BLUE, ORANGE, TEAL, PURPLE, RED, OLIVE, PINK)
"""Colours of the best elements' lines, in order; the lines of all others are grey."""

LINE_PX, GAP_PX, AXES_PX = 17, 12, 90
"""Height of a label's line, of the gap between two elements, and of axis and legend."""


def throughput_by_element(timed: Mapping[str, BenchmarkRecord]) -> go.Figure:
    """Return the median tokens/s of each element, with a line over the middle half of its timed steps."""
    labels, ahead, behind = [], [], []
    for name, record in timed.items():
        slow, fast = throughput_quartiles(record)
        labels.append(_label(name, f"{record.tokens_per_second:,.0f}"))
        ahead.append(max(0.0, fast - record.tokens_per_second))
        behind.append(max(0.0, record.tokens_per_second - slow))
    figure = styled_figure("")
    spread = {"type": "data", "array": ahead, "arrayminus": behind, "color": ORANGE, "thickness": 2.5}
    rates = [record.tokens_per_second for record in timed.values()]
    _add_bars(figure, labels, rates, "median", color=BLUE, hover="%{x:,.0f} tokens/s", error_x=spread)
    _finish(figure, labels, "throughput (tokens/s)")
    figure.update_layout(showlegend=False)
    figure.update_xaxes(tickformat="~s")
    return figure


def loss_curves(losses: "Mapping[str, pd.Series[float]]", *, x_title: str, marked: bool = False) -> go.Figure:
    """Return a line for each element.

    Args:
        losses: the losses of each element by step or token, the best element first.
        x_title: what they are by.
        marked: whether every point gets a dot.
    """
    figure = styled_figure("loss (nats per token)")
    for number, (name, loss) in enumerate(losses.items()):
        figure.add_scatter(
            x=loss.index.to_series(),
            y=loss,
            name=name,
            mode="lines+markers" if marked else "lines",
            line={"color": CURVE_COLORS[number] if number < len(CURVE_COLORS) else GREY, "width": 1.8},
            marker={"size": 6},
            showlegend=True,
            hovertemplate="%{y:.4f}",
        )
    highest = highest_shown(losses.values())
    if highest is not None:
        lowest = min(loss.min() for loss in losses.values())
        margin = 0.06 * (highest - lowest) or 0.5
        figure.update_yaxes(range=[lowest - margin, highest + margin])
    figure.update_xaxes(title_text=x_title, tickformat="~s" if x_title == "tokens" else "d")
    return figure


def highest_shown(losses: "Iterable[pd.Series[float]]") -> float | None:
    """Return the highest loss in a figure of curves, so that one that diverges does not flatten the others.

    It is at most as far above the middle one of the first losses as the lowest loss is below. None without a finite
    loss.
    """
    finite = [loss for loss in (loss[loss.abs() < float("inf")] for loss in losses) if not loss.empty]
    if not finite:
        return None
    every = pd.concat(finite)
    most = 2 * pd.Series([loss.iloc[0] for loss in finite]).median() - every.min()
    return float(every[every <= most].max())


def predicted_throughput(rates: Mapping[str, float]) -> go.Figure:
    """Return the predicted tokens/s of each element."""
    labels = [_label(name, f"{rate:,.0f}") for name, rate in rates.items()]
    figure = styled_figure("")
    _add_bars(figure, labels, list(rates.values()), "predicted", color=BLUE, hover="%{x:,.0f} tokens/s")
    _finish(figure, labels, "throughput (tokens/s)")
    figure.update_layout(showlegend=False)
    figure.update_xaxes(tickformat="~s")
    return figure


def memory_by_element(peaks: Mapping[str, Mapping[str, int | None]]) -> go.Figure:
    """Return the estimated, rehearsed and measured peak of each element side by side; a peak of None has no bar.

    Args:
        peaks: bytes of each element, by the keys of ``PEAK_COLORS``.
    """
    known = [num_bytes for by_kind in peaks.values() for num_bytes in by_kind.values() if num_bytes is not None]
    size, unit = memory_unit(max(known, default=0))
    labels = [_label(name) for name in peaks]
    figure = styled_figure("")
    for kind, color in PEAK_COLORS.items():
        num_bytes = [by_kind.get(kind) for by_kind in peaks.values()]
        lengths = [None if value is None else value / size for value in num_bytes]
        if any(lengths):
            _add_bars(figure, labels, lengths, kind, color=color, hover=f"{kind}: %{{x:.3f}} {unit}")
    _finish(figure, labels, f"peak per rank ({unit})")
    return figure


def height_px(names: Mapping[str, Any], extra_lines: int = 1) -> int:
    """Return the height of a figure that its labels need.

    Args:
        names: the names of its elements.
        extra_lines: height of each element beyond its name, in lines.
    """
    lines = max((name.count(",") + 1 for name in names), default=1) + extra_lines
    return AXES_PX + len(names) * (lines * LINE_PX + GAP_PX)


def _label(name: str, value: str = "") -> str:
    """Return an element's name with one setting per line, to keep labels narrow."""
    return name.replace(",", "<br>") + (f"<br><b>{value}</b>" if value else "")


def _add_bars(
    figure: go.Figure, labels: list[str], lengths: list[Any], name: str, *, color: str, hover: str, **options: Any
) -> None:
    # A mapping, because the keyword annotations allow only numbers for y.
    bars = {
        "type": "bar",
        "x": lengths,
        "y": labels,
        "orientation": "h",
        "name": name,
        "marker": {"color": color},
        "hovertemplate": f"{hover}<extra></extra>",
    }
    figure.add_trace(bars | options)


def _finish(figure: go.Figure, labels: list[str], x_title: str) -> None:
    figure.update_layout(barmode="group", bargap=0.3, hovermode="closest")
    figure.update_xaxes(title_text=x_title, rangemode="tozero", showgrid=True)
    figure.update_yaxes(
        autorange="reversed", showgrid=False, ticklabelstandoff=8, categoryorder="array", categoryarray=labels, dtick=1
    )
