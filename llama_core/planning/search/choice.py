"""A plan with its reasons: why each choice was made, which plans come next, and which values were rejected."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from llama_core.errors import PlanError
from llama_core.planning.memory.verdict import FILL_LIMIT
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.candidates import Shape, Variant
from llama_core.planning.search.least_memory import least_memory_plan
from llama_core.planning.search.search import CLOSE, Option, Search
from llama_core.planning.time.step_time import StepTime
from llama_core.schedules.registry import DEFAULT_SCHEDULE, searched_schedules
from llama_core.schedules.traits import ScheduleType
from llama_core.units import format_bytes

MAX_RUNNERS_UP = 4
"""Plans shown beside the chosen one."""
NOTICEABLE = 0.01
"""Share of a step below which two plans count as equally fast: estimates of times are not more exact."""


@dataclass(frozen=True)
class Choice:
    """The plan the search found, and why."""

    plan: ParallelPlan
    step: StepTime
    """Time of one optimizer step."""
    peak_bytes: int
    """Peak of the fullest rank."""
    limit_bytes: int | None
    """Limit for that peak: ``FILL_LIMIT`` of the memory budget; None without a budget."""
    reasons: Mapping[str, str]
    """The reason for each choice, a sentence each."""
    runners_up: tuple[Option, ...]
    """The fastest plans of other shapes that the search found, fastest first."""
    rejected: tuple[str, ...]
    """Values that were not tried or do not fit, each with the reason."""

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as a record."""
        return {
            "plan": self.plan.as_dict(),
            "step": self.step.as_dict(),
            "peak_bytes": self.peak_bytes,
            "limit_bytes": self.limit_bytes,
            "reasons": dict(self.reasons),
            "runners_up": [_as_dict(other) for other in self.runners_up],
            "rejected": list(self.rejected),
        }

    def lines(self) -> list[str]:
        """Return the choice as lines of text."""
        limit = ""
        if self.limit_bytes is not None:
            allowed = format_bytes(self.limit_bytes)
            limit = f", within the limit of {allowed} ({FILL_LIMIT:.0%} of the usable memory)"
        lines = [
            f"plan: {self.plan.summary()}",
            f"step: {self.step.summary()}",
            f"memory: the fullest rank peaks at {format_bytes(self.peak_bytes)}{limit}",
            "why:",
        ]
        lines += [f"  {sentence}" for sentence in self.reasons.values()]
        if self.runners_up:
            lines.append("next best:")
        for other in self.runners_up:
            seconds = _seconds(other.step.total, self.step.total)
            peak = format_bytes(other.peak_bytes)
            lines.append(f"  {seconds}, {peak}: {other.plan.summary()}")
        if self.rejected:
            lines.append("not tried, or does not fit:")
        lines += [f"  {sentence}" for sentence in self.rejected]
        return lines


def _as_dict(option: Option) -> dict[str, Any]:
    """Return an option as a record."""
    return {
        "plan": option.plan.as_dict(),
        "step": option.step.as_dict(),
        "peak_bytes": option.peak_bytes,
    }


_KEYS: Mapping[str, Callable[[Variant], Any]] = {
    "tp": lambda variant: variant.shape.tp,
    "pp": lambda variant: variant.shape.pp,
    "cp": lambda variant: variant.shape.cp,
    "ep": lambda variant: variant.experts,
    "sharding": lambda variant: variant.sharding,
    "schedule": lambda variant: variant.order,
    "microbatch": lambda variant: variant.microbatch_size,
}
"""The choices of a variant, each compared with its best alternative."""


def explain(search: Search, best: Option) -> Choice:
    """Return ``best`` with its reasons; if an alternative proves faster, or as fast and simpler, return that one.

    Args:
        search: the search that found it.
        best: the fastest option.
    """
    others = _others(search, best)
    faster = min(filter(None, others.values()), key=lambda other: other.step.total, default=best)
    if faster.step.total < best.step.total:
        return explain(search, faster)
    simplest = _simplest(search, best)
    if simplest is best:
        return _explained(search, best, others)
    less = 1 - best.step.total / simplest.step.total
    fastest = f"the fastest, which is {less:.1%} faster, less than estimates can tell"
    why = f"simpler than {fastest}: {best.plan.summary()}"
    choice = _explained(search, simplest, _others(search, simplest))
    return replace(choice, reasons={"simpler": why, **choice.reasons})


def _complexity(variant: Variant) -> tuple[int, bool]:
    """Return how far a variant divides the model and its sequences, and whether its schedule is another than usual."""
    shape = variant.shape
    return shape.tp * shape.pp * shape.cp * variant.experts.ep, variant.order.schedule != DEFAULT_SCHEDULE


