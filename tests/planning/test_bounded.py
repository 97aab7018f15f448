"""Planning takes little time and memory whatever the request."""

import pytest

import llama_core.planning.memory.estimate as estimating
import llama_core.planning.memory.step_states as walked
import llama_core.planning.plan as planning
from llama_core.config.hardware import gpu_spec
from llama_core.config.models import model_spec
from llama_core.config.run import MAX_MICROBATCHES, RunConfig, config_keys
from llama_core.errors import ConfigError, PlanError
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.auto import choose_plan, search
from llama_core.planning.work import Work
from llama_core.units import divisors

SHORT_STEP = 64
"""More microbatches than planning needs for a pipeline of four."""


@pytest.mark.parametrize(
    "setting",
    [
        "training.batch_size=100000000",
        "training.seq_len=1000000000",
        "parallel.gpus=1000000000",
        "parallel.microbatch_size=1000000000",
        "parallel.num_microbatches=1000000000",
        "parallel.pp=1000000",
        "parallel.num_chunks=1000000",
        "architecture.num_layers=1000000000",
    ],
)
def test_a_size_beyond_all_runs_is_refused_in_one_line_that_names_it(setting):
    overrides = ["parallel.gpus=1000000"] if "pp" in setting else []
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping({}, [*overrides, setting])
    assert len(caught.value.problems) == 1
    assert setting in str(caught.value)


@pytest.mark.parametrize("key", config_keys())
def test_a_number_that_no_float_can_hold_is_refused_in_one_short_line(key):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping({}, [f"{key}={10**400}"])
    assert all(key in problem and len(problem) < 300 for problem in caught.value.problems)


@pytest.mark.parametrize("device", [None, gpu_spec("h100")])
def test_more_microbatches_than_a_step_may_have_are_refused_with_what_to_change(device):
    config = RunConfig.from_mapping({"training": {"batch_size": 1_000_000}})
    with pytest.raises(PlanError, match=rf"above {MAX_MICROBATCHES}; use a smaller batch_size"):
        choose_plan(config, None, device)


def test_the_longest_step_is_planned_from_short_ones(monkeypatch):
    built = []
    real = planning.remembered_schedule

    def build(*args, num_microbatches, **sizes):
        built.append(num_microbatches)
        return real(*args, num_microbatches=num_microbatches, **sizes)

    monkeypatch.setattr(planning, "remembered_schedule", build)
    monkeypatch.setattr(walked, "remembered_schedule", build)
    walked.step_states.cache_clear()
    config = RunConfig.from_mapping(
        {
            "parallel": {"gpus": 8, "pp": 4, "num_microbatches": MAX_MICROBATCHES},
            "training": {"batch_size": 2 * MAX_MICROBATCHES},
        }
    )
    choice = search(config, gpu_spec("h100").usable_bytes, gpu_spec("h100"))
    assert choice.plan.num_microbatches == MAX_MICROBATCHES
    assert max(built) <= SHORT_STEP


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "chimera", "zb_h1"])
@pytest.mark.parametrize("num_microbatches", [17, 40])
def test_a_short_step_has_the_memory_of_the_whole(monkeypatch, schedule, num_microbatches):
    plan = ParallelPlan(pp=4, schedule=schedule, num_microbatches=num_microbatches, microbatch_size=2)
    work = Work(model_spec("tiny_llama3_50m"), plan, 128, "fp32", "mask")
    short = estimating.estimate_ranks(work)
    monkeypatch.setattr(estimating, "STEADY_UNITS", num_microbatches)
    assert short == estimating.estimate_ranks(work)


@pytest.mark.parametrize(
    ("schedule", "num_chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("chimera", 1), ("zb_h1", 1), ("zbv", 1)],
)
def test_states_that_are_left_out_hold_no_more_than_those_that_are_not(monkeypatch, schedule, num_chunks):
    plan = ParallelPlan(pp=4, schedule=schedule, num_chunks=num_chunks, num_microbatches=16, microbatch_size=2)
    work = Work(model_spec("tiny_llama3_50m"), plan, 128, "fp32", "mask")
    few = estimating.estimate_ranks(work)
    monkeypatch.setattr(estimating, "step_states", walked.step_states.__wrapped__)
    monkeypatch.setattr(walked, "_fullest", list)
    assert few == estimating.estimate_ranks(work)


def test_a_longer_pipeline_has_no_more_states():
    def count(num_ranks):
        sizes = {"num_ranks": num_ranks, "num_microbatches": 3 * num_ranks, "num_chunks": 1, "num_skipped": 0}
        ranks = [walked.step_states("1f1b", pp_rank=rank, **sizes) for rank in (0, num_ranks // 2)]
        return [len(moments) for states in ranks for _, moments in states]

    assert count(32) == count(8)


def test_divisors_are_all_numbers_that_divide():
    for count in range(1, 200):
        assert divisors(count) == [number for number in range(1, count + 1) if count % number == 0]
