"""A plan's memory and step time in closed form, in microseconds where the full estimates take milliseconds.

The memory is that of the fullest pipeline rank: its states, and the layers of the microbatches it holds. Where some
layers have experts, those of a pipeline rank are taken to have none. The time of a step of two microbatches, which is
cheap to estimate, is extrapolated with the schedule's bubble. All stages are assumed to recompute alike, and a backward
to take twice as long as its forward; where they do not, a bound is off by a few percent, either way.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from llama_core.config.parameter_counts import active_parameters
from llama_core.config.run import RecomputeMode
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.program.passes import Passes
from llama_core.planning.search.candidates import Candidates, ScheduleChoice, Variant
from llama_core.planning.search.fitting import Fitting
from llama_core.planning.time.step_time import StepTime
from llama_core.planning.work import Work
from llama_core.schedules.registry import DEFAULT_SCHEDULE, schedule_type

MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")
"""Recompute modes, cheapest first."""
_SCATTERED = 2
"""ZeRO 2's traffic of every microbatch, fp32 gradients, per traffic of once a step: the bf16 weights are gathered."""


class Recomputed(NamedTuple):
    """How much of a rank's layers is recomputed."""

    mode: RecomputeMode
    share: float
    """Share of the layers, from 0 to 1."""


class _Pace(NamedTuple):
    """How the step time grows with the number of microbatches."""

    once: float
    """Seconds per step, independent of that number."""
    slowest: float
    """Seconds per microbatch on the slowest rank."""
    others: float
    """Seconds per microbatch on an average one of the others."""


class _Layer(NamedTuple):
    """The size of the smallest layer of a rank; of an average one, without a pipeline."""

    parameters: float
    """Parameters a rank computes with."""
    shared: float
    """Parameters that all sharding ranks share."""
    kept: dict[RecomputeMode, float]
    """Bytes kept of one microbatch, by mode."""


