"""Pictures of pipeline schedules and a table that compares them, made from the action lists that the executor runs.

``python -m training_reports.schedules docs/schedules`` writes the pictures into that folder and the table into the page
beside it. Each picture is a self-contained SVG.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from llama_core.schedules.actions import Kind, Schedule, TimedAction
from llama_core.schedules.clock import Timeline, simulate
from llama_core.schedules.registry import build_schedule, schedule_names, schedule_type
from training_reports.figures import BLUE, GREY, ORANGE, TEAL
from training_reports.layout import TEMPLATES

NUM_RANKS, NUM_MICROBATCHES, NUM_CHUNKS = 4, 8, 2
"""Sizes of the pictures and the table; only ``interleaved`` takes a number of chunks."""

KINDS = {
    Kind.FORWARD: ("forward", BLUE),
    Kind.BACKWARD: ("backward", ORANGE),
    Kind.INPUT_GRADIENT: ("input gradient", ORANGE),
    Kind.WEIGHT_GRADIENT: ("weight gradient", TEAL),
}
WIDTH, LEFT, TOP, LANE, BAR = 1000, 56, 30, 32, 26
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


def _bar(schedule: Schedule, rank: int, timed: TimedAction, scale: float) -> dict[str, object]:
    action = timed.action
    fill, text_class = _colors(schedule, rank, action.stage, action.kind)
    x, width = LEFT + timed.start * scale, (timed.end - timed.start) * scale
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
    if len(stages) > 1:
        shades = "down, up" if schedule.num_replicas > 1 else f"chunk 1 to {len(stages)}"
        yield {"swatches": [], "words": f"dark to light: {shades}", "x": x}


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
