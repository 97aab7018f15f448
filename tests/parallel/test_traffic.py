"""The engine sends exactly the transfers and bytes that ``planning.time.communication`` counts."""

from collections import Counter

import pytest
import torch
from distributed import run_ranks
from parity import ADAPTED, SEQ_LEN, SPARSE, TIED, UNTIED
from tiers import nightly
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core.models.batch import Batch
from llama_core.parallel.apply import ParallelModel
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.communication import communication
from llama_core.planning.work import Work

# each operator's collective, and how to get the whole tensors from its arguments and its result
TRANSFERS = {
    "c10d::_allgather_base_": ("all_gather", lambda args, _: [args[0]]),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", lambda args, _: [args[1]]),
    "c10d::allreduce_": ("all_reduce", lambda args, _: args[0]),
    "c10d::send": ("send", lambda args, _: args[0]),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", lambda _, out: [out]),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", lambda args, _: [args[0]]),
    "_c10d_functional::all_to_all_single": ("all_to_all", lambda args, _: [args[0]]),
    "_c10d_functional::all_reduce": ("all_reduce", lambda args, _: [args[0]]),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", lambda args, _: args[0]),
}
PLANS = [
    ParallelPlan(dp_shard=2, zero_stage=2, num_microbatches=3),
    ParallelPlan(tp=2, pp=2, recompute="selective", num_microbatches=2),
    ParallelPlan(cp=2, zero_stage=3, recompute="full"),
    ParallelPlan(cp=2, attention="ulysses", recompute="selective", microbatch_size=2),
    nightly(ParallelPlan(cp=2, attention="ulysses", zero_stage=3, recompute="full")),
    nightly(ParallelPlan(dp_replicate=2, num_microbatches=2)),
    nightly(ParallelPlan(dp_shard=2, zero_stage=1, num_microbatches=3)),
    nightly(ParallelPlan(dp_shard=2, dp_replicate=2, zero_stage=3, num_microbatches=2)),
    nightly(ParallelPlan(tp=2, recompute="full", dp_shard=2, zero_stage=3, num_microbatches=2)),
    nightly(ParallelPlan(tp=2, recompute="full", sequence_parallel=False)),
    nightly(ParallelPlan(pp=2, schedule="chimera", num_microbatches=4)),
    nightly(ParallelPlan(pp=2, schedule="interleaved", num_chunks=2, num_microbatches=4, dp_shard=2, zero_stage=3)),
]


class Transfers(TorchDispatchMode):
    """Counts transfers and bytes by collective, except those of a single number or of numbers of tokens."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        collective, whole = TRANSFERS.get(func._schema.name, (None, lambda args, out: [torch.empty(())]))
        tensors = whole(args, out)
        counts = tensors[0].dim() > 0 and tensors[0].is_floating_point()
        self.counted[collective, "count"] += counts
        self.counted[collective, "bytes"] += sum(tensor.nbytes for tensor in tensors) * counts
        return out


class Order(TorchDispatchMode):
    """Lists the elements of every gather of weights, and 0 for the matrix products between them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d._allgather_base_.default:
            self.seen.append(args[0].numel())
        elif func is torch.ops.aten.mm.default and self.seen and self.seen[-1]:
            self.seen.append(0)
        return func(*args, **(kwargs or {}))


def take_a_step(plan, spec, watching):
    model = ParallelModel(spec, plan, device=torch.device("cpu"), compute_dtype=torch.bfloat16).materialize()
    model.initialize_weights(0)
    tokens_BS = torch.zeros(plan.microbatch_size, SEQ_LEN, dtype=torch.int64)
    with watching as seen:
        batch = Batch(tokens_BS, tokens_BS, None)
        model.forward_backward([batch] * plan.num_microbatches, loss_scale=1.0, on_phase=lambda phase: None)
    return seen


def transfers_of_a_step(plan, spec):
    counted = take_a_step(plan, spec, Transfers()).counted
    return {key: number for key, number in counted.items() if key[0] and number}


def order_of_a_step(plan, spec):
    return take_a_step(plan, spec, Order()).seen


