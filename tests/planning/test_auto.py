import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_core.config.run import ParallelConfig, RunConfig
from llama_core.errors import PlanError
from llama_core.planning.memory.estimate import estimate_memory
from llama_core.planning.memory.verdict import FILL_LIMIT
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.auto import choose_plan
from llama_core.planning.search.candidates import MAX_MICROBATCH_TOKENS
from llama_core.planning.search.rules import BUSY_MICROBATCHES
from llama_core.planning.work import Work
from llama_core.units import GIB, MIB


def run_config(**settings):
    return RunConfig.from_mapping(
        {"model": "tiny_llama3_50m", "training": {"precision": "bf16", "batch_size": 64}},
        [f"{key.replace('__', '.')}={value}" for key, value in settings.items()],
    )


def peak_bytes(config, plan):
    return estimate_memory(Work.of(config, plan)).peak_bytes


def least_budget(config, plan):
    """Return the smallest budget that ``plan`` fits with the margin."""
    return math.ceil(peak_bytes(config, plan) / FILL_LIMIT)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 24, 64]), st.integers(0, 16))
def test_the_plan_covers_the_batch_exactly(gpus, batch_size, budget):
    config = run_config(parallel__gpus=gpus, training__batch_size=batch_size)
    plan = choose_plan(config, budget * GIB)
    assert (plan.world_size, plan.batch_size) == (gpus, batch_size)


def fits(config, plan, budget):
    return peak_bytes(config, plan) <= FILL_LIMIT * budget