def _simplest(search: Search, fastest: Option) -> Option:
    """Return the simplest option that is as fast as the fastest, as far as estimates can tell."""
    near = (1 + NOTICEABLE) * fastest.step.total
    most = _complexity(fastest.variant)
    simpler: dict[tuple[int, bool], set[Variant]] = {}
    for variant, bound in search.bounded.items():
        if _complexity(variant) < most and CLOSE * bound <= near:
            simpler.setdefault(_complexity(variant), set()).add(variant)
    for _, variants in sorted(simpler.items()):
        option = search.fastest(variants.__contains__)
        if option is not None and option.step.total <= near:
            return option
    return fastest


def _explained(search: Search, best: Option, others: Mapping[str, Option | None]) -> Choice:
    reasons = _Reasons(search, best, others)
    pipeline = None
    for option in (others["pp"], best):
        if option and option.variant.shape.pp > 1:
            pipeline = option
    return Choice(
        plan=best.plan,
        step=best.step,
        peak_bytes=best.peak_bytes,
        limit_bytes=search.fitting.limit,
        reasons=reasons.sentences(),
        rejected=(
            *search.candidates.degrees.refusals(),
            *_rejected_schedules(search, pipeline),
            *reasons.rejected_stages(),
        ),
        runners_up=_runners_up(search, best),
    )


def _others(search: Search, best: Option) -> dict[str, Option | None]:
    """Return, for each of ``_KEYS``, the fastest option with another value; None if none fits."""
    return {name: _other(search, best, key) for name, key in _KEYS.items()}


def _other(search: Search, best: Option, key: Callable[[Variant], Any]) -> Option | None:
    return search.fastest(lambda variant: key(variant) != key(best.variant), close=1.0)


def _runners_up(search: Search, best: Option) -> tuple[Option, ...]:
    fastest: dict[Shape, Option] = {}
    for option in sorted(search.options(), key=lambda option: option.step.total):
        fastest.setdefault(option.variant.shape, option)
    fastest.pop(best.variant.shape, None)
    return tuple(islice(fastest.values(), MAX_RUNNERS_UP))


def _seconds(seconds: float, best: float) -> str:
    more = seconds / best - 1
    if more < 1:
        return f"{seconds:.3g} s ({more:+.1%})"
    return f"{seconds:.3g} s ({more + 1:.1f} times)"


