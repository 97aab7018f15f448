"""A pipeline's timeline: every recorded action is drawn at its time, below the one that was planned."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.hardware import gpu_spec
from llama_core.config.run import RunConfig
from llama_core.errors import RunDirectoryError
from llama_core.planning.time.step_time import step_time
from llama_core.planning.work import Work
from llama_core.records.files import write_json
from llama_core.records.timelines import LaneRecord, read_lanes, write_lane
from llama_core.schedules.clock import Timeline, simulate
from llama_core.schedules.registry import build_schedule, schedule_names
from training_reports.contents import RunContents
from training_reports.page import write_report
from training_reports.schedules import timelines_figure
from training_reports.timelines import pipeline_timelines, planned_timeline, predicted_timeline


def schedule_of(name):
    return build_schedule(name, num_ranks=2, num_microbatches=4, num_chunks=2 if name == "interleaved" else 1)


def write_timeline(run, schedule, origin=5.0):
    """Write a run that took the actions of ``schedule`` at their planned times, after ``origin`` seconds."""
    chunks = len(schedule.stages_of(0)) if schedule.name == "interleaved" else 1
    sizes = {"pp": 2, "num_microbatches": 4, "microbatch_size": 2, "num_chunks": chunks}
    write_json(run.plan, sizes | {"schedule": schedule.name})
    timeline = simulate(schedule, forward=0.02, backward=0.05)
    for pp_rank, lane in enumerate(timeline.lanes):
        names = tuple(str(timed.action) for timed in lane)
        begins, ends = (tuple(origin + getattr(timed, edge) for timed in lane) for edge in ("start", "end"))
        write_lane(run, pp_rank, LaneRecord(names, begins, ends))
    return timeline


@pytest.mark.parametrize("name", schedule_names())
def test_a_step_that_ran_as_planned_is_drawn_twice_alike_with_all_its_actions(run, name):
    timeline = write_timeline(run, schedule_of(name))
    (panel,) = pipeline_timelines(RunContents.read(run))
    rows = {"y": [], "y2": []}
    for trace in panel.figure.data:
        rows[trace.yaxis] += zip(trace.hovertext, trace.y, trace.base, trace.x, strict=True)
    planned, measured = (sorted(row) for row in rows.values())
    drawn = sorted(
        (str(timed.action), f"rank {rank}", 1e3 * timed.start, 1e3 * (timed.end - timed.start))
        for rank, lane in enumerate(timeline.lanes)
        for timed in lane
    )
    for ours, theirs, expected in zip(planned, measured, drawn, strict=True):
        assert ours[:2] == theirs[:2] == expected[:2]
        assert ours[2:] == pytest.approx(expected[2:], rel=1e-4, abs=1e-3)
        assert theirs[2:] == pytest.approx(expected[2:], rel=1e-4, abs=1e-3)
    assert panel.summary.count(f"{timeline.bubble_ratio:.1%}") == 2


@given(st.lists(st.floats(0, 1), min_size=16, max_size=16))
def test_no_plan_takes_longer_than_what_was_measured_if_actions_of_a_kind_take_as_long(waits):
    """Waits before actions, and nothing else, set the measured step apart."""
    schedule, late = schedule_of("1f1b"), iter(waits)
    delayed = {timed.action: next(late) for lane in simulate(schedule).lanes for timed in lane}
    busy = {"F": 1.0, "B": 2.0}
    waiting = schedule.replay(lambda action: busy[action.kind] + delayed[action])
    lanes = tuple(tuple(type(t)(t.action, t.end - busy[t.action.kind], t.end) for t in lane) for lane in waiting)
    measured = Timeline(schedule, lanes)
    planned = planned_timeline(measured)
    assert planned.makespan <= measured.makespan + 1e-9
    assert planned.makespan == pytest.approx(simulate(schedule, forward=1, backward=2).makespan)
    assert all(first.end <= second.start + 1e-9 for lane in planned.lanes for first, second in pairwise(lane))


@pytest.mark.parametrize("name", ["1f1b", "chimera", "interleaved"])
def test_on_a_gpu_the_planned_step_is_as_long_as_the_planner_says(run, name):
    write_timeline(run, schedule_of(name))
    settings = {"model": "llama3_8b", "launch": {"device": "cuda", "gpu_type": "h100"}, "parallel": {"gpus": 2}}
    run.config.write_text(RunConfig.from_mapping(settings).to_yaml())
    contents = RunContents.read(run)
    planned = predicted_timeline(contents, contents.parallel_plan.build_schedule())
    config, plan = RunConfig.load(run.config), contents.parallel_plan
    step = step_time(Work.of(config, plan), gpu_spec("h100"))
    whole = step.total - step.parts["optimizer"]
    # some of the communication comes once in a step, not in a pass
    assert step.parts["compute"] + step.parts["bubble"] <= planned.makespan <= whole * (1 + 1e-9)
    (panel,) = pipeline_timelines(contents)
    assert "that the planner predicts for this GPU" in panel.notes[2]


def test_the_first_actions_of_a_long_step_are_drawn():
    timeline = simulate(build_schedule("1f1b", num_ranks=2, num_microbatches=50))
    figure = timelines_figure(timeline, timeline, most_actions=20)
    assert sum(len(trace.x) for trace in figure.data) == 2 * 20


@pytest.mark.parametrize("values", [{}, {"actions": 3}, {"begins": [None]}, {"ends": {"a": 1}}, {"begins": "abc"}])
def test_a_record_with_wrong_values_is_named(run, values):
    whole = {"actions": ["0F0"], "begins": [0.0], "ends": [1.0]}
    write_json(run.timeline(0), whole | values if values else {})
    with pytest.raises(RunDirectoryError, match=f"{run.timeline(0)} is damaged"):
        read_lanes(run, 1)


@pytest.mark.parametrize("damage", ["missing", "another plan", "not a record", "not an action"])
def test_a_pipeline_without_a_usable_record_says_how_to_get_one(run, damage):
    write_timeline(run, schedule_of("1f1b"))
    match damage:
        case "missing":
            run.timeline(1).unlink()
        case "another plan":
            write_json(run.plan, {"pp": 2, "num_microbatches": 8})
        case "not a record":
            run.timeline(1).write_text("{")
        case "not an action":
            write_lane(run, 1, LaneRecord(("0X0",), (0.0,), (1.0,)))
    (panel,) = pipeline_timelines(RunContents.read(run))
    assert panel.figure is None
    assert f"training-infra profile {run.path}" in panel.notes[0]
    assert run.name in write_report(run).read_text()


def test_a_run_without_a_pipeline_has_no_timeline(run):
    assert list(pipeline_timelines(RunContents.read(run))) == []
