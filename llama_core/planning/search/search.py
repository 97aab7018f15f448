"""The search for the fastest plan that fits: best first, by the approximate step time of each variant.

A variant is evaluated in up to three rounds, each slower and more accurate: memory and time in closed form; the
recomputation it needs, from the memory estimate of three ranks of its pipeline; and the whole plan, with the least
recomputation that makes every rank fit and the time of its step. The search ends when nothing left can be faster.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from llama_core.config.hardware import DeviceSpec
from llama_core.config.run import Offload
from llama_core.errors import PlanError
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.candidates import Candidates, Variant
from llama_core.planning.search.fitting import Fitting
from llama_core.planning.search.lower_bounds import MODES, Bounds, Recomputed
from llama_core.planning.search.rules import in_best_form, no_shape
from llama_core.planning.time.step_time import StepTime, step_time_of
from llama_core.schedules.registry import schedule_type

CLOSE = 0.95
"""Fraction of its bound that the fastest step takes at least, by assumption; slow ones took down to 0.9."""


@dataclass(frozen=True)
class Option:
    """A plan that fits, and how long its step takes."""

    variant: Variant
    plan: ParallelPlan
    step: StepTime
    peak_bytes: int
    """Peak of the fullest rank."""


class _Queued(NamedTuple):
    """A variant to look at; with equal bounds, the first variant comes first."""

    bound: float
    """Approximate step time in seconds."""
    number: int
    is_close: bool
    """Whether the bound is from a memory estimate."""
    variant: Variant


class Search:
    """The search for the plan of one request.

    Args:
        candidates: the plans the request allows.
        fitting: the memory limit.
        device: the devices, all of one kind.
        offload: what DeepSpeed keeps in host memory.
    """

    def __init__(
        self,
        candidates: Candidates,
        fitting: Fitting,
        device: DeviceSpec,
        offload: Offload = "none",
    ) -> None:
        self.candidates = candidates
        self.fitting = fitting
        self.device = device
        self.offload = offload
        self.bounds = Bounds(candidates, fitting, self.step)
        self._closer: dict[Variant, float | None] = {}
        self._options: dict[Variant, Option | None] = {}

    @cached_property
    def bounded(self) -> Mapping[Variant, float]:
        """The variants that may fit, each with its approximate step time in seconds.

        Raises:
            PlanError: if no division of the devices is a valid plan; names the problem of the most data-parallel one.
        """
        problems = []
        bounded = {}
        is_any_legal = False
        for variant in self.candidates.variants(self.offload):
            try:
                recomputed = self.bounds.recomputed(variant)
                if recomputed:
                    bounded[variant] = self.bounds.seconds(variant, recomputed)
            except PlanError as error:
                problems.append(error)
            else:
                is_any_legal = True
        if not is_any_legal:
            raise problems[0] if problems else no_shape(self.candidates)
        return bounded

    def fastest(
        self,
        keep: Callable[[Variant], bool] = lambda variant: True,
        close: float = CLOSE,
    ) -> Option | None:
        """Return the fastest option that fits; None if none does.

        Args:
            keep: which variants to look at, by default all.
            close: fraction of its bound that a step takes at least, by assumption.
        """
        numbers = itertools.count()
        queue: list[_Queued] = []
        for variant, bound in self.bounded.items():
            if keep(variant):
                queue.append(_Queued(bound, next(numbers), is_close=False, variant=variant))
        heapq.heapify(queue)
        best: Option | None = None
        best_seconds = math.inf
        while queue and close * queue[0].bound < best_seconds:
            first = heapq.heappop(queue)
            if not first.is_close:
                closer = self.closer(first.variant)
                if closer is not None:
                    # back into the queue: by its closer bound, others may come before it
                    again = _Queued(closer, next(numbers), is_close=True, variant=first.variant)
                    heapq.heappush(queue, again)
                continue
            option = self.option(first.variant)
            if option and option.step.total < best_seconds:
                best = option
                best_seconds = option.step.total
        return best

    def closer(self, variant: Variant) -> float | None:
        """Return the approximate step time in seconds, from a memory estimate; None if the variant cannot fit."""
        if variant not in self._closer:
            try:
                recomputed = self._recomputed(variant)
            except PlanError:
                recomputed = None
            self._closer[variant] = self.bounds.seconds(variant, recomputed) if recomputed else None
        return self._closer[variant]

    def _recomputed(self, variant: Variant) -> Recomputed | None:
        """Return the recomputation a rank needs, in whole layers; None if no recomputation is enough."""
        limit = self.fitting.limit
        pp = variant.shape.pp
        plan = self.candidates.plan(variant)
        peak = 0 if limit is None else self.fitting.glance(plan)
        if limit is None or peak <= limit:
            return Recomputed("none", 0.0)
        if not self.candidates.adapts_to(variant):
            return None
        num_layers = -(-self.candidates.config.spec.num_layers // pp)
        for mode in MODES[1:]:
            least = self.fitting.glance(replace(plan, recompute=mode))
            if least <= limit:
                share = (peak - limit) / (peak - least)
                return Recomputed(mode, math.ceil(share * num_layers) / num_layers)
        return None

    def option(self, variant: Variant) -> Option | None:
        """Return the variant with the least recomputation that makes it fit; None if nothing does."""
        if variant not in self._options:
            try:
                self._options[variant] = self._option(variant)
            except PlanError:
                self._options[variant] = None
        return self._options[variant]

    def options(self) -> list[Option]:
        """Return the options found so far."""
        return [option for option in self._options.values() if option]

    def _option(self, variant: Variant) -> Option | None:
        candidates = self.candidates
        plan = self.candidates.plan(variant)
        if candidates.adapts_to(variant):
            plan = self.fitting.with_least_recomputation(plan)
        if not self.fitting.fits(plan):
            return None
        if candidates.asked.schedule != "auto":
            plan = in_best_form(plan, self.fitting)
        else:
            # recomputation makes the backward longer, which may take a schedule's advantage
            kind = schedule_type(plan.schedule)
            if candidates.refusal(kind, variant.shape, plan.num_microbatches, plan.recompute):
                return None
        return Option(variant, plan, self.step(plan), self.fitting.peak_bytes(plan))

    def step(self, plan: ParallelPlan) -> StepTime:
        """Return the step time of ``plan``."""
        return step_time_of(self.candidates.config, plan, self.device)
