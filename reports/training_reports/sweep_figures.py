"""Figures of a sweep: a bar, a point or a line for each element, labelled with its name.

A name may hold any text, and Plotly renders HTML, so names are escaped here.
"""

import html
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from textwrap import wrap
from typing import Any, TypeVar

import pandas as pd
import plotly.graph_objects as go

from llama_core.records.measurements import BenchmarkRecord
from llama_core.sweep.naming import value_in_words
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
)

PEAK_COLORS = {"estimated": BLUE, "rehearsed": TEAL, "measured": ORANGE}
"""Colour of each kind of peak, in drawing order."""

CURVE_COLORS = (BLUE, ORANGE, TEAL, PURPLE, RED, OLIVE, PINK)
"""Colours of the best elements' lines, in order; the lines of all others are grey."""

MAX_DRAWN = 12
"""Most elements with a bar or a line of their own in one figure."""

MAX_STEP_TICKS = 12
"""Most steps that each get a tick."""
LINE_PX = 17
GAP_PX = 12
AXES_PX = 90
"""Height of a label's line, of the gap between two elements, and of axis and legend."""

LABEL_LETTERS = 24
"""Most letters of a line of a label beside a bar."""
MAX_LISTED = 3
"""Most elements that a note names."""

LETTER_PX = 6.2
LABEL_PX = 15
"""Width of a letter of a point's label, and the label's height."""
MAX_LINEAR = 8
"""Largest ratio of two numbers of ranks on linear axes."""
NARROW_PX = 300
"""Width and height of the plot of a narrow page, in which labels must not overlap."""

T = TypeVar("T")


def first_drawn(by_name: Mapping[str, T]) -> dict[str, T]:
    """Return the first elements, as many as a figure has room for."""
    return dict(islice(by_name.items(), MAX_DRAWN))


def not_drawn(by_name: Mapping[str, Any], where: str = "the table has all") -> Iterator[str]:
    """Yield a sentence if there are more elements than a figure has room for."""
    if len(by_name) > MAX_DRAWN:
        yield f"The first {MAX_DRAWN} of {len(by_name)}; {where}."


def throughput_by_element(timed: Mapping[str, BenchmarkRecord]) -> go.Figure:
    """Return the median tokens/s of each element, and a line over the middle half of its steps."""
    labels: list[str] = []
    rates: list[float] = []
    ahead: list[float] = []
    behind: list[float] = []
    for name, record in timed.items():
        rate = record.tokens_per_second
        slow, fast = record.throughput_quartiles
        labels.append(_label(name, f"{rate:,.0f}"))
        rates.append(rate)
        ahead.append(max(0.0, fast - rate))
        behind.append(max(0.0, rate - slow))
    figure = styled_figure("")
    spread = {
        "type": "data",
        "array": ahead,
        "arrayminus": behind,
        "color": ORANGE,
        "thickness": 2.5,
    }
    hover = "%{x:,.0f} tokens/s"
    _add_bars(figure, labels, rates, "median", color=BLUE, hover=hover, error_x=spread)
    _finish(figure, labels, "throughput (tokens/s)")
    figure.update_layout(showlegend=False)
    figure.update_xaxes(tickformat="~s")
    return figure


def loss_curves(
    losses: "Mapping[str, pd.Series[float]]",
    *,
    x_title: str,
    unit: str,
    marked: bool = False,
    unsound: Collection[str] = (),
) -> go.Figure:
    """Return a line for each element.

    Args:
        losses: the losses of each element by step or token, the best element first.
        x_title: what they are by.
        unit: of the losses.
        marked: whether every point gets a dot.
        unsound: the elements that diverged or failed, which the y axis need not show.
    """
    figure = styled_figure(f"loss ({unit})")
    for number, (name, loss) in enumerate(losses.items()):
        figure.add_scatter(
            x=loss.index.to_series(),
            y=loss,
            name=html.escape(name),
            mode="lines+markers" if marked else "lines",
            line={"color": _curve_color(number), "width": 1.8},
            marker={"size": 6},
            showlegend=True,
            hovertemplate="%{y:.4f}",
        )
    if shown := losses_shown(losses, unsound):
        lowest, highest = shown
        margin = 0.06 * (highest - lowest) or 0.5
        figure.update_yaxes(range=[lowest - margin, highest + margin])
    if x_title == "tokens":
        figure.update_xaxes(title_text=x_title, tickformat="~s")
    else:
        last_step = max((loss.index.max() for loss in losses.values()), default=0)
        few = last_step <= MAX_STEP_TICKS  # then Plotly would set ticks at half steps
        figure.update_xaxes(title_text=x_title, tickformat="d", dtick=1 if few else None)
    return figure


