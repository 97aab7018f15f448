"""Check on one CPU that the ranks of a plan cannot wait for each other forever.

Every rank of a small copy of the plan takes real steps, evaluates, saves and loads, one rank after the other, among
process groups that only record. The copy has the plan's kinds of ranks, schedule and model; ``call_order`` checks the
records. It runs on tiny tensors, whose values do not matter; fake ones take four times as long.

Left out are the control messages of the trainer between steps, and what torch's checkpoint threads say to each other,
on a gloo group of their own. Blocks are not compiled, and multiply in bf16 where the run would in fp8.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.errors import DeadlockError
from llama_core.models.batch import Batch, ones_per_token
from llama_core.models.block_attention import BlockKernel
from llama_core.models.layers import local_part
from llama_core.parallel import expert, gathered_attention
from llama_core.parallel.expert import Dispatch
from llama_core.parallel.hops import NOWHERE, Arrived, Routed, Trip
from llama_core.parallel.measured import measured_totals
from llama_core.parallel.mesh import Mesh
from llama_core.parallel.pipeline import _Execution
from llama_core.parallel.ranks import most_over_devices
from llama_core.planning.kernels import attention_kernel
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.before import with_rows_before
from llama_core.rehearsal.byte_counter import replaced
from llama_core.rehearsal.call_order import (
    Call,
    CalledOperation,
    Communicator,
    Ranks,
    circle,
    collectives_in_line,
    mismatches,
)
from llama_core.rehearsal.recorder import BACKEND, Recorder
from llama_core.rehearsal.small_plan import shrunk
from llama_core.rehearsal.trace import alone_among
from llama_core.schedules.actions import Action, Kind
from llama_core.training import engine as native
from llama_core.training.engine import COMPUTE_DTYPES, NativeEngine, build_model, train_step
from llama_core.training.optimizer import build_optimizer

MAX_RANKS = 8
"""Most ranks of a small copy."""
MAX_RANKS_WITH_TENSORS = 4
"""The same with tensor parallelism, where a rank takes five times as long: some 0.25 s."""
_CUTS = (("tp", 2), ("cp", 2), ("dp_shard", 2), ("dp_replicate", 2), ("pp", 4), ("pp", 2), ("dp_replicate", 1))
"""How to make a plan small; a pipeline of four has ranks with neighbours on both sides."""


@dataclass(frozen=True)
class CheckedOrder:
    """The calls of a small copy of a plan, all of which can end."""

    plan: ParallelPlan
    """The copy."""
    num_communicators: int
    num_calls: int
    """Calls of all its ranks."""

    def summary(self) -> str:
        """Return the result in one line."""
        return (
            f"{self.num_calls:,} calls of {self.plan.world_size} ranks match on {self.num_communicators} "
            f"communicators, and no call waits for itself; checked on a small copy of the plan: {self.plan.summary()}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a record."""
        return {
            "plan": self.plan.as_dict(),
            "num_communicators": self.num_communicators,
            "num_calls": self.num_calls,
        }


def check_order(config: RunConfig, plan: ParallelPlan) -> CheckedOrder | None:
    """Check the order of communication in a small copy of ``plan``; return None if that has a single rank.

    Args:
        config: the resolved configuration (no ``auto`` left).
        plan: the plan.

    Raises:
        DeadlockError: if ranks disagree, or wait in a circle; it names the ranks and their calls.
        PlanError: if a process group exists already.
    """
    small = small_copy(plan)
    if small.world_size == 1:
        return None
    ranks = record_ranks(config, small)
    if problems := find_problems(ranks):
        raise DeadlockError(
            f"this plan would hang: {'; '.join(problems)}; seen in a small copy of it: {small.summary()}; use another "
            "plan, and report this one"
        )
    communicators = {call.communicator for calls in ranks for call in calls}
    return CheckedOrder(small, len(communicators), sum(map(len, ranks)))


def find_problems(ranks: Ranks) -> list[str]:
    """Return a line for each way in which a run that makes these calls would hang."""
    return mismatches(ranks) or [found for found in [circle(ranks, collectives_in_line)] if found]


def small_copy(plan: ParallelPlan) -> ParallelPlan:
    """Return ``plan`` with few ranks, microbatches and stages, and blocks that are not compiled.

    It has at most ``MAX_RANKS`` ranks, with tensor parallelism ``MAX_RANKS_WITH_TENSORS``; or two on each axis that the
    plan divides the work over, if that is more.
    """
    most = MAX_RANKS_WITH_TENSORS if plan.tp > 1 else MAX_RANKS
    max_ranks = max(most, 2 ** sum(size > 1 for size in (plan.tp, plan.cp, plan.dp_shard, plan.pp)))
    few_stages = replace(plan, num_chunks=min(plan.num_chunks, 2), recomputed_layers=None)
    return replace(shrunk(few_stages, max_ranks, _CUTS), gradient_compression=plan.gradient_compression)


