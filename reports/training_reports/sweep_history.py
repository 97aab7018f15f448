"""A sweep beside the earlier ones of the same elements on the same kind of machine."""

import html
from collections.abc import Iterator
from datetime import datetime

import plotly.graph_objects as go

from llama_core.sweep.judgement import ComparedElement, Judgement
from llama_core.units import format_bytes
from training_reports.figures import GREY, LEGEND_LINE_PX, styled_figure
from training_reports.layout import NOTHING, Panel
from training_reports.sweep_figures import CURVE_COLORS, first_drawn, not_drawn

COLUMNS = ("Element", "Verdict", "Tokens/s", "Expected", "Change", "Noise between results", "Peak memory", "Remarks")
VERDICT_STYLE = {"slower": "bad", "faster": "good", "disturbed": "warn"}
"""CSS class of a verdict; that of all others is ``idle``."""


def history_rows(judgement: Judgement) -> Iterator[tuple[str, str, str, list[str | None]]]:
    """Yield the name of each element, its verdict, the CSS class of the verdict, and its cells."""
    for one in judgement.elements:
        verdict = "no verdict" if one.verdict == "too few" else one.verdict
        yield one.element, verdict, VERDICT_STYLE.get(one.verdict, "idle"), _cells(one)


def _cells(one: ComparedElement) -> list[str | None]:
    remarks = "; ".join(one.notes)
    if one.verdict in {"too few", "disturbed"}:
        remarks = "; ".join([one.sentence().rpartition("; ")[2], *one.notes])
    return [
        f"{one.tokens_per_second:,.0f}",
        None if one.expected is None else f"{one.expected:,.0f} (of {len(one.earlier)})",
        None if one.change is None else f"{one.change:+.1%}",
        None if one.noise is None else f"{one.noise:.1%}",
        _memory(one),
        remarks or None,
    ]


def _memory(one: ComparedElement) -> str:
    now = format_bytes(one.memory_peak_bytes)
    before = one.earlier_memory_bytes
    return now if before is None else f"{now} ({one.memory_peak_bytes / before - 1:+.1%})"


def history_panel(judgement: Judgement) -> Iterator[Panel]:
    """Yield a panel with the throughput of each element by date, if there are earlier results."""
    every = sorted((one for one in judgement.elements if one.earlier), key=lambda one: one.verdict not in VERDICT_STYLE)
    by_name = {one.element: one for one in every}
    lines = list(first_drawn(by_name).values())
    if not lines:
        return
    figure = styled_figure("throughput (tokens/s)")
    for number, one in enumerate(lines):
        times = [*(time for time, _ in one.earlier), "now"]
        rates = [*(rate for _, rate in one.earlier), one.tokens_per_second]
        _add_line(figure, one.element, times, rates, CURVE_COLORS[number] if number < len(CURVE_COLORS) else GREY)
    figure.update_yaxes(rangemode="tozero", tickformat="~s")
    figure.update_xaxes(title_text="earlier results, and this one", dtick=1)
    told = "; ".join(f"{one.element}: {one.sentence()}" for one in lines)
    height = 280 + LEGEND_LINE_PX * len(lines)
    notes = [*not_drawn(by_name), f"Medians of the timed steps. The results are in {judgement.folder}."]
    yield Panel("Throughput since the first result", figure, told, notes, wide=True, height_px=height)


def _add_line(figure: go.Figure, name: str, times: list[str], rates: list[float], color: str) -> None:
    places = list(range(1 - len(times), 1))
    figure.add_scatter(
        x=places,
        y=rates,
        name=html.escape(name),
        text=[shown_time(time) for time in times],
        mode="lines+markers",
        line={"color": color, "width": 1.8},
        marker={"size": 6},
        showlegend=True,
        hovertemplate="%{y:,.0f} tokens/s, %{text}",
    )


def shown_time(time: str) -> str:
    """Return an ISO 8601 time to the minute, and any other text as it is."""
    try:
        return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M")
    except ValueError:  # the newest one
        return time or NOTHING