def _curve_color(number: int) -> str:
    """Return the colour of a line: the best elements come first and have colours of their own."""
    return CURVE_COLORS[number] if number < len(CURVE_COLORS) else GREY


def losses_shown(
    losses: "Mapping[str, pd.Series[float]]",
    unsound: Collection[str] = (),
) -> tuple[float, float] | None:
    """Return the lowest and the highest loss to show, so that what diverges flattens no other.

    Unsound elements do not count, unless all are. The highest loss is at most as far above the
    median of the first losses as the lowest is below it, which leaves out spikes and bad starts.
    None without a finite loss.
    """
    sound: list[pd.Series[float]] = []
    others: list[pd.Series[float]] = []
    for name, loss in losses.items():
        finite = loss[loss.abs() < float("inf")]
        if not finite.empty:
            (others if name in unsound else sound).append(finite)
    sound = sound or others
    if not sound:
        return None
    every = pd.concat(sound)
    lowest = every.min()
    most = 2 * statistics.median(loss.iloc[0] for loss in sound) - lowest
    return float(lowest), float(every[every <= most].max())


def cut_off(
    losses: "Mapping[str, pd.Series[float]]",
    unsound: Collection[str] = (),
) -> Iterator[str]:
    """Yield a sentence if the axis of a figure of curves leaves out some losses."""
    shown = losses_shown(losses, unsound)
    if shown is None:
        return
    above = [name for name, loss in losses.items() if (loss > shown[1]).any()]
    if above:
        yield f"Losses above {shown[1]:.3g} are cut off: those of {_listed(above)}."


@dataclass(frozen=True)
class Point:
    """An element in the figure of the objective against a swept value."""

    name: str
    x: int | float | str
    value: float
    """Its held-out loss, or its score."""
    spread: float | None
    """How far chance moves its distance to the best element.

    None for the best itself, or if it is unknown.
    """


def quality_by_value(
    lines: Mapping[str, Sequence[Point]],
    *,
    y_title: str,
    higher_is_better: bool,
    values: Sequence[int | float | str],
    x_title: str,
    is_log: bool,
    diverged: Sequence[tuple[str, int | float | str]] = (),
) -> go.Figure:
    """Return the held-out loss or the score of the elements by one of their settings.

    Args:
        lines: the elements of each line in the order of their values, by their other
            settings; the best line first.
        y_title: what the points are.
        higher_is_better: whether the best point is the highest.
        values: all values of the setting, in order.
        x_title: the setting.
        is_log: whether the x axis is logarithmic.
        diverged: name and value of the elements that diverged: crosses where the worst ones are.
    """
    figure = styled_figure(html.escape(y_title))
    drawn: list[Point] = []
    for number, (name, points) in enumerate(lines.items()):
        drawn += points
        spreads = [point.spread or 0.0 for point in points]
        figure.add_scatter(
            x=[point.x for point in points],
            y=[point.value for point in points],
            error_y={"type": "data", "array": spreads, "thickness": 1.5, "width": 4},
            name=html.escape(name),
            mode="lines+markers",
            line={"color": _curve_color(number), "width": 1.8},
            marker={"size": 8},
            showlegend=len(lines) > 1,
            hovertext=[html.escape(point.name) for point in points],
            hovertemplate="<b>%{hovertext}</b><br>%{y:.4f}<extra></extra>",
        )
    sign = -1 if higher_is_better else 1  # the best point has the lowest value after it
    best = min(sign * point.value for point in drawn)
    worst = max(sign * point.value + (point.spread or 0.0) for point in drawn)
    margin = 0.12 * (worst - best) or 0.5
    if diverged:
        figure.add_scatter(
            x=[value for _, value in diverged],
            y=[sign * (worst + margin)] * len(diverged),
            name="diverged",
            mode="markers",
            marker={"color": RED, "symbol": "x", "size": 10},
            showlegend=True,
            hovertext=[html.escape(name) for name, _ in diverged],
            hovertemplate="<b>%{hovertext}</b><br>diverged<extra></extra>",
        )
        worst += margin
    figure.add_hline(sign * best, line={"color": GREY, "width": 1, "dash": "dot"})
    figure.update_layout(hovermode="closest")
    figure.update_yaxes(range=sorted([sign * (best - margin), sign * (worst + margin)]))
    _set_values(figure, values, x_title, is_log=is_log)
    return figure


