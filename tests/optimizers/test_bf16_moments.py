"""Moments in bf16 are rounded stochastically: without bias, and with the same bits under every plan."""

import pytest
import torch
from parity import HYBRID, SPARSE, largest_differences
from test_optimizer_rows import everything, step
from tiers import cases, nightly
from torch import nn

from llama_core.config.run import RunConfig, TrainingConfig
from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.optimizers.traits import Trained
from llama_core.planning.plan import ParallelPlan
from llama_core.training import bf16_moments
from llama_core.training.bf16_moments import round_stochastically
from llama_core.training.optimizer import build_optimizer
from llama_core.training.random_bits import BlockOrigin, random_bits

PLANS = {
    "tp2 dp2": ParallelPlan(tp=2, dp_replicate=2, num_microbatches=2),
    "tp2 zero3 dp2": ParallelPlan(tp=2, dp_shard=2, zero_stage=3, num_microbatches=2),
    "pp2 1f1b zero2 dp2": ParallelPlan(pp=2, dp_shard=2, zero_stage=2, num_microbatches=4),
    "cp2": ParallelPlan(cp=2, num_microbatches=2),
    "zero3 dp3": ParallelPlan(dp_shard=3, zero_stage=3, num_microbatches=2),
}
EP_PLANS = {
    "ep2 tp2": ParallelPlan(tp=2, dp_replicate=2, ep=2, num_microbatches=2),
    "ep2 zero3 dp2": ParallelPlan(dp_shard=4, ep=2, zero_stage=3, num_microbatches=2),
}
KEY = torch.tensor(12345, dtype=torch.int32)


def narrow(optimizer="adamw", **settings):
    return TrainingConfig(optimizer=optimizer, moments="bf16", precision="fp32", **settings)


@pytest.mark.parametrize("value", [1.001, -1.001, 3e-5, -7.77e-12, 0.0, 2.0**-126, 255.99])
def test_the_mean_over_all_random_bits_is_the_number_itself(value):
    number = torch.tensor(value, dtype=torch.float32)
    bits = torch.arange(2**16, dtype=torch.int32)
    rounded = torch.empty(2**16, dtype=torch.bfloat16)
    round_stochastically(number.repeat(2**16), bits, rounded)
    assert rounded.double().mean().item() == number.item()
    assert len(rounded.unique()) <= 2, "it is one of the two nearest numbers"


def test_numbers_of_bf16_stay_what_they_are():
    exact = torch.randn(2**16, generator=torch.Generator().manual_seed(1)).bfloat16()
    rounded = torch.empty_like(exact)
    round_stochastically(exact.float(), torch.full((2**16,), 2**16 - 1, dtype=torch.int32), rounded)
    assert torch.equal(rounded, exact)


@pytest.mark.parametrize("shift", [0, 16], ids=["first", "second"])
def test_the_bits_of_a_matrix_are_uniform_and_unrelated_to_their_neighbours(shift):
    size = 1000
    halves = (random_bits(KEY, BlockOrigin(0, 0), torch.Size((size, size))) >> shift) & 0xFFFF
    numbers = halves.double() / 2**16 - 0.5
    deviations = 5 / size  # five standard deviations of a mean of size**2 numbers, each over its own
    assert abs(numbers.mean()) < deviations * 12**-0.5
    assert abs(12 * (numbers**2).mean() - 1) < deviations
    for one, other in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        assert abs(12 * (one * other).mean()) < deviations
    every_bit = ((halves[..., None] >> torch.arange(16)) & 1).double().mean((0, 1))
    assert (every_bit - 0.5).abs().max() < deviations / 2


def test_the_bits_of_a_block_are_those_of_the_whole_and_other_keys_have_others():
    whole = random_bits(KEY, BlockOrigin(0, 0), torch.Size((40, 50)))
    assert torch.equal(random_bits(KEY, BlockOrigin(7, 9), torch.Size((20, 30))), whole[7:27, 9:39])
    assert (random_bits(KEY + 1, BlockOrigin(0, 0), whole.shape) == whole).float().mean() < 0.01


