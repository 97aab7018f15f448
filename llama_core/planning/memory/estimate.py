"""The bytes one rank holds while it trains, by category and phase, from arithmetic alone.

The model is this engine: fp32 weights, gradients and AdamW moments; activations in the compute dtype; attention that
keeps its output and log-sum-exp but no scores; a linear cross-entropy that processes the tokens in chunks and computes
its gradients in the forward; a fused optimizer without temporaries. A rank steps through its actions of the schedule,
and at each one holds what the microbatches in flight have kept. Bytes are those of tensors: the allocator's rounding,
its fragmentation and the device's context come on top.

``fully_shard`` handles weights that several ranks share, except in copies of a whole model. Between steps a rank holds
its shard of weights, gradients and moments, 16 bytes per parameter over N ranks. Within a step it gathers, in the
compute dtype, every layer once (stages 1 and 2) or the layers at work (stage 3). Weights that only one rank holds are
cast at each use, and every microbatch in flight keeps the copies. DeepSpeed's buffers are assumed to be like
``fully_shard``'s; the states it keeps in host memory do not count. See ``lora`` for adapters, ``experts`` for experts.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, for the states that each ZeRO stage shards.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any, NotRequired, TypedDict, Unpack

from llama_core.config.models import LayerTraits, ModelSpec
from llama_core.config.run import Precision, RunConfig
from llama_core.planning.memory.experts import ExpertTensors
from llama_core.planning.memory.lora import AdaptedExpertTensors, AdaptedTensors
from llama_core.planning.memory.passes import Around, Moment, ShardedMoments, StageMoments
from llama_core.planning.memory.peaks import Category, MemoryProfile, Phase
from llama_core.planning.memory.situations import Held, Progress, Situation, Turn, situations
from llama_core.planning.memory.tensors import FP32_BYTES, Tensors
from llama_core.planning.memory.weights import ShardedWeights, Stage, StageWeights, When
from llama_core.planning.plan import DocumentAttention, ParallelPlan, document_attention, runs_on_cuda
from llama_core.schedules.actions import Kind
from llama_core.schedules.registry import DEFAULT_SCHEDULE, schedule_type

STEADY_UNITS = 3
"""Microbatches per pipeline rank, or pairs of them, after which further ones bring no new situation."""


class Sizes(TypedDict):
    """What the bytes depend on besides the model and the plan."""

    seq_len: int
    """Tokens per sequence."""
    precision: Precision
    """The dtype of activations and matrix products; ``auto`` counts as bf16, which every GPU in the hardware table
    supports."""
    documents: DocumentAttention
    """How attention is kept inside packed documents; a mask has ``seq_len`` squared elements."""
    on_cuda: NotRequired[bool]
    """Whether CUDA's kernels make the loss and the norms. Default: they do not."""


def sizes_of(config: RunConfig, plan: ParallelPlan) -> Sizes:
    """Return the sizes of a resolved ``config`` under ``plan``."""
    return {
        "seq_len": config.seq_len,
        "precision": config.training.precision,
        "documents": document_attention(config, plan),
        "on_cuda": runs_on_cuda(config),
    }


def estimate_memory(
    spec: ModelSpec, plan: ParallelPlan, *, pp_rank: int | None = None, **sizes: Unpack[Sizes]
) -> MemoryProfile:
    """Return the peak of each phase on one rank, from the second step on, when the moments exist.

    Args:
        spec: the architecture.
        plan: how it is divided.
        pp_rank: the rank's position in its pipeline; by default the fullest one.
        sizes: the fields of ``Sizes``.
    """
    ranks = estimate_ranks(spec, plan, pp_ranks=None if pp_rank is None else (pp_rank,), **sizes)
    return max(ranks, key=lambda profile: profile.peak_bytes)


def estimate_ranks(
    spec: ModelSpec, plan: ParallelPlan, *, pp_ranks: Iterable[int] | None = None, **sizes: Unpack[Sizes]
) -> tuple[MemoryProfile, ...]:
    """Return ``estimate_memory`` of these ranks of a pipeline, by default of every one, in order."""
    pipeline = _Pipeline(spec, plan, tensors_by_layer(spec, plan, **sizes))
    return tuple(map(pipeline.profile, range(plan.pp) if pp_ranks is None else pp_ranks))


