"""Pictures of pipeline schedules and a table that compares them, made from the action lists that the executor runs.

``python -m training_reports.schedules docs/schedules`` writes the pictures into that folder and the table into the page
beside it. Each picture is a self-contained SVG.
"""

import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from llama_core.schedules.actions import Kind, Schedule, TimedAction
from llama_core.schedules.clock import Timeline, simulate
from llama_core.schedules.registry import build_schedule, schedule_names, schedule_type
from training_reports.figures import BLUE, GREY, ORANGE, TEAL, styled_figure
from training_reports.layout import TEMPLATES

NUM_RANKS = 4
NUM_MICROBATCHES = 8
NUM_CHUNKS = 2
"""Sizes of the pictures and the table; only ``interleaved`` takes a number of chunks."""

KINDS = {
    Kind.FORWARD: ("forward", BLUE),
    Kind.BACKWARD: ("backward", ORANGE),
    Kind.INPUT_GRADIENT: ("input gradient", ORANGE),
    Kind.WEIGHT_GRADIENT: ("weight gradient", TEAL),
}
WIDTH = 1000
LEFT = 56
TOP = 30
LANE = 32
BAR = 26
MAX_ACTIONS = 2000
"""Most actions of a timeline that a page draws."""
MAX_EDGED = 64
"""Most actions of a rank whose bars have an edge; with more, the edges would hide the bars."""
CHARACTER = 7
"""Width of a character in px, rounded up."""
TABLE = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of table -->)", re.DOTALL)


def timeline_svg(timeline: Timeline, span: float | None = None) -> str:
    """Return ``timeline`` as an SVG 1000 px wide: a lane for each rank, a bar for each action with its microbatch.

    Args:
        timeline: the timeline to draw.
        span: time that fills the width, to draw several pictures on one scale; by default the makespan.
    """
    schedule = timeline.schedule
    scale = (WIDTH - LEFT) / (timeline.makespan if span is None else span)
    return TEMPLATES.get_template("schedule.svg").render(
        schedule=schedule,
        width=WIDTH,
        height=TOP + LANE * schedule.num_ranks,
        bar_height=BAR - 1,
        idle=GREY,
        legend=_legend(timeline),
        lanes=[
            {
                "y": TOP + LANE * rank + 0.5,
                "middle": TOP + LANE * rank + BAR // 2,
                "bars": [_bar(schedule, rank, timed, scale) for timed in lane],
                **_inset(LEFT, timeline.makespan * scale),
            }
            for rank, lane in enumerate(timeline.lanes)
        ],
    )


