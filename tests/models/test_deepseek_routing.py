"""DeepSeek-V3's routing is that of transformers, gradients included."""

from dataclasses import replace

import pytest
import torch
from parity import UNTIED
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from llama_core.config.strategy import MoE
from llama_core.models.moe import MixtureOfExperts, choose_experts

ROUTING = MoE(
    num_experts=16,
    experts_per_token=4,
    expert_size=24,
    shared_size=48,
    gates="sigmoid_chosen",
    gate_scale=2.5,
    expert_groups=4,
    groups_per_token=2,
    balance_bias=True,
)
WITHOUT = {
    "nothing": {},
    "groups": {"expert_groups": 1, "groups_per_token": 1},
    "division by the sum": {"gates": "sigmoid"},
    "a scale": {"gate_scale": 1.0},
    "biases": {"balance_bias": False},
}
SHAPE = (2, 64, UNTIED.hidden_size)


def theirs_of(moe):
    sizes = {"hidden_size": UNTIED.hidden_size, "moe_intermediate_size": moe.expert_size, "n_routed_experts": 16}
    groups = {"n_group": moe.expert_groups, "topk_group": moe.groups_per_token}
    config = DeepseekV3Config(
        **sizes,
        **groups,
        n_shared_experts=moe.shared_size // moe.expert_size,
        num_experts_per_tok=moe.experts_per_token,
        routed_scaling_factor=moe.gate_scale,
        norm_topk_prob=moe.gates == "sigmoid_chosen",
    )
    return DeepseekV3MoE(config)


def both(moe):
    """Return our mixture and theirs, with the same weights."""
    ours = MixtureOfExperts(replace(UNTIED, moe=moe), moe)
    theirs = theirs_of(moe)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (*ours.parameters(), *ours.buffers()):
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        if moe.balance_bias:
            theirs.gate.e_score_correction_bias.copy_(ours.balance_bias)
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat((ours.experts.w1.weight, ours.experts.w3.weight), dim=1))
        theirs.experts.down_proj.copy_(ours.experts.w2.weight)
        theirs.shared_experts.gate_proj.weight.copy_(ours.shared.w1.weight)
        theirs.shared_experts.down_proj.weight.copy_(ours.shared.w2.weight)
        theirs.shared_experts.up_proj.weight.copy_(ours.shared.w3.weight)
    return ours, theirs


@pytest.mark.parametrize("changes", WITHOUT.values(), ids=WITHOUT)
def test_outputs_and_gradients_are_those_of_transformers(changes):
    ours, theirs = both(ROUTING.model_copy(update=changes))
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), requires_grad=True)
    upstream = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    out, expected = ours(x), theirs(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out, (x, ours.router.weight, ours.experts.w2.weight), upstream)
    wanted = torch.autograd.grad(expected, (x, theirs.gate.weight, theirs.experts.down_proj), upstream)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_groups_decide_which_experts_are_chosen():
    logits = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(3))
    chosen = choose_experts(logits, ROUTING)[1]
    of_groups = (chosen // 4).flatten(0, 1)
    assert max(len(set(groups.tolist())) for groups in of_groups) == ROUTING.groups_per_token
    without = choose_experts(logits, ROUTING.model_copy(update=WITHOUT["groups"]))[1]
    assert not torch.equal(chosen.sort().values, without.sort().values)


def test_a_balance_bias_decides_who_is_chosen_and_not_the_gates():
    logits = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(3))
    alone = ROUTING.model_copy(update=WITHOUT["groups"])
    _, unbiased = choose_experts(logits, alone, torch.zeros(16))
    gates, chosen = choose_experts(logits, alone, torch.arange(16.0))
    assert set(chosen.unique().tolist()) == {12, 13, 14, 15} != set(unbiased.unique().tolist())
    sigmoids = logits[..., 12:].sigmoid()
    expected = 2.5 * (sigmoids / sigmoids.sum(-1, keepdim=True)).gather(-1, chosen - 12)
    torch.testing.assert_close(gates, expected)


def test_gates_add_up_to_their_scale_even_where_all_sigmoids_underflow():
    logits = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(4)) - 200
    gates, _ = choose_experts(logits, ROUTING)
    torch.testing.assert_close(gates.sum(-1), torch.full((2, 8), 2.5))
