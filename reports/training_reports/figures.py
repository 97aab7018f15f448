"""Figures of a run: pure functions from its records to Plotly figures.

``steps`` is a table with one row per optimizer step and the columns of ``StepRecord``. Unmeasured values are NaN and
leave a gap in the line. Series colours have a contrast of at least 3:1 on white and on near-black; the page sets the
colours of text and grid.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from llama_core.planning.memory.host import FREED
from llama_core.records.measurements import BenchmarkRecord
from llama_core.units import GIB, MIB
from training_reports.downsampling import kept

BLUE, ORANGE, TEAL, PURPLE = "#4078c0", "#cf7320", "#2f9494", "#8f67b8"
RED, OLIVE, PINK, BROWN = "#cf4b4b", "#8a8a3c", "#c25d93", "#a0705a"
GREY, STEEL, TAUPE = "#7c8591", "#5f86a3", "#8f7d6b"

CATEGORY_COLORS = {
    "weights": BLUE,
    "gradients": ORANGE,
    "moments": TEAL,
    "activations": PURPLE,
    "loss": RED,
    "communication": OLIVE,
    "temporaries": PINK,
    "checkpoint copy": BROWN,
}
"""Colour of each memory category, in stacking order."""

BESIDE_COLORS = {"process": TAUPE, FREED: STEEL}
"""Colour of each part of the memory taken beside the memory alive."""

PART_COLORS = {
    "forward + backward": BLUE,
    "forward": BLUE,
    "backward": PURPLE,
    "computing": STEEL,
    "communication": OLIVE,
    "pipeline bubble": PINK,
    "optimizer": TEAL,
    "waiting for data": ORANGE,
    "idle": TAUPE,
    "everything else": GREY,
}
"""Colour of each part of a step's time, in stacking order."""

MEASURED = "all categories"
"""Name of a measurement's bar."""

MAX_MARKED_STEPS = 60
"""Most steps for which each step gets a dot; more dots would hide the line."""

Profile = Mapping[str, Any]
"""A memory profile from ``estimate.json`` or ``dry_run.json``: ``phases``, ``peak_phase``, ``peak_bytes``."""


def loss(steps: pd.DataFrame, unigram_entropy: float | None = None, bigram_entropy: float | None = None) -> go.Figure:
    """Return training and held-out loss by step, with the entropies of the corpus as reference lines.

    A skipped step is marked at its loss, or at the nearest finite loss if its own is not finite.
    """
    figure = styled_figure("loss (nats per token)")
    _add_line(figure, steps["step"], steps["loss"], "training", color=BLUE, hover="%{y:.4f}")
    held_out = steps[steps["eval_loss"].notna()]
    if not held_out.empty:
        _add_line(
            figure, held_out["step"], held_out["eval_loss"], "held-out", color=ORANGE, hover="%{y:.4f}", marked=True
        )
    skipped = steps[steps["skipped"].astype(bool)]
    if not skipped.empty:
        finite = steps["loss"].where(steps["loss"].abs() < float("inf"))
        nearest = finite.ffill().bfill().fillna(0.0)[skipped.index]
        drawn = kept(nearest)
        figure.add_scatter(
            x=skipped["step"].iloc[drawn],
            y=nearest.iloc[drawn],
            name="skipped step",
            mode="markers",
            marker={"color": RED, "symbol": "x", "size": 9},
            hovertemplate="not finite, update left out",
        )
    for entropy, name, dash in ((unigram_entropy, "unigram", "dash"), (bigram_entropy, "bigram", "dot")):
        if entropy is not None:
            _add_level(figure, entropy, f"byte-{name} entropy {entropy:.3f}", GREY, dash)
    _label_steps(figure, steps)
    return figure


def learning_rate_and_gradient_norm(steps: pd.DataFrame) -> go.Figure:
    """Return two rows by step: the learning rate, and below it the global gradient norm before clipping."""
    figure = _two_rows(
        steps,
        ("learning_rate", "learning rate", "learning rate", "%{y:.3g}"),
        ("grad_norm", "gradient norm", "gradient norm", "%{y:.4g}"),
    )
    figure.update_yaxes(exponentformat="power", row=1)
    return figure


def routing(steps: pd.DataFrame) -> go.Figure:
    """Return two rows by step: the load of the busiest expert, and below it the entropy of the routers."""
    return _two_rows(
        steps,
        ("expert_load", "busiest expert", "load (x mean)", "%{y:.3g} x mean"),
        ("router_entropy", "entropy", "entropy (nats)", "%{y:.3g} nats"),
    )


