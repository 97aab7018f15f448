"""A plan's memory and step time in closed form, in microseconds where the full estimates take milliseconds.

The memory is that of the fullest pipeline rank: its states, and the layers of the microbatches it holds. The time of a
step of one microbatch, which is cheap to estimate, is extrapolated with the schedule's bubble. All stages are assumed
equal, and a backward twice as long as its forward; where they are not, a bound is off by a few percent, either way.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from llama_core.config.run import RecomputeMode
from llama_core.planning.memory.tensors import FP32_BYTES
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.candidates import Candidates, Order, Variant
from llama_core.planning.search.fitting import Fitting
from llama_core.planning.time.step_time import StepTime
from llama_core.schedules.registry import DEFAULT_SCHEDULE, schedule_type

MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")
"""Recompute modes, cheapest first."""
_SCATTER_SHARE = 2 / 3
"""Share of ZeRO 2's traffic that every microbatch repeats: fp32 gradients. The bf16 weights are gathered once."""


class Recomputed(NamedTuple):
    """How much of a rank's layers is recomputed."""

    mode: RecomputeMode
    share: float
    """Share of the layers, from 0 to 1."""


class _Pace(NamedTuple):
    """How the step time grows with the number of microbatches."""

    once: float
    """Seconds per step, independent of that number."""
    each: float
    """Seconds per microbatch on the slowest rank."""


class Bounds:
    """The bounds of the variants of one request.

    Args:
        candidates: the plans the request allows.
        fitting: the memory limit.
        clock: returns the step time of a plan.
    """

    def __init__(self, candidates: Candidates, fitting: Fitting, clock: Callable[[ParallelPlan], StepTime]) -> None:
        self.candidates, self.fitting, self.clock = candidates, fitting, clock
        self.spec = candidates.config.spec
        self._paces: dict[tuple[Variant, RecomputeMode], _Pace] = {}
        self._kept: dict[Variant, dict[RecomputeMode, int]] = {}

    def seconds(self, variant: Variant, recomputed: Recomputed) -> float:
        """Return the approximate step time of ``variant``."""
        count, pp = self._count(variant), variant.shape.pp
        once, each = self._pace(variant, "none")
        if recomputed.share:
            each += recomputed.share * (self._pace(variant, recomputed.mode).each - each)
        return once + (count + idle_microbatches(variant.order, pp, count)) * each

    def recomputed(self, variant: Variant) -> Recomputed | None:
        """Return the least recomputation that may be enough; None if recomputing all layers is not."""
        limit, kept = self.fitting.limit, self._kept_by_layer(variant)
        held = self._num_layers(variant) * in_flight(variant.order, variant.shape.pp, self._count(variant))
        states = self._states(variant)
        if limit is None or states + held * kept[self.candidates.recompute] <= limit:
            return Recomputed("none", 0.0)  # none beyond what is asked for
        for mode in MODES[1:] if self.candidates.adapts_to(variant) else ():
            if states + held * kept[mode] <= limit:
                return Recomputed(mode, (states / held + kept["none"] - limit / held) / (kept["none"] - kept[mode]))
        return None

    def _count(self, variant: Variant) -> int:
        return self.candidates.num_microbatches(variant.shape, variant.microbatch_size)

    def _num_layers(self, variant: Variant) -> float:
        """Return the fewest layers a rank may have: the embedding can take the place of some."""
        spec, pp = self.spec, variant.shape.pp
        if pp == 1:
            return spec.num_layers
        tables = spec.embedding_parameters / spec.layer_parameters
        return max(1.0, (spec.num_layers + 2 * tables) / pp - tables - 1)

    def _states(self, variant: Variant) -> float:
        """Return the fewest bytes of states while a rank holds the most microbatches."""
        shape, (stage, copies) = variant.shape, variant.sharding
        if variant.offload != "none":
            return 0.0
        own = self._num_layers(variant) * self.spec.layer_matmul_parameters / shape.tp
        if shape.pp > 1:
            own *= schedule_type(variant.order.schedule).replicas
        shards = shape.dp // copies * shape.cp if stage else 1
        lora, gradients = self.spec.lora, 0.0
        if self._count(variant) > shape.pp and not lora:  # else there may be none yet when the rank holds the most
            gradients = FP32_BYTES * own / (shards if stage > 1 else 1)
        gathered = 2 * own if stage in {1, 2} else 0
        held = 2 if lora else 3 * FP32_BYTES  # frozen weights have no moments; adapters are negligible
        return held * own / shards + gradients + gathered

    def _pace(self, variant: Variant, mode: RecomputeMode) -> _Pace:
        alone = _alone(variant)
        if (alone, mode) not in self._paces:
            plan = self.candidates.plan(alone, num_microbatches=1)
            step = self.clock(plan if mode == "none" else replace(plan, recompute=mode))
            parts, stage = step.parts, variant.sharding.zero_stage
            computing = parts["compute"] + parts["bubble"]
            through = computing + parts["tp"] + parts["cp"]
            through += parts["dp"] * {2: _SCATTER_SHARE, 3: 1.0}.get(stage, 0.0)
            self._paces[alone, mode] = _Pace(step.total - through, through * parts["compute"] / computing)
        return self._paces[alone, mode]

    def _kept_by_layer(self, variant: Variant) -> dict[RecomputeMode, int]:
        """Return the bytes that one layer keeps of one microbatch, by mode."""
        alone = _alone(variant)
        if alone not in self._kept:
            tensors = self.fitting.tensors(self.candidates.plan(alone, num_microbatches=1))
            self._kept[alone] = {mode: tensors.layer(mode) for mode in MODES}
        return self._kept[alone]


def _alone(variant: Variant) -> Variant:
    """Return the variant that represents all whose microbatches take the same time and memory."""
    return variant._replace(order=Order(DEFAULT_SCHEDULE))


def idle_microbatches(order: Order, pp: int, count: int) -> float:
    """Return a pipeline rank's idle time in units of a microbatch's work, if a backward takes two forwards."""
    return schedule_type(order.schedule).idle(pp, count / pp, order.num_chunks, backward=2) / 3 if pp > 1 else 0.0


def in_flight(order: Order, pp: int, count: int) -> float:
    """Return the fewest microbatches that the fullest pipeline rank holds at its peak, in full stages."""
    return schedule_type(order.schedule).in_flight(pp, count, order.num_chunks) if pp > 1 else 1
