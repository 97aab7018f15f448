"""The rehearsal builds the optimizer that a run asks for, so it finds out a row that does not tell the truth."""

import pytest
from gathering_optimizer import NORMALISED
from tiers import cases, nightly
from toy_optimizer import SIGNUM

from llama_core.config.run import RunConfig
from llama_core.optimizers.adamw import ADAMW
from llama_core.optimizers.muon import MUON
from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.planning.memory.estimate import estimate_memory
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.communication import communication
from llama_core.planning.work import Work
from llama_core.rehearsal.dry_run import rehearse

PLANS = {
    "zero0": ParallelPlan(dp_replicate=2, microbatch_size=2),
    "zero1": ParallelPlan(dp_shard=2, zero_stage=1, microbatch_size=2),
    "zero2": ParallelPlan(dp_shard=2, zero_stage=2, num_microbatches=2),
    "zero3": ParallelPlan(dp_shard=4, zero_stage=3, num_microbatches=2),
    "tp2 pp2": ParallelPlan(tp=2, pp=2, num_microbatches=4),
}


KINDS = (ADAMW, SIGNUM, MUON)


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    for kind in (SIGNUM, NORMALISED):
        monkeypatch.setitem(OPTIMIZERS, kind.name, kind)


def request(optimizer, plan, moments="fp32", architecture=(), **sections):
    training = {
        "optimizer": optimizer,
        "moments": moments,
        "precision": "bf16",
        "seq_len": 256,
        "batch_size": plan.batch_size,
    }
    model = {"model": "tiny_llama3_50m", "architecture": {"num_layers": 4} | dict(architecture)}
    return RunConfig.from_mapping(model | {"training": training} | sections)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("plan", cases(PLANS, narrow={"zero2"}))
def test_the_estimate_of_an_optimizer_is_what_its_rehearsal_counts(plan, kind):
    compare_with_rehearsal(request(kind.name, plan), plan)


@pytest.mark.parametrize("optimizer", [nightly("adamw"), "muon"])
@pytest.mark.parametrize("plan", cases(PLANS, narrow={"tp2 pp2"}))
def test_the_estimate_of_moments_in_bf16_is_what_the_rehearsal_counts(plan, optimizer):
    compare_with_rehearsal(request(optimizer, plan, "bf16"), plan)


def test_a_rank_with_few_weights_holds_no_whole_chunk_of_moments_in_fp32():
    plan = ParallelPlan(dp_shard=4, zero_stage=2, recompute="selective")
    config = request("adamw", plan, "bf16", architecture={"num_layers": 2, "vocab_size": 1024})
    (rank,) = rehearse(config, plan).ranks
    estimated = estimate_memory(Work.of(config, plan), pp_rank=0)
    counted = rank.profile.phases["optimizer"]["temporaries"]
    assert estimated.phases["optimizer"]["temporaries"] == pytest.approx(counted, rel=0.01)


def test_the_estimate_knows_which_experts_a_rank_orthogonalises_and_keeps_the_momentum_of():
    plan = ParallelPlan(dp_shard=4, ep=2, zero_stage=3, num_microbatches=2)
    experts = {"strategy": "moe", "moe": {"num_experts": 4}, "architecture": {"vocab_size": 1024}}
    compare_with_rehearsal(request("muon", plan, **experts), plan)


def test_the_gradient_of_the_embedding_is_made_before_those_that_its_backward_defers():
    plan = ParallelPlan(pp=2, schedule="zb_h1", microbatch_size=2)
    compare_with_rehearsal(request("adamw", plan), plan)


def compare_with_rehearsal(config, plan):
    for rank in rehearse(config, plan).ranks:
        estimated = estimate_memory(Work.of(config, plan), pp_rank=rank.pp_rank)
        assert estimated.peak_bytes == pytest.approx(rank.profile.peak_bytes, rel=0.01)
        for phase, counted in rank.profile.phases.items():
            assert estimated.phases[phase]["moments"] == pytest.approx(counted["moments"], rel=0.002)


def test_what_rounding_a_chunk_holds_is_in_the_estimate():
    config = request("adamw", PLANS["zero3"], "bf16")
    (rank,) = rehearse(config, PLANS["zero3"]).ranks
    estimated = estimate_memory(Work.of(config, PLANS["zero3"]), pp_rank=0)
    counted = rank.profile.phases["optimizer"]["temporaries"]
    assert estimated.phases["optimizer"]["temporaries"] == pytest.approx(counted, rel=0.001)


@pytest.mark.parametrize("optimizer", ["normalised", "muon"])
@pytest.mark.parametrize("plan", cases({name: PLANS[name] for name in ("zero1", "zero3")}, narrow={"zero3"}))
def test_what_an_update_sends_is_in_the_rehearsed_traffic(plan, optimizer):
    config = request(optimizer, plan)
    (rank,) = rehearse(config, plan).ranks
    counted = {(one.collective, one.axis): one.num_bytes for one in rank.traffic if one.axis != "world"}
    expected = {(one.collective, one.axis): one.num_bytes for one in communication(Work.of(config, plan))}
    assert counted == pytest.approx({what: num_bytes for what, num_bytes in expected.items() if num_bytes}, rel=1e-3)