def _set_values(
    figure: go.Figure,
    values: Sequence[int | float | str],
    x_title: str,
    *,
    is_log: bool,
) -> None:
    """Give the x axis a tick at each value, if there is room on a narrow page."""
    figure.update_xaxes(title_text=html.escape(x_title), type="log" if is_log else None)
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(values))
        return
    texts = [value_in_words(value) for value in numbers]
    num_letters = sum(map(len, texts)) + 2 * len(texts)  # with a gap before the next one
    if num_letters * LETTER_PX < NARROW_PX:
        figure.update_xaxes(tickvals=numbers, ticktext=texts)


def throughput_bars(rates: Mapping[str, float]) -> go.Figure:
    """Return the tokens/s of each element, as bars."""
    labels = [_label(name, f"{rate:,.0f}") for name, rate in rates.items()]
    lengths = list(rates.values())
    figure = styled_figure("")
    _add_bars(figure, labels, lengths, "tokens/s", color=BLUE, hover="%{x:,.0f} tokens/s")
    _finish(figure, labels, "throughput (tokens/s)")
    figure.update_layout(showlegend=False)
    figure.update_xaxes(tickformat="~s")
    return figure


def memory_by_element(peaks: Mapping[str, Mapping[str, int | None]]) -> go.Figure:
    """Return the estimated, rehearsed and measured peak of each element side by side.

    Args:
        peaks: bytes of each element, by the keys of ``PEAK_COLORS``; None has no bar.
    """
    largest = 0
    for by_kind in peaks.values():
        for peak in by_kind.values():
            largest = max(largest, peak or 0)
    size, unit = memory_unit(largest)
    labels = [_label(name) for name in peaks]
    figure = styled_figure("")
    for kind, color in PEAK_COLORS.items():
        num_bytes = [by_kind.get(kind) for by_kind in peaks.values()]
        lengths = [None if value is None else value / size for value in num_bytes]
        if any(lengths):
            hover = f"{kind}: %{{x:.3f}} {unit}"
            _add_bars(figure, labels, lengths, kind, color=color, hover=hover)
    _finish(figure, labels, f"peak per rank ({unit})")
    return figure


