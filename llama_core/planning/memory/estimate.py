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
from llama_core.planning.memory.tensors import FP32_BYTES, Tensors
from llama_core.planning.memory.weights import ShardedWeights, Stage, StageWeights, When
from llama_core.planning.plan import DocumentAttention, ParallelPlan, document_attention, runs_on_cuda
from llama_core.schedules.actions import RELEASES, Action, Kind
from llama_core.schedules.registry import schedule_type

STEADY_UNITS = 3
"""Microbatches per pipeline rank, or pairs of them, after which more of them are in no new situation."""
_BACKWARDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})


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
    ranks = range(plan.pp) if pp_rank is None else (pp_rank,)
    return max(_profiles(spec, plan, ranks, **sizes), key=lambda profile: profile.peak_bytes)


def estimate_ranks(spec: ModelSpec, plan: ParallelPlan, **sizes: Unpack[Sizes]) -> tuple[MemoryProfile, ...]:
    """Return ``estimate_memory`` of every rank of a pipeline, in order."""
    return tuple(_profiles(spec, plan, range(plan.pp), **sizes))


def _profiles(
    spec: ModelSpec, plan: ParallelPlan, ranks: Iterable[int], **sizes: Unpack[Sizes]
) -> Iterator[MemoryProfile]:
    layers = tensors_by_layer(spec, plan, **sizes)
    tensors = layers[0]
    stages = [_stage_moments(stage, tensors, plan) for stage in _stages(spec, plan, layers)]
    return (_Rank(plan, rank, stages, tensors).profile() for rank in ranks)


def tensors_by_layer(spec: ModelSpec, plan: ParallelPlan, **sizes: Unpack[Sizes]) -> list[Tensors]:
    """Return the sizes of every layer's tensors; equal layers share one object."""
    itemsize = FP32_BYTES if sizes["precision"] == "fp32" else FP32_BYTES // 2
    others = {name: size for name, size in sizes.items() if name != "precision"}

    def made_of(kind: Callable[..., Tensors]) -> Tensors:
        return kind(spec, plan, itemsize=itemsize, **others)

    # the input of a frozen first layer may need no gradient
    kinds = [(traits, layer == 0 and not spec.trains_embedding) for layer, traits in enumerate(spec.layers)]
    made = {kind: made_of(_kind_of_tensors(spec, *kind)) for kind in set(kinds)}
    return [made[kind] for kind in kinds]


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


