"""Balance biases spread tokens over experts without a loss, alike under every plan; only steps that count move them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from distributed import run_ranks
from parity import UNTIED, draw_adapters, native_engine, own_microbatches
from tiers import wide

from llama_core.config.strategy import LoRA, MoE
from llama_core.models.layers import local_part
from llama_core.models.llama import named_weights
from llama_core.models.moe import mixtures
from llama_core.parallel.measured import measured, measured_totals
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.retention import Retention
from llama_core.training.checkpoint import Checkpointer
from llama_core.training.engine import train_step

RATE = 0.03
BALANCED = replace(
    UNTIED,
    num_layers=2,
    moe=MoE(
        num_experts=8,
        experts_per_token=2,
        expert_size=16,
        gates="sigmoid_chosen",
        biases=True,
        balance_bias=True,
        balance_bias_rate=RATE,
        balance_loss_coefficient=0,
        z_loss_coefficient=0,
    ),
)
ALONE = ParallelPlan(num_microbatches=4)


def with_experts(**settings):
    return replace(BALANCED, moe=BALANCED.moe.model_copy(update=settings))


def unbalanced(plan, spec=BALANCED, dtype=torch.float64):
    """Return an engine whose routers prefer some experts."""
    engine = native_engine(plan, spec, dtype, weight_dtype=dtype)
    draw_adapters(engine.model)  # biases of routers among others
    for mixture in mixtures(engine.model):
        local_part(mixture.router.weight.detach()).mul_(10)
    return engine


def take(engine, plan, step):
    return train_step(engine, own_microbatches(step, plan), learning_rate=1e-3, max_grad_norm=1.0)


def biases(engine):
    found = {name: weight for name, weight in named_weights(engine.model) if name.endswith("balance_bias")}
    assert all(bias.dtype == torch.float32 for bias in found.values())
    return {name: local_part(bias).numpy().copy() for name, bias in found.items()}


def trained(plan, num_steps=3, spec=BALANCED, dtype=torch.float64):
    """Return the load of the busiest expert in each step, and the biases at the end by name."""
    engine = unbalanced(plan, spec, dtype)
    loads = []
    for step in range(num_steps):
        take(engine, plan, step)
        values = measured(engine.model, measured_totals(engine.model, plan)).values
        loads.append(values["expert_load"])
    for name, bias in biases(engine).items():
        recorded = values[f"balance_bias/layer_{name.split('.')[1]}"]
        assert recorded == pytest.approx(np.abs(bias).max(), rel=1e-6)
    return loads, biases(engine)


def test_experts_are_balanced_without_a_loss():
    balanced, found = trained(ALONE, 16)
    unmoved, zeros = trained(ALONE, 16, with_experts(balance_bias_rate=0))
    assert balanced[0] == unmoved[0] > 3.5
    assert np.mean(balanced[-4:]) < 1.7
    assert np.mean(unmoved[-4:]) > 2.8
    assert all(bias.any() for bias in found.values())
    assert not any(bias.any() for bias in zeros.values())


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(microbatch_size=4),
        ParallelPlan(num_microbatches=4, recompute="full"),
        ParallelPlan(num_microbatches=2, microbatch_size=2, recompute="selective"),
    ],
    ids=["one microbatch", "full recompute", "selective recompute"],
)
def test_how_a_step_is_cut_or_recomputed_changes_no_bias(plan):
    loads, found = trained(plan)
    expected_loads, expected = trained(ALONE)
    assert loads == expected_loads
    np.testing.assert_equal(found, expected)


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(dp_replicate=2, ep=2, num_microbatches=2),
        wide(ParallelPlan(dp_replicate=2, num_microbatches=2)),
        wide(ParallelPlan(pp=2, num_microbatches=4)),
        wide(ParallelPlan(pp=2, schedule="chimera", num_microbatches=4)),
        wide(ParallelPlan(cp=2, num_microbatches=4)),
        wide(ParallelPlan(tp=2, expert_tp=1, ep=2, num_microbatches=4)),
    ],
    ids=["ep2", "dp2", "pp2", "pp2 chimera", "cp2", "ep2 over tp2"],
)
def test_every_rank_moves_its_biases_by_the_tokens_of_all(plan):
    expected_loads, expected = trained(ALONE)
    found = {}
    for loads, own in run_ranks(plan.world_size, trained, plan):
        assert loads == expected_loads
        for name, bias in own.items():
            np.testing.assert_equal(bias, expected[name])
        found |= own
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_biases_are_held_in_fp32_and_move_by_the_rate(dtype):
    _, found = trained(ALONE, 1, dtype=dtype)
    assert {round(abs(float(number)), 6) for bias in found.values() for number in bias} <= {0.0, RATE}


def test_a_skipped_step_and_an_evaluation_move_no_bias():
    engine = unbalanced(ALONE)
    take(engine, ALONE, 0)
    before = biases(engine)
    loss = engine.forward_backward(own_microbatches(1, ALONE), loss_scale=1.0, on_phase=lambda phase: None)
    skipped = engine.update(
        loss * torch.nan, learning_rate=1e-3, max_grad_norm=1.0, loss_scale=1.0, on_phase=lambda phase: None
    )
    assert not skipped.updated
    engine.evaluate(own_microbatches(2, ALONE))
    np.testing.assert_equal(biases(engine), before)
    take(engine, ALONE, 1)
    assert any((bias != before[name]).any() for name, bias in biases(engine).items())


def test_the_experts_of_a_prediction_module_are_balanced_too():
    _, found = trained(ALONE, 1, replace(BALANCED, mtp_layers=1))
    assert found["layers.2.feed_forward.balance_bias"].any()


def test_biases_move_beside_adapters_and_are_no_parameters():
    spec = replace(BALANCED, lora=LoRA(lora_rank=4))
    _, found = trained(ALONE, 1, spec)
    assert all(bias.any() for bias in found.values())
    assert spec.num_parameters == replace(spec, moe=with_experts(balance_bias=False).moe).num_parameters
    assert not any("balance_bias" in name for name in spec.trained_in_full)


@torch.no_grad()
def spoil(engine):
    """Set all that a checkpoint holds to NaN, from which no run can continue."""
    spec = engine.model.spec
    for name, weight in named_weights(engine.model):
        if name in spec.saved_in_full | spec.adapter_shapes.keys():
            weight.fill_(torch.nan)


def saved(path, plan, spec, first, last):
    """Go on from the newest checkpoint, if any, and save one; return the biases before and after, and all weights."""
    engine = unbalanced(plan, spec)
    if first:
        spoil(engine)
    checkpointer = Checkpointer(RunDirectory(path), keep=Retention(2))
    checkpointer.load(engine)
    loaded = biases(engine)
    for step in range(first, last):
        take(engine, plan, step)
    checkpointer.save(last, engine, {})
    checkpointer.finish()
    whole = {name: local_part(weight.detach()).numpy().copy() for name, weight in named_weights(engine.model)}
    return loaded, biases(engine), whole


def new_run(path):
    run = RunDirectory(path)
    run.create()
    run.config.write_text("model: test\n")
    return run.path


@pytest.mark.parametrize("spec", [BALANCED, replace(BALANCED, lora=LoRA(lora_rank=4))], ids=["full", "adapters"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, spec):
    _, _, expected = saved(new_run(tmp_path / "whole"), ALONE, spec, 0, 4)
    halves = new_run(tmp_path / "halves")
    _, halfway, _ = saved(halves, ALONE, spec, 0, 2)
    loaded, _, found = saved(halves, ALONE, spec, 2, 4)
    np.testing.assert_equal(loaded, halfway)
    np.testing.assert_equal(found, expected)


@pytest.mark.wide
def test_another_plan_resumes_with_the_biases(tmp_path):
    path = new_run(tmp_path / "run")
    sharded = ParallelPlan(dp_shard=4, ep=2, zero_stage=3)
    _, before, _ = run_ranks(4, saved, path, sharded, BALANCED, 0, 2)[0]
    loaded, before_pipeline, _ = saved(path, ALONE, BALANCED, 2, 3)
    np.testing.assert_equal(loaded, before)
    pipeline = ParallelPlan(pp=2, tp=2, num_microbatches=4)
    found = {}
    for of_rank, _, _ in run_ranks(4, saved, path, pipeline, BALANCED, 3, 4):
        found |= of_rank
    np.testing.assert_equal(found, before_pipeline)