class Bounds:
    """The bounds of the variants of one request.

    Args:
        candidates: the plans the request allows.
        fitting: the memory limit.
        clock: returns the step time of a plan.
    """

    def __init__(
        self,
        candidates: Candidates,
        fitting: Fitting,
        clock: Callable[[ParallelPlan], StepTime],
    ) -> None:
        self.candidates = candidates
        self.fitting = fitting
        self.clock = clock
        self.spec = candidates.config.spec
        self._paces: dict[tuple[Variant, RecomputeMode, int], _Pace] = {}
        self._layers: dict[Variant, _Layer] = {}

    def seconds(self, variant: Variant, recomputed: Recomputed) -> float:
        """Return the approximate step time of ``variant``."""
        count = self._count(variant)
        pp = variant.shape.pp
        pace = self._pace(variant, "none")
        slowest = pace.slowest
        others = pace.others
        if recomputed.share:
            more = self._pace(variant, recomputed.mode)
            slowest += recomputed.share * (more.slowest - slowest)
            others += recomputed.share * (more.others - others)
        # the slowest rank always computes, except in the bubble, while it waits for the others
        return pace.once + count * slowest + idle_microbatches(variant.order, pp, count) * others

    def recomputed(self, variant: Variant) -> Recomputed | None:
        """Return the least recomputation that may be enough; None if recomputing all layers is not."""
        limit = self.fitting.limit
        kept = self._layer(variant).kept
        num_in_flight = in_flight(variant.order, variant.shape.pp, self._count(variant))
        held = self._num_layers(variant) * num_in_flight
        states = self._states(variant)
        if limit is None or states + held * kept[self.candidates.recompute] <= limit:
            return Recomputed("none", 0.0)  # none beyond what is asked for
        if not self.candidates.adapts_to(variant):
            return None
        for mode in MODES[1:]:
            if states + held * kept[mode] <= limit:
                # every recomputed layer saves as much, so the excess says how many it takes
                excess = states / held + kept["none"] - limit / held
                saved = kept["none"] - kept[mode]
                return Recomputed(mode, excess / saved)
        return None

    def _count(self, variant: Variant) -> int:
        return self.candidates.num_microbatches(variant.shape, variant.microbatch_size)

    def _num_layers(self, variant: Variant) -> float:
        """Return the fewest layers a rank may have: the embedding can take the place of some."""
        spec = self.spec
        pp = variant.shape.pp
        if pp == 1:
            return spec.num_layers
        sizes = [active_parameters(spec, layer) for layer in range(spec.num_layers)]
        tables = spec.embedding_parameters
        of_stage = (sum(sizes) + 2 * tables) / pp
        return max(1.0, (of_stage - tables) / max(sizes) - 1)

    def _states(self, variant: Variant) -> float:
        """Return the fewest bytes of states while a rank holds the most microbatches."""
        shape = variant.shape
        stage = variant.sharding.zero_stage
        if variant.offload != "none":
            return 0.0
        layer = self._layer(variant)
        num_layers = self._num_layers(variant)
        if shape.pp > 1:
            num_layers *= schedule_type(variant.order.schedule).replicas
        own = num_layers * layer.parameters
        shared = num_layers * layer.shared
        shards = shape.dp // variant.sharding.dp_replicate * shape.cp if stage else 1
        lora = self.spec.lora
        gradients = 0.0
        # with fewer microbatches there may be no gradients yet when the rank holds the most
        has_gradients = self._count(variant) > shape.pp and not lora
        if has_gradients:
            num_elements = shared / shards if stage > 1 else own
            gradients = FP32_BYTES * num_elements
        gathered = 2 * own if stage in {1, 2} else 0
        # frozen weights have no states; adapters are negligible
        states = min(kind.state_bytes for kind in self.candidates.config.optimizer.kinds)
        held = 2 if lora else FP32_BYTES + states
        return held * shared / shards + gradients + gathered

    def _pace(self, variant: Variant, mode: RecomputeMode) -> _Pace:
        alone = _alone(variant)
        # a single microbatch does each time what several do once, such as casting weights
        clocked = min(2, self._count(variant))
        key = (alone, mode, clocked)
        if key not in self._paces:
            plan = self.candidates.plan(alone, num_microbatches=clocked)
            step = self.clock(plan if mode == "none" else replace(plan, recompute=mode))
            parts = step.parts
            computing = parts["compute"] + parts["bubble"]
            through = computing + parts["tp"] + parts["cp"] + parts.get("ep", 0.0)
            match variant.sharding.zero_stage:
                case 2:
                    scattered = _SCATTERED * clocked
                    through += parts["dp"] * scattered / (scattered + 1)
                case 3:
                    through += parts["dp"]
            slowest = through * parts["compute"] / computing
            others = (through - slowest) / max(1, variant.shape.pp - 1)
            # a further forward before the step takes as long as it does on the slowest rank
            prepared = parts.get("preparation", 0.0) / (clocked + variant.shape.pp - 1)
            once = step.total - through - prepared * clocked
            self._paces[key] = _Pace(once, slowest / clocked + prepared, others)
        return self._paces[key]

    def _layer(self, variant: Variant) -> _Layer:
        alone = _alone(variant)
        if alone not in self._layers:
            plan = self.candidates.plan(alone, num_microbatches=1)
            kinds = Counter(Work.of(self.candidates.config, plan).layers)
            # a parameter that fewer ranks share counts as that many more
            more = plan.fewer_expert_shards - 1

            def typical(size: Callable[[Passes], float]) -> float:
                if variant.shape.pp > 1:
                    return min(map(size, kinds))
                return sum(count * size(kind) for kind, count in kinds.items()) / kinds.total()

            def shared(kind: Passes) -> int:
                return kind.program.num_held + more * kind.program.num_of_experts

            self._layers[alone] = _Layer(
                parameters=typical(lambda kind: kind.program.num_held),
                shared=typical(shared),
                kept={mode: typical(partial(_kept, mode)) for mode in MODES},
            )
        return self._layers[alone]


def _kept(mode: RecomputeMode, layer: Passes) -> int:
    return layer.kept(mode)


def _alone(variant: Variant) -> Variant:
    """Return the variant that represents all whose microbatches take the same time and memory."""
    return variant._replace(order=ScheduleChoice(DEFAULT_SCHEDULE))


def idle_microbatches(order: ScheduleChoice, pp: int, count: int) -> float:
    """Return a pipeline rank's idle time in units of a microbatch's work, if a backward takes two forwards."""
    if pp == 1:
        return 0.0
    in_forwards = schedule_type(order.schedule).idle(pp, count / pp, order.num_chunks, backward=2)
    return in_forwards / 3


def in_flight(order: ScheduleChoice, pp: int, count: int) -> float:
    """Return the fewest microbatches that the fullest pipeline rank holds at its peak, in full stages."""
    return schedule_type(order.schedule).in_flight(pp, count, order.num_chunks) if pp > 1 else 1
