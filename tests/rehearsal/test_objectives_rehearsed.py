"""The rehearsal trains for the objective of its run, so it finds out a program that does not tell the truth."""

from collections import Counter

import pytest
import torch
from tiers import cases
from torch._subclasses.fake_tensor import FakeTensorMode
from toy_objective import MASKED
from weighted_objective import WEIGHTED

from llama_core.config.run import RunConfig
from llama_core.objectives.distill import DISTILL
from llama_core.objectives.preferences import DPO, KTO, SIMPO
from llama_core.objectives.registry import OBJECTIVES
from llama_core.planning.memory.estimate import estimate_memory
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.communication import communication
from llama_core.planning.work import Work
from llama_core.rehearsal.byte_counter import ByteCounter
from llama_core.rehearsal.dry_run import rehearse
from llama_core.rehearsal.kernels import kernels_of
from llama_core.rehearsal.trace import _fake_batch, alone_among
from llama_core.rehearsal.transfers import axes_by_group, on_axes, summed
from llama_core.training.engine import build_model

PLANS = {
    "alone": ParallelPlan(microbatch_size=4),
    "zero3": ParallelPlan(dp_shard=4, zero_stage=3, num_microbatches=2),
    "tp2": ParallelPlan(tp=2, num_microbatches=2),
    "tp2 pp2": ParallelPlan(tp=2, pp=2, num_microbatches=4),
}
KINDS = (MASKED, WEIGHTED, DPO, SIMPO, KTO, DISTILL)


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    for kind in KINDS:
        monkeypatch.setitem(OBJECTIVES, kind.name, kind)


def request(objective, plan):
    training = {"objective": objective, "precision": "bf16", "seq_len": 256, "batch_size": plan.batch_size}
    training |= dict.fromkeys(OBJECTIVES[objective].required, "/there")
    model = {"model": "tiny_llama3_50m", "architecture": {"num_layers": 4}}
    return RunConfig.from_mapping(model | {"training": training})


@pytest.mark.parametrize("kind", cases({kind.name: kind for kind in KINDS}, narrow={"dpo", "kto", "distill"}))
@pytest.mark.parametrize("plan", cases(PLANS, narrow={"tp2 pp2"}))
def test_the_estimates_of_an_objective_are_what_its_rehearsal_counts(plan, kind):
    config = request(kind.name, plan)
    work = Work.of(config, plan)
    for rank in rehearse(config, plan).ranks:
        estimated = estimate_memory(work, pp_rank=rank.pp_rank)
        assert estimated.peak_bytes == pytest.approx(rank.profile.peak_bytes, rel=0.01)
        for phase, counted in rank.profile.phases.items():
            assert sum(estimated.phases[phase].values()) == pytest.approx(sum(counted.values()), rel=0.01), phase
        assert sent_to_divide_matrices(rank.traffic) == sent_to_divide_matrices(
            communication(work, pp_rank=rank.pp_rank)
        )


def sent_to_divide_matrices(traffic):
    return {one.collective: one.num_bytes for one in traffic if one.axis == "tp"}


DEEP = {
    "zero3": PLANS["zero3"],
    "tp2 pp2": PLANS["tp2 pp2"],
    "many microbatches": ParallelPlan(pp=2, num_microbatches=16, recompute="full"),
    "zero2, many microbatches": ParallelPlan(pp=2, dp_shard=2, zero_stage=2, num_microbatches=16, recompute="full"),
}


@pytest.mark.parametrize("kind", cases({"dpo": DPO, "kto": KTO}, narrow=["dpo"]))
@pytest.mark.parametrize("plan", cases(DEEP, narrow=["tp2 pp2", "many microbatches"]))
def test_the_reference_of_adapters_takes_no_more_memory_than_training(plan, kind):
    """Adapters, since the gradients and moments of whole weights would hide what a forward keeps."""
    config = RunConfig.from_mapping(
        {
            "architecture": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_size": 128, "vocab_size": 256},
            "strategy": "lora",
            "training": {"objective": kind.name, "precision": "bf16", "seq_len": 256, "batch_size": plan.batch_size},
        }
    )
    for pp_rank in range(plan.pp):
        reference = peak_of_reference(config, plan, plan.world_size // plan.pp * pp_rank)
        assert 0 < reference <= estimate_memory(Work.of(config, plan), pp_rank=pp_rank).peak_bytes


def peak_of_reference(config, plan, rank):
    """The most bytes that a rank holds while it computes the reference of as many rows as a step has."""
    counter, _ = counted(config, plan, rank, refer)
    return max(peak.num_bytes for peak in counter.peaks.values())


def refer(model, rows):
    objective = model.model.objective
    model.measure_rows(objective.of_reference, objective.num_referred(rows[0].tokens_BS.shape[1]), rows)


def counted(config, plan, rank, forward):
    """What a byte counter finds while a rank does something with as many microbatches as a step has, and its mesh."""
    with alone_among(plan.world_size, rank), kernels_of(config, plan):
        model = build_model(config, plan, torch.device("cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True), ByteCounter() as counter:
            model.materialize()
            counter.forget_segments()
            forward(model, [_fake_batch(config, plan) for _ in range(plan.num_microbatches)])
            counter.begin_segment()
        return counter, axes_by_group(model.mesh)


PREPARING = {name: PLANS[name] for name in ("alone", "tp2 pp2")} | {
    "zero2": ParallelPlan(dp_shard=2, zero_stage=2, num_microbatches=2),
    "chimera": ParallelPlan(pp=2, schedule="chimera", num_microbatches=4),
}


@pytest.mark.parametrize("plan", cases(PREPARING, narrow=["tp2 pp2"]))
def test_what_an_objective_measures_before_a_step_is_in_its_flops_and_its_traffic(plan):
    """The forward over other rows is traced here as the engine runs it, and composed there from that of the step."""
    config = request("kto", plan)
    ranks = rehearse(config, plan).ranks
    for rank, without in zip(ranks, rehearse(request("dpo", plan), plan).ranks, strict=True):
        counter, axes = counted(config, plan, rank.rank, prepare)
        assert rank.flops - without.flops == sum(segment.flops for segment in counter.segments) > 0
        forward = sent(summed(sum((on_axes(segment.transfers, axes) for segment in counter.segments), Counter())))
        more = sent(rank.traffic)
        more.subtract(sent(without.traffic))
        of_weights_and_stream = {"tp", "pp", "shard"}
        assert {key: num for key, num in more.items() if key[1] in of_weights_and_stream and num} == {
            key: num for key, num in forward.items() if key[1] in of_weights_and_stream and key[0] != "all_reduce"
        }
        estimated = sent(communication(Work.of(config, plan), pp_rank=rank.pp_rank))
        estimated.subtract(sent(communication(Work.of(request("dpo", plan), plan), pp_rank=rank.pp_rank)))
        assert all(estimated[key] == num for key, num in more.items() if key[1] in of_weights_and_stream)


def prepare(model, rows):
    objective = model.model.objective
    model.measure_rows(objective.of_rows_before, objective.num_prepared, rows)


def sent(traffic):
    return Counter({(one.collective, one.axis): one.num_bytes for one in traffic})
