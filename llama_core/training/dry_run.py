"""The dry run: real steps of the real model on fake tensors, which have shapes and lifetimes but no memory."""

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_core.config.run import RunConfig
from llama_core.errors import PlanError
from llama_core.models.batch import Batch
from llama_core.models.llama import Llama
from llama_core.parallel.apply import ParallelModel
from llama_core.planning.memory import estimate_memory
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.profile import MemoryProfile, Phase
from llama_core.training.byte_counter import ByteCounter, replaced
from llama_core.training.engine import COMPUTE_DTYPES, NativeEngine, train_step
from llama_core.training.optim import build_optimizer
from llama_core.units import TFLOP, format_bytes, format_duration

NUM_STEPS = 2
"""The first step makes the optimizer's moments; only the second one, which is counted, finds them there."""


@dataclass(frozen=True)
class DryRunResult:
    """What a rehearsed optimizer step held and computed on one rank."""

    profile: MemoryProfile
    rank: int
    """The rank that was rehearsed."""
    peak_at: str
    """The operator that reached the peak, and the module or gradient before it."""
    flops: int
    """FLOPs of one step as executed by this rank: attention in full, recomputation included."""
    seconds: float
    """Wall time of the rehearsal."""
    device: str
    """What the bytes stand for."""

    def summary(self) -> str:
        """Return the result in one line."""
        return (
            f"peak {format_bytes(self.profile.peak_bytes)} in the {self.profile.peak_phase}, "
            f"{self.flops / TFLOP:.2f} TFLOP per step; counted in {format_duration(self.seconds)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a flat record."""
        return self.profile.as_dict() | {
            "rank": self.rank,
            "peak_at": self.peak_at,
            "flops": self.flops,
            "seconds": self.seconds,
            "device": self.device,
        }


def rehearse(config: RunConfig, plan: ParallelPlan, rank: int | None = None) -> DryRunResult:
    """Run two optimizer steps of one rank of ``plan``, without allocating, and count bytes and FLOPs.

    The other ranks are not there: a process group is made for the time of the rehearsal in which every transfer is
    over at once and brings nothing.

    Args:
        config: the resolved configuration (no ``auto`` left).
        plan: how the work is divided over ranks and microbatches, and what is recomputed.
        rank: which rank; by default the one that is estimated to hold most.

    Raises:
        PlanError: if the plan leaves its sharding to DeepSpeed, has no such rank, or ranks are connected already.
    """
    if plan.zero_backend == "deepspeed":
        raise PlanError(
            "the dry run rehearses torch's own ZeRO, not DeepSpeed's; use parallel.zero_backend=native to rehearse"
        )
    rank = _fullest_rank(config, plan) if rank is None else rank
    started = time.perf_counter()
    with _alone_among(plan.world_size, rank):
        model = _on_meta_device(config, plan)
        with FakeTensorMode(allow_non_fake_inputs=True):
            counter = count_steps(model, config)
    phases = {phase: dict(peak.categories) for phase, peak in counter.peaks.items()}
    profile = MemoryProfile(phases)
    which = f"rank {rank} of {plan.world_size}" if plan.world_size > 1 else "one device"
    return DryRunResult(
        profile=profile,
        rank=rank,
        peak_at=counter.peaks[profile.peak_phase].where,
        flops=counter.flops,
        seconds=time.perf_counter() - started,
        device=f"{which}, counted on fake tensors; a CUDA context and allocator fragmentation come on top",
    )


def _on_meta_device(config: RunConfig, plan: ParallelPlan) -> ParallelModel:
    dtype = COMPUTE_DTYPES[config.training.precision]
    return ParallelModel(config.spec, plan, device=torch.device("cpu"), compute_dtype=dtype)


def count_steps(model: ParallelModel, config: RunConfig) -> ByteCounter:
    """Return a counter that has seen the last of ``NUM_STEPS`` steps of a model without memory yet.

    It does not matter whether the tensors are fake.
    """
    plan, counter = model.plan, ByteCounter()
    with counter:
        model.materialize()
        optimizer = build_optimizer(model.model, config.training)
        engine = NativeEngine(model, optimizer, check_finite=False)
        labels = _Labels(counter, model.model)
        buckets = _Buckets(model.model, plan)
        counter.relabel(buckets.gradients.values(), "gradients")

        def enter(phase: Phase) -> None:
            labels.enter(phase)
            buckets.enter(phase)

        for _ in range(NUM_STEPS):
            counter.relabel(model.model.parameters(), "weights")  # fully_shard pads uneven shards in its first forward
            counter.forget_peaks()
            buckets.num_backwards = 0
            microbatches = [_fake_batch(config, plan) for _ in range(plan.num_microbatches)]
            for batch in microbatches:
                counter.relabel(_tensors(batch), "activations")
            train_step(
                engine,
                microbatches,
                learning_rate=config.training.learning_rate,
                max_grad_norm=config.training.max_grad_norm,
                on_phase=enter,
            )
            counter.relabel((s for state in optimizer.state.values() for s in state.values()), "moments")
            del microbatches
    return counter


class _Labels:
    """Tells a counter where in ``train_step`` the computation is, and what its tensors have become.

    What a forward leaves behind are activations, what is made after the final norm is the loss's, and a gradient is
    one from when it is accumulated; everything else is temporary or, as the counter sees itself, communication.
    """

    def __init__(self, counter: ByteCounter, model: Llama) -> None:
        self.counter, self.model = counter, model
        self._forward_since = 0
        self._watched: set[int] = set()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, args, name=name: self._at(module, name))
        model.register_forward_pre_hook(lambda module, args: self._begin_forward(args[0]))
        model.register_forward_hook(lambda module, args, out: self._end_forward())
        if model.norm is not None:
            model.norm.register_forward_hook(lambda module, args, out: self._begin_loss())
        self._watch(model)

    def enter(self, phase: Phase) -> None:
        """Begin a phase of ``train_step``."""
        counter = self.counter
        counter.phase, counter.category, counter.landmark = phase, "temporaries", f"the {phase} began"
        counter.relabel((p.grad for p in self.model.parameters() if p.grad is not None), "gradients")

    def _watch(self, module: nn.Module) -> None:
        """Recognise gradients of ``module`` from now on; gathered weights have some of their own."""
        for name, parameter in module.named_parameters():
            if id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda parameter, name=name: self._accumulated(parameter, name)
                )

    def _at(self, module: nn.Module, name: str) -> None:
        self.counter.landmark = name or "the model"
        self._watch(module)

    def _begin_forward(self, inputs: Tensor) -> None:
        self._forward_since = self.counter.num_born
        self.counter.relabel([inputs], "activations")

    def _end_forward(self) -> None:
        # a ring of ranks sends what it keeps
        self.counter.relabel_since(self._forward_since, ("temporaries", "communication"), "activations")
        self.counter.category = "temporaries"

    def _begin_loss(self) -> None:
        self.counter.landmark, self.counter.category = "the loss began", "loss"

    def _accumulated(self, parameter: nn.Parameter, name: str) -> None:
        self.counter.landmark = f"the gradient of {name}"
        if parameter.grad is not None:
            self.counter.relabel([parameter.grad], "gradients")


