"""The bytes one rank holds while it trains, by category and phase, from arithmetic alone.

The model is this engine: fp32 weights and gradients, and the optimizer's states; activations in the compute dtype;
attention that keeps its output and log-sum-exp but no scores; a linear cross-entropy that processes the tokens in
chunks and computes its gradients in the forward; an optimizer without temporaries but those of its row. A rank steps
through its actions of the schedule, and at each one holds what the microbatches in flight have kept. Bytes are those of
tensors: the allocator's rounding, its fragmentation and the device's context come on top.

``fully_shard`` handles weights that several ranks share, except in copies of a whole model. Between steps a rank holds
its shard of weights, gradients and optimizer states: with AdamW, 16 bytes per parameter over N ranks. Within a step it
gathers, in the compute dtype, every layer once (stages 1 and 2) or the layers at work (stage 3). Weights that only one
rank holds are cast at each use, and every microbatch in flight keeps the copies; with several microbatches and no
recomputation, one copy lasts from update to update instead. DeepSpeed's buffers are assumed to be like
``fully_shard``'s; the states it keeps in host memory do not count.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, for the states that each ZeRO stage shards.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil

from llama_core.optimizers.traits import Trained
from llama_core.planning.memory.position import Position
from llama_core.planning.memory.profile import Category, MemoryProfile, Phase
from llama_core.planning.memory.snapshots import StageSnapshots
from llama_core.planning.memory.stage_bytes import Snapshot
from llama_core.planning.memory.step_states import Moment, step_states
from llama_core.planning.memory.whole_matrices import workspace
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.work import Work
from llama_core.schedules.actions import Kind
from llama_core.schedules.registry import DEFAULT_SCHEDULE, schedule_type
from llama_core.schedules.walk import Held, Progress, StepState

STEADY_UNITS = 3
"""Microbatches per pipeline rank, or pairs of them, after which further ones bring no new state of a rank."""


def estimate_memory(work: Work, *, pp_rank: int | None = None) -> MemoryProfile:
    """Return the peak of each phase on one rank, from the second step on, when the optimizer has states.

    Args:
        work: the model, the plan and the sequences.
        pp_rank: the rank's position in its pipeline; by default the fullest one.
    """
    ranks = estimate_ranks(work, pp_ranks=None if pp_rank is None else (pp_rank,))
    return max(ranks, key=lambda profile: profile.peak_bytes)


def estimate_ranks(
    work: Work,
    *,
    pp_ranks: Iterable[int] | None = None,
) -> tuple[MemoryProfile, ...]:
    """Return ``estimate_memory`` of these ranks of a pipeline, by default of every one, in order."""
    pipeline = _Pipeline(work)
    wanted = range(work.plan.pp) if pp_ranks is None else pp_ranks
    return tuple(map(pipeline.profile, wanted))


def steady_plan(plan: ParallelPlan) -> ParallelPlan:
    """Return ``plan`` with few microbatches, but enough to meet every state of its step.

    The others add their tokens, which a rank holds from the start, and what a schedule holds of all of them.
    """
    kind = schedule_type(plan.schedule)
    fewer = STEADY_UNITS * kind.pair * plan.pp + plan.num_microbatches % (kind.replicas * plan.pp)
    return replace(plan, num_microbatches=min(fewer, plan.num_microbatches))


class _Pipeline:
    """The ranks of a pipeline in one optimizer step. Equal stages share one object, and so their peaks.

    Args:
        work: the model, the plan and the sequences.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.plan = work.plan
        self.snapshots = {stage: StageSnapshots(stage, work) for stage in set(work.stages)}
        self._step_states = _step_states_of(work.plan)
        self._states: dict[tuple[StageSnapshots, ...], dict[Category, int]] = {}

    def profile(self, pp_rank: int) -> MemoryProfile:
        """Return the peak of every phase on one rank."""
        hosted = tuple(self.snapshots[stage] for stage in self.work.hosted(pp_rank))
        if hosted not in self._states:
            self._states[hosted] = self._states_of(hosted)
        states = self._states[hosted]
        phases: dict[Phase, dict[Category, int]] = {}
        for phase, peak in self._peaks(hosted, pp_rank).items():
            phases[phase] = states | peak.categories()
        update: dict[Category, int] = {
            "activations": self.work.batch_bytes,
            "temporaries": max(workspace(self.work, pp_rank), self._workspace_of_elements(hosted)),
        }
        return MemoryProfile(phases | {"optimizer": states | update})

    def _peaks(self, hosted: Sequence[StageSnapshots], pp_rank: int) -> dict[Phase, Snapshot]:
        """Return the fullest snapshot of a rank's forwards and of its backwards."""
        fullest: list[tuple[int, Phase, Snapshot]] = []
        for state, moments in self._step_states(pp_rank=pp_rank):
            phase: Phase = "forward" if state.kind is Kind.FORWARD else "backward"
            moment = max(moments, key=lambda moment: self._held_outside(hosted, moment.held))
            snapshot = self._fullest_snapshot(hosted, state, moment.held)
            fullest.append((moment.number, phase, snapshot))
        peaks: dict[Phase, Snapshot] = {}
        # in the order of the step: of equal peaks the first one counts
        for _, phase, snapshot in sorted(fullest, key=lambda found: found[0]):
            if phase not in peaks or sum(snapshot) > sum(peaks[phase]):
                peaks[phase] = snapshot
        return peaks

    def _workspace_of_elements(self, hosted: Iterable[StageSnapshots]) -> int:
        """Return the most bytes that a rank holds while it updates what it updates without other ranks."""
        update = self.work.update
        rule = update.kinds[-1]
        largest = 0
        for stage in hosted:
            of_stage = stage.stage.largest_trained(with_matrices=update.others is None)
            largest = max(largest, ceil(of_stage / Fraction(stage.weights.num_shards)))
        return rule.workspace_bytes(largest)

    def _states_of(self, hosted: Iterable[StageSnapshots]) -> dict[Category, int]:
        """Return the bytes of weights, gradients and the optimizer's states between steps."""
        weights = [stage.weights for stage in hosted]
        updated = ceil(sum(own.updated for own in weights))
        matrices = round(sum(own.updated_in_matrices for own in weights))
        frozen = ceil(sum(own.frozen for own in weights))
        copied = sum(own.num_copied for own in weights)
        undivided = sum(own.undivided_bytes for own in weights)
        shard = FP32_BYTES * updated
        states: dict[Category, int] = {
            "weights": shard + self.work.itemsize * (frozen + copied) + undivided,
            "gradients": shard,
            "moments": round(self.work.optimizer.states_of(Trained(matrices, updated - matrices))),
        }
        # DeepSpeed keeps the gradients in host memory together with the states that they update
        if self.plan.offload != "none":
            states["gradients"] = 0
            states["moments"] = 0
        if self.plan.offload == "parameters":
            states["weights"] = 0
        return states

    def _held_outside(self, hosted: Sequence[StageSnapshots], held: Held) -> int:
        """Return the bytes held outside the microbatch at work that differ between turns of one state."""
        num_bytes = held.messages * self.work.stream_bytes
        for stage, in_flight, deferred in zip(hosted, held.in_flight, held.deferred, strict=True):
            kept = stage.kept
            num_bytes += in_flight * (kept.total + kept.loss) + deferred * kept.deferred
        return num_bytes

    def _fullest_snapshot(
        self,
        hosted: Sequence[StageSnapshots],
        state: StepState,
        outside: Held,
    ) -> Snapshot:
        """Return the snapshot of a rank's action at which it holds most."""
        position = _position_at_work(hosted, state)
        peak = hosted[state.slot].peak(state.kind, position)
        gradients = peak.gradients
        activations = peak.activations + self.work.batch_bytes
        loss = peak.loss
        communication = peak.communication + outside.messages * self.work.stream_bytes
        for slot, stage in enumerate(hosted):
            kept = stage.kept
            in_flight = outside.in_flight[slot]
            activations += kept.total * in_flight + kept.deferred * outside.deferred[slot]
            loss += kept.loss * in_flight
            if slot != state.slot:
                other = _position(stage, state.progress[slot])
                gradients += stage.gradients.held(other, 0)
                communication += stage.gradients.averaged(other, 0)
                communication += stage.gathered.between_actions(other, head=state.head_gathered)
        return Snapshot(gradients, activations, loss, communication, peak.temporaries)