def test_a_second_moment_falls_as_it_should_where_the_nearest_number_would_stay():
    """A factor of 0.999 changes a number of bf16 by less than half of its last bit."""
    weight = nn.Linear(256, 256, bias=False)
    optimizer = build_optimizer(weight, narrow(beta2=0.999))
    step(optimizer, 1.0)
    first = optimizer.state[weight.weight]["exp_avg_sq"].float().mean().item()
    assert torch.tensor(0.999 * first).bfloat16() == torch.tensor(first).bfloat16()
    for _ in range(100):
        step(optimizer, 0.0)
    last = optimizer.state[weight.weight]["exp_avg_sq"].float().mean().item()
    assert last == pytest.approx(0.999**100 * 0.001, rel=1e-3)


def test_the_update_itself_is_that_of_adamw(model):
    """The first one comes from moments that are exact in bf16: zeros."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights = []
    for moments in ("bf16", "fp32"):
        model.load_state_dict(before)
        step(build_optimizer(model, narrow().model_copy(update={"moments": moments})), 0.5)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_states_are_those_of_the_row(optimizer, model):
    training = narrow(optimizer)
    built = build_optimizer(model, training)
    step(built, 1.0)
    kind = OPTIMIZERS.named(optimizer).with_moments("bf16")
    for name, parameter in model.named_parameters():
        sizes = {state: tensor.nbytes / parameter.numel() for state, tensor in built.state[parameter].items()}
        sizes.pop("step", None)
        assert sizes == {state.name: state.num_bytes for state in kind.updates(name, parameter.ndim).states}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_skipped_step_changes_nothing(optimizer, model):
    built = build_optimizer(model, narrow(optimizer))
    step(built, 6.0, scale=2.0)
    before = everything(model, built)
    step(built, torch.nan, skipped=True)
    torch.testing.assert_close(everything(model, built), before, rtol=0, atol=0)


def test_chunks_of_any_size_and_runs_of_one_seed_round_alike(model, monkeypatch):
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def moments(seed):
        model.load_state_dict(before)
        optimizer = build_optimizer(model, narrow(seed=seed))
        step(optimizer, 0.3)
        return torch.cat([state["exp_avg"].flatten() for state in optimizer.state.values()])

    whole = moments(seed=1)
    monkeypatch.setattr(bf16_moments, "CHUNK_ELEMENTS", 1)
    assert torch.equal(moments(seed=1), whole)
    assert not torch.equal(moments(seed=2), whole)


@pytest.mark.parametrize("plan", cases(PLANS, narrow={"tp2 zero3 dp2"}))
def test_a_plan_matches_one_process(plan):
    differences = largest_differences(plan, moments="bf16")
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", [nightly("adamw"), "muon"])
@pytest.mark.parametrize("plan", cases(EP_PLANS, narrow={"ep2 tp2"}))
def test_experts_round_as_on_one_process(plan, optimizer):
    differences = largest_differences(plan, spec=SPARSE, optimizer=optimizer, moments="bf16")
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("plan", cases({"tp2 zero3 dp2": PLANS["tp2 zero3 dp2"]}, narrow=set()))
def test_experts_beside_adapters_round_as_on_one_process(plan):
    differences = largest_differences(plan, spec=HYBRID, moments="bf16")
    assert max(differences.values()) < 1e-8, differences


def test_a_run_holds_four_bytes_less_per_parameter_of_adamw():
    for optimizer, trained in (("adamw", Trained(1, 1)), ("muon", Trained(0, 1))):
        wide = OPTIMIZERS.named(optimizer)
        assert wide.states_of(trained) - wide.with_moments("bf16").states_of(trained) == 4 * sum(trained)
    config = RunConfig.from_mapping({"model": "llama3_8b"}, ["training.moments=bf16"])
    assert config.checkpoint_bytes == 8 * config.spec.num_parameters