def throughput_against_memory(
    points: Mapping[str, tuple[float, float]],
    front: Sequence[str],
    labels: Mapping[str, str],
    how: str,
) -> go.Figure:
    """Return a point for each element, and the front as a stepped line.

    The front has the most tokens/s in at most so much memory.

    Args:
        points: bytes of peak memory and tokens/s of each element, by name.
        front: the elements that no other one beats in both, by memory.
        labels: a short label of each element; those without room for it on a
            narrow page are left out.
        how: whether the points are measured or predicted.
    """
    size, unit = memory_unit(max(num_bytes for num_bytes, _ in points.values()))
    shown = {name: (num_bytes / size, rate) for name, (num_bytes, rate) in points.items()}
    others = [name for name in points if name not in set(front)]
    x_range = _range([x for x, _ in shown.values()])
    y_range = _range([y for _, y in shown.values()])
    # labels of the front take their room first
    order = [*reversed(front), *others]
    positions = _placed(shown, order, set(front), labels, (x_range, y_range))
    figure = styled_figure("")
    hover = f"<b>%{{hovertext}}</b><br>%{{y:,.0f}} tokens/s<br>%{{x:.3f}} {unit}<extra></extra>"
    for kind, names, color, mode in (
        ("others", others, GREY, "markers+text"),
        ("front", front, BLUE, "lines+markers+text"),
    ):
        if not names:
            continue
        figure.add_scatter(
            x=[shown[name][0] for name in names],
            y=[shown[name][1] for name in names],
            name=kind,
            mode=mode,
            text=[labels[name] if name in positions else "" for name in names],
            textposition=[positions.get(name, "top left") for name in names],
            textfont={"size": 11},
            hovertext=[html.escape(name) for name in names],
            line={"color": color, "width": 1.8, "shape": "hv"},
            marker={"size": 9 if kind == "front" else 7, "color": color},
            showlegend=True,
            hovertemplate=hover,
        )
    figure.update_layout(hovermode="closest")
    memory = f"{how} peak memory per rank ({unit})"
    figure.update_xaxes(title_text=memory, range=list(x_range), showgrid=True)
    throughput = f"{how} throughput (tokens/s)"
    figure.update_yaxes(title_text=throughput, range=list(y_range), tickformat=".3~s")
    return figure


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis over positive values, with room for labels."""
    low = min(values)
    high = max(values)
    margin = 0.15 * ((high - low) or high)
    return max(0.0, low - margin), high + margin


def _placed(
    points: Mapping[str, tuple[float, float]],
    order: Sequence[str],
    front: set[str],
    labels: Mapping[str, str],
    ranges: tuple[tuple[float, float], tuple[float, float]],
) -> dict[str, str]:
    """Return the label positions by name, of the labels that have room on a narrow page.

    None overlaps another label or a dot. Labels of the front are above it, where no dot
    can be, if there is room.
    """
    (left, right), (low, high) = ranges
    dots: dict[str, tuple[float, float]] = {}
    taken: list[Box] = []
    for name, (along, up) in points.items():
        x = (along - left) / (right - left) * NARROW_PX
        y = (up - low) / (high - low) * NARROW_PX
        dots[name] = (x, y)
        taken.append((x - 3, y - 3, x + 3, y + 3))
    positions = {}
    for name in order:
        x, y = dots[name]
        width = LETTER_PX * len(labels[name])
        boxes = {
            "top left": (x - width, y + 4, x - 4, y + LABEL_PX),
            "top right": (x + 4, y + 4, x + width, y + LABEL_PX),
            "bottom right": (x + 4, y - LABEL_PX, x + width, y - 4),
            "bottom left": (x - width, y - LABEL_PX, x - 4, y - 4),
        }
        for position in list(boxes) if name in front else list(reversed(boxes)):
            box = boxes[position]
            is_inside = box[0] >= 0 and box[2] <= NARROW_PX
            if is_inside and not any(_overlap(box, other) for other in taken):
                positions[name] = position
                taken.append(box)
                break
    return positions


Box = tuple[float, float, float, float]
"""The left, lower, right and upper edge of a rectangle."""


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def throughput_by_ranks(
    lines: Mapping[str, Sequence[tuple[int, float, float, str]]],
    how: str,
) -> go.Figure:
    """Return tokens/s by the number of ranks, with the ideal as a dotted line of the same colour.

    Args:
        lines: by the name of the line, for each of its elements: ranks, tokens/s, the
            ideal tokens/s, and its name.
        how: whether the throughputs are measured or predicted.
    """
    figure = styled_figure(f"{how} throughput (tokens/s)")
    all_sizes: set[int] = set()
    for number, (name, points) in enumerate(lines.items()):
        color = _curve_color(number)
        ranks: list[int] = []
        rates: list[float] = []
        ideals: list[float] = []
        texts: list[str] = []
        for size, rate, ideal, element in points:
            ranks.append(size)
            rates.append(rate)
            ideals.append(ideal)
            speed = f"{rate:,.0f} tokens/s on {size} ranks<br>{rate / ideal:.1%} of ideal"
            texts.append(f"<b>{html.escape(element)}</b><br>{speed}")
        all_sizes.update(ranks)
        figure.add_scatter(
            x=ranks,
            y=ideals,
            mode="lines",
            line={"color": color, "width": 1.5, "dash": "dot"},
            showlegend=False,
            hoverinfo="skip",
        )
        figure.add_scatter(
            x=ranks,
            y=rates,
            name=name,
            mode="lines+markers",
            line={"color": color, "width": 1.8},
            marker={"size": 8},
            showlegend=True,
            hovertext=texts,
            hovertemplate="%{hovertext}<extra></extra>",
        )
    sizes = sorted(all_sizes)
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(title_text="ranks", tickvals=sizes, ticktext=list(map(str, sizes)))
    if sizes[-1] > MAX_LINEAR * sizes[0]:
        figure.update_xaxes(type="log")
        figure.update_yaxes(type="log", dtick=math.log10(2), tickformat=".2~s")
    else:
        figure.update_yaxes(rangemode="tozero", tickformat="~s")
    return figure


def height_px(names: Mapping[str, Any], extra_lines: int = 1) -> int:
    """Return the height of a figure that its labels need.

    Args:
        names: the names of its elements.
        extra_lines: height of each element beyond its name, in lines.
    """
    lines = max((_label(name).count("<br>") + 1 for name in names), default=1) + extra_lines
    return AXES_PX + len(names) * (lines * LINE_PX + GAP_PX)


def _label(name: str, value: str = "") -> str:
    """Return an element's name with one setting per line, to keep labels narrow."""
    lines: list[str] = []
    for setting in name.split(", "):
        lines += wrap(setting, LABEL_LETTERS)
    return "<br>".join(map(html.escape, lines)) + (f"<br><b>{value}</b>" if value else "")


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
    return "; ".join([*names[:MAX_LISTED], *more])


def _add_bars(
    figure: go.Figure,
    labels: list[str],
    lengths: list[Any],
    name: str,
    *,
    color: str,
    hover: str,
    **options: Any,
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
        autorange="reversed",  # the first element on top
        showgrid=False,
        ticklabelstandoff=8,
        categoryorder="array",
        categoryarray=labels,
        dtick=1,
    )
