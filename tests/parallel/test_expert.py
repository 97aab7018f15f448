import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from parity import SPARSE, native_engine, own_microbatches
from tiers import cases

from llama_core.errors import PlanError
from llama_core.parallel.expert import dispatch
from llama_core.parallel.measured import measured, measured_totals
from llama_core.planning.plan import ParallelPlan

NUM_EXPERTS, DIM = 4, 8


def tokens_and_experts(rank, num_tokens):
    """Return a rank's tokens, sorted by expert, and the expert of each; some experts have none."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(num_tokens, DIM, generator=generator, dtype=torch.float64)
    experts = torch.randint(0, NUM_EXPERTS - 1, (num_tokens,), generator=generator).sort().values
    return tokens, experts


def weight_of(expert):
    return torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(100 + expert), dtype=torch.float64)


def alone(rank, num_tokens):
    tokens, experts = tokens_and_experts(rank, num_tokens)
    tokens.requires_grad_()
    weights = torch.stack([weight_of(expert) for expert in range(NUM_EXPERTS)])
    out = torch.einsum("td,tod->to", tokens, weights[experts])
    out.square().sum().backward()
    return out.detach(), tokens.grad


def check_round_trip(num_tokens):
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, experts = tokens_and_experts(rank, num_tokens[rank])
    tokens.requires_grad_()
    sent = dispatch(tokens, torch.bincount(experts, minlength=NUM_EXPERTS), dist.group.WORLD)
    first = rank * NUM_EXPERTS // world
    parts = sent.tokens_RD.split(sent.tokens_per_expert.tolist())
    results = torch.cat([part @ weight_of(first + i).T for i, part in enumerate(parts)])
    out = sent.combine(results)
    out.square().sum().backward()
    expected, expected_grad = alone(rank, num_tokens[rank])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tokens.grad, expected_grad, rtol=1e-12, atol=1e-12)
    assert len(sent.tokens_RD) == sum(sent.num_received)


@pytest.mark.parametrize("num_tokens", [(16, 16), (1, 30), (5, 5, 5, 5), (0, 3, 9, 1)])
def test_tokens_reach_their_experts_and_their_results_come_back_in_order(num_tokens):
    run_ranks(len(num_tokens), check_round_trip, num_tokens)


def check_refusal():
    with pytest.raises(PlanError, match="ep=2 does not divide the 3 experts; use one of 1, 3"):
        dispatch(torch.zeros(3, DIM), torch.ones(3, dtype=torch.long), dist.group.WORLD)


def test_experts_that_cannot_be_divided_are_refused():
    run_ranks(2, check_refusal)


def statistics(plan):
    """Return the statistics of two steps, in float64."""
    torch.compiler.set_default_backend("aot_eager")  # generating code would take half a minute
    engine = native_engine(plan, SPARSE, torch.float64, weight_dtype=torch.float64)
    found = []
    for step in range(2):
        engine.forward_backward(own_microbatches(step, plan), loss_scale=2.0, on_phase=lambda phase: None)
        engine.evaluate(own_microbatches(9, plan))
        found.append(measured(engine.model, measured_totals(engine.model, plan)))
    return found


@pytest.mark.parametrize(
    "plan",
    cases(
        {
            "ep2 tp2, full recompute": ParallelPlan(tp=2, dp_replicate=2, ep=2, recompute="full", num_microbatches=2),
            "cp2": ParallelPlan(cp=2, num_microbatches=4),
            "ep2 over tp2": ParallelPlan(tp=2, expert_tp=1, ep=2, recompute="selective", num_microbatches=4),
            "ep2 over tp2 cp2": ParallelPlan(tp=2, expert_tp=1, ep=2, cp=2, num_microbatches=4),
            "pp2 chimera": ParallelPlan(pp=2, schedule="chimera", num_microbatches=4),
            "selective recompute": ParallelPlan(recompute="selective", num_microbatches=2, microbatch_size=2),
            "compiled": ParallelPlan(compile=True, recompute="full", num_microbatches=4),
        },
        narrow={"cp2", "ep2 over tp2"},
    ),
)
def test_every_plan_reports_the_same_routing(plan):
    (expected,) = run_ranks(1, statistics, ParallelPlan(num_microbatches=4))
    for found in run_ranks(plan.world_size, statistics, plan):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.values == pytest.approx(theirs.values, rel=1e-6)
            assert ours.expert_shares == theirs.expert_shares