def record_ranks(config: RunConfig, plan: ParallelPlan, *, in_full: bool = False) -> list[list[Call]]:
    """Return the calls of every rank of a small plan: it is set up, takes a step, evaluates and saves.

    Args:
        config: the resolved configuration; its model is made small.
        plan: the small plan.
        in_full: give every stage of a pipeline two layers instead of one, load the checkpoint and take another step.

    Raises:
        PlanError: if a process group exists already.
    """
    with remembered_shapes():
        return [record_calls(config, plan, rank, in_full=in_full) for rank in range(plan.world_size)]


def record_calls(config: RunConfig, plan: ParallelPlan, rank: int, *, in_full: bool = False) -> list[Call]:
    """Return the calls of one rank; see ``record_ranks``."""
    recorder = Recorder(rank)
    spec = small_spec(config.spec, plan, layers_per_stage=1 if plan.pp > 1 and not in_full else 2)
    with recorder.recording(), alone_among(plan.world_size, rank, BACKEND), _watched(recorder):
        dtype = COMPUTE_DTYPES[config.training.precision]
        recorder.where = "the set-up"
        model = build_model(config, plan, torch.device("cpu"), spec=spec, compute_dtype=dtype).materialize()
        for parameter in model.model.parameters():
            local_part(parameter).detach().zero_()
        engine = NativeEngine(model, build_optimizer(model.model, config.training))
        batches = [_batch(config, plan) for _ in range(plan.build_schedule().num_microbatches)]
        _step(engine, batches, recorder, "step 1")
        recorder.where = "the evaluation"
        engine.evaluate(batches)
        recorder.where = "the checkpoint"
        engine.save(_NOWHERE)
        if in_full:
            engine.load(_NOWHERE)
            _step(engine, batches, recorder, "step 2")
        purposes = _purposes(model.mesh) if model.mesh else {}
    return [replace(call, communicator=purposes.get(call.communicator, call.communicator)) for call in recorder.calls]


def small_spec(spec: ModelSpec, plan: ParallelPlan, *, layers_per_stage: int) -> ModelSpec:
    """Return the architecture of ``spec`` in sizes that ``plan`` divides, but whose rows it does not shard evenly."""
    few = spec.with_few_layers(layers_per_stage * plan.num_stages)
    return replace(
        few,
        hidden_size=33,
        num_heads=2 * plan.ranks_of_heads,
        head_dim=8,
        **{"num_kv_heads": plan.ranks_of_heads} | few.latents_of_heads(8, 2 * plan.ranks_of_heads),
        ffn_size=35 * plan.tp,
        moe=few.moe and few.moe.with_widths(39 * plan.tp, 41 * plan.tp),
        vocab_size=37 * plan.tp,
        lora=spec.lora and spec.lora.model_copy(update=dict.fromkeys(spec.lora.kind.sizes, 3)),
    )


def _step(engine: NativeEngine, batches: list[Batch], recorder: Recorder, where: str) -> None:
    """Take a step as the trainer does, which also asks for the most of some numbers and for what was measured."""
    recorder.where = where
    train_step(engine, batches, learning_rate=1e-3, max_grad_norm=1.0)
    most_over_devices(engine.parallel.device, 0.0)
    measured_totals(engine.model, engine.parallel.plan)


def _batch(config: RunConfig, plan: ParallelPlan) -> Batch:
    """Return a microbatch; its documents matter only where they decide how context-parallel ranks attend."""
    rows = plan.rows_per_forward
    seq_len = 4 * plan.cp * plan.tp
    tokens = torch.zeros((rows, seq_len), dtype=torch.int64)
    batch = Batch(
        tokens, torch.zeros_like(tokens), None, per_token=ones_per_token(tokens, config.objective.values_per_token)
    )
    if attention_kernel(config, plan).moves == "gather":
        batch = batch.with_positions().with_documents()
    return with_rows_before(batch, config.objective)


@contextmanager
def remembered_shapes() -> Iterator[None]:
    """Let DTensor infer the shape of a result once for all ranks; that takes half of the time."""
    infer = ShardingPropagator._propagate_tensor_meta_non_cached
    known = dict[Any, Any]()

    def look_up(propagator: ShardingPropagator, operation: Any) -> Any:
        if operation not in known:
            known[operation] = infer(propagator, operation)
        return known[operation]

    with replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", look_up):
        yield


