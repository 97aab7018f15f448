"""The rehearsal trains the adapters of its run, so it finds out a row or a program that does not tell the truth."""

import pytest
from tiers import cases
from toy_adapter import FACTORS

from llama_core.adapters.registry import ADAPTERS
from llama_core.config.run import RunConfig
from llama_core.planning.memory.estimate import estimate_memory
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.communication import communication
from llama_core.planning.work import Work
from llama_core.rehearsal.dry_run import rehearse

PLANS = {
    "alone": ParallelPlan(microbatch_size=4),
    "tp2": ParallelPlan(tp=2, num_microbatches=2),
    "zero3": ParallelPlan(dp_shard=4, zero_stage=3, num_microbatches=2),
    "tp2 pp2": ParallelPlan(tp=2, pp=2, num_microbatches=4),
    "tp2 whole sequence": ParallelPlan(tp=2, sequence_parallel=False),
    "selective": ParallelPlan(num_microbatches=2, recompute="selective"),
    "full": ParallelPlan(num_microbatches=2, recompute="full"),
    "zero1 compiled": ParallelPlan(dp_shard=2, zero_stage=1, num_microbatches=2, compile=True),
    "zero bubble": ParallelPlan(pp=2, schedule="zb_h1", num_microbatches=4),
}
KINDS = (*ADAPTERS.values(), FACTORS)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ADAPTERS, FACTORS.name, FACTORS)


def request(kind, plan, **settings):
    training = {"precision": "bf16", "seq_len": 256, "batch_size": plan.batch_size}
    lora = {"method": kind.name, "target_modules": "all-linear"} | settings
    model = {"model": "tiny_llama3_50m", "architecture": {"num_layers": 4}}
    return RunConfig.from_mapping(model | {"strategy": "lora", "lora": lora, "training": training})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("plan", cases(PLANS, narrow={"tp2"}))
def test_the_estimates_of_adapters_are_what_their_rehearsal_counts(plan, kind):
    assert_estimated(request(kind, plan), plan)


def test_how_adapters_begin_changes_no_estimate():
    settings = {"initial_values": "pissa", "rslora": True}
    assert_estimated(request(ADAPTERS["lora"], PLANS["tp2"], **settings), PLANS["tp2"])


@pytest.mark.parametrize("plan", cases(PLANS, narrow={"zero3"}))
def test_the_estimates_over_matrices_in_nf4_are_what_their_rehearsal_counts(plan):
    assert_estimated(request(ADAPTERS["lora"], plan, base="nf4"), plan)


def assert_estimated(config, plan):
    """Compare the bytes that every rank holds and sends."""
    work = Work.of(config, plan)
    for rank in rehearse(config, plan).ranks:
        estimated = estimate_memory(work, pp_rank=rank.pp_rank)
        assert estimated.peak_bytes == pytest.approx(rank.profile.peak_bytes, rel=0.01)
        for phase, counted in rank.profile.phases.items():
            assert sum(estimated.phases[phase].values()) == pytest.approx(sum(counted.values()), rel=0.01), phase
        assert sent(rank.traffic) == sent(communication(work, pp_rank=rank.pp_rank))


def sent(traffic):
    return {(one.collective, one.axis): one.num_bytes for one in traffic if one.axis in {"tp", "shard"}}