class _Reasons:
    """The reasons for the choices of an option.

    Args:
        search: the search that found it.
        best: the option.
        others: for each of ``_KEYS``, the fastest option with another value; None if none fits.
    """

    def __init__(self, search: Search, best: Option, others: Mapping[str, Option | None]) -> None:
        self.search = search
        self.best = best
        self.others = others
        self.candidates = search.candidates
        self.fitting = search.fitting
        self.asked = search.candidates.asked

    def sentences(self) -> dict[str, str]:
        """Return a sentence for each choice."""
        variant = self.best.variant
        asked = self.asked
        is_whole_asked = variant.experts.expert_tp is None or asked.expert_tp != "auto"
        is_microbatch_asked = bool(asked.microbatch_size or asked.num_microbatches)
        given = {
            "tp": (f"tp {variant.shape.tp}", asked.tp != "auto"),
            "pp": (f"pp {variant.shape.pp}", asked.pp != "auto"),
            "cp": (f"cp {variant.shape.cp}", asked.cp != "auto"),
            "ep": (f"ep {variant.experts}", asked.ep != "auto" and is_whole_asked),
            "sharding": (f"dp {variant.shape.dp}, {variant.sharding}", asked.zero_stage != "auto"),
            "schedule": (f"schedule {self._schedule}", asked.schedule != "auto"),
            "microbatch": (f"microbatch of {variant.microbatch_size}", is_microbatch_asked),
        }
        if not self.candidates.config.spec.moe:
            del given["ep"]
        reasons: dict[str, str] = {}
        for name, (label, is_asked) in given.items():
            reason = self._asked_for(name) if is_asked else self._compared(name)
            reasons[name] = f"{label}: {reason}"
        return reasons | {"recompute": self._recompute(), "offload": self._offload()}

    @property
    def _schedule(self) -> str:
        plan = self.best.plan
        if plan.num_chunks > 1:
            return f"{plan.schedule} x {plan.num_chunks} chunks"
        return plan.schedule

    def _asked_for(self, name: str) -> str:
        tp = self.best.variant.shape.tp
        node_size = self.candidates.node_size
        if name == "tp" and node_size % tp:
            crosses = f"it crosses nodes of {node_size}"
            return f"asked for; {crosses}, so every layer communicates over the slower network"
        return "asked for"

    def _compared(self, name: str) -> str:
        """Return the step time of the best alternative; if none fits, by how much the smallest one misses the limit."""
        key = _KEYS[name]
        value = _KEYS[name](self.best.variant)
        if name == "schedule" and self.best.plan.pp == 1:
            return "no effect with one pipeline rank"
        other = self.others[name]
        if other:
            shows_plan = name in {"tp", "pp", "cp", "ep", "sharding"}
            rest = f": {other.plan.summary()}" if shows_plan else ""
            seconds = _seconds(other.step.total, self.best.step.total)
            return f"with the best alternative, {key(other.variant)}, a step takes {seconds}{rest}"
        try:
            smallest = least_memory_plan(self.candidates, self.fitting, lambda other: key(other) != value)
        except PlanError:
            return "there is no other value to try"
        misses = self._misses(smallest)
        return f"no other value fits; the plan of least memory ({smallest.summary()}) {misses}"

    def _misses(self, plan: ParallelPlan) -> str:
        over = self.fitting.peak_bytes(plan) - (self.fitting.limit or 0)
        return f"exceeds the limit by {format_bytes(over)}"

    def _recompute(self) -> str:
        plan = self.best.plan
        if not self.candidates.adapts:
            return f"recompute {plan.recompute}: asked for"
        if plan.recompute == "none":
            return "recompute none: fits without it"
        num_layers = self.candidates.config.spec.num_layers
        count = num_layers if plan.recomputed_layers is None else sum(plan.recomputed_layers)
        without = self._misses(replace(plan, recompute="none", recomputed_layers=None))
        where = f"on {count} of {num_layers} layers"
        label = f"recompute {plan.recompute} {where}: without it, a rank {without}"
        if plan.recompute == "selective":
            return label
        selective = self._misses(replace(plan, recompute="selective", recomputed_layers=None))
        return f"{label}; with selective on all layers, it {selective}"

    def _offload(self) -> str:
        offload = self.best.variant.offload
        if self.asked.offload != "auto":
            return f"offload {offload}: asked for"
        if self.asked.zero_backend == "native":
            return "offload none: offloading needs parallel.zero_backend=deepspeed"
        if offload == "none":
            return f"offload {offload}: fits without it"
        return f"offload {offload}: less does not fit"

    def rejected_stages(self) -> Iterator[str]:
        """Yield the lower ZeRO stages whose states alone exceed the limit at the same tp and pp, lowest first."""
        plan = self.best.plan
        limit = self.fitting.limit
        if self.asked.zero_stage != "auto" or plan.zero_backend == "deepspeed" or limit is None:
            return
        for stage in range(plan.effective_zero_stage):
            shards, copies = (1, plan.dp) if stage == 0 else (plan.dp_shard, plan.dp_replicate)
            other = replace(plan, zero_stage=stage, dp_shard=shards, dp_replicate=copies)
            states = self.fitting.state_bytes(other)
            if states > limit:
                yield (
                    f"ZeRO {stage}: weights, gradients and moments alone take "
                    f"{format_bytes(states)} at tp {plan.tp} x pp {plan.pp}"
                )


def _rejected_schedules(search: Search, pipeline: Option | None) -> Iterator[str]:
    """Yield the schedules that are not tried, or do not fit, in the shape of the best pipeline."""
    if search.candidates.asked.schedule != "auto" or pipeline is None:
        return
    plan = pipeline.plan
    shape = pipeline.variant.shape
    reasons: dict[str, list[str]] = {}
    for kind in searched_schedules():
        reason = search.candidates.refusal(kind, shape, plan.num_microbatches, plan.recompute)
        if reason is None and _nothing_of_may_fit(search, shape, kind):
            reason = f"too large at {shape}"
            if kind.replicas > 1:
                reason += ", with two copies of each stage"
        if reason is not None:
            reasons.setdefault(reason, []).append(kind.name)
    for reason, names in reasons.items():
        yield f"{', '.join(names)}: {reason}"


def _nothing_of_may_fit(search: Search, shape: Shape, kind: ScheduleType) -> bool:
    """Return whether no variant of a shape with a schedule can fit."""
    for variant in search.bounded:
        is_meant = variant.shape == shape and variant.order.schedule == kind.name
        if is_meant and search.closer(variant) is not None:
            return False
    return True
