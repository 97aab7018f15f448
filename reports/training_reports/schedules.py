"""Pictures of pipeline schedules, and the table that compares them, drawn from the very lists that run.

``python -m training_reports.schedules docs/schedules`` writes the pictures into that folder and the table into the page
beside it. A picture is one SVG that needs no other file: a page embeds its text, a README links to it.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama_core.schedules.actions import Kind, Schedule, TimedAction
from llama_core.schedules.clock import Timeline, simulate
from llama_core.schedules.registry import build_schedule, schedule_names, schedule_type
from training_reports.figures import BLUE, GREY, ORANGE, TEAL
from training_reports.markup import Markup, element

NUM_RANKS, NUM_MICROBATCHES, NUM_CHUNKS = 4, 8, 2
"""Sizes of the pictures and of the table; only ``interleaved`` has chunks to choose."""

KINDS = {
    Kind.FORWARD: ("forward", BLUE),
    Kind.BACKWARD: ("backward", ORANGE),
    Kind.INPUT_GRADIENT: ("input gradient", ORANGE),
    Kind.WEIGHT_GRADIENT: ("weight gradient", TEAL),
}
WIDTH, LEFT, TOP, LANE, BAR = 1000, 56, 30, 32, 26
CHARACTER = 7
"""Width of a character, on the wide side."""
STYLE = (
    ".schedule text{font:12px system-ui,sans-serif;fill:#59626d}"
    "@media(prefers-color-scheme:dark){.schedule text{fill:#a4adb8}}"
    ".schedule text.on-dark{fill:#fff}.schedule text.on-light{fill:#1c2024}"
)
TABLE = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of table -->)", re.DOTALL)


def timeline_svg(timeline: Timeline, span: float | None = None) -> Markup:
    """Return ``timeline`` as an SVG of 1000 px: a lane for each rank, a bar for each action, its microbatch inside.

    Args:
        timeline: what to draw.
        span: time that fills the width, for pictures on one scale; the makespan if not given.
    """
    schedule = timeline.schedule
    scale = (WIDTH - LEFT) / (timeline.makespan if span is None else span)
    lanes = (_lines(*_lane(schedule, rank, lane, timeline.makespan, scale)) for rank, lane in enumerate(timeline.lanes))
    return element(
        "svg",
        _lines(element("style", Markup(STYLE)), *_legend(timeline), *lanes),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {TOP + LANE * schedule.num_ranks}",
        class_="schedule",
        role="img",
        aria_label=f"{schedule.name} over {schedule.num_ranks} ranks, time from left to right",
    )


def _lane(
    schedule: Schedule, rank: int, lane: Sequence[TimedAction], makespan: float, scale: float
) -> Iterator[Markup]:
    y = TOP + LANE * rank
    yield element("text", f"rank {rank}", x="0", y=str(y + BAR / 2), dy=".35em")
    yield _rectangle(LEFT, y, makespan * scale, fill=GREY, opacity="0.15")
    for timed in lane:
        action = timed.action
        fill, text_class = _colors(schedule, rank, action.stage, action.kind)
        x, width = LEFT + timed.start * scale, (timed.end - timed.start) * scale
        number = str(action.microbatch // schedule.parts_per_microbatch)
        bar = _rectangle(x, y, width, fill=fill, stroke=KINDS[action.kind][1])
        label = element(
            "text",
            number,
            x=_px(x + width / 2),
            y=_px(y + BAR / 2),
            dy=".35em",
            text_anchor="middle",
            class_=text_class,
        )
        title = element("title", f"{action}, {timed.start:g} to {timed.end:g}")
        yield element("g", title, bar, *([label] if CHARACTER * len(number) < width else []))


def _legend(timeline: Timeline) -> Iterator[Markup]:
    """Yield the colours of each kind with its name, and what their shades mean where a rank hosts several stages."""
    schedule = timeline.schedule
    stages = schedule.stages_of(0)  # as many as any other rank has
    x = LEFT
    for kind in [kind for kind in KINDS if any(timed.action.kind is kind for timed in timeline.lanes[0])]:
        name, color = KINDS[kind]
        for stage in stages:
            fill, _ = _colors(schedule, 0, stage, kind)
            yield element("rect", x=str(x), y="4.5", width="12", height="12", fill=fill, stroke=color)
            x += 16
        yield element("text", name, x=str(x + 2), y="10.5", dy=".35em")
        x += CHARACTER * len(name) + 16
    if len(stages) > 1:
        shades = "down, up" if schedule.num_replicas > 1 else f"chunk 1 to {len(stages)}"
        yield element("text", f"dark to light: {shades}", x=str(x), y="10.5", dy=".35em")


def _colors(schedule: Schedule, rank: int, stage: int, kind: Kind) -> tuple[str, str]:
    """Return the fill of a bar, lighter for each further stage of the rank, and the class of the text on it."""
    stages = schedule.stages_of(rank)
    further = stages.index(stage)
    color = KINDS[kind][1]
    if further == 0:
        return color, "on-dark"
    white = 0.5 + 0.35 * (further - 1) / max(1, len(stages) - 2)
    channels = (int(color[first : first + 2], 16) for first in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in channels), "on-light"


def _rectangle(x: float, y: float, width: float, **paint: str) -> Markup:
    inset = min(0.5, width / 4)  # half a stroke, but something is left of the thinnest bar
    return element("rect", x=_px(x + inset), y=_px(y + 0.5), width=_px(width - 2 * inset), height=_px(BAR - 1), **paint)


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _lines(*parts: str) -> Markup:
    return Markup("\n" + "\n".join(parts) + "\n")


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
    """Return what every schedule costs and holds at the sizes of the pictures, as a Markdown table."""
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
    """Write the pictures into ``folder`` and the table between its marks in the page of the same name beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (folder / name).write_text(text, encoding="utf-8")
    page = folder.with_suffix(".md")
    page.write_text(TABLE.sub(comparison(), page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
