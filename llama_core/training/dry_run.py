"""The dry run: real steps of the real model on fake tensors, which have shapes and lifetimes but no memory."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from llama_core.config.run import RunConfig
from llama_core.errors import PlanError
from llama_core.models.llama import Llama
from llama_core.parallel.recompute import apply_recompute
from llama_core.planning.memory import MemoryProfile, Phase
from llama_core.planning.plan import ParallelPlan
from llama_core.training.byte_counter import ByteCounter
from llama_core.training.data import Batch
from llama_core.training.optim import build_optimizer
from llama_core.training.trainer import COMPUTE_DTYPES, train_step
from llama_core.units import TFLOP, format_bytes, format_duration

NUM_STEPS = 2
"""The first step makes the optimizer's moments; only the second one finds them in memory from its beginning."""


@dataclass(frozen=True)
class DryRunResult:
    """What a rehearsed optimizer step held and computed."""

    profile: MemoryProfile
    peak_at: str
    """The operator that reached the peak, and the module or gradient before it."""
    flops: int
    """FLOPs of one step as executed: attention in full, recomputation included."""
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
            "peak_at": self.peak_at,
            "flops": self.flops,
            "seconds": self.seconds,
            "device": self.device,
        }


def rehearse(config: RunConfig, plan: ParallelPlan) -> DryRunResult:
    """Run two optimizer steps as ``plan`` lays them out, without allocating, and count bytes and FLOPs.

    Args:
        config: the resolved configuration (no ``auto`` left).
        plan: how a batch is cut into microbatches, and what is recomputed.

    Raises:
        PlanError: if the plan has more than one rank.
    """
    if plan.world_size > 1:
        raise PlanError(f"a dry run rehearses one device, not {plan.world_size}; use --gpus 1")
    started = time.perf_counter()
    with torch.device("meta"):
        model = Llama(config.spec, compute_dtype=COMPUTE_DTYPES[config.training.precision])
    apply_recompute(model, plan.recompute)
    counter = ByteCounter()
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        model.to_empty(device="cpu")
        optimizer = build_optimizer(model, config.training)
        counter.relabel(model.parameters(), "weights")
        stage = _Stage(counter, model)
        for _ in range(NUM_STEPS):
            counter.flops = 0
            microbatches = [_fake_batch(config, plan) for _ in range(plan.num_microbatches)]
            for batch in microbatches:
                counter.relabel(_tensors(batch), "activations")
            train_step(
                model,
                optimizer,
                microbatches,
                learning_rate=config.training.learning_rate,
                max_grad_norm=config.training.max_grad_norm,
                check_finite=False,
                on_phase=stage.enter,
            )
            counter.relabel((s for state in optimizer.state.values() for s in state.values()), "moments")
            del microbatches
    phases = {phase: dict(peak.categories) for phase, peak in counter.peaks.items()}
    profile = MemoryProfile(phases)
    return DryRunResult(
        profile=profile,
        peak_at=counter.peaks[profile.peak_phase].where,
        flops=counter.flops,
        seconds=time.perf_counter() - started,
        device="one device, counted on fake tensors; a CUDA context and allocator fragmentation come on top",
    )


class _Stage:
    """Tells a counter where in ``train_step`` the computation is, and what its tensors have become.

    What the forward leaves behind are activations, what is made after the final norm is the loss's, and a gradient is
    one from when it is accumulated; everything else is temporary.
    """

    def __init__(self, counter: ByteCounter, model: Llama) -> None:
        self.counter = counter
        self._forward_since = 0
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, args, name=name: self._at(name or "the model"))
        model.norm.register_forward_hook(lambda module, args, out: self._begin_loss())
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda parameter, name=name: self._accumulated(parameter, name)
            )

    def enter(self, phase: Phase) -> None:
        """Begin a phase of ``train_step``."""
        counter = self.counter
        if phase == "forward":
            self._forward_since = counter.num_born
        if phase == "backward":
            counter.relabel_since(self._forward_since, "temporaries", "activations")
        counter.phase, counter.category, counter.landmark = phase, "temporaries", f"the {phase} began"

    def _at(self, landmark: str) -> None:
        self.counter.landmark = landmark

    def _begin_loss(self) -> None:
        self.counter.landmark, self.counter.category = "the loss began", "loss"

    def _accumulated(self, parameter: nn.Parameter, name: str) -> None:
        self.counter.landmark = f"the gradient of {name}"
        if parameter.grad is not None:
            self.counter.relabel([parameter.grad], "gradients")


def _fake_batch(config: RunConfig, plan: ParallelPlan) -> Batch:
    shape = (plan.microbatch_size, config.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    return Batch(
        tokens,
        torch.zeros_like(tokens),
        torch.zeros_like(tokens) if config.data.document_mask else None,
        tokens.numel(),
    )


def _tensors(batch: Batch) -> list[Tensor]:
    return [t for t in (batch.tokens_BS, batch.targets_BS, batch.positions_BS) if t is not None]
