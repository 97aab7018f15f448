"""The cost of training: FLOPs, the time of an optimizer step, and from that tokens per second and money.

FLOPs count matrix products only, two per multiply-add; norms, rotary embedding, softmax and optimizer are left out.
Everything printed counts full attention: the half that a causal mask saves is not subtracted, as in the figures of
Megatron-LM and torchtitan.

The step time is arithmetic from data sheets and published measurements. ``docs/cost.md`` lists every constant with its
source, and compares the estimate with published throughputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llama_core.config.hardware import DeviceSpec
from llama_core.config.models import ModelSpec
from llama_core.config.run import RecomputeMode, RunConfig
from llama_core.planning.before import spec_before_run
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.links import node_size
from llama_core.planning.time.matmul_flops import forward_matmul_flops_per_token, matmul_flops_per_token
from llama_core.planning.time.parts import Part, StepParts
from llama_core.planning.work import Work
from llama_core.units import format_count, format_duration

_SHOWN_SHARE = 0.005
"""Share of a step below which a part is not shown."""


def flops_per_token(spec: ModelSpec, seq_len: int, *, causal: bool = False) -> float:
    """Return the model FLOPs per token of a forward and a backward pass, without recomputation.

    Args:
        spec: the architecture.
        seq_len: tokens per sequence; every token is scored against all of them.
        causal: count only the scores below the diagonal, half of them.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B (6 N + 12 L H Q T), with N the parameters
    multiplied: the head counts, the embedding look-up does not. Where values are narrower than queries, their
    product counts less.
    """
    attention = 6 * spec.num_blocks * (spec.q_size + spec.attended_size) * seq_len
    return matmul_flops_per_token(spec) + (attention / 2 if causal else attention)


def hardware_flops_per_token(spec: ModelSpec, seq_len: int, recompute: RecomputeMode) -> float:
    """Return the FLOPs per token that the hardware executes: with ``'full'`` every layer runs its forward twice.

    This approaches 4/3 of ``flops_per_token`` as the layers outweigh the head, which is not recomputed. The scores
    that flash attention recomputes in its backward are not counted.
    """
    flops = flops_per_token(spec, seq_len)
    if recompute == "full":
        head_forward = 2 * (1 + spec.mtp_layers) * spec.embedding_parameters
        flops += forward_flops_per_token(spec, seq_len) - head_forward
    return flops


def forward_flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Return the FLOPs per token of a forward pass alone, attention in full."""
    attention = 2 * spec.num_blocks * (spec.q_size + spec.attended_size) * seq_len
    return forward_matmul_flops_per_token(spec) + attention


def model_flops_utilisation(
    tokens_per_second: float, spec: ModelSpec, seq_len: int, num_devices: int, peak_flops: float | None
) -> float | None:
    """Return model FLOP/s over the devices' peak rate, from 0 to 1; None if that peak is unknown.

    Attention is counted in full; recomputation is not counted.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    if peak_flops is None:
        return None
    return tokens_per_second * flops_per_token(spec, seq_len) / (num_devices * peak_flops)


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step in seconds, and the throughput and cost that follow from it."""

    parts: Mapping[Part, float]
    """The seconds of each part on the pipeline rank that computes most; they add up to the whole step.

    ``compute``: forwards, backwards and recomputation. ``bubble``: waiting while other pipeline ranks compute. ``tp``,
    ``cp``, ``ep``, ``dp``, ``pp``: the time communication over these axes adds; ep is there only if the plan divides
    experts; dp covers weights and gradients over all ranks that hold the same ones. ``optimizer``: clipping, updating,
    and moving states to the host and back. ``preparation``: the forward over other rows of an objective that prepares,
    with its communication and its bubble; else it is not there.
    """
    tokens: int
    """Tokens of a step, over all devices."""
    num_devices: int
    flops: float
    """Model FLOPs of a step: attention in full, recomputation not counted."""
    peak_flops: float
    """Peak bf16 rate of all devices."""

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.tokens / self.total

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens per second of one device."""
        return self.tokens_per_second / self.num_devices

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the peak, from 0 to 1."""
        return self.flops / self.total / self.peak_flops

    def training_time(self, tokens: float) -> float:
        """Return the seconds to train on ``tokens``, without checkpoints, evaluations and failures."""
        return tokens / self.tokens_per_second

    def price(self, tokens: float, dollars_per_gpu_hour: float) -> float:
        """Return the dollars to train on ``tokens``."""
        return self.training_time(tokens) / 3600 * self.num_devices * dollars_per_gpu_hour

    def summary(self) -> str:
        """Return the estimate in one line."""
        duration = f"{self.total:.3g} s" if self.total < 60 else format_duration(self.total)
        shares = {name: seconds / self.total for name, seconds in self.parts.items()}
        shown = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= _SHOWN_SHARE)
        return (
            f"about {duration} per step, {format_count(self.tokens_per_second)} tokens/s "
            f"({format_count(self.tokens_per_second_per_device)} per GPU), MFU {self.mfu:.1%}; {shown}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as a flat record."""
        return {
            "step_seconds": self.total,
            **{f"{name}_seconds": seconds for name, seconds in self.parts.items()},
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "mfu": self.mfu,
        }


def step_time(work: Work, device: DeviceSpec) -> StepTime:
    """Return the time of one optimizer step on ``device``.

    Args:
        work: the model, the plan, which has to be able to divide it (``plan.check``), and the sequences.
        device: the devices, all of one kind.
    """
    plan = work.plan
    tokens = plan.batch_size * work.seq_len
    return StepTime(
        parts=StepParts(work, device).seconds(),
        tokens=tokens,
        num_devices=plan.world_size,
        flops=tokens * flops_per_token(work.spec, work.seq_len),
        peak_flops=plan.world_size * device.bf16_flops,
    )


def step_time_of(config: RunConfig, plan: ParallelPlan, device: DeviceSpec) -> StepTime:
    """Return the time of one optimizer step of a resolved ``config`` under ``plan`` on its nodes of ``device``."""
    return step_time(Work.of(config, plan), _on_its_nodes(config, device))


def step_by_kind(config: RunConfig, plan: ParallelPlan, device: DeviceSpec) -> tuple[StepTime, dict[str, float]]:
    """Return the time of one optimizer step like ``step_time_of``, and its seconds by kind of work."""
    work = Work.of(config, plan)
    on_nodes = _on_its_nodes(config, device)
    step = step_time(work, on_nodes)
    return step, StepParts(work, on_nodes).by_kind(step.parts)


def forward_time(work: Work, device: DeviceSpec, tokens: float) -> float:
    """Return the seconds of one forward over ``tokens`` on ``device``, in which nothing is kept for a backward.

    Every forward of the engine has the rows of a microbatch, and as many of them follow each other as in a step.
    """
    plan = work.plan
    tokens_at_a_time = plan.rows_per_forward * plan.num_microbatches * plan.dp * work.seq_len
    return tokens / tokens_at_a_time * StepParts(work, device).forwards()


def forward_time_of(config: RunConfig, plan: ParallelPlan, device: DeviceSpec, tokens: float) -> float:
    """Return the seconds of a forward over ``tokens`` before a run, on its nodes of ``device``.

    It is a forward of the model that a resolved ``config`` trains, or of its teacher.
    """
    work = replace(Work.of(config, plan), spec=spec_before_run(config))
    return forward_time(work, _on_its_nodes(config, device), tokens)


def _on_its_nodes(config: RunConfig, device: DeviceSpec) -> DeviceSpec:
    return replace(device, gpus_per_node=node_size(config, device.gpus_per_node))
