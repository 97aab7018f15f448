"""The rehearsal trains for the objective of its run, so it finds out a program that does not tell the truth."""

import pytest
from toy_objective import MASKED
from weighted_objective import WEIGHTED
from width import cases

from llama_core.config.run import RunConfig
from llama_core.objectives.preferences import DPO, SIMPO
from llama_core.objectives.registry import OBJECTIVES
from llama_core.planning.memory.estimate import estimate_memory
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.communication import communication
from llama_core.planning.work import Work
from llama_core.rehearsal.dry_run import rehearse

PLANS = {
    "alone": ParallelPlan(microbatch_size=4),
    "zero3": ParallelPlan(dp_shard=4, zero_stage=3, num_microbatches=2),
    "tp2": ParallelPlan(tp=2, num_microbatches=2),
    "tp2 pp2": ParallelPlan(tp=2, pp=2, num_microbatches=4),
}
KINDS = (MASKED, WEIGHTED, DPO, SIMPO)


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    for kind in KINDS:
        monkeypatch.setitem(OBJECTIVES, kind.name, kind)


def request(objective, plan):
    training = {"objective": objective, "precision": "bf16", "seq_len": 256, "batch_size": plan.batch_size}
    return RunConfig.from_mapping({"model": "tiny_llama3_50m", "training": training})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("plan", cases(PLANS, narrow={"tp2 pp2"}))
def test_the_estimate_of_an_objective_is_what_its_rehearsal_counts(plan, kind):
    config = request(kind.name, plan)
    for rank in rehearse(config, plan).ranks:
        estimated = estimate_memory(Work.of(config, plan), pp_rank=rank.pp_rank)
        assert estimated.peak_bytes == pytest.approx(rank.profile.peak_bytes, rel=0.01)
        for phase, counted in rank.profile.phases.items():
            assert sum(estimated.phases[phase].values()) == pytest.approx(sum(counted.values()), rel=0.01), phase


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_an_objective_sends_is_in_the_rehearsed_traffic(kind):
    plan = PLANS["tp2"]
    config = request(kind.name, plan)
    (rank,) = rehearse(config, plan).ranks
    counted = {(one.collective, one.axis): one.num_bytes for one in rank.traffic if one.axis == "tp"}
    expected = {(one.collective, one.axis): one.num_bytes for one in communication(Work.of(config, plan))}
    assert counted == expected