class _Buckets:
    """The memory in which copies of a whole model average their gradients: there at all times, for all of them.

    What ``DistributedDataParallel`` does to bytes; its own reducer needs real ranks. A gradient lies outside until the
    last backward of a step moves it in.
    """

    def __init__(self, model: Llama, plan: ParallelPlan) -> None:
        copies = plan.dp * plan.cp > 1 and not plan.uses_fully_shard and dist.get_backend() == "fake"
        self.num_backwards, self._last = 0, plan.num_microbatches
        self.gradients = {p: torch.empty_like(p, requires_grad=False) for p in model.parameters() if copies}
        for parameter in self.gradients:
            parameter.register_post_accumulate_grad_hook(self._move)  # type: ignore[no-untyped-call]

    def enter(self, phase: Phase) -> None:
        """Begin a phase of ``train_step``."""
        self.num_backwards += phase == "backward"

    def _move(self, parameter: nn.Parameter) -> None:
        if self.num_backwards == self._last:
            parameter.grad = self.gradients[parameter]


def _fullest_rank(config: RunConfig, plan: ParallelPlan) -> int:
    """Return the first rank of the pipeline rank that is estimated to hold most."""

    def peak_bytes(pp_rank: int) -> int:
        return estimate_memory(
            config.spec,
            plan,
            seq_len=config.seq_len,
            precision=config.training.precision,
            document_mask=config.data.document_mask,
            pp_rank=pp_rank,
        ).peak_bytes

    return max(range(plan.pp), key=peak_bytes) * (plan.world_size // plan.pp)


@contextmanager
def _alone_among(world_size: int, rank: int) -> Iterator[None]:
    """Be one of several ranks of which the others do not exist.

    Raises:
        PlanError: if there is no such rank, or this process is connected to others already.
    """
    if not 0 <= rank < world_size:
        raise PlanError(f"rank {rank} is not one of the plan's ranks 0 to {world_size - 1}")
    if dist.is_initialized():
        raise PlanError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, and a dry run is of one "
            "process; rehearse before the process group is made"
        )
    if world_size == 1:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_without_torchs_advice())
        stack.enter_context(replaced(sys, "excepthook", sys.excepthook))  # a process group sets one of its own
        # or else sent tensors would be kept to the end: a fake transfer never says that it is over
        stack.enter_context(replaced(FakeWork, "is_completed", lambda work: True))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(_clear_sharding_prop_cache)  # it remembers meshes, and equal ones have groups of their own
        stack.callback(dist.destroy_process_group)
        yield


@contextmanager
def _without_torchs_advice() -> Iterator[None]:
    """Keep from the user what torch has to say on how collectives could be fewer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        logger = logging.getLogger("torch.distributed.tensor._redistribute")
        with replaced(logger, "disabled", True):
            yield


def _fake_batch(config: RunConfig, plan: ParallelPlan) -> Batch:
    shape = (plan.microbatch_size, config.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    return Batch(tokens, torch.zeros_like(tokens), torch.zeros_like(tokens) if config.data.document_mask else None)


def _tensors(batch: Batch) -> list[Tensor]:
    return [t for t in (batch.tokens_BS, batch.targets_BS, batch.positions_BS) if t is not None]