def _two_rows(steps: pd.DataFrame, *rows: tuple[str, str, str, str]) -> go.Figure:
    """Return two lines, one above the other; each row is the column, the line's name, the axis title and the hover."""
    figure = styled_figure("", rows=2)
    for row, (column, name, title, hover), color in zip((1, 2), rows, (BLUE, TEAL), strict=True):
        _add_line(figure, steps["step"], steps[column], name, color=color, hover=hover, row=row)
        figure.update_yaxes(title_text=title, rangemode="tozero", row=row)
    figure.update_layout(showlegend=False)
    _label_steps(figure, steps, lowest_row=2)
    return figure


def throughput(steps: pd.DataFrame, benchmark: BenchmarkRecord | None = None) -> go.Figure:
    """Return tokens/s by step, with the benchmark's median as a line and its interquartile range as a band."""
    figure = styled_figure("throughput (tokens/s)")
    _add_line(
        figure, steps["step"], steps["tokens_per_second"], "training steps", color=BLUE, hover="%{y:,.0f} tokens/s"
    )
    if benchmark is not None:
        slow, fast = benchmark.throughput_quartiles
        figure.add_hrect(
            slow,
            fast,
            name="benchmark, middle half",
            showlegend=True,
            fillcolor=ORANGE,
            opacity=0.3,
            line_width=0,
        )
        median = benchmark.tokens_per_second
        _add_level(figure, median, f"benchmark, median {median:,.0f}", ORANGE, "solid")
    figure.update_yaxes(rangemode="tozero", tickformat="~s")
    _label_steps(figure, steps)
    return figure


def step_time(steps: pd.DataFrame) -> go.Figure:
    """Return the seconds of every step as a stack: the measured parts and the rest."""
    parts = measured_parts(steps)
    drawn = kept(steps["step_seconds"], *parts.values())
    figure = styled_figure("time (s per step)")
    for name, seconds in parts.items():
        x, y = steps["step"].iloc[drawn], seconds.iloc[drawn]
        _add_line(figure, x, y, name, color=PART_COLORS[name], hover="%{y:.3f} s", stack="step")
    figure.update_yaxes(rangemode="tozero")
    _label_steps(figure, steps)
    return figure


def measured_parts(steps: pd.DataFrame) -> dict[str, "pd.Series[float]"]:
    """Return the measured parts of every step and the rest, in seconds, in stacking order."""
    both, backward = steps["forward_backward_seconds"], steps["backward_seconds"]
    parts = {"forward + backward": both}
    if backward.notna().all():  # else some steps are of a version that did not tell them apart
        parts = {"forward": both - backward, "backward": backward}
    parts |= {"optimizer": steps["optimizer_seconds"], "waiting for data": steps["data_seconds"]}
    # The parts are timed separately and may exceed the whole by a hair; a stack cannot go down.
    rest = (steps["step_seconds"] - sum(parts.values())).clip(lower=0.0)
    return parts | {"everything else": rest}


