"""The pictures in the documentation show every action of the schedules that run."""

import shutil
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from llama_core.schedules.clock import simulate
from llama_core.schedules.registry import build_schedule, schedule_names
from training_reports import schedules

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
LIGHT = "on-light"


def bars(svg):
    """Return x, width and title of every bar, in order."""
    groups = ET.fromstring(svg).iter(f"{SVG}g")
    return [
        (float(group.find(f"{SVG}rect").get("x")), float(group.find(f"{SVG}rect").get("width")), group[0].text)
        for group in groups
    ]


def labels(svg, text_class=None):
    texts = [text for group in ET.fromstring(svg).iter(f"{SVG}g") for text in group.iter(f"{SVG}text")]
    return [text.text for text in texts if text_class in {None, text.get("class")}]


def legend(svg):
    """Return the words above the lanes, whose labels start with rank 0."""
    texts = [text.text for text in ET.fromstring(svg).findall(f"{SVG}text")]
    return texts[: texts.index("rank 0")]


@pytest.fixture(params=schedule_names())
def timeline(request):
    return schedules.example(request.param)


def test_the_committed_pictures_and_table_are_up_to_date(tmp_path):
    shutil.copy(DOCS / "schedules.md", tmp_path)
    schedules.write(tmp_path / "schedules")
    assert (tmp_path / "schedules.md").read_text() == (DOCS / "schedules.md").read_text()
    drawn = {path.name: path.read_text() for path in (tmp_path / "schedules").iterdir()}
    assert drawn == {path.name: path.read_text() for path in (DOCS / "schedules").iterdir()}


def test_an_outdated_table_is_replaced(tmp_path):
    page = tmp_path / "schedules.md"
    page.write_text("before\n<!-- table -->\n| old |\n<!-- end of table -->\nafter\n")
    schedules.write(tmp_path / "schedules")
    assert page.read_text() == f"before\n<!-- table -->\n{schedules.comparison()}<!-- end of table -->\nafter\n"


def test_every_schedule_has_its_section_picture_and_row():
    page = (DOCS / "schedules.md").read_text()
    for name in schedule_names():
        assert f"\n## {name}\n" in page
        assert f"![{name}](schedules/{name}.svg)" in page
        assert f"\n| {name} | " in page


def test_every_action_has_its_bar_at_its_time(timeline):
    svg = schedules.timeline_svg(timeline)
    actions = [timed for lane in timeline.lanes for timed in lane]
    scale = (schedules.WIDTH - schedules.LEFT) / timeline.makespan
    for (x, width, title), timed in zip(bars(svg), actions, strict=True):
        assert title.split(",")[0] == str(timed.action)
        assert x - 0.5 == pytest.approx(schedules.LEFT + timed.start * scale, abs=0.01)
        assert width + 1 == pytest.approx((timed.end - timed.start) * scale, abs=0.01)


def test_every_bar_of_the_documentation_shows_its_microbatch(timeline):
    parts = timeline.schedule.parts_per_microbatch
    numbers = [str(timed.action.microbatch // parts) for lane in timeline.lanes for timed in lane]
    span = max(schedules.example(name).makespan for name in schedule_names())
    assert labels(schedules.timeline_svg(timeline, span)) == numbers


def test_a_number_that_does_not_fit_its_bar_is_left_out():
    timeline = simulate(build_schedule("1f1b", num_ranks=2, num_microbatches=200))
    svg = schedules.timeline_svg(timeline)
    assert labels(svg) == []
    assert len(bars(svg)) == 2 * 2 * 200


def test_the_thinnest_bars_can_still_be_drawn():
    timeline = simulate(build_schedule("1f1b", num_ranks=2, num_microbatches=800))
    assert all(width > 0 for _, width, _ in bars(schedules.timeline_svg(timeline)))


def test_bars_of_one_lane_do_not_overlap(timeline):
    by_lane = iter(bars(schedules.timeline_svg(timeline)))
    for lane in timeline.lanes:
        drawn = [next(by_lane) for _ in lane]
        for (x, width, _), (following, _, _) in pairwise(drawn):
            assert x + width < following


def test_a_shade_tells_the_stages_of_a_rank_apart(timeline):
    schedule = timeline.schedule
    further = [
        str(timed.action.microbatch // schedule.parts_per_microbatch)
        for rank, lane in enumerate(timeline.lanes)
        for timed in lane
        if timed.action.stage != schedule.stages_of(rank)[0]
    ]
    assert labels(schedules.timeline_svg(timeline), LIGHT) == further


def test_every_chunk_has_its_own_shade():
    timeline = simulate(build_schedule("interleaved", num_ranks=2, num_microbatches=2, num_chunks=4))
    root = ET.fromstring(schedules.timeline_svg(timeline))
    fills = {rect.get("fill") for group in root.iter(f"{SVG}g") for rect in group.iter(f"{SVG}rect")}
    assert len(fills) == 2 * 4
    assert legend(ET.tostring(root))[-1] == "dark to light: chunk 1 to 4"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("1f1b", ["forward", "backward"]),
        ("chimera", ["forward", "backward", "dark to light: down, up"]),
        ("zbv", ["forward", "input gradient", "weight gradient", "dark to light: chunk 1 to 2"]),
    ],
)
def test_the_legend_names_the_drawn_actions(name, words):
    svg = schedules.timeline_svg(schedules.example(name))
    assert legend(svg) == words


def test_ranks_wait_equally_long_at_the_sizes_of_the_table(timeline):
    idle = {timeline.idle(rank) for rank in range(timeline.schedule.num_ranks)}
    assert len(idle) == 1