def tensors_by_layer(spec: ModelSpec, plan: ParallelPlan, **sizes: Unpack[Sizes]) -> list[Tensors]:
    """Return the sizes of every layer's tensors; equal layers share one object."""
    itemsize = FP32_BYTES if sizes["precision"] == "fp32" else FP32_BYTES // 2
    others = {name: size for name, size in sizes.items() if name != "precision"}
    made: dict[tuple[int, bool], Tensors] = {}
    layers = []
    for layer, traits in enumerate(spec.layers):
        # equal traits are one object; the input of a frozen first layer may need no gradient
        kind = id(traits), layer == 0 and not spec.trains_embedding
        if kind not in made:
            made[kind] = _kind_of_tensors(spec, traits, kind[1])(spec, plan, itemsize=itemsize, **others)
        layers.append(made[kind])
    return layers


def _kind_of_tensors(spec: ModelSpec, traits: LayerTraits, begins: bool) -> Callable[..., Tensors]:
    """Return the class of a layer's tensors; ``begins`` says that nothing before the layer is trained."""
    if spec.lora is None:
        return partial(ExpertTensors, spec.moe) if spec.moe and traits.sparse else Tensors
    adapted: dict[str, Any] = {"lora": spec.lora, "traits": traits, "follows_trained": not begins}
    if spec.moe and traits.sparse:
        return partial(AdaptedExpertTensors, spec.moe, **adapted)
    return partial(AdaptedTensors, **adapted)


def steady_plan(plan: ParallelPlan) -> ParallelPlan:
    """Return ``plan`` with few microbatches, but enough to meet every situation of its step.

    The others add their tokens, which a rank holds from the start, and what a schedule holds of all of them.
    """
    kind = schedule_type(plan.schedule)
    fewer = STEADY_UNITS * kind.pair * plan.pp + plan.num_microbatches % (kind.replicas * plan.pp)
    return replace(plan, num_microbatches=min(fewer, plan.num_microbatches))


def _stages(spec: ModelSpec, plan: ParallelPlan, sizes: Sequence[Tensors]) -> Iterator[Stage]:
    """Yield every stage of a plan's pipeline."""
    stages, placement = plan.stage_layers(spec), plan.layout.placement
    modes = plan.recompute_modes(spec)
    last = len(stages) - 1
    both_ends_on_a_rank = any({0, last} <= set(hosted) for hosted in placement)
    for index, layers in enumerate(stages):
        yield Stage(
            modes=modes[index],
            layers=tuple(sizes[layer] for layer in layers),
            is_first=index == 0,
            is_last=index == last,
            tied=spec.tied_embeddings,
            shares_table=spec.tied_embeddings and index == 0 < last and both_ends_on_a_rank,
        )


def _stage_moments(stage: Stage, tensors: Tensors, plan: ParallelPlan) -> StageMoments:
    if plan.uses_fully_shard:
        return ShardedMoments(ShardedWeights(stage, tensors, plan), tensors)
    return StageMoments(StageWeights(stage, tensors, has_buckets=plan.dp * plan.cp > 1), tensors)


