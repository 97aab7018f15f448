"""How figures are drawn: colours, lines, bars and axes in the style of the pages.

Series colours have a contrast of at least 3:1 on white and on near-black; the page sets the colours of text and grid.
Each figure is in the file of its panel: ``by_step.py``, ``peak_memory.py``, ``breakdown.py``.
"""

import html
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from llama_core.units import GIB, MIB
from training_reports.downsampling import kept

BLUE = "#4078c0"
ORANGE = "#cf7320"
TEAL = "#2f9494"
PURPLE = "#8f67b8"
RED = "#cf4b4b"
OLIVE = "#8a8a3c"
PINK = "#c25d93"
BROWN = "#a0705a"
GREY = "#7c8591"
STEEL = "#5f86a3"
TAUPE = "#8f7d6b"

LEGEND_LINE_PX = 18
"""Height of a name in the legend of a narrow page."""

MAX_MARKED_STEPS = 60
"""Most steps for which each step gets a dot; more dots would hide the line."""


def memory_unit(num_bytes: float) -> tuple[int, str]:
    """Return a readable unit for a number of bytes: its size in bytes and its name."""
    return (GIB, "GiB") if num_bytes >= GIB else (MIB, "MiB")


def styled_figure(y_title: str, rows: int = 1) -> go.Figure:
    """Return an empty figure in the page's style; its rows share the x axis."""
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.12)
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12},
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        hovermode="x unified",
        hoverlabel={"bgcolor": "#ffffff", "font": {"color": "#1c2024"}},
    )
    figure.update_xaxes(automargin=True, showgrid=False, zeroline=False, title_font_size=13)
    figure.update_yaxes(automargin=True, zeroline=False, title={"text": y_title, "font": {"size": 13}})
    return figure


def add_line(
    figure: go.Figure,
    x: "pd.Series[Any]",
    y: "pd.Series[Any]",
    name: str,
    *,
    color: str,
    hover: str,
    marked: bool = False,
    dash: str | None = None,
    stack: str | None = None,
    row: int | None = None,
) -> None:
    """Add a line by step; of a long series, the lowest and the highest of every few points.

    Args:
        figure: the figure.
        x: the steps.
        y: the values; NaN leaves a gap.
        name: the line's name.
        color: its colour.
        hover: Plotly's template of the text at a point.
        marked: give every point a large dot.
        dash: Plotly's name of a dash.
        stack: the stack of areas that the line is the top of.
        row: the row of the figure, from 1.
    """
    # Dots would blot the thin parts of a stack, but a single step has no area to show.
    most_marked = MAX_MARKED_STEPS if stack is None else 1
    drawn = kept(y)
    line = go.Scatter(
        x=x.iloc[drawn],
        y=y.iloc[drawn],
        name=name,
        mode="lines+markers" if marked or len(x) <= most_marked else "lines",
        line={"color": color, "width": 1.8 if stack is None else 0, "dash": dash},
        marker={"size": 8 if marked else 4},
        stackgroup=stack,
        fillcolor=None if stack is None else color,
        hovertemplate=hover,
    )
    figure.add_trace(line, row=row, col=None if row is None else 1)


def add_level(figure: go.Figure, y: float, name: str, color: str, dash: str) -> None:
    """Add a level line over the whole width."""
    figure.add_hline(y, name=name, showlegend=True, line={"color": color, "width": 1.8, "dash": dash})


def add_place(figure: go.Figure, x: float, name: str) -> None:
    """Add a vertical line over the whole height, with its name along it: lines may be close to each other."""
    figure.add_vline(
        x,
        line={"color": GREY, "width": 1.2, "dash": "dot"},
        annotation={"text": html.escape(name), "textangle": -90, "font": {"size": 12}},
        annotation_position="top left",
    )


def add_bar(
    figure: go.Figure, lengths: Mapping[str, float], name: str, color: str, unit: str, *, has_legend: bool = True
) -> None:
    """Add a part of horizontal bars.

    Args:
        figure: the figure.
        lengths: the length of the part in each bar, by the bar's label.
        name: the part's name.
        color: its colour.
        unit: unit of the lengths.
        has_legend: whether the legend names it.
    """
    # A mapping, because the keyword annotations allow only numbers for y.
    bar = {
        "type": "bar",
        "x": list(lengths.values()),
        "y": list(lengths),
        "orientation": "h",
        "name": name,
        "showlegend": has_legend,
        "marker": {"color": color},
        "text": [name] * len(lengths),
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": "#ffffff"},
        "hovertemplate": f"{name}: %{{x:.3f}} {unit}<extra></extra>",
    }
    figure.add_trace(bar)


def stack_bars(figure: go.Figure, labels: list[str], x_title: str) -> None:
    """Stack the bars of each label, the first label on top."""
    figure.update_layout(barmode="stack", bargap=0.35, hovermode="closest", uniformtext={"minsize": 11, "mode": "hide"})
    figure.update_xaxes(title_text=x_title, rangemode="tozero", showgrid=True)
    figure.update_yaxes(
        autorange="reversed", showgrid=False, ticklabelstandoff=8, categoryorder="array", categoryarray=labels
    )
