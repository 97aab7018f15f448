"""What ``fully_shard`` makes of a model is what ``planning.fully_shard`` describes and planning counts."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from parity import ADAPTED, DORA, HYBRID, SEQ_LEN, SPARSE, TIED, UNTIED
from torch.distributed.fsdp import FSDPModule

from llama_core.config.strategy import MATRICES, LoRA
from llama_core.models.batch import Batch
from llama_core.parallel.apply import ParallelModel
from llama_core.planning.fully_shard import Resharding
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.communication import Messages
from llama_core.planning.work import Work
from llama_core.rehearsal.folding import state_of
from llama_core.rehearsal.trace import alone_among

TIED_ADAPTED = replace(TIED, lora=LoRA(lora_rank=4, target_modules=MATRICES))
SPECS = {
    "untied": UNTIED,
    "tied": TIED,
    "experts": SPARSE,
    "adapted": ADAPTED,
    "tied_adapted": TIED_ADAPTED,
    "dora": DORA,
    "hybrid": HYBRID,
}
PLANS = {
    "zero1": ParallelPlan(dp_shard=2, zero_stage=1),
    "zero2": ParallelPlan(dp_shard=2, zero_stage=2),
    "zero3": ParallelPlan(dp_shard=2, zero_stage=3),
    "copies": ParallelPlan(dp_shard=2, dp_replicate=2, zero_stage=3),
    "replicas": ParallelPlan(dp_replicate=2, tp=2),
    "tp": ParallelPlan(dp_shard=2, tp=2, zero_stage=3),
    "pp": ParallelPlan(dp_shard=2, pp=2, zero_stage=3, num_microbatches=2),
    "several_stages": ParallelPlan(dp_shard=2, pp=2, zero_stage=2, schedule="chimera", num_microbatches=2),
}
PLANS_OF_EXPERTS = {
    "fewer_shards": ParallelPlan(dp_shard=4, ep=2, zero_stage=3),
    "one_shard": ParallelPlan(dp_shard=2, ep=2, zero_stage=2),
    "whole_experts": ParallelPlan(tp=2, expert_tp=1, ep=4, dp_shard=4, zero_stage=3),
    "shards_of_the_same_ranks": ParallelPlan(tp=2, expert_tp=1, ep=2, dp_shard=2, zero_stage=1),
    "fewer_copies": ParallelPlan(dp_shard=2, dp_replicate=2, ep=2, zero_stage=1),
}
CASES = [(spec, plan) for spec in SPECS for plan in PLANS]
CASES += [("experts", plan) for plan in PLANS_OF_EXPERTS]


def case(spec, plan):
    return SPECS[spec], {**PLANS, **PLANS_OF_EXPERTS}[plan]


def made_by_torch(spec, plan, rank):
    """Return the groups of weights that ``fully_shard`` has made on a rank, with what it does with each."""
    made = Counter()
    with alone_among(plan.world_size, rank):
        model = ParallelModel(spec, plan, device=torch.device("cpu"), compute_dtype=torch.bfloat16).model
        states = {id(state): state for state in map(state_of, model.modules()) if state is not None}
        for state in states.values():
            for group in state._fsdp_param_groups:
                mesh = group.mesh_info
                sizes = [parameter._orig_size.numel() for parameter in group.fsdp_params]
                trained = [parameter.sharded_param.requires_grad for parameter in group.fsdp_params]
                made[
                    sum(sizes),
                    sum(size for size, is_trained in zip(sizes, trained, strict=True) if is_trained),
                    getattr(mesh, "shard_mesh_size", 1),
                    getattr(mesh, "replicate_mesh_size", 1),
                    group._reshard_after_forward,
                    group.unshard_in_backward,
                ] += 1
    return made


def described(spec, plan, pp_rank):
    """Return the same of the description, with the numbers of parameters that planning counts."""
    made = Counter()
    work = Work(spec, plan, SEQ_LEN, "bf16")
    messages = Messages(work)
    resharding = Resharding.of(plan)
    for stage in work.hosted(pp_rank):
        for unit, group in zip(stage.units, messages.groups(stage), strict=True):
            drops = resharding.drops_after_forward(unit)
            needs = unit.gathers_in_backward
            programs = [part.program for part in unit.parts]
            experts = sum(program.num_of_experts for program in programs) if plan.ep > 1 else 0
            trained = sum(program.num_trained for program in programs) - experts
            made[group.parameters, trained, group.num_shards, group.num_copies, drops, needs] += 1
            if experts:
                made[experts, experts, plan.num_expert_shards, plan.num_expert_copies, drops, needs] += 1
    return made


@pytest.mark.parametrize(("spec", "plan"), CASES)
def test_fully_shard_makes_the_groups_that_planning_counts(spec, plan):
    spec, plan = case(spec, plan)
    for pp_rank in range(plan.pp):
        rank = pp_rank * plan.world_size // plan.pp
        assert made_by_torch(spec, plan, rank) == described(spec, plan, pp_rank)


def whole_units(model):
    """Return how many units of each role are gathered."""
    roles = {id(model): "root", id(model.tok_embeddings): "embedding", id(model.norm): "head"}
    roles |= {id(layer): "layer" for layer in model.layers.values()}
    whole = Counter()
    for module in model.modules():
        if id(module) in roles and isinstance(module, FSDPModule):
            groups = state_of(module)._fsdp_param_groups
            whole[roles[id(module)]] += any(group.is_unsharded for group in groups)
    return +whole


def seen_in_a_step(spec, plan):
    """Return the units that are whole as each forward and backward of a step begins, and after the last one."""
    with alone_among(plan.world_size, rank=0):
        model = ParallelModel(spec, plan, device=torch.device("cpu"), compute_dtype=torch.float32).materialize()
        model.initialize_weights(0)
        tokens_BS = torch.zeros(plan.microbatch_size, SEQ_LEN, dtype=torch.int64)
        batch = Batch(tokens_BS, tokens_BS, positions_BS=torch.arange(SEQ_LEN).expand_as(tokens_BS))
        seen = []
        model.forward_backward(
            [batch] * plan.num_microbatches,
            loss_scale=1.0,
            on_phase=lambda phase: seen.append((phase, whole_units(model.model))),
        )
        return [*seen, ("end", whole_units(model.model))]


def expected_in_a_step(spec, plan):
    """Return the same, as the description has it."""
    resharding = Resharding.of(plan)
    units = Work(spec, plan, SEQ_LEN, "fp32").stages[0].units
    kept = Counter(unit.role for unit in units if not resharding.drops_after_forward(unit))
    seen = []
    whole = Counter()
    for microbatch in range(plan.num_microbatches):
        seen += [("forward", whole), ("backward", kept)]
        is_last = microbatch == plan.num_microbatches - 1
        whole = Counter() if resharding.drops_after_backward(last=is_last) else kept
    return [*seen, ("end", whole)]


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("spec", [UNTIED, TIED, ADAPTED], ids=["untied", "tied", "adapted"])
def test_what_stays_gathered_between_microbatches_is_what_the_description_says(spec, zero_stage):
    plan = ParallelPlan(dp_shard=2, zero_stage=zero_stage, num_microbatches=2)
    assert seen_in_a_step(spec, plan) == expected_in_a_step(spec, plan)
