"""Data parallelism: the memory of each ZeRO stage, gradient compression and narrow dtypes."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from parity import UNTIED, largest_differences, native_engine, own_microbatches
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion

from llama_core.config.models import model_spec
from llama_core.config.strategy import LoRA, MoE
from llama_core.errors import EnvironmentMismatchError
from llama_core.parallel import zero as data
from llama_core.parallel.apply import ParallelModel
from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import train_step
from llama_core.training.optimizer import LossScale

FP32_BYTES = 4


def held_bytes(tensors):
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def held_in_a_step(plan):
    """Return the bytes of weights and gradients this rank holds at each phase of a step, and of moments after it."""
    engine = native_engine(plan)
    shards = list(engine.model.parameters())
    held = []

    def look(phase):
        registered = list(engine.model.parameters())  # the whole weights while they are gathered
        both = {id(parameter): parameter for parameter in (*shards, *registered)}.values()
        held.append((phase, held_bytes(registered), held_bytes([parameter.grad for parameter in both])))

    train_step(engine, own_microbatches(0, plan), learning_rate=1e-3, max_grad_norm=1.0, on_phase=look)
    look("after")
    moments = [state[key] for state in engine.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    root = held_bytes([*engine.model.norm.parameters(), *engine.model.output.parameters()]) if engine.model.norm else 0
    return held, held_bytes(moments), root


ZERO_PLANS = {
    stage: ParallelPlan(
        **({"dp_shard": 2} if stage else {"dp_replicate": 2}), zero_stage=stage, num_microbatches=2, microbatch_size=2
    )
    for stage in range(4)
}


@pytest.mark.parametrize("stage", ZERO_PLANS)
def test_every_zero_stage_holds_its_share_between_and_within_steps(stage):
    whole = FP32_BYTES * UNTIED.num_parameters
    for held, moments, root in run_ranks(2, held_in_a_step, ZERO_PLANS[stage]):
        phases = [phase for phase, _, _ in held]
        assert phases == ["forward", "backward", "forward", "backward", "optimizer", "after"]
        shard = whole // 2
        sharded_between = whole if stage == 0 else shard
        # only the final norm and the head stay whole from their forward to their backward, which follows at once
        in_backward = {0: whole, 1: whole, 2: whole, 3: shard + root}[stage]
        before_second = {0: whole, 1: whole, 2: whole, 3: shard}[stage]
        assert [weights for _, weights, _ in held] == [
            sharded_between,
            in_backward,
            before_second,
            in_backward,
            sharded_between,
            sharded_between,
        ]
        after_first = whole if stage < 2 else shard
        at_update = whole if stage == 0 else shard
        assert [gradients for _, _, gradients in held] == [0, 0, after_first, after_first, at_update, 0]
        assert moments == 2 * at_update


def losses_with(plan, steps):
    engine = native_engine(plan)
    return [
        float(train_step(engine, own_microbatches(0, plan), learning_rate=1e-2, max_grad_norm=1.0).loss)
        for _ in range(steps)
    ]


def losses_with_early_powersgd(plan, steps):
    data.POWERSGD_START_STEP = 2
    return losses_with(plan, steps)


def test_bf16_gradients_between_copies_change_losses_only_by_rounding():
    plain = ParallelPlan(dp_replicate=2, num_microbatches=2)
    compressed = ParallelPlan(dp_replicate=2, num_microbatches=2, gradient_compression="bf16")
    exact, rounded = (run_ranks(2, losses_with, plan, 10)[0] for plan in (plain, compressed))
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=2**-7)


def test_bf16_gradients_between_shards_change_losses_only_by_rounding():
    plain = ParallelPlan(dp_shard=2, zero_stage=2, num_microbatches=2)
    compressed = ParallelPlan(dp_shard=2, zero_stage=2, num_microbatches=2, gradient_compression="bf16")
    exact, rounded = (run_ranks(2, losses_with, plan, 10)[0] for plan in (plain, compressed))
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=2**-7)  # the sum is rounded too


def test_powersgd_sends_low_rank_gradients_and_still_trains():
    plan = ParallelPlan(dp_replicate=2, num_microbatches=2, gradient_compression="powersgd")
    exact = run_ranks(2, losses_with, ParallelPlan(dp_replicate=2, num_microbatches=2), 20)[0]
    compressed = run_ranks(2, losses_with_early_powersgd, plan, 20)[0]
    assert compressed[:2] == pytest.approx(exact[:2], rel=1e-6)
    assert compressed != pytest.approx(exact, rel=1e-6)
    assert compressed[-1] < 0.9 * compressed[0]


def steps_around_an_overflow(plan):
    """Return whether each of five steps with early PowerSGD updated; the third has infinite gradients."""
    data.POWERSGD_START_STEP = 2
    engine, batches = native_engine(plan), own_microbatches(0, plan)
    scales = (1.0, 1.0, math.inf, 1.0, 1.0)
    return [
        bool(train_step(engine, batches, learning_rate=1e-2, max_grad_norm=1.0, loss_scale=scale).updated)
        for scale in scales
    ]


def test_powersgd_forgets_an_overflow():
    plan = ParallelPlan(dp_replicate=2, num_microbatches=2, gradient_compression="powersgd")
    assert run_ranks(2, steps_around_an_overflow, plan) == [[True, True, False, True, True]] * 2


def one_step(plan, compute_dtype, loss_scale):
    engine = native_engine(plan, UNTIED, compute_dtype)
    result = train_step(engine, own_microbatches(0, plan), learning_rate=1e-3, max_grad_norm=1.0, loss_scale=loss_scale)
    return float(result.loss), float(result.grad_norm), bool(result.updated)


@pytest.mark.parametrize("plan", [ZERO_PLANS[0], ZERO_PLANS[3]], ids=["dp2", "zero3"])
def test_fp16_with_a_scaled_loss_is_near_fp32(plan):
    (exact_loss, exact_norm, _), _ = run_ranks(2, one_step, plan, torch.float32, 1.0)
    for loss, norm, updated in run_ranks(2, one_step, plan, torch.float16, 1024.0):
        assert updated
        assert loss == pytest.approx(exact_loss, rel=2**-9)
        assert norm == pytest.approx(exact_norm, rel=2**-9)


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", [{"dp_shard": 2, "zero_stage": 1}, {"dp_replicate": 2}])
def test_a_backward_before_the_first_forward_of_a_ranks_other_stage_trains_in_16_bits(sharding):
    plan = ParallelPlan(pp=2, schedule="chimera_halving", microbatch_size=2, **sharding)
    exact_loss, exact_norm, _ = run_ranks(4, one_step, plan, torch.float32, 1.0)[0]
    for loss, norm, updated in run_ranks(4, one_step, plan, torch.bfloat16, 1.0):
        assert updated
        assert loss == pytest.approx(exact_loss, rel=2**-7)
        assert norm == pytest.approx(exact_norm, rel=2**-6)


def two_steps_spoiled_on_one_rank(plan):
    engine = native_engine(plan)
    gradients = engine.parallel.gradients
    complete = gradients.complete

    def spoil():
        complete()
        if dist.get_rank() == 1:
            next(engine.model.parameters()).grad.to_local()[:] = math.inf

    gradients.complete = spoil
    results = [train_step(engine, own_microbatches(0, plan), learning_rate=1.0, max_grad_norm=1.0) for _ in range(2)]
    return [(float(result.loss), bool(result.updated)) for result in results]


def test_an_overflow_on_one_rank_leaves_all_weights_unchanged():
    for first, second in run_ranks(2, two_steps_spoiled_on_one_rank, ZERO_PLANS[3]):
        assert first == second
        assert not first[1]


def test_the_loss_scale_halves_after_an_overflow_and_doubles_after_a_while_without():
    scale = LossScale.for_dtype(torch.float16)
    first = scale.value
    scale.update(finite=False)
    assert scale.value == first / 2
    for _ in range(scale.growth_interval):
        scale.update(finite=True)
    assert scale.value == first
    restored = LossScale.for_dtype(torch.float16)
    scale.update(finite=False)
    restored.load_state_dict(scale.state_dict())
    assert restored == scale


def test_the_loss_is_not_scaled_in_dtypes_with_the_range_of_fp32():
    scale = LossScale.for_dtype(torch.bfloat16)
    scale.update(finite=False)
    assert scale.value == 1.0


@pytest.mark.wide
def test_compiled_blocks_match_plain_ones():
    plan = ParallelPlan(dp_shard=2, zero_stage=2, num_microbatches=2, compile=True)
    differences = largest_differences(plan)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize(
    ("traits", "plan", "asked"),
    [
        ({"moe": MoE(num_experts=4)}, {"ep": 2}, "parallel.ep=2"),
        ({"lora": LoRA(base="nf4")}, {}, "lora.base=nf4 on several data-parallel ranks"),
    ],
)
def test_what_an_older_torch_cannot_shard_is_refused_in_a_line(traits, plan, asked, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    spec = replace(model_spec("tiny_llama3_50m"), num_layers=2, **traits)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        plan = ParallelPlan(dp_shard=2, zero_stage=3, **plan)
        with pytest.raises(EnvironmentMismatchError) as refused:
            ParallelModel(spec, plan, device=torch.device("cpu"), compute_dtype=torch.bfloat16)
    finally:
        dist.destroy_process_group()
    assert str(refused.value).startswith(f"{asked} needs torch 2.13 or newer, but 2.11.0+cu130 is installed")