def step_parts(rows: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Return the time of a step as bars, one above the other.

    Args:
        rows: the seconds of the parts in ``PART_COLORS``, by the label of their bar; unknown parts are missing.
    """
    labels = {name: f"{name}<br><b>{sum(parts.values()):.3g} s</b>" for name, parts in rows.items()}
    figure = styled_figure("")
    for part, color in PART_COLORS.items():
        lengths = {labels[name]: parts[part] for name, parts in rows.items() if parts.get(part, 0) > 0}
        if lengths:
            _add_bar(figure, lengths, part, color, "s")
    _stack_bars(figure, list(labels.values()), "time of a step (s)")
    return figure


def memory_by_step(steps: pd.DataFrame) -> go.Figure:
    """Return the memory alive at the end of every step, and its peak and the memory taken for it up to that step."""
    taken = steps["memory_reserved_bytes"].fillna(0)
    size, unit = memory_unit(max(steps["memory_peak_bytes"].max(), taken.max()))
    figure = styled_figure(f"memory ({unit})")
    lines = [("allocated", "held now", BLUE, None), ("peak", "peak so far", ORANGE, "dot")]
    if taken.max() > 0:  # else nobody recorded it
        lines.insert(0, ("reserved", "taken so far", GREY, None))
    # The peak is drawn last and dotted, so that both lines show where they coincide.
    for column, name, color, dash in lines:
        held = steps[f"memory_{column}_bytes"] / size
        _add_line(figure, steps["step"], held, name, color=color, hover=f"%{{y:.3f}} {unit}", dash=dash)
    figure.update_yaxes(rangemode="tozero")
    _label_steps(figure, steps)
    return figure


def memory_comparison(
    estimated: Profile | None,
    rehearsed: Profile | None,
    measured_bytes: float | None,
    beside: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> go.Figure:
    """Return the estimated, rehearsed and measured peaks as bars side by side; an argument of None has no bar.

    Each prediction is a stack of the categories at its peak phase, so its length is ``peak_bytes``. A measurement has
    no categories. Every bar continues with the memory taken beside the memory alive.

    Args:
        estimated: the estimate.
        rehearsed: the dry run.
        measured_bytes: the most bytes alive.
        beside: bytes taken beside those alive, by part, for ``estimated``, ``rehearsed`` and ``measured``.
    """
    profiles = {
        label: profile for label, profile in (("estimated", estimated), ("rehearsed", rehearsed)) if profile is not None
    }
    peaks = {label: profile["peak_bytes"] for label, profile in profiles.items()}
    if measured_bytes is not None:
        peaks["measured"] = measured_bytes
    parts = {label: beside.get(label, {}) for label in peaks}
    totals = {label: peak + sum(parts[label].values()) for label, peak in peaks.items()}
    size, unit = memory_unit(max(totals.values(), default=0))
    rows = {
        label: f"{label}<br><b>{peak / size:.2f} {unit}</b>"
        + (f"<br>{totals[label] / size:.2f} {unit} taken" if totals[label] > peak else "")
        for label, peak in peaks.items()
    }

    figure = styled_figure("")
    stacks = {label: profile["phases"][profile["peak_phase"]] for label, profile in profiles.items()}
    categories = dict.fromkeys([*CATEGORY_COLORS, *(category for stack in stacks.values() for category in stack)])
    for category in categories:
        num_bytes = {label: stack.get(category, 0) for label, stack in stacks.items()}
        if any(num_bytes.values()):
            color = CATEGORY_COLORS.get(category, GREY)
            _add_bar(figure, {rows[label]: value / size for label, value in num_bytes.items()}, category, color, unit)
    if measured_bytes is not None:
        _add_bar(figure, {rows["measured"]: measured_bytes / size}, MEASURED, GREY, unit)
    for part in dict.fromkeys(part for own in parts.values() for part in own):
        lengths = {rows[label]: own.get(part, 0) / size for label, own in parts.items()}
        _add_bar(figure, lengths, part, BESIDE_COLORS.get(part, GREY), unit)
    _stack_bars(figure, list(rows.values()), f"peak memory per rank ({unit})")
    return figure


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


def _add_line(
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


def _add_level(figure: go.Figure, y: float, name: str, color: str, dash: str) -> None:
    figure.add_hline(y, name=name, showlegend=True, line={"color": color, "width": 1.8, "dash": dash})


def _add_bar(figure: go.Figure, lengths: Mapping[str, float], name: str, color: str, unit: str) -> None:
    # A mapping, because the keyword annotations allow only numbers for y.
    bar = {
        "type": "bar",
        "x": list(lengths.values()),
        "y": list(lengths),
        "orientation": "h",
        "name": name,
        "showlegend": name != MEASURED,
        "marker": {"color": color},
        "text": [name] * len(lengths),
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": "#ffffff"},
        "hovertemplate": f"{name}: %{{x:.3f}} {unit}<extra></extra>",
    }
    figure.add_trace(bar)


def _stack_bars(figure: go.Figure, labels: list[str], x_title: str) -> None:
    """Stack the bars of each label, the first label on top."""
    figure.update_layout(barmode="stack", bargap=0.35, hovermode="closest", uniformtext={"minsize": 11, "mode": "hide"})
    figure.update_xaxes(title_text=x_title, rangemode="tozero", showgrid=True)
    figure.update_yaxes(
        autorange="reversed", showgrid=False, ticklabelstandoff=8, categoryorder="array", categoryarray=labels
    )


def _label_steps(figure: go.Figure, steps: pd.DataFrame, lowest_row: int = 1) -> None:
    """Label the lowest x axis; with few steps, set a tick for each, so that the axis shows no half steps."""
    figure.update_xaxes(tickformat="d", dtick=1 if len(steps) <= 10 else None)
    figure.update_xaxes(title_text="optimizer step", row=lowest_row)
