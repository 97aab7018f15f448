"""The bytes one rank holds while it trains, by category and phase, from arithmetic alone.

The model is this engine: fp32 weights and gradients, and the optimizer's states; activations in the compute dtype;
attention that keeps its output and log-sum-exp but no scores; a linear cross-entropy that processes the tokens in
chunks and computes its gradients in the forward; an optimizer without temporaries. A rank steps through its actions of
the schedule, and at each one holds what the microbatches in flight have kept. Bytes are those of tensors: the
allocator's rounding, its fragmentation and the device's context come on top.

``fully_shard`` handles weights that several ranks share, except in copies of a whole model. Between steps a rank holds
its shard of weights, gradients and optimizer states: with AdamW, 16 bytes per parameter over N ranks. Within a step it
gathers, in the compute dtype, every layer once (stages 1 and 2) or the layers at work (stage 3). Weights that only one
rank holds are cast at each use, and every microbatch in flight keeps the copies; with several microbatches and no
recomputation, one copy lasts from update to update instead. DeepSpeed's buffers are assumed to be like
``fully_shard``'s; the states it keeps in host memory do not count.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, for the states that each ZeRO stage shards.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil

from llama_core.planning.memory.profile import Category, MemoryProfile, Phase
from llama_core.planning.memory.situations import Held, Progress, Situation, Turn, situations
from llama_core.planning.memory.snapshots import Around, ShardedSnapshots, Snapshot, StageSnapshots
from llama_core.planning.memory.weights import ShardedWeights, Stage, StageWeights, When
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.work import Work
from llama_core.schedules.actions import Kind
from llama_core.schedules.registry import DEFAULT_SCHEDULE, schedule_type

STEADY_UNITS = 3
"""Microbatches per pipeline rank, or pairs of them, after which further ones bring no new situation."""


def estimate_memory(work: Work, *, pp_rank: int | None = None) -> MemoryProfile:
    """Return the peak of each phase on one rank, from the second step on, when the optimizer has states.

    Args:
        work: the model, the plan and the sequences.
        pp_rank: the rank's position in its pipeline; by default the fullest one.
    """
    ranks = estimate_ranks(work, pp_ranks=None if pp_rank is None else (pp_rank,))
    return max(ranks, key=lambda profile: profile.peak_bytes)


def estimate_ranks(work: Work, *, pp_ranks: Iterable[int] | None = None) -> tuple[MemoryProfile, ...]:
    """Return ``estimate_memory`` of these ranks of a pipeline, by default of every one, in order."""
    pipeline = _Pipeline(work)
    return tuple(map(pipeline.profile, range(work.plan.pp) if pp_ranks is None else pp_ranks))


def steady_plan(plan: ParallelPlan) -> ParallelPlan:
    """Return ``plan`` with few microbatches, but enough to meet every situation of its step.

    The others add their tokens, which a rank holds from the start, and what a schedule holds of all of them.
    """
    kind = schedule_type(plan.schedule)
    fewer = STEADY_UNITS * kind.pair * plan.pp + plan.num_microbatches % (kind.replicas * plan.pp)
    return replace(plan, num_microbatches=min(fewer, plan.num_microbatches))


def _stages(work: Work) -> Iterator[Stage]:
    """Yield every stage of a plan's pipeline."""
    plan = work.plan
    spec = work.spec
    stages = plan.stage_layers(spec)
    modes = plan.recompute_modes(spec)
    last = len(stages) - 1
    both_ends_on_a_rank = any({0, last} <= set(hosted) for hosted in plan.layout.placement)
    for index, layers in enumerate(stages):
        yield Stage(
            modes=modes[index],
            layers=work.layers[layers.start : layers.stop],
            embedding=work.embedding if index == 0 else None,
            final_norm=work.final_norm if index == last else None,
            head=work.head if index == last else None,
            tied=spec.tied_embeddings,
            shares_table=spec.tied_embeddings and index == 0 < last and both_ends_on_a_rank,
        )


def _stage_snapshots(stage: Stage, work: Work) -> StageSnapshots:
    plan = work.plan
    if plan.uses_fully_shard:
        return ShardedSnapshots(ShardedWeights(stage, work.itemsize, plan), work)
    return StageSnapshots(StageWeights(stage, has_buckets=plan.dp * plan.cp > 1), work)


