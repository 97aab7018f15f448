"""The rehearsal builds the optimizer that a run asks for, so it finds out a row that does not tell the truth."""

import pytest
from gathering_optimizer import NORMALISED
from toy_optimizer import SIGNUM
from width import cases

from llama_core.config.run import RunConfig
from llama_core.optimizers.adamw import ADAMW
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


KINDS = (ADAMW, SIGNUM)


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    for kind in (SIGNUM, NORMALISED):
        monkeypatch.setitem(OPTIMIZERS, kind.name, kind)


def request(optimizer, plan):
    training = {"optimizer": optimizer, "precision": "bf16", "seq_len": 256, "batch_size": plan.batch_size}
    return RunConfig.from_mapping({"model": "tiny_llama3_50m", "training": training})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("plan", cases(PLANS, narrow={"zero2"}))
def test_the_estimate_of_an_optimizer_is_what_its_rehearsal_counts(plan, kind):
    config = request(kind.name, plan)
    for rank in rehearse(config, plan).ranks:
        estimated = estimate_memory(Work.of(config, plan), pp_rank=rank.pp_rank)
        assert estimated.peak_bytes == pytest.approx(rank.profile.peak_bytes, rel=0.01)
        for phase, counted in rank.profile.phases.items():
            assert estimated.phases[phase]["moments"] == pytest.approx(counted["moments"], rel=0.002)


@pytest.mark.parametrize("plan", [PLANS["zero1"], PLANS["zero3"]], ids=["zero1", "zero3"])
def test_what_an_update_gathers_is_in_the_rehearsed_traffic(plan):
    config = request("normalised", plan)
    (rank,) = rehearse(config, plan).ranks
    counted = {(one.collective, one.axis): one.num_bytes for one in rank.traffic if one.axis != "world"}
    expected = {(one.collective, one.axis): one.num_bytes for one in communication(Work.of(config, plan))}
    assert counted == expected