@given(st.integers(2 * GIB, 20 * GIB))
def test_the_microbatch_is_the_largest_divisor_that_fits_with_a_margin(budget):
    config = run_config(training__seq_len=256)
    plan = choose_plan(config, budget)
    larger = [
        dataclasses.replace(plan, microbatch_size=size, num_microbatches=64 // size)
        for size in (2, 4, 8, 16, 32, 64)
        if size > plan.microbatch_size
    ]
    assert fits(config, plan, budget)
    assert not any(fits(config, candidate, budget) for candidate in larger)


def test_one_sequence_is_planned_even_if_nothing_fits():
    assert choose_plan(run_config(), 1).microbatch_size == 1


def test_a_requested_microbatch_is_used_whatever_the_memory():
    assert choose_plan(run_config(parallel__microbatch_size=32), 1).microbatch_size == 32


def test_a_microbatch_stops_growing_when_speed_does():
    plan = choose_plan(run_config(), None)
    assert plan.microbatch_size * 2048 == MAX_MICROBATCH_TOKENS


def test_devices_share_the_states_unless_zero_is_switched_off():
    sharded = choose_plan(run_config(parallel__gpus=8), None)
    replicated = choose_plan(run_config(parallel__gpus=8, parallel__zero_stage=0), None)
    assert (sharded.dp_shard, sharded.effective_zero_stage) == (8, 3)
    assert (replicated.dp_replicate, replicated.effective_zero_stage) == (8, 0)


def test_processes_without_degrees_are_data_parallel_as_long_as_they_divide_the_batch():
    assert choose_plan(run_config(parallel__gpus=4), None).dp == 4
    odd = choose_plan(run_config(parallel__gpus=4, training__batch_size=2), None)
    assert (odd.dp, odd.world_size) == (2, 4)


def test_a_pipeline_is_kept_busy_before_the_microbatch_grows():
    plan = choose_plan(run_config(parallel__gpus=4, parallel__pp=4), None)
    assert plan.num_microbatches == BUSY_MICROBATCHES * 4


def test_a_pipeline_with_too_small_a_batch_gets_single_sequences():
    plan = choose_plan(run_config(parallel__gpus=4, parallel__pp=4, training__batch_size=12), None)
    assert (plan.microbatch_size, plan.num_microbatches) == (1, 12)


def pipeline(schedule, **settings):
    return run_config(
        parallel__gpus=4,
        parallel__pp=4,
        parallel__schedule=schedule,
        parallel__microbatch_size=4,
        **settings,
    )


def with_one_layer_fewer(config, plan):
    """Yield the plans that recompute one layer fewer on every stage of one rank."""
    counts = plan.recomputed_layers or tuple(map(len, plan.stage_layers(config.spec)))
    for stages in set(plan.build_schedule().placement):
        fewer = [max(0, count - (stage in stages)) for stage, count in enumerate(counts)]
        yield from [dataclasses.replace(plan, recomputed_layers=tuple(fewer))] * (tuple(fewer) != counts)


@settings(deadline=None)
@given(st.integers(600 * MIB, 3000 * MIB), st.sampled_from(["1f1b", "gpipe", "interleaved", "chimera_doubling"]))
def test_adaptive_recomputation_recomputes_as_little_as_fits_on_every_rank(budget, schedule):
    config = pipeline(schedule, parallel__recompute="adaptive")
    plan = choose_plan(config, budget)
    assert plan.recompute != "none"
    assert not any(fits(config, fewer, budget) for fewer in with_one_layer_fewer(config, plan))


@given(st.integers(100 * MIB, 20 * GIB))
def test_adaptive_recomputation_fits_whenever_full_recomputation_does(budget):
    config = pipeline("1f1b", parallel__recompute="adaptive")
    full = choose_plan(pipeline("1f1b", parallel__recompute="full"), budget)
    assert fits(config, choose_plan(config, budget), budget) or not fits(config, full, budget)


def test_nothing_is_recomputed_when_everything_fits():
    assert choose_plan(pipeline("1f1b", parallel__recompute="adaptive"), None).recompute == "none"


def test_the_cheaper_recomputation_is_preferred_to_fewer_layers_of_the_other():
    config = pipeline("1f1b", parallel__recompute="adaptive")
    selective = choose_plan(pipeline("1f1b", parallel__recompute="selective"), None)
    budget = least_budget(config, selective)
    assert choose_plan(config, budget).recompute == "selective"
    assert choose_plan(config, budget - 1).recompute == "full"


@pytest.fixture(scope="module")
def chimera_budgets():
    """The least budgets for direct concatenation, halving and doubling, without recomputation."""
    forms = ("chimera", "chimera_halving", "chimera_doubling")
    plans = {form: dataclasses.replace(choose_plan(pipeline("1f1b"), None), schedule=form) for form in forms}
    return {form: least_budget(pipeline(form), plan) for form, plan in plans.items()}


def test_chimera_doubles_if_it_fits_else_halves_and_concatenates_directly_only_where_it_cannot_halve(chimera_budgets):
    direct, halving, doubling = chimera_budgets.values()
    assert halving < direct < doubling
    for budget, form in (
        (doubling, "chimera_doubling"),
        (doubling - 1, "chimera_halving"),
        (direct, "chimera_halving"),
        (halving, "chimera_halving"),
    ):
        assert choose_plan(pipeline("chimera", parallel__recompute="none"), budget).schedule == form


def test_chimera_halves_no_microbatch_of_an_odd_size(chimera_budgets):
    config = pipeline("chimera").with_overrides("parallel.microbatch_size=1")
    doubled = dataclasses.replace(choose_plan(config, None), schedule="chimera_doubling")
    assert choose_plan(config, least_budget(config, doubled) - 1).schedule == "chimera"


def test_a_chimera_form_that_fits_with_recomputation_beats_direct_concatenation(chimera_budgets):
    plan = choose_plan(pipeline("chimera"), chimera_budgets["chimera_halving"] - 1)
    assert (plan.schedule, plan.recompute) == ("chimera_halving", "selective")


def test_one_unit_of_chimera_keeps_the_direct_form():
    config = pipeline("chimera").with_overrides("training.batch_size=16")
    assert choose_plan(config, None).schedule == "chimera"


PASSED_ON = {
    "tp": {"gpus": 2, "tp": 2},
    "pp": {"gpus": 2, "pp": 2},
    "cp": {"gpus": 2, "cp": 2},
    "dp_replicate": {"gpus": 4, "dp_replicate": 2},
    "sequence_parallel": {"gpus": 2, "tp": 2, "sequence_parallel": False},
    "zero_stage": {"gpus": 2, "zero_stage": 1},
    "zero_backend": {"gpus": 2, "zero_backend": "deepspeed"},
    "offload": {"gpus": 2, "zero_backend": "deepspeed", "offload": "optimizer"},
    "schedule": {"gpus": 2, "pp": 2, "schedule": "gpipe"},
    "num_chunks": {"gpus": 2, "pp": 2, "schedule": "interleaved", "num_chunks": 4},
    "microbatch_size": {"microbatch_size": 16},
    "num_microbatches": {"num_microbatches": 32},
    "recompute": {"recompute": "selective"},
    "gradient_compression": {"gpus": 2, "gradient_compression": "bf16"},
    "compile": {"compile": True},
    "attention": {"attention": "math"},
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_a_requested_setting_is_planned(name):
    asked = PASSED_ON[name]
    plan = choose_plan(run_config(**{f"parallel__{key}": value for key, value in asked.items()}), None)
    assert getattr(plan, name) == asked[name] != getattr(ParallelPlan(), name)


def test_every_field_of_a_request_reaches_the_plan():
    planned = {field.name for field in dataclasses.fields(ParallelPlan)}
    # no model has experts to divide yet, and a plan that divides none is refused
    assert set(PASSED_ON) | {"ep", "expert_tp"} == planned & set(ParallelConfig.model_fields)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"gpus": 4, "tp": 4}, "parallel.tp=4 does not divide the 2 key/value heads"),
        ({"gpus": 2, "ep": 2}, "parallel.ep=2"),
        ({"offload": "optimizer"}, "parallel.offload=optimizer needs parallel.zero_backend=deepspeed"),
        ({"gpus": 3, "pp": 3, "schedule": "chimera", "batch_size": 63}, "parallel.pp=3 is odd"),
        ({"gpus": 7, "batch_size": 8}, "training.batch_size=8 cannot be divided among parallel.gpus=7; use 14"),
        ({"gpus": 2, "cp": 2, "seq_len": 1023}, "training.seq_len=1023 is not a multiple of 4"),
    ],
    ids=str,
)
def test_an_impossible_request_is_refused_in_one_line_in_the_users_spelling(asked, named):
    sections = {"batch_size": "training", "seq_len": "training"}
    config = run_config(**{f"{sections.get(key, 'parallel')}__{key}": value for key, value in asked.items()})
    with pytest.raises(PlanError) as error:
        choose_plan(config, None)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