class _Pipeline:
    """The ranks of a pipeline in one optimizer step. Equal stages share one object, and so their peaks.

    Args:
        work: the model, the plan and the sequences.
    """

    def __init__(self, work: Work) -> None:
        stages = list(_stages(work))
        made = {stage: _stage_snapshots(stage, work) for stage in set(stages)}
        self.work = work
        self.plan = work.plan
        self.stages = [made[stage] for stage in stages]
        self._situations = _situations_of(work.plan)
        self._states: dict[tuple[StageSnapshots, ...], dict[Category, int]] = {}

    def profile(self, pp_rank: int) -> MemoryProfile:
        """Return the peak of every phase on one rank."""
        hosted = tuple(self.stages[stage] for stage in self.plan.layout.stages_of(pp_rank))
        if hosted not in self._states:
            self._states[hosted] = self._states_of(hosted)
        states = self._states[hosted]
        fullest = []
        for situation, turns in self._situations(pp_rank=pp_rank):
            turn = max(turns, key=lambda turn: self._held_outside(hosted, turn.held))
            fullest.append((turn.number, situation, self._fullest_snapshot(hosted, situation, turn.held)))
        peaks: dict[Phase, Snapshot] = {}
        for _, situation, snapshot in sorted(fullest, key=lambda found: found[0]):
            phase: Phase = "forward" if situation.kind is Kind.FORWARD else "backward"
            if phase not in peaks or snapshot.total() > peaks[phase].total():
                peaks[phase] = snapshot
        held: Snapshot = Counter({"weights": states["weights"], "moments": states["moments"]})
        optimizer = Counter(states | {"activations": self.work.batch_bytes})
        return MemoryProfile({phase: held + snapshot for phase, snapshot in peaks.items()} | {"optimizer": optimizer})

    def _states_of(self, hosted: Iterable[StageSnapshots]) -> dict[Category, int]:
        """Return the bytes of weights, gradients and the optimizer's states between steps."""
        weights = [stage.weights for stage in hosted]
        updated = ceil(sum(Fraction(own.trained.total) / own.num_shards for own in weights))
        shard = FP32_BYTES * updated
        frozen = sum(Fraction(own.held.total - own.trained.total) / own.num_frozen_shards for own in weights)
        narrow = ceil(frozen) + sum(own.cast for own in weights)
        return {
            "weights": 0 if self.plan.offload == "parameters" else shard + self.work.itemsize * narrow,
            "gradients": 0 if self.plan.offload != "none" else shard,
            "moments": 0 if self.plan.offload != "none" else self.work.optimizer.state_bytes * updated,
        }

    def _held_outside(self, hosted: Sequence[StageSnapshots], held: Held) -> int:
        """Return the bytes held outside the microbatch at work that differ between turns of one situation."""
        kept = sum((stage.kept + stage.kept_loss) * count for stage, count in zip(hosted, held.under_way, strict=True))
        deferred = sum(stage.deferred * count for stage, count in zip(hosted, held.deferred, strict=True))
        return kept + deferred + held.messages * self.work.stream_bytes

    def _fullest_snapshot(self, hosted: Sequence[StageSnapshots], situation: Situation, outside: Held) -> Snapshot:
        """Return the snapshot of a rank's action at which it holds most."""
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
        snapshot = at_work.peak(situation.kind, around).copy()
        snapshot["activations"] += self.work.batch_bytes
        snapshot["communication"] += outside.messages * self.work.stream_bytes
        for place, (stage, progress) in enumerate(zip(hosted, situation.progress, strict=True)):
            snapshot["activations"] += stage.kept * outside.under_way[place] + stage.deferred * outside.deferred[place]
            snapshot["loss"] += stage.kept_loss * outside.under_way[place]
            if place != situation.place:
                when = _when(stage, progress)
                snapshot["gradients"] += stage.weights.gradients(when, 0)
                snapshot["communication"] += _kept_gathered(stage.weights, when, head=situation.head_gathered)
        return snapshot


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


def _when(stage: StageSnapshots, progress: Progress, at_work: Situation | None = None) -> When:
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
