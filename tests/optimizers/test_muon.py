"""Muon is what torch's does with a matrix, and the same wherever the matrices are."""

import pytest
import torch
from parity import ADAPTED, DORA, HYBRID, SPARSE, TIED, largest_differences
from tiers import cases
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core.config.parameter_counts import trained_parameters
from llama_core.config.run import RunConfig, TrainingConfig
from llama_core.optimizers import assignment
from llama_core.optimizers.muon import MUON
from llama_core.planning.plan import ParallelPlan
from llama_core.training import muon
from llama_core.training.optimizer import build_optimizer

TRAINING = TrainingConfig(optimizer="muon", learning_rate=0.02, weight_decay=0.1, precision="fp32")
PLANS = {
    "dp3": ParallelPlan(dp_replicate=3, num_microbatches=2),
    "hsdp2x2": ParallelPlan(dp_replicate=2, dp_shard=2, zero_stage=3, num_microbatches=2),
    "zero3 dp3": ParallelPlan(dp_shard=3, zero_stage=3, num_microbatches=2),
    "tp2 dp2": ParallelPlan(tp=2, dp_replicate=2, num_microbatches=2),
    "tp2 zero3 dp2": ParallelPlan(tp=2, dp_shard=2, zero_stage=3, num_microbatches=2),
    "pp2 1f1b zero2 dp2": ParallelPlan(pp=2, dp_shard=2, zero_stage=2, num_microbatches=4),
    "pp2 zbv": ParallelPlan(pp=2, schedule="zbv", num_microbatches=4),
    "pp2 chimera zero2 dp2": ParallelPlan(pp=2, schedule="chimera", dp_shard=2, zero_stage=2, num_microbatches=4),
    "cp2": ParallelPlan(cp=2, num_microbatches=2),
}
EP_PLANS = {
    "ep2 tp2": ParallelPlan(tp=2, dp_replicate=2, ep=2, num_microbatches=2),
    "ep2 zero3 dp2": ParallelPlan(dp_shard=4, ep=2, zero_stage=3, num_microbatches=2),
    "ep2 over tp2 zero3": ParallelPlan(tp=2, expert_tp=1, ep=2, dp_shard=2, zero_stage=3, num_microbatches=2),
    "hsdp2x2": PLANS["hsdp2x2"],
    "zero3 dp3": PLANS["zero3 dp3"],
}