def timelines_figure(planned: Timeline, measured: Timeline, most_actions: int = MAX_ACTIONS) -> go.Figure:
    """Return the planned and the measured timeline of a schedule, one above the other on one axis.

    Args:
        planned: the timeline above, in seconds.
        measured: the timeline below, in seconds.
        most_actions: most actions to draw of each; if there are more, the first of every rank are drawn.
    """
    schedule = planned.schedule
    size, unit = (1.0, "s") if max(planned.makespan, measured.makespan) >= 1 else (1e-3, "ms")
    most = max(1, most_actions // schedule.num_ranks)
    edges = 0.5 if max(map(len, planned.lanes)) <= MAX_EDGED else 0.0
    figure = styled_figure("", rows=2)
    for row, (how, timeline) in enumerate({"planned": planned, "measured": measured}.items(), 1):
        for kind, place in product(KINDS, range(len(schedule.stages_of(0)))):
            bars = [
                (rank, timed)
                for rank, lane in enumerate(timeline.lanes)
                for timed in lane[:most]
                if timed.action.kind is kind and timed.action.stage == schedule.stages_of(rank)[place]
            ]
            if not bars:
                continue
            fill, style = _colors(schedule, bars[0][0], bars[0][1].action.stage, kind)
            # A mapping, because the keyword annotations allow only numbers for y.
            trace = {
                "type": "bar",
                "orientation": "h",
                "y": [f"rank {rank}" for rank, _ in bars],
                "base": np.array([timed.start / size for _, timed in bars], dtype=np.float32),
                "x": np.array([(timed.end - timed.start) / size for _, timed in bars], dtype=np.float32),
                "name": KINDS[kind][0],
                "legendgroup": kind,
                "showlegend": row == 1 and place == 0,
                "marker": {"color": fill, "line": {"width": edges, "color": "#ffffff"}},
                "text": [str(timed.action.microbatch // schedule.parts_per_microbatch) for _, timed in bars],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "textfont": {"color": "#ffffff" if style == "on-dark" else "#1c2024"},
                "hovertext": [str(timed.action) for _, timed in bars],
                "hovertemplate": f"%{{hovertext}}, {how}: %{{x:.3g}} {unit} from %{{base:.4g}} {unit}<extra></extra>",
            }
            figure.add_trace(trace, row=row, col=1)
        figure.update_yaxes(
            title_text=how,
            autorange="reversed",
            showgrid=False,
            ticklabelstandoff=8,
            categoryorder="array",
            categoryarray=[f"rank {rank}" for rank in range(schedule.num_ranks)],
            row=row,
        )
    figure.update_layout(
        barmode="overlay", bargap=0.15, hovermode="closest", uniformtext={"minsize": 9, "mode": "hide"}
    )
    figure.update_xaxes(rangemode="tozero")
    figure.update_xaxes(title_text=f"time since the first action ({unit})", row=2)
    return figure


def _bar(schedule: Schedule, rank: int, timed: TimedAction, scale: float) -> dict[str, object]:
    action = timed.action
    fill, text_class = _colors(schedule, rank, action.stage, action.kind)
    x = LEFT + timed.start * scale
    width = (timed.end - timed.start) * scale
    number = str(action.microbatch // schedule.parts_per_microbatch)
    return {
        "title": f"{action}, {timed.start:g} to {timed.end:g}",
        "fill": fill,
        "stroke": KINDS[action.kind][1],
        "number": number if CHARACTER * len(number) < width else None,
        "text_class": text_class,
        "middle": _px(x + width / 2),
        **_inset(x, width),
    }


def shades(schedule: Schedule) -> str:
    """Return the meaning of the shades if a rank hosts several stages, else an empty string."""
    chunks = len(schedule.stages_of(0))  # all ranks have the same number
    if chunks == 1:
        return ""
    return f"dark to light: {'down, up' if schedule.num_replicas > 1 else f'chunk 1 to {chunks}'}"


def _legend(timeline: Timeline) -> Iterator[dict[str, object]]:
    """Yield the colours and the name of each kind, and the meaning of the shades if a rank hosts several stages."""
    schedule = timeline.schedule
    stages = schedule.stages_of(0)  # all ranks have the same number
    x = LEFT
    for kind in [kind for kind in KINDS if any(timed.action.kind is kind for timed in timeline.lanes[0])]:
        name, color = KINDS[kind]
        swatches = [(x + 16 * place, _colors(schedule, 0, stage, kind)[0], color) for place, stage in enumerate(stages)]
        x += 16 * len(stages)
        yield {"swatches": swatches, "words": name, "x": x + 2}
        x += CHARACTER * len(name) + 16
    if words := shades(schedule):
        yield {"swatches": [], "words": words, "x": x}


def _colors(schedule: Schedule, rank: int, stage: int, kind: Kind) -> tuple[str, str]:
    """Return the fill of a bar, lighter for each further stage of the rank, and the class of its text."""
    stages = schedule.stages_of(rank)
    further = stages.index(stage)
    color = KINDS[kind][1]
    if further == 0:
        return color, "on-dark"
    white = 0.5 + 0.35 * (further - 1) / max(1, len(stages) - 2)
    channels = (int(color[first : first + 2], 16) for first in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in channels), "on-light"


def _inset(x: float, width: float) -> dict[str, str]:
    inset = min(0.5, width / 4)  # half a stroke, but never the whole of a thin bar
    return {"x": _px(x + inset), "width": _px(width - 2 * inset)}


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def example(name: str) -> Timeline:
    """Return the schedule called ``name`` at the sizes of the pictures, with F = 1 and B = 2."""
    num_chunks = NUM_CHUNKS if schedule_type(name).takes_chunks else 1
    schedule = build_schedule(name, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES, num_chunks=num_chunks)
    return simulate(schedule, forward=1, backward=2)


def pictures() -> dict[str, str]:
    """Return the text of every picture by its file name, all on one time scale."""
    examples = {name: example(name) for name in schedule_names()}
    span = max(timeline.makespan for timeline in examples.values())
    return {f"{name}.svg": timeline_svg(timeline, span) + "\n" for name, timeline in examples.items()}


def comparison() -> str:
    """Return the makespan, bubble and memory of every schedule at the sizes of the pictures, as a Markdown table."""
    rows = [
        "| schedule | weights | makespan | idle per rank | bubble | peak in flight by rank |",
        "|---|---|---|---|---|---|",
    ]
    for name in schedule_names():
        timeline = example(name)
        ranks = range(timeline.schedule.num_ranks)
        rows.append(
            f"| {name} | {timeline.schedule.num_replicas}x | {timeline.makespan:g} | {timeline.idle(0):g} "
            f"| {timeline.bubble_ratio:.1%} | {', '.join(f'{timeline.peak_in_flight(rank):g}' for rank in ranks)} |"
        )
    return "\n".join(rows) + "\n"


def write(folder: Path) -> None:
    """Write the pictures into ``folder``, and the table between its marks in the ``.md`` page of the same name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (folder / name).write_text(text, encoding="utf-8")
    page = folder.with_suffix(".md")
    page.write_text(TABLE.sub(comparison(), page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