class _Rank:
    """One rank of a pipeline, stepping through one optimizer step.

    Args:
        plan: the plan.
        pp_rank: its position in the pipeline.
        stages: all stages of the pipeline.
        tensors: the sizes of their tensors.
    """

    def __init__(self, plan: ParallelPlan, pp_rank: int, stages: list[StageMoments], tensors: Tensors) -> None:
        shorter = steady_plan(plan)
        schedule, holds_all = shorter.build_schedule(), plan.pp > 1 and schedule_type(plan.schedule).holds_all
        self.num_microbatches = schedule.num_microbatches
        self.skipped = plan.num_microbatches - shorter.num_microbatches if holds_all else 0
        """Microbatches between a stage's first and last one that are not stepped through but held."""
        self.plan, self.stages = plan, stages
        self.inputs, self.stream, self.itemsize = tensors.inputs, tensors.stream, tensors.itemsize
        self.schedule = schedule
        self.actions, self.hosted = schedule.actions[pp_rank], schedule.stages_of(pp_rank)
        self._last_backward = max(i for i, action in enumerate(self.actions) if action.kind is not Kind.FORWARD)
        self._under_way: Counter[int] = Counter()  # microbatches between their forward and their backward, by stage
        self._put_off: Counter[int] = Counter()  # microbatches with deferred weight gradients, by stage
        self._accumulated: Counter[int] = Counter()  # parameters with gradients, by stage
        self._num_backwards: Counter[int] = Counter()  # by stage
        self._gathered: set[int] = set()  # stages whose weights have been gathered
        self._head_gathered = False  # whether the last stage's head stayed gathered
        self._buffer = 0

    def profile(self) -> MemoryProfile:
        """Return the peak of every phase."""
        states = self._states()
        peaks: dict[Phase, Moment] = {}
        for phase, moment in self._moments():
            if phase not in peaks or moment.total() > peaks[phase].total():
                peaks[phase] = moment
        held: Moment = Counter({"weights": states["weights"], "moments": states["moments"]})
        optimizer = Counter(states | {"activations": self.inputs})
        return MemoryProfile({phase: held + moment for phase, moment in peaks.items()} | {"optimizer": optimizer})

    def _states(self) -> dict[Category, int]:
        """Return the bytes of weights, gradients and moments between steps."""
        hosted = [self.stages[stage].weights for stage in self.hosted]
        shard = FP32_BYTES * ceil(sum(Fraction(own.trained.total) / own.num_shards for own in hosted))
        frozen = sum(Fraction(own.held.total - own.trained.total) / own.num_frozen_shards for own in hosted)
        return {
            "weights": 0 if self.plan.offload == "parameters" else shard + self.itemsize * ceil(frozen),
            "gradients": 0 if self.plan.offload != "none" else shard,
            "moments": 0 if self.plan.offload != "none" else 2 * shard,
        }

    def _moments(self) -> Iterator[tuple[Phase, Moment]]:
        """Yield the moments of every action with their phase, skipping repetitions."""
        seen = set()
        for place, action in enumerate(self.actions):
            around = self._begin(place)
            if (action.stage, action.kind, around) not in seen:
                seen.add((action.stage, action.kind, around))
                stage = self.stages[action.stage]
                if action.kind is Kind.FORWARD:
                    yield from (("forward", moment) for moment in stage.forward(around))
                elif action.kind is Kind.WEIGHT_GRADIENT:
                    yield from (("backward", moment) for moment in stage.weight_gradients(around))
                else:
                    yield from (("backward", moment) for moment in stage.backward(around))
            self._end(action)

    def _begin(self, place: int) -> Around:
        """Return what the rank holds outside the microbatch of the action at ``place``."""
        action = self.actions[place]
        before, after = self.actions[place - 1 : place], self.actions[place + 1 : place + 2]
        index, stages = action.stage, self.stages
        after_forward, final = [last.kind for last in before] == [Kind.FORWARD], place == self._last_backward
        # what the action before sends, and what the next one receives
        messages = sum(map(self.schedule.is_sent, before)) + sum(map(self.schedule.is_received, after))
        if action.kind in _BACKWARDS:
            self._under_way[index] -= 1
            if self._num_backwards[index] == self.num_microbatches - 1:
                self._under_way[index] -= self.skipped
        if action.kind is Kind.WEIGHT_GRADIENT:
            self._put_off[index] -= 1
        others = [s for s in self.hosted if s != index]
        return Around(
            when=self._when(index, after_forward=after_forward, final=final),
            activations=self.inputs
            + sum(stages[s].kept * n for s, n in self._under_way.items())
            + sum(stages[s].put_off * n for s, n in self._put_off.items()),
            loss=sum(stages[s].kept_loss * n for s, n in self._under_way.items()),
            gradients=sum(stages[s].weights.gradients(self._when(s), 0) for s in others),
            communication=sum(self._communication(s) for s in others) + messages * self.stream,
            head=self._head_gathered and stages[index].stage.is_last,
            buffer=self._buffer,
        )

    def _end(self, action: Action) -> None:
        """Record what an action leaves behind."""
        index = action.stage
        if action.kind is Kind.FORWARD:
            self._under_way[index] += 1 if index in self._gathered else 1 + self.skipped
        self._gathered.add(index)
        # a backward drops the head, also if it is another stage's
        self._head_gathered |= self.stages[index].stage.is_last
        self._head_gathered &= action.kind not in _BACKWARDS
        if action.kind is Kind.INPUT_GRADIENT:
            self._put_off[index] += 1
        weights = self.stages[index].weights
        if action.kind in RELEASES:
            self._accumulated[index] = weights.trained.total
            self._num_backwards[index] += 1
        elif action.kind is Kind.INPUT_GRADIENT:  # the gradients of norms and tables are not deferred
            self._accumulated[index] = max(self._accumulated[index], weights.trained.tables)
        if action.kind in _BACKWARDS and len(self.hosted) == 1:  # else other stages' groups release it
            self._buffer = weights.last_buffer

    def _when(self, stage: int, *, after_forward: bool = False, final: bool = False) -> When:
        """Return a stage's position in the step, whether or not it is at work."""
        return When(
            is_first=stage not in self._gathered,
            after_forward=after_forward,
            accumulated=self._accumulated[stage],
            final=final,
            repeated=self._num_backwards[stage] > 1,
        )

    def _communication(self, stage: int) -> int:
        """Return the gathered and averaged bytes that a stage keeps while another one runs."""
        weights, when = self.stages[stage].weights, self._when(stage)
        gathered = weights.root_gathered if when.is_first else weights.stay_gathered
        return weights.averaged(when, 0) + gathered + weights.head_gathered * self._head_gathered
