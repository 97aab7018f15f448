"""``ParallelPlan``: how a run is divided over its devices."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from llama_core.attention import kernels_of, refusal
from llama_core.config.models import ModelSpec
from llama_core.config.run import (
    MAX_LAYERS,
    MAX_MICROBATCHES,
    AttentionKernel,
    GradientCompression,
    Offload,
    Precision,
    RecomputeMode,
    ZeroBackend,
    literal_values,
)
from llama_core.errors import PlanError
from llama_core.planning.stages import cut_layers
from llama_core.schedules.actions import Schedule
from llama_core.schedules.registry import (
    DEFAULT_SCHEDULE,
    SCHEDULES,
    remembered_schedule,
    schedule_type,
)
from llama_core.units import divisors

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of the ranks, slowest varying first.

Ranks on the last ones share a machine and communicate most.
"""

FP8_MULTIPLE = 16
"""Every side of a product in fp8 is a multiple of this: torch's ``_scaled_mm`` takes no others."""

MANY_PARTS = 1024
"""Parts of a tensor in a checkpoint from which on listing them takes minutes for a large model."""
PART_SECONDS = 20e-6
"""What the first rank takes to list a part at every save, by ``benchmarks/scale.py``; it is read in nearly as long."""


@dataclass(frozen=True)
class ParallelPlan:
    """How one optimizer step is divided over ranks and microbatches.

    Raises:
        PlanError: naming every size that is out of range and every pair of choices that exclude
            each other.
    """

    tp: int = 1
    """Tensor-parallel ranks, which divide every matrix and the vocabulary."""
    pp: int = 1
    """Pipeline-parallel ranks, which divide the layers."""
    cp: int = 1
    """Context-parallel ranks, which divide every sequence."""
    ep: int = 1
    """Expert-parallel ranks, which divide the experts: neighbours among the data-parallel ranks, with all of the
    tensor-parallel ranks of each if these do not divide every expert."""
    ep_nodes: int = 1
    """Nodes that these span, if tokens go once to each node and from there to its ranks; 1: straight to experts."""
    expert_tp: int | None = None
    """Tensor-parallel ranks that divide every expert: ``tp``, which is the default, or 1."""
    dp_shard: int = 1
    """Data-parallel ranks that shard optimizer states, gradients and weights."""
    dp_replicate: int = 1
    """Copies of the sharding group."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks divide the sequence between matrices; no effect with tp=1."""
    zero_stage: int = 0
    """What the sharding ranks divide: 1 optimizer states, 2 also gradients, 3 also weights."""
    zero_backend: ZeroBackend = "native"
    """Who shards: torch's fully_shard, or DeepSpeed."""
    offload: Offload = "none"
    """What DeepSpeed keeps in host memory."""
    schedule: str = DEFAULT_SCHEDULE
    """The order of forwards and backwards over the pipeline ranks; no effect with pp=1."""
    num_chunks: int = 1
    """Stages per pipeline rank under the ``interleaved`` schedule."""
    microbatch_size: int = 1
    """Sequences per forward pass and rank."""
    num_microbatches: int = 1
    """Forward passes per rank and optimizer step."""
    recompute: RecomputeMode = "none"
    """What the backward pass recomputes instead of keeping."""
    recomputed_layers: tuple[int, ...] | None = None
    """Layers of each stage, from its first, that ``recompute`` applies to; None means all."""
    gradient_compression: GradientCompression = "none"
    """How gradients are compressed between data-parallel ranks."""
    compile: bool = False
    """Whether every block is compiled."""
    attention: AttentionKernel = "auto"
    """torch's attention kernel: the one torch chooses, or the one that holds all scores."""

    def __post_init__(self) -> None:
        if self.recomputed_layers is not None:
            as_tuple = tuple(self.recomputed_layers)  # JSON has lists
            object.__setattr__(self, "recomputed_layers", as_tuple)
        problems = list(self._problems())
        if not problems:
            problems = [*self._exclusions()]
        if problems:
            raise PlanError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        ranks = ("tp", "pp", "cp", "ep", "ep_nodes", "dp_shard", "dp_replicate")
        for name in (*ranks, "num_chunks", "microbatch_size", "num_microbatches"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)} is not at least 1"
        if self.num_microbatches > MAX_MICROBATCHES:
            yield (
                f"num_microbatches={self.num_microbatches} in one step, of {self.microbatch_size} "
                f"sequences each, is above {MAX_MICROBATCHES}; use a smaller batch_size, a larger "
                "microbatch_size or more gpus"
            )
        if self.pp * self.num_chunks > MAX_LAYERS:  # their schedule would take minutes to build
            yield (
                f"pp={self.pp} with num_chunks={self.num_chunks} makes more stages than the "
                f"{MAX_LAYERS} layers that a model may have; use fewer"
            )
        if self.zero_stage not in range(4):
            yield f"zero_stage={self.zero_stage} is not one of 0, 1, 2, 3"
        choices = {
            "recompute": literal_values(RecomputeMode),
            "zero_backend": literal_values(ZeroBackend),
            "offload": literal_values(Offload),
            "gradient_compression": literal_values(GradientCompression),
            "attention": literal_values(AttentionKernel),
        }
        for name, legal in choices.items():
            if getattr(self, name) not in legal:
                yield f"{name}={getattr(self, name)!r} is not one of {', '.join(legal)}"
        if SCHEDULES.find(self.schedule) is None:
            yield f"schedule={self.schedule!r} is not one of {', '.join(SCHEDULES.names())}"

    def _exclusions(self) -> Iterator[str]:
        try:
            schedule = self.layout
        except PlanError:
            yield from self._refusal_of_schedule()
            return
        num_parts = schedule.parts_per_microbatch
        if self.microbatch_size % num_parts:
            yield (
                f"schedule={self.schedule} cuts every microbatch in {num_parts}, but "
                f"microbatch_size={self.microbatch_size} is odd; use an even one"
            )
        least = schedule_type(self.schedule).min_microbatches
        if self.pp > 1 and self.num_microbatches < least:
            yield (
                f"schedule={self.schedule} runs num_microbatches={self.num_microbatches} in one "
                f"direction only; use at least {least}, or another schedule"
            )
        if self.recomputed_layers is not None and len(self.recomputed_layers) != self.num_stages:
            yield f"recomputed_layers={self.recomputed_layers} needs one number for each of {self.num_stages} stages"
        if self.dp_shard > 1 and self.zero_stage == 0:
            yield f"dp_shard={self.dp_shard} shards nothing at zero_stage=0; use dp_replicate, or zero_stage 1 to 3"
        if not kernels_of(self.attention, cp=self.cp):
            yield f"attention={self.attention} needs whole sequences, but cp={self.cp} divides them; use cp=1"
        yield from self._exclusions_of_experts()
        yield from self._exclusions_of_split_backwards()
        yield from self._exclusions_of_deepspeed()
        yield from self._exclusions_of_compression()

    def _exclusions_of_experts(self) -> Iterator[str]:
        yield from self._exclusions_of_expert_tp()
        if self.ep % self.ep_nodes:
            yield f"ep_nodes={self.ep_nodes} does not divide the ranks of ep={self.ep}"
        if self.compile and self.ep > 1 and self.recompute != "none":
            yield (
                f"compile with ep={self.ep} and recompute={self.recompute} would compile nothing, "
                "because tokens leave the recomputed block; use recompute=none, or no compile"
            )

    def _exclusions_of_expert_tp(self) -> Iterator[str]:
        if self.tp_of_experts not in {1, self.tp}:
            yield f"expert_tp={self.expert_tp} is neither 1 nor tp={self.tp}"
            return
        ep = f"ep={self.ep}"
        if self.folds_experts:
            if not self.sequence_parallel:
                yield (
                    "expert_tp=1 needs sequence_parallel=true: without, all tensor-parallel ranks have the same tokens"
                )
            if self.ep % self.tp:
                yield (
                    f"expert_tp=1 needs an ep that is a multiple of tp={self.tp}, because tensor-parallel ranks then "
                    f"are expert-parallel ranks, but ep is {self.ep}; use ep={-(-self.ep // self.tp) * self.tp}, "
                    "or leave expert_tp out"
                )
                return
            ep = f"ep={self.ep} over tp={self.tp}"
        if self.dp % self.ep_over_dp:
            yield f"{ep} does not divide the {self.dp} data-parallel ranks"
        elif self.dp_shard % self.ep_over_dp and self.ep_over_dp % self.dp_shard:
            yield f"{ep} neither divides dp_shard={self.dp_shard} nor is a multiple of it"

    def _refusal_of_schedule(self) -> Iterator[str]:
        try:
            self.build_schedule()
        except PlanError as error:
            yield str(error)

    def _exclusions_of_split_backwards(self) -> Iterator[str]:
        if not self.splits_backward:
            return
        if self.dp * self.cp * self.tp > 1 or self.recompute != "none" or self.compile:
            yield (
                f"schedule={self.schedule} computes weight gradients separately, which works with "
                "pipeline parallelism only (no tp, cp, data parallelism, recompute or compile); "
                f"use schedule={DEFAULT_SCHEDULE}"
            )

    def _exclusions_of_deepspeed(self) -> Iterator[str]:
        if self.zero_backend == "native":
            if self.offload != "none":
                yield f"offload={self.offload} needs zero_backend=deepspeed"
            return
        for name in ("tp", "pp", "cp", "ep", "dp_replicate"):
            size = getattr(self, name)
            if size > 1:
                yield f"zero_backend=deepspeed works with data parallelism only, not with {name}={size}; use native"
        if self.zero_stage == 0:
            yield "zero_backend=deepspeed needs zero_stage 1, 2 or 3"
        if self.offload == "parameters" and self.zero_stage < 3:
            yield f"offload=parameters needs zero_stage=3, not {self.zero_stage}"

    def _exclusions_of_compression(self) -> Iterator[str]:
        if self.gradient_compression == "powersgd" and not self._holds_whole_model:
            yield (
                "gradient_compression=powersgd needs the whole model on every rank (zero_stage=0, "
                "tp=1, pp=1, ep=1); use bf16"
            )

    def check(self, spec: ModelSpec, *, seq_len: int, precision: Precision) -> None:
        """Raise an error if this plan cannot divide ``spec``.

        Args:
            spec: the model.
            seq_len: tokens per sequence.
            precision: the dtype of activations.

        Raises:
            PlanError: naming every size that does not divide evenly, with the legal sizes.
        """
        problems = list(self._misfits(spec, seq_len, precision))
        if problems:
            raise PlanError("; ".join(problems))

    def _misfits(self, spec: ModelSpec, seq_len: int, precision: Precision) -> Iterator[str]:
        for what, count in spec.divided_by_tp(whole_experts=self.folds_experts).items():
            if count % self.tp:
                legal = [n for n in divisors(count) if n <= 2 * self.tp]
                yield (
                    f"tp={self.tp} does not divide the {count} {what} of {spec.name}; "
                    f"use one of {', '.join(map(str, legal))}"
                )
        if self.num_stages > spec.num_layers:
            yield (
                f"{self.num_stages} pipeline stages (pp={self.pp}) are more than the "
                f"{spec.num_layers} layers of {spec.name}; use at most "
                f"pp={spec.num_layers * self.pp // self.num_stages}"
            )
        # each rank holds one piece from either end of a sequence, see parallel.context
        cut = 2 * self.cp if self.cp > 1 else 1
        if seq_len % cut:
            yield f"seq_len={seq_len} is not a multiple of {cut} (2 x cp); use {-(-seq_len // cut) * cut}"
        elif self.sharded_sequence and (seq_len // self.cp) % self.tp:
            yield f"seq_len={seq_len} over cp={self.cp} is not a multiple of tp={self.tp}; use sequence_parallel=false"
        yield from self._misfits_of_attention(spec)
        yield from self._misfits_of_experts(spec)
        if self.zero_backend == "deepspeed":
            yield from self._misfits_of_deepspeed(spec, precision)
        if precision == "fp8":
            yield from self._misfits_of_fp8(spec, seq_len)
        if precision == "fp16" and self.gradient_compression == "powersgd":
            yield "precision fp16 with gradient_compression=powersgd feeds back errors of another loss scale; use bf16"

    @staticmethod
    def _misfits_of_deepspeed(spec: ModelSpec, precision: Precision) -> Iterator[str]:
        if spec.trainable:
            yield f"zero_backend=deepspeed does not train {', '.join(spec.trainable)} beside adapters; use native"
        if spec.packed:
            yield "zero_backend=deepspeed does not shard the bytes of lora.base=nf4; use native"
        if spec.mtp_layers:
            yield f"zero_backend=deepspeed does not train the mtp_layers={spec.mtp_layers} of {spec.name}; use native"
        if precision == "fp16":
            yield "precision fp16 with zero_backend=deepspeed would scale the loss twice; use native or bf16"

    def _misfits_of_fp8(self, spec: ModelSpec, seq_len: int) -> Iterator[str]:
        sizes = {
            "the hidden size": spec.hidden_size,
            f"the query columns over tp={self.tp}": spec.q_size // self.tp,
            f"the key/value columns over tp={self.tp}": spec.kv_size // self.tp,
            "the tokens of a forward": self.rows_per_forward * seq_len // self.cp,
        }
        sizes |= {f"the {what} over tp={self.tp}": width // self.tp for what, width in spec.dense_widths.items()}
        sizes |= {f"the {what}": width for what, width in spec.latent_widths(self.tp).items()}
        for what, size in sizes.items():
            if size % FP8_MULTIPLE:
                yield f"precision fp8 needs multiples of {FP8_MULTIPLE}, but {what} are {size}; use bf16"
        if spec.packed:
            yield "precision fp8 does not work with lora.base=nf4; use bf16"
        if self.zero_backend == "deepspeed":
            yield "precision fp8 does not work with zero_backend=deepspeed; use native or bf16"
        if self.splits_backward:
            yield f"precision fp8 does not work with schedule={self.schedule}; use schedule={DEFAULT_SCHEDULE} or bf16"

    def _misfits_of_attention(self, spec: ModelSpec) -> Iterator[str]:
        if unserved := refusal(spec.attentions, asked=self.attention, cp=self.cp):
            yield unserved
        heads = spec.num_kv_heads // self.tp
        if spec.num_kv_heads % self.tp == 0 and spec.num_kv_heads % self.ranks_of_heads:
            of_rank = f" that each of tp={self.tp} ranks has" if self.tp > 1 else ""
            legal = ", ".join(map(str, divisors(heads)))
            yield (
                f"attention=ulysses: cp={self.cp} does not divide the {heads} key/value heads of {spec.name}{of_rank}; "
                f"use attention=auto, or cp one of {legal}"
            )

    def _misfits_of_experts(self, spec: ModelSpec) -> Iterator[str]:
        if spec.moe is None:
            if self.ep > 1:
                yield f"ep={self.ep}: {spec.name} has no experts to divide; use ep=1"
            return
        count = spec.moe.num_experts
        if count % self.ep:
            legal = divisors(count)
            yield f"ep={self.ep} does not divide the {count} experts; use one of {', '.join(map(str, legal))}"
        if self.zero_backend == "deepspeed":
            yield "zero_backend=deepspeed does not train experts; use native"

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of a global rank on one of ``AXES``."""
        behind = math.prod(getattr(self, name) for name in AXES[AXES.index(axis) + 1 :])
        place: int = rank // behind % getattr(self, axis)
        return place

    def dp_rank(self, rank: int) -> int:
        """Return the position of a global rank among those that train on different sequences."""
        copy = self.coordinate(rank, "dp_replicate")
        return copy * self.dp_shard + self.coordinate(rank, "dp_shard")

    @property
    def dp(self) -> int:
        """Ranks that train on different sequences."""
        return self.dp_shard * self.dp_replicate

    @property
    def ranks_of_heads(self) -> int:
        """Ranks that divide the heads while they attend: also those of a sequence, if they exchange heads."""
        return self.tp * self.cp if self.attention == "ulysses" else self.tp

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def effective_zero_stage(self) -> int:
        """The ZeRO stage that takes effect: 0 if there are no ranks to shard over.

        Context-parallel ranks hold the same weights, so they shard with the data-parallel ones.
        """
        return self.zero_stage if self.dp_shard * self.cp > 1 else 0

    @property
    def uses_fully_shard(self) -> bool:
        """Whether ``fully_shard`` gathers the weights.

        Else a rank has them whole, alone or as a copy of the model.
        """
        return self.dp * self.cp > 1 and not self._holds_whole_model

    @property
    def averages_in_buckets(self) -> bool:
        """Whether ranks with the whole model each average their gradients, bucket by bucket."""
        return self.dp * self.cp > 1 and self._holds_whole_model

    @property
    def _holds_whole_model(self) -> bool:
        return self.zero_stage == 0 and self.tp == self.pp == self.ep == 1

    @property
    def keeps_cast_weights(self) -> bool:
        """Whether a rank also keeps its matrices in the dtype of activations, if that is another.

        It pays where several microbatches of a step would cast whole weights anew. It costs no
        memory where each of them would keep what it has cast for its backward; with recomputation
        none does.
        """
        is_whole = self.zero_backend == "native" and not self.uses_fully_shard
        return is_whole and self.num_microbatches > 1 and self.recompute == "none"

    @property
    def num_shards(self) -> int:
        """Ranks that each have a part of the same weights' states."""
        # context-parallel ranks hold the same weights too
        return self.dp_shard * self.cp if self.zero_stage else 1

    @property
    def parts_of_a_tensor(self) -> int:
        """Parts in which a checkpoint has a matrix and each of its moments."""
        return self.num_shards * self.tp

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same part of them."""
        return self.dp_replicate if self.zero_stage else self.dp * self.cp

    @property
    def num_expert_shards(self) -> int:
        """``num_shards`` of the weights of experts."""
        return self.num_shards // self.fewer_expert_shards

    @property
    def num_expert_copies(self) -> int:
        """``num_copies`` of the weights of experts."""
        return self.num_copies * self.fewer_expert_shards // self.ep_over_dp

    @property
    def fewer_expert_shards(self) -> int:
        """The factor by which experts have fewer shards than other weights."""
        # ranks that divide experts do not shard them too
        return math.gcd(self.ep_over_dp, self.dp_shard)

    @property
    def tp_of_experts(self) -> int:
        """Tensor-parallel ranks that divide every expert."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def folds_experts(self) -> bool:
        """Whether tensor-parallel ranks have whole experts, and each of them other ones.

        They then route the tokens of their part of the sequence.
        """
        return self.tp_of_experts == 1 < self.tp

    @property
    def ep_over_dp(self) -> int:
        """Data-parallel ranks that divide the experts, alone or with the tensor-parallel ranks of each."""
        return self.ep // self.tp if self.folds_experts else self.ep

    @property
    def sharded_sequence(self) -> bool:
        """Whether tensor-parallel ranks divide the residual stream along the sequence."""
        return self.sequence_parallel and self.tp > 1

    @property
    def rows_per_forward(self) -> int:
        """Sequences of one forward: a microbatch, or the part into which the schedule cuts it."""
        return self.microbatch_size // self.layout.parts_per_microbatch

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.dp * self.microbatch_size * self.num_microbatches

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.layout.num_stages

    @property
    def divides_matrices(self) -> bool:
        """Whether tensor parallelism divides every matrix."""
        return self.tp > 1

    @property
    def splits_backward(self) -> bool:
        """Whether backwards are split in two, with weight gradients computed separately."""
        return self.pp > 1 and schedule_type(self.schedule).splits_backward

    def build_schedule(self) -> Schedule:
        """Return the order of forwards and backwards on every pipeline rank."""
        return self.schedule_of(self.num_microbatches)

    @property
    def layout(self) -> Schedule:
        """The schedule of a short step with the same stages on the same ranks, quick to build."""
        period = 2 * self.pp  # the largest group of microbatches that any schedule repeats
        return self.schedule_of(min(self.num_microbatches, period + self.num_microbatches % period))

    def schedule_of(self, num_microbatches: int) -> Schedule:
        """Return the schedule of a step of another number of microbatches."""
        return remembered_schedule(
            self.schedule if self.pp > 1 else DEFAULT_SCHEDULE,
            num_ranks=self.pp,
            num_microbatches=num_microbatches,
            num_chunks=self.num_chunks,
        )

    def stage_layers(self, spec: ModelSpec) -> tuple[range, ...]:
        """Return the layers of every stage, as ``cut_layers`` divides them."""
        return cut_layers(spec, self.num_stages)

    def recompute_modes(self, spec: ModelSpec) -> tuple[tuple[RecomputeMode, ...], ...]:
        """Return the recompute mode of every layer, stage by stage."""
        stages = self.stage_layers(spec)
        counts = self.recomputed_layers or [len(layers) for layers in stages]
        modes: list[tuple[RecomputeMode, ...]] = []
        for count, layers in zip(counts, stages, strict=True):
            recomputed = [self.recompute] * min(count, len(layers))
            kept: list[RecomputeMode] = ["none"] * (len(layers) - len(recomputed))
            modes.append((*recomputed, *kept))
        return tuple(modes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Settings without an effect in this plan, or with one that may surprise, in sentences."""
        return tuple(self._without_effect())

    def _without_effect(self) -> Iterator[str]:
        if self.world_size > 1 and self.zero_stage and not self.effective_zero_stage:
            why = f"tp {self.tp} x pp {self.pp} leaves one data-parallel rank"
            if self.dp > 1:
                why = f"dp_replicate={self.dp_replicate} makes every data-parallel rank a copy"
            yield f"zero_stage={self.zero_stage} shards nothing because {why}; the effective stage is 0"
        sends_bf16 = self.gradient_compression == "bf16"
        if sends_bf16 and self.effective_zero_stage == 1 and self.num_microbatches > 1:
            yield "gradient_compression=bf16 at zero_stage=1 also sums microbatches in bf16; zero_stage=2 does not"
        if self.gradient_compression != "none" and self.dp * self.cp == 1:
            yield f"gradient_compression={self.gradient_compression} has no effect with one data-parallel rank"
        if self.pp == 1 and self.schedule != DEFAULT_SCHEDULE:
            yield f"schedule={self.schedule} has no effect with pp=1"
        if self.attention == "ulysses" and self.cp == 1:
            yield "attention=ulysses has no effect with cp=1"
        if self.attention == "math":
            yield "attention=math holds all scores and is slow; the estimate counts its memory but not its time"
        parts = self.parts_of_a_tensor
        if self.zero_backend == "native" and parts >= MANY_PARTS:
            seconds = 1000 * parts * PART_SECONDS
            yield (
                f"checkpoints have each tensor in {parts:,} parts: for every 1,000 tensors, a save keeps a thread of "
                f"the first rank busy for {seconds:.0f} s, and a start takes every rank nearly as long; where memory "
                "allows it, dp_replicate divides both (docs/scale.md)"
            )

    def summary(self) -> str:
        """Return the plan in one line."""
        sizes: list[str] = []
        for axis in reversed(AXES):
            size = getattr(self, axis)
            if size > 1:
                sizes.append(f"{axis} {size}")
        ranks = f"{self.world_size} ranks ({' x '.join(sizes)})" if sizes else "1 rank"
        zero = f"ZeRO {self.effective_zero_stage}" if self.effective_zero_stage else ""
        if self.zero_backend == "deepspeed":
            offload = "" if self.offload == "none" else f" with {self.offload} in host memory"
            zero = f"ZeRO {self.zero_stage} by DeepSpeed{offload}"
        nodes = f" on {self.ep_nodes} nodes" if self.ep_nodes > 1 else ""
        experts = f"experts over {self.ep}{nodes}" if self.ep > 1 else ""
        if self.folds_experts:
            experts += ", each whole"
        schedule = self.schedule if self.pp > 1 else ""
        attention = "" if self.attention == "auto" else f"{self.attention} attention"
        compression = ""
        if self.gradient_compression != "none":
            compression = f"{self.gradient_compression} gradients"
        recompute = "" if self.recompute == "none" else f"recompute {self.recompute}"
        rows = f"{self.num_microbatches} x {self.microbatch_size} sequences per step and rank"
        parts = (ranks, zero, experts, schedule, rows, recompute, attention, compression)
        return ", ".join(filter(None, parts))

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a flat record, with derived sizes for readers."""
        return asdict(self) | {
            "world_size": self.world_size,
            "effective_zero_stage": self.effective_zero_stage,
            "batch_size": self.batch_size,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the plan that ``as_dict`` recorded; derived keys are ignored."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: record[name] for name in names if name in record})
