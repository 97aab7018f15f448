"""Tokens that reach experts on other nodes in two hops give the sums that one process makes, and cross nodes once."""

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from llama_core.config.strategy import MoE
from llama_core.parallel.hops import run_experts_over_hops
from llama_core.parallel.mesh import Hops
from llama_core.parallel.ranks import split_ranks
from llama_core.planning.crossings import rows_of_hops, share_reached

DIM = 6


class Matrices(torch.nn.Module):
    """A matrix for each of some experts, in place of a feed-forward."""

    def __init__(self, first, num_experts):
        super().__init__()
        self.weight = torch.stack([weight_of(first + i) for i in range(num_experts)]).requires_grad_()

    def forward(self, x_RD, tokens_per_expert):
        parts = x_RD.split(tokens_per_expert.tolist())
        return torch.cat([part @ weight.T for part, weight in zip(parts, self.weight, strict=True)])


def weight_of(expert):
    return torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(100 + expert), dtype=torch.float64)


def routed(rank, num_tokens, moe):
    """Return a rank's tokens, gates and experts; the last expert is never chosen."""
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(num_tokens, DIM, generator=generator, dtype=torch.float64)
    gates_TK = torch.rand(num_tokens, moe.experts_per_token, generator=generator, dtype=torch.float64)
    scores_TE = torch.rand(num_tokens, moe.num_experts - 1, generator=generator)
    return x_TD.requires_grad_(), gates_TK.requires_grad_(), scores_TE.topk(moe.experts_per_token).indices


def alone(rank, num_tokens, moe):
    x_TD, gates_TK, chosen_TK = routed(rank, num_tokens, moe)
    weights = torch.stack([weight_of(expert) for expert in range(moe.num_experts)])[chosen_TK]
    results = torch.einsum("td,tkod->tko", x_TD, weights) * gates_TK[:, :, None]
    out = results.sum(1)
    out.square().sum().backward()
    return out.detach(), x_TD.grad, gates_TK.grad


def check_hops(num_tokens, num_nodes, moe):
    rank, world = dist.get_rank(), dist.get_world_size()
    places = torch.arange(world).view(num_nodes, -1)
    hops = Hops(split_ranks(places.T.tolist()), split_ranks(places.tolist()))
    own = moe.num_experts // world
    x_TD, gates_TK, chosen_TK = routed(rank, num_tokens[rank], moe)
    experts = Matrices(rank * own, own)
    out = run_experts_over_hops(experts, x_TD, gates_TK, chosen_TK, moe=moe, hops=hops)
    out.square().sum().backward()
    expected = alone(rank, num_tokens[rank], moe)
    for ours, theirs in zip((out, x_TD.grad, gates_TK.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("num_tokens", "num_nodes", "gate_inputs"),
    [((16, 16), 2, False), ((1, 30), 1, True), ((5, 9, 2, 7), 2, True), ((0, 3, 9, 1), 2, False)],
)
def test_sums_and_gradients_are_those_of_one_process(num_tokens, num_nodes, gate_inputs):
    moe = MoE(num_experts=8, experts_per_token=3, gate_inputs=gate_inputs)
    run_ranks(len(num_tokens), check_hops, num_tokens, num_nodes, moe)


@pytest.mark.parametrize(
    ("moe", "num_places"),
    [
        (MoE(num_experts=8, experts_per_token=2), 4),
        (MoE(num_experts=8, experts_per_token=8), 4),
        (MoE(num_experts=12, experts_per_token=3, expert_groups=6, groups_per_token=2), 3),
        (MoE(num_experts=12, experts_per_token=3, expert_groups=3, groups_per_token=2), 6),
        (MoE(num_experts=12, experts_per_token=3, expert_groups=3, groups_per_token=1), 3),
    ],
)
def test_the_share_of_places_that_a_token_reaches_is_that_of_random_choices(moe, num_places):
    generator = torch.Generator().manual_seed(0)
    num_tokens = 40_000
    scores = torch.rand(num_tokens, moe.num_experts, generator=generator).view(num_tokens, moe.expert_groups, -1)
    groups = torch.rand(num_tokens, moe.expert_groups, generator=generator).argsort(1) < moe.groups_per_token
    chosen = (scores * groups[:, :, None]).flatten(1).topk(moe.experts_per_token).indices
    places = chosen // (moe.num_experts // num_places)
    reached = torch.zeros(num_tokens, num_places).scatter(1, places, 1.0).mean()
    assert share_reached(moe, num_places) == pytest.approx(reached.item(), rel=0.01)


def test_fewer_rows_cross_nodes_than_there_are_choices():
    rows = rows_of_hops(MoE(num_experts=64, experts_per_token=8), 1000, num_nodes=2, num_ranks=16)
    assert 1900 < rows.to_nodes <= 2000 < rows.to_ranks < rows.to_experts == 8000
