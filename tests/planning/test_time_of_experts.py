"""What experts add to the time of a step."""

from dataclasses import replace

import pytest

from llama_core.config.hardware import gpu_spec
from llama_core.config.models import model_spec
from llama_core.config.strategy import MoE
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.compute import StageCompute
from llama_core.planning.time.links import COLLECTIVE_SHARE
from llama_core.planning.time.step_time import step_time
from llama_core.planning.work import Work

DENSE = model_spec("llama3_8b")
H100 = gpu_spec("h100")


def sparse(num_experts=8, experts_per_token=2, moe_layers=None):
    return replace(DENSE, moe=MoE(num_experts=num_experts, experts_per_token=experts_per_token, moe_layers=moe_layers))


def compute(spec, plan=None):
    plan = plan or ParallelPlan(dp_shard=8, zero_stage=3)
    return StageCompute(Work(spec, plan, 8192, "bf16"), H100)


def seconds(spec, plan):
    return step_time(Work(spec, plan, 8192, "bf16"), H100)


def test_a_token_costs_the_products_of_its_experts_however_many_there_are():
    dense, one, two = (
        compute(spec).layer("none").forward
        for spec in (DENSE, sparse(experts_per_token=1), sparse(experts_per_token=2))
    )
    feed_forward = 2 * 8192 * sparse().expert_parameters / (H100.bf16_flops * H100.matmul_share)
    assert dense < one < two
    assert two - one == pytest.approx(feed_forward, rel=0.35)
    assert compute(sparse(num_experts=64)).layer("none").forward < 1.3 * two


def test_only_sparse_layers_cost_more():
    dense, some, every = (
        seconds(spec, ParallelPlan(dp_shard=64, zero_stage=3)).parts["compute"]
        for spec in (DENSE, sparse(moe_layers=4), sparse())
    )
    assert some - dense == pytest.approx((every - dense) / 4, rel=1e-6)


def test_expert_parallel_ranks_send_tokens_and_gather_fewer_weights():
    alone, divided = (seconds(sparse(), ParallelPlan(dp_shard=64, zero_stage=3, ep=ep)).parts for ep in (1, 8))
    assert "ep" not in alone
    assert divided["ep"] > 0
    assert divided["dp"] < alone["dp"] / 2


def test_between_nodes_two_steps_cost_less_than_a_copy_for_every_expert_and_more_for_one_expert():
    for experts_per_token, is_faster in ((8, True), (1, False)):
        spec = sparse(num_experts=64, experts_per_token=experts_per_token)
        direct, two_steps = (
            seconds(spec, ParallelPlan(dp_shard=64, zero_stage=3, ep=16, ep_nodes=nodes)).parts["ep"]
            for nodes in (1, 2)
        )
        assert (two_steps < direct) == is_faster


def test_a_rank_that_sends_to_other_nodes_has_one_network_card():
    """All that leaves a node does so through the cards of its ranks, each of which sends as much."""
    fast = replace(H100, network_bandwidth=H100.network_bandwidth * 2)
    plan = ParallelPlan(dp_shard=64, zero_stage=3, ep=64)
    slow, faster = (
        step_time(Work(sparse(num_experts=64), plan, 8192, "bf16"), device).parts["ep"] for device in (H100, fast)
    )
    assert slow / faster == pytest.approx(2, rel=0.05)
    # two copies of every token, there and back, forward and backward, in 32 layers; 7 of 8 leave the node
    leaving = 2 * 8192 * DENSE.hidden_size * 2 * 7 / 8
    assert slow == pytest.approx(32 * 4 * leaving / (H100.network_bandwidth * COLLECTIVE_SHARE), rel=0.05)