def counted(plan, spec, pp_rank):
    sums = Counter()
    for record in communication(Work(spec, plan, SEQ_LEN, "bf16"), pp_rank=pp_rank):
        sums[record.collective, "count"] += record.count
        sums[record.collective, "bytes"] += record.num_bytes
    return dict(sums)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.summary())
def test_every_rank_sends_the_counted_transfers(plan):
    ranks = run_ranks(plan.world_size, transfers_of_a_step, plan, UNTIED)
    assert ranks == [counted(plan, UNTIED, plan.coordinate(rank, "pp")) for rank in range(plan.world_size)]


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(dp_replicate=2, num_microbatches=2),
        nightly(ParallelPlan(tp=2, dp_shard=2, zero_stage=3, num_microbatches=2)),
        nightly(ParallelPlan(tp=2, pp=2, recompute="selective", num_microbatches=2)),
        nightly(ParallelPlan(pp=2, schedule="chimera", dp_shard=2, zero_stage=1, num_microbatches=4)),
    ],
    ids=lambda plan: plan.summary(),
)
def test_only_adapters_are_reduced(plan):
    ranks = run_ranks(plan.world_size, transfers_of_a_step, plan, ADAPTED)
    assert ranks == [counted(plan, ADAPTED, plan.coordinate(rank, "pp")) for rank in range(plan.world_size)]


@pytest.mark.wide
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(tp=2, dp_shard=2, ep=2, zero_stage=3, recompute="full", num_microbatches=2),
        nightly(ParallelPlan(dp_shard=4, ep=2, zero_stage=1, num_microbatches=2)),
        nightly(ParallelPlan(dp_shard=4, ep=2, zero_stage=2, recompute="selective", num_microbatches=2)),
        nightly(ParallelPlan(dp_replicate=4, ep=2, num_microbatches=2)),
        nightly(ParallelPlan(cp=2, dp_shard=2, ep=2, zero_stage=3, num_microbatches=2)),
        nightly(ParallelPlan(pp=2, schedule="chimera", dp_shard=2, ep=2, zero_stage=1, num_microbatches=4)),
        nightly(ParallelPlan(tp=2, dp_shard=2, zero_stage=2, num_microbatches=2)),
        ParallelPlan(tp=2, expert_tp=1, ep=4, dp_shard=2, zero_stage=3, num_microbatches=2),
        nightly(ParallelPlan(tp=2, expert_tp=1, ep=2, recompute="selective", num_microbatches=2)),
        nightly(ParallelPlan(tp=2, expert_tp=1, ep=2, dp_shard=2, zero_stage=1, num_microbatches=2)),
    ],
    ids=lambda plan: plan.summary(),
)
def test_tokens_travel_to_their_experts_and_these_are_reduced_over_fewer_ranks(plan):
    ranks = run_ranks(plan.world_size, transfers_of_a_step, plan, SPARSE)
    expected = [counted(plan, SPARSE, plan.coordinate(rank, "pp")) for rank in range(plan.world_size)]
    # not every rank gets as many tokens
    travelled = [[rank.pop(("all_to_all", "bytes"), 0) for rank in sums] for sums in (ranks, expected)]
    assert ranks == expected
    assert sum(travelled[0]) == sum(travelled[1])


def test_the_ends_of_a_pipeline_with_a_tied_embedding_send_the_counted_transfers():
    plan = ParallelPlan(pp=2, dp_shard=2, zero_stage=3, num_microbatches=2)
    ranks = run_ranks(plan.world_size, transfers_of_a_step, plan, TIED)
    assert ranks == [counted(plan, TIED, plan.coordinate(rank, "pp")) for rank in range(plan.world_size)]


def test_weights_are_gathered_while_the_group_before_computes_and_the_head_last():
    plan = ParallelPlan(dp_shard=2, zero_stage=3)
    table, layer, inner = UNTIED.embedding_parameters, UNTIED.layer_parameters, UNTIED.num_layers - 2
    forward = [table, layer, layer, 0, *[layer, 0] * inner, table + UNTIED.hidden_size, 0]
    backward = [layer, layer, 0, *[layer, 0] * inner]
    assert run_ranks(2, order_of_a_step, plan, UNTIED) == [forward + backward] * 2