def _step_states_of(
    plan: ParallelPlan,
) -> Callable[..., Sequence[tuple[StepState, Sequence[Moment]]]]:
    """Return the function from ``pp_rank`` to a rank's states in a step of ``plan``, with their moments."""
    shorter = steady_plan(plan)
    holds_all = plan.pp > 1 and schedule_type(plan.schedule).holds_all
    return partial(
        step_states,
        plan.schedule if plan.pp > 1 else DEFAULT_SCHEDULE,
        num_ranks=plan.pp,
        num_microbatches=shorter.num_microbatches,
        num_chunks=plan.num_chunks,
        num_skipped=plan.num_microbatches - shorter.num_microbatches if holds_all else 0,
    )


def _position_at_work(hosted: Sequence[StageSnapshots], state: StepState) -> Position:
    """Return the position of the stage at work."""
    at_work = hosted[state.slot]
    has_run = any(progress.has_run for progress in state.progress)
    of_head = Progress()
    for stage, progress in zip(hosted, state.progress, strict=True):
        if stage.stage.is_last:
            of_head = progress
    position = _position(at_work, state.progress[state.slot])
    return position._replace(
        # a backward drops the root in ZeRO 3, else only the step's last one does
        root_is_gathered=state.after_forward or (has_run and not at_work.gathered.drops),
        is_final=state.is_last,
        head_gathered=state.head_gathered and at_work.stage.is_last,
        head_has_gradient=of_head.accumulated != "none",
        head_is_averaged=of_head.repeated,
        buffer=0 if state.last_backward is None else at_work.gradients.last_buffer,
    )


def _position(stage: StageSnapshots, progress: Progress) -> Position:
    """Return the position of a stage that is not at work."""
    return Position(
        is_first=not progress.has_run,
        accumulated=stage.weights.accumulated[progress.accumulated],
        repeated=progress.repeated,
    )