class Layers(nn.Module):
    """Matrices inside layers, tall and wide, with a vector, and one outside."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24, bias=False))})
        self.output = nn.Linear(24, 16, bias=False)


def step(optimizer, model):
    for parameter in model.parameters():
        generator = torch.Generator().manual_seed(parameter.numel())
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Layers()


def test_matrices_inside_layers_change_as_torchs_muon_changes_them(model):
    torch.manual_seed(0)
    theirs = Layers()
    matrices = [parameter for parameter in theirs.layers.parameters() if parameter.ndim > 1]
    expected = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    ours = build_optimizer(model, TRAINING.model_copy(update={"precision": "bf16"}))
    for _ in range(3):
        step(ours, model)
        step(expected, theirs)
    for layer, other in zip(model.layers["0"], theirs.layers["0"], strict=True):
        torch.testing.assert_close(layer.weight, other.weight, rtol=0, atol=1e-4)


def test_everything_else_changes_as_adamw_changes_it(model):
    torch.manual_seed(0)
    theirs = Layers()
    ours = build_optimizer(model, TRAINING)
    expected = build_optimizer(theirs, TRAINING.model_copy(update={"optimizer": "adamw"}))
    for _ in range(3):
        for optimizer, one in ((ours, model), (expected, theirs)):
            step(optimizer, one)
    assert torch.equal(model.output.weight, theirs.output.weight)
    assert torch.equal(model.layers["0"][0].bias, theirs.layers["0"][0].bias)
    assert not torch.equal(model.layers["0"][0].weight, theirs.layers["0"][0].weight)


@pytest.mark.parametrize("shape", [(3, 24, 40), (2, 40, 24), (1, 16, 16)], ids=str)
def test_an_orthogonalised_matrix_keeps_its_singular_vectors_and_has_values_around_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for matrix, result in zip(matrices, muon.orthogonalised(list(matrices)), strict=True):
        u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
        turned = u.T @ result @ vh.T
        kept = values > 0.1 * values.max()  # five iterations do not lift the smallest
        torch.testing.assert_close(turned, torch.diag(turned.diagonal()), atol=1e-9, rtol=0)
        assert turned.diagonal()[kept].min() > 0.6
        assert turned.diagonal().max() < 1.25


def test_a_rate_of_its_own_is_that_of_the_matrices_alone(model):
    groups = build_optimizer(model, TRAINING.model_copy(update={"muon_lr": 0.08})).param_groups
    rates = {group["updated_by"]: group.get("rate", 1.0) for group in groups}
    assert rates == {"muon": 4.0, "adamw": 1.0}


@pytest.mark.parametrize("plan", cases(PLANS, narrow={"tp2 zero3 dp2", "pp2 zbv"}))
def test_a_plan_matches_one_process(plan):
    differences = largest_differences(plan, optimizer="muon")
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.wide
@pytest.mark.parametrize("plan", cases(EP_PLANS, narrow={"ep2 tp2"}))
def test_experts_are_matrices_of_their_own(plan):
    differences = largest_differences(plan, spec=SPARSE, optimizer="muon")
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("spec", [ADAPTED, DORA, HYBRID, TIED], ids=["lora", "dora", "hybrid", "tied"])
@pytest.mark.parametrize("plan", cases({"tp2 zero3 dp2": PLANS["tp2 zero3 dp2"]}, narrow=set()))
def test_what_a_strategy_trains_matches_one_process(plan, spec):
    differences = largest_differences(plan, spec=spec, optimizer="muon")
    assert max(differences.values()) < 1e-8, differences


def test_owners_have_equal_work_to_the_last_matrix():
    work = (9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)
    owner_of = assignment.dealt(work, 3)
    loads = [sum(size for size, owner in zip(work, owner_of, strict=True) if owner == rank) for rank in range(3)]
    assert max(loads) - min(loads) <= 2.0


def test_many_small_rounds_are_the_same_as_one():
    plan = ParallelPlan(dp_shard=2, zero_stage=3, num_microbatches=2)
    differences = largest_differences(plan, optimizer="muon", fault=_small_rounds)
    assert max(differences.values()) < 1e-8, differences


def _small_rounds():
    assignment.ROUND_ELEMENTS = 1


def test_a_run_with_muon_holds_four_bytes_per_parameter_of_its_matrices():
    config = RunConfig.from_mapping({"model": "llama3_8b"}, ["training.optimizer=muon"])
    matrices, others = trained_parameters(config.spec)
    assert others == 2 * 128256 * 4096 + (2 * 32 + 1) * 4096
    assert config.checkpoint_bytes == 8 * matrices + 12 * others
    assert MUON.states_of(trained_parameters(config.spec)) == 4 * matrices + 8 * others


class Launches(TorchDispatchMode):
    """Counts the operators that launch a kernel on CUDA."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        makes_view = isinstance(result, torch.Tensor) and result._is_view()
        self.number += not makes_view and function.overloadpacket.__name__ not in {"unbind", "empty", "zeros_like"}
        return result


def launches_of_an_update(num_layers):
    model = nn.Module()
    model.layers = nn.ModuleDict({str(layer): nn.Linear(8, 8, bias=False) for layer in range(num_layers)})
    optimizer = build_optimizer(model, TRAINING.model_copy(update={"precision": "bf16"}))
    optimizer.grad_scale = torch.ones(())
    optimizer.found_inf = torch.zeros(())
    step(optimizer, model)
    with Launches() as launches:
        optimizer.step()
    return launches.number


def test_a_further_matrix_of_a_shape_takes_five_launches():
    """Its gradient is cleared if it is not finite, both moving averages, the cast and the change."""
    assert launches_of_an_update(5) - launches_of_an_update(2) == 3 * 5
