import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.run import RunConfig
from llama_core.planning.auto import MAX_MICROBATCH_TOKENS, choose_plan
from llama_core.planning.memory import FILL_LIMIT, estimate_memory
from llama_core.units import GIB


def run_config(**settings):
    return RunConfig.from_mapping(
        {"model": "tiny_llama3_50m", "training": {"precision": "bf16", "batch_size": 64}},
        [f"{key.replace('__', '.')}={value}" for key, value in settings.items()],
    )


def peak_bytes(config, plan):
    return estimate_memory(
        config.spec, plan, seq_len=config.seq_len, precision="bf16", document_mask=config.data.document_mask
    ).peak_bytes


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


def test_one_sequence_is_planned_even_where_nothing_fits():
    assert choose_plan(run_config(), 1).microbatch_size == 1


def test_a_microbatch_asked_for_is_taken_whatever_the_memory():
    assert choose_plan(run_config(parallel__microbatch_size=32), 1).microbatch_size == 32


def test_a_microbatch_grows_no_further_than_speed_does():
    plan = choose_plan(run_config(), None)
    assert plan.microbatch_size * 2048 == MAX_MICROBATCH_TOKENS


def test_devices_share_the_states_unless_zero_is_switched_off():
    sharded = choose_plan(run_config(parallel__gpus=8), None)
    replicated = choose_plan(run_config(parallel__gpus=8, parallel__zero_stage=0), None)
    assert (sharded.dp_shard, sharded.effective_zero_stage) == (8, 3)
    assert (replicated.dp_replicate, replicated.effective_zero_stage) == (8, 0)
