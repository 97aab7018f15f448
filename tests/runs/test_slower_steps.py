"""A step that took another time than predicted: which part explains it, and what may be done."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.measurements import BenchmarkRecord, ExpectedStep
from llama_core.records.profiles import ProfileRecord
from llama_core.records.step_parts import BUBBLE, COLLECTIVES, COMPUTING, HEAD, HOST, NEARLY, OPTIMIZER, POINTWISE, SEND
from llama_core.records.timelines import LaneRecord
from llama_core.runs.step_parts import CLOCKS, COMMUNICATION, compared_step, explained_step, remedy
from training_infra.cli import make_parser

NUM_STEPS = 4
PARTS = (*COMPUTING, OPTIMIZER, HOST, "all-gather", "reduce-scatter")


def expected(parts, rates="operations"):
    return ExpectedStep(sum(parts.values()), 1e12, "from a table", parts, rates)


def timed(step_seconds):
    return BenchmarkRecord("a device", 1, (step_seconds,) * NUM_STEPS, step_seconds, 0.0, 512, 512.0, None, 1)


def profile_of(parts, *, on_gpu):
    """Return a profile of steps that took these times."""
    own = {kind: NUM_STEPS * seconds for kind, seconds in parts.items() if kind not in {HOST, BUBBLE, POINTWISE}}
    own["copies and casts"] = own["norms, activations and other"] = NUM_STEPS * parts.get(POINTWISE, 0.0) / 2
    if not on_gpu:
        return ProfileRecord(0, own)
    exposed = {kind: own[kind] for kind in COLLECTIVES.values() if kind in own}
    idle = NUM_STEPS * (parts.get(HOST, 0.0) + parts.get(BUBBLE, 0.0))
    return ProfileRecord(0, own, NUM_STEPS * sum(parts.values()), idle, sum(exposed.values()), exposed)


def profiled(predicted, measured, *, on_gpu):
    step = sum(measured.values())
    return compared_step(expected(predicted), [profile_of(measured, on_gpu=on_gpu)], timed(step), {}, [])


times = st.fixed_dictionaries(dict.fromkeys(PARTS, st.floats(0.01, 10)))


@given(times, st.sampled_from(PARTS), st.booleans())
def test_the_part_that_was_planted_slower_is_the_one_named(predicted, planted, on_gpu):
    added = sum(predicted.values())
    step = profiled(predicted, predicted | {planted: predicted[planted] + added}, on_gpu=on_gpu)
    assert not step.is_as_predicted
    of_cpu = COMMUNICATION if planted in COLLECTIVES.values() and not on_gpu else planted
    assert step.main.name.startswith(of_cpu)
    assert step.main.added_seconds == pytest.approx(added)
    assert step.main.name in step.verdict()


@given(times, times, st.booleans())
def test_no_time_is_lost_between_the_parts(predicted, measured, on_gpu):
    step = profiled(predicted, measured, on_gpu=on_gpu)
    assert step.predicted_seconds == pytest.approx(sum(predicted.values()))
    assert step.measured_seconds == pytest.approx(sum(measured.values()))


@given(times, st.floats(-NEARLY, NEARLY))
def test_a_step_as_predicted_needs_no_explanation(predicted, change):
    measured = {kind: (1 + 0.99 * change) * seconds for kind, seconds in predicted.items()}
    assert profiled(predicted, measured, on_gpu=True).is_as_predicted


def test_a_pipeline_waits_for_turns_and_messages_alike():
    predicted = {**dict.fromkeys(COMPUTING, 1.0), BUBBLE: 1.0, SEND: 0.5, HOST: 0.25}
    for on_gpu in (True, False):
        measured = predicted | {SEND: 3.0} if on_gpu else predicted | {SEND: 0.0, BUBBLE: 3.5}
        step = profiled(predicted, measured, on_gpu=on_gpu)
        assert step.main.name == "pipeline bubble, send and host"
        assert step.main.predicted_seconds == pytest.approx(1.75)


def clocks(passes, optimizer, data, rest=0.0):
    return dict(zip(CLOCKS, (passes + optimizer + data + rest, passes, optimizer, data), strict=True))


@pytest.mark.parametrize(
    ("measured", "named"),
    [
        (clocks(8.0, 1.0, 0.0), "computing and communication"),
        (clocks(4.5, 4.0, 0.1), OPTIMIZER),
        (clocks(4.5, 1.0, 3.0), "data"),
        (clocks(4.5, 1.0, 0.1, rest=3.0), "rest"),
    ],
)
def test_clocks_name_what_they_know(measured, named):
    predicted = {**dict.fromkeys(COMPUTING, 1.0), "all-reduce": 0.5, OPTIMIZER: 1.0}
    step = compared_step(expected(predicted), [], None, measured, [])
    assert step.main.name == named
    assert step.predicted_seconds == pytest.approx(5.5)
    assert step.measured_seconds == pytest.approx(measured["step_seconds"])


def test_the_timeline_of_a_pipeline_tells_its_bubble_from_computing():
    predicted = {**dict.fromkeys(COMPUTING, 1.0), BUBBLE: 1.0, OPTIMIZER: 1.0}
    lanes = [LaneRecord(("0F0", "0B0"), (0.0, 7.0), (2.0, 9.0)), LaneRecord(("1F0", "1B0"), (2.0, 4.0), (3.0, 5.0))]
    step = compared_step(expected(predicted), [], None, clocks(9.0, 1.0, 0.0), lanes)
    assert step.main.name == BUBBLE
    assert step.main.measured_seconds == pytest.approx(5.0)
    assert step.measured_seconds == pytest.approx(10.0)


def test_a_step_predicted_as_a_whole_is_compared_as_a_whole():
    rough = ExpectedStep(2.0, 1e12, "from a guess")
    step = compared_step(rough, [profile_of({HEAD: 1.0}, on_gpu=False)], timed(3.0), {}, [])
    assert [part.name for part in step.parts] == ["whole step"]
    assert step.verdict().endswith("predicted 2 s (+50%).")
    assert compared_step(rough, [], None, {}, []) is None


def found(measured, *, rates="operations", device="cpu", predicted=None, run="runs/my run", **plan):
    """Return the remedy of a step whose parts were predicted to take a second each, by its profile or its clocks."""
    config = RunConfig.from_mapping({"launch": {"device": device}})
    predicted = predicted or dict.fromkeys(PARTS, 1.0)
    if set(measured) == set(CLOCKS):
        step = compared_step(expected(predicted), [], None, measured, [])
    else:
        step = profiled(predicted, predicted | measured, on_gpu=device == "cuda")
    return remedy(step, expected(predicted, rates), config, ParallelPlan(**plan), Path(run))


CPU_CASES = {
    "few rates alone": ({HEAD: 9.0}, {"rates": "few rates"}, "training-infra calibrate"),
    "no profile": (clocks(30.0, 1.0, 0.0), {}, "training-infra profile 'runs/my run'"),
    "slow data": (
        clocks(7.0, 1.0, 9.0),
        {},
        "training-infra train --config 'runs/my run/config.yaml' --set data.num_w",
    ),
    "recomputation": (
        {"attention": 9.0},
        {"recompute": "full"},
        "training-infra estimate-memory --config 'runs/my run",
    ),
    "a slow link": ({"all-gather": 9.0}, {"dp_replicate": 2}, "training-infra calibrate --ranks 2 --only link"),
    "slow products": ({"matrix products": 9.0}, {}, "training-infra calibrate"),
}


@pytest.mark.parametrize("case", CPU_CASES)
def test_every_command_for_a_cpu_is_one(case):
    measured, options, begins = CPU_CASES[case]
    command = found(measured, **options).command
    assert command.startswith(begins)
    program, *arguments = shlex.split(command)
    assert program == "training-infra"
    assert make_parser().parse_args(arguments).command.name == arguments[0]


def test_a_gpu_of_which_only_the_data_sheet_is_known_can_be_measured():
    command = found({HEAD: 9.0}, rates="data sheet", device="cuda").command
    assert make_parser().parse_args(shlex.split(command)[1:]).device == "cuda"


def test_nothing_is_proposed_where_nothing_would_help():
    assert found({}) is None
    assert found({HOST: 9.0}) is None
    assert found({HEAD: 9.0}, rates="unmodelled") is None


def test_a_run_without_a_prediction_or_without_a_step_explains_nothing(tmp_path):
    run = RunDirectory(tmp_path)
    run.config.write_text(RunConfig().to_yaml())
    write_json(run.plan, ParallelPlan().as_dict())
    assert explained_step(run) is None
    write_json(run.expected, expected(dict.fromkeys(PARTS, 1.0)))
    assert explained_step(run) is None
    write_json(run.benchmark, timed(3.0))
    assert explained_step(run).step.main.name == "whole step"


def test_on_a_shared_machine_no_command_is_given_and_the_reason_is(tmp_path):
    run = RunDirectory(tmp_path)
    run.config.write_text(RunConfig().to_yaml())
    write_json(run.plan, ParallelPlan().as_dict())
    write_json(run.expected, expected({HEAD: 1.0}, rates="few rates"))
    write_json(run.benchmark, timed(3.0))
    assert explained_step(run).remedy is not None
    write_json(run.benchmark, replace(timed(3.0), num_threads=1, waiting_threads=0.9))
    told = explained_step(run).sentences()
    assert len(told) == 2
    assert "the machine was shared" in told[1]