class _Pipeline:
    """The ranks of a pipeline in one optimizer step. Equal stages share one object, and so their peaks.

    Args:
        spec: the architecture.
        plan: the plan.
        layers: the sizes of every layer's tensors.
    """

    def __init__(self, spec: ModelSpec, plan: ParallelPlan, layers: Sequence[Tensors]) -> None:
        tensors, made = layers[0], dict[Stage, StageMoments]()
        for stage in (stages := list(_stages(spec, plan, layers))):
            if stage not in made:
                made[stage] = _stage_moments(stage, tensors, plan)
        self.plan, self.stages = plan, [made[stage] for stage in stages]
        self.inputs, self.stream, self.itemsize = tensors.inputs, tensors.stream, tensors.itemsize
        self._situations = _situations_of(plan)
        self._states: dict[tuple[StageMoments, ...], dict[Category, int]] = {}

    def profile(self, pp_rank: int) -> MemoryProfile:
        """Return the peak of every phase on one rank."""
        hosted = tuple(self.stages[stage] for stage in self.plan.layout.stages_of(pp_rank))
        if hosted not in self._states:
            self._states[hosted] = self._states_of(hosted)
        states = self._states[hosted]
        fullest = []
        for situation, turns in self._situations(pp_rank=pp_rank):
            turn = max(turns, key=lambda turn: self._held_outside(hosted, turn.held))
            fullest.append((turn.number, situation, self._fullest_moment(hosted, situation, turn.held)))
        peaks: dict[Phase, Moment] = {}
        for _, situation, moment in sorted(fullest, key=lambda found: found[0]):
            phase: Phase = "forward" if situation.kind is Kind.FORWARD else "backward"
            if phase not in peaks or moment.total() > peaks[phase].total():
                peaks[phase] = moment
        held: Moment = Counter({"weights": states["weights"], "moments": states["moments"]})
        optimizer = Counter(states | {"activations": self.inputs})
        return MemoryProfile({phase: held + moment for phase, moment in peaks.items()} | {"optimizer": optimizer})

    def _states_of(self, hosted: Iterable[StageMoments]) -> dict[Category, int]:
        """Return the bytes of weights, gradients and moments between steps."""
        weights = [stage.weights for stage in hosted]
        shard = FP32_BYTES * ceil(sum(Fraction(own.trained.total) / own.num_shards for own in weights))
        frozen = sum(Fraction(own.held.total - own.trained.total) / own.num_frozen_shards for own in weights)
        return {
            "weights": 0 if self.plan.offload == "parameters" else shard + self.itemsize * ceil(frozen),
            "gradients": 0 if self.plan.offload != "none" else shard,
            "moments": 0 if self.plan.offload != "none" else 2 * shard,
        }

    def _held_outside(self, hosted: Sequence[StageMoments], held: Held) -> int:
        """Return the bytes held outside the microbatch at work that differ between turns of one situation."""
        kept = sum((stage.kept + stage.kept_loss) * count for stage, count in zip(hosted, held.under_way, strict=True))
        put_off = sum(stage.put_off * count for stage, count in zip(hosted, held.put_off, strict=True))
        return kept + put_off + held.messages * self.stream

    def _fullest_moment(self, hosted: Sequence[StageMoments], situation: Situation, outside: Held) -> Moment:
        """Return the moment of a rank's action at which it holds most."""
        at_work = hosted[situation.place]
        around = Around(
            when=_when(at_work, situation.progress[situation.place], situation),
            head=situation.head_gathered and at_work.stage.is_last,
            # with several stages, other stages' groups release it
            buffer=at_work.weights.last_buffer if situation.has_reduced and len(hosted) == 1 else 0,
            head_has_gradient=any(
                stage.stage.is_last and progress.accumulated != "none"
                for stage, progress in zip(hosted, situation.progress, strict=True)
            ),
        )
        moment = at_work.peak(situation.kind, around).copy()
        moment["activations"] += self.inputs
        moment["communication"] += outside.messages * self.stream
        for place, (stage, progress) in enumerate(zip(hosted, situation.progress, strict=True)):
            moment["activations"] += stage.kept * outside.under_way[place] + stage.put_off * outside.put_off[place]
            moment["loss"] += stage.kept_loss * outside.under_way[place]
            if place != situation.place:
                when = _when(stage, progress)
                moment["gradients"] += stage.weights.gradients(when, 0)
                moment["communication"] += _kept_gathered(stage.weights, when, head=situation.head_gathered)
        return moment


def _situations_of(plan: ParallelPlan) -> Callable[..., Sequence[tuple[Situation, Sequence[Turn]]]]:
    """Return the function from ``pp_rank`` to a rank's situations in a step of ``plan``, with their turns."""
    shorter = steady_plan(plan)
    holds_all = plan.pp > 1 and schedule_type(plan.schedule).holds_all
    return partial(
        situations,
        plan.schedule if plan.pp > 1 else DEFAULT_SCHEDULE,
        num_ranks=plan.pp,
        num_microbatches=shorter.num_microbatches,
        num_chunks=plan.num_chunks,
        skipped=plan.num_microbatches - shorter.num_microbatches if holds_all else 0,
    )


def _when(stage: StageMoments, progress: Progress, at_work: Situation | None = None) -> When:
    """Return a stage's position in the step; ``at_work`` is the situation, if the stage is at work."""
    trained = stage.weights.trained
    return When(
        is_first=not progress.has_run,
        after_forward=at_work is not None and at_work.after_forward,
        accumulated={"none": 0, "tables": trained.tables, "all": trained.total}[progress.accumulated],
        final=at_work is not None and at_work.final,
        repeated=progress.repeated,
    )


def _kept_gathered(weights: StageWeights, when: When, *, head: bool) -> int:
    """Return the gathered and averaged bytes that a stage keeps while another one runs."""
    gathered = weights.root_gathered if when.is_first else weights.stay_gathered
    return weights.averaged(when, 0) + gathered + weights.head_gathered * head