@contextmanager
def _watched(recorder: Recorder) -> Iterator[None]:
    """Let the engine name its calls, route tokens unevenly, and write no checkpoint."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for name in ("_forward", "_backward", "_weight_gradient", "_send_output", "_send_input_gradient", "_receive"):
            stack.enter_context(replaced(_Execution, name, _placed(getattr(_Execution, name), recorder)))
        stack.enter_context(replaced(expert, "dispatch", partial(_dispatch_unevenly, expert.dispatch)))
        stack.enter_context(replaced(Trip, "plan", partial(_travel_unevenly, Trip.plan)))
        stack.enter_context(replaced(Arrived, "sort", partial(_choose_evenly, Arrived.sort)))
        stack.enter_context(replaced(gathered_attention, "VARLEN", _NO_ATTENTION))
        stack.enter_context(replaced(native, "PlainReader", dcp.FileSystemReader))  # which reads nothing until asked
        stack.enter_context(replaced(dcp, "async_save", partial(_async_save, recorder)))
        stack.enter_context(replaced(dcp, "load", partial(_load, recorder)))
        yield


def _placed(run: Callable[[Any, Action], None], recorder: Recorder) -> Callable[[Any, Action], None]:
    def run_placed(execution: Any, action: Action) -> None:
        if content := _content(action):
            with recorder.sending(content):
                run(execution, action)
            return
        part = recorder.where
        recorder.where = f"{recorder.where}, {action}"
        run(execution, action)
        recorder.where = part

    return run_placed


def _content(action: Action) -> str:
    """Return what a send or a receive transfers, in words that both ranks use; empty for a computation."""
    match action.kind:
        case Kind.SEND_F | Kind.RECV_F:
            border = action.stage if action.kind is Kind.SEND_F else action.stage - 1
            return f"the output of stage {border} for microbatch {action.microbatch}"
        case Kind.SEND_B | Kind.RECV_B:
            border = action.stage if action.kind is Kind.SEND_B else action.stage + 1
            return f"the gradient of the input of stage {border} for microbatch {action.microbatch}"
        case _:
            return ""


def _dispatch_unevenly(
    dispatch: Callable[..., Dispatch], tokens_TD: Tensor, tokens_per_expert: Tensor, group: ProcessGroup
) -> Dispatch:
    """Send other numbers of tokens to every rank: those of a rank are those of the one before it, one rank further."""
    num_tokens = len(tokens_TD)
    num_experts = len(tokens_per_expert)
    counts = torch.full_like(tokens_per_expert, num_tokens // (2 * num_experts))
    counts[0] += num_tokens - counts.sum()
    own = counts.roll(group.rank() * (num_experts // group.size()))
    return dispatch(tokens_TD, own, group)


def _travel_unevenly(
    plan: Callable[..., Trip], routed: Routed, num_experts: int, group: ProcessGroup, num_rows: None
) -> Trip:
    """Send other numbers of tokens to every place, as ``_dispatch_unevenly`` does, and each token to one place."""
    steps_T = torch.arange(len(routed.x_TD))
    steps_T[::2] = 0
    chosen_TK = torch.full_like(routed.chosen_TK, NOWHERE)
    chosen_TK[:, 0] = (group.rank() + steps_T) % group.size() * num_experts
    return plan(routed._replace(chosen_TK=chosen_TK), num_experts, group, num_rows)


def _choose_evenly(sort: Callable[..., Arrived], routed: Routed, num_experts: int, num_rows: None) -> Arrived:
    """Give every token one expert, since no choice has arrived."""
    chosen_TK = torch.full_like(routed.chosen_TK, NOWHERE)
    chosen_TK[:, 0] = torch.arange(len(chosen_TK)) % num_experts
    return sort(routed._replace(chosen_TK=chosen_TK), num_experts, num_rows)


def _attend(q_TNH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q_TNH), q_TNH.new_zeros(q_TNH.shape[1::-1], dtype=torch.float32)


def _differentiate(_: Tensor, *qkv: Any) -> tuple[Tensor, ...]:
    return tuple(map(torch.zeros_like, qkv[:3]))


_NOWHERE = Path("never-written")
_NO_ATTENTION = BlockKernel(_attend, _differentiate)
"""Stands for CUDA's attention over documents, which no CPU has."""


def _async_save(recorder: Recorder, state: Any, *, process_group: Any, **_: Any) -> "Future[None]":
    recorder.call(process_group.communicator, CalledOperation("save"))
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _load(recorder: Recorder, state: Any, *, process_group: Any, **_: Any) -> None:
    recorder.host_waits(recorder.call(process_group.communicator, CalledOperation("load")))


def _purposes(mesh: Mesh) -> dict[Communicator, Communicator]:
    """Return every communicator of this rank with what it is for; a group may serve several axes."""
    groups: list[tuple[Any, str]] = [(torch.distributed.group.WORLD, "all ranks")]
    groups += [(mesh.weights.get_group(axis), axis) for axis in mesh.weights.mesh_dim_names or ()]
    groups += [(mesh.experts.get_group(axis), axis) for axis in mesh.experts.mesh_dim_names or ()]
    if mesh.expert_hops is not None:
        groups += zip(mesh.expert_hops, ("ep between nodes", "ep in a node"), strict=True)
    groups.append((mesh.cp_group, "cp"))
    groups += [(group, f"from {source} to {target}") for (source, target), group in mesh.transfers.items()]
    named: dict[Communicator, Communicator] = {}
    for group, purpose in groups:
        if group is not None:
            named.setdefault(group.communicator, replace(group.communicator, purpose=purpose))
    return named
