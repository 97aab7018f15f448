"""The dry run: real steps of the real model on fake tensors, which have shapes and lifetimes but no memory."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llama_core.config.models import ModelSpec
from llama_core.config.run import RecomputeMode, RunConfig
from llama_core.errors import PlanError
from llama_core.planning.memory.peaks import MemoryProfile
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.compute import Pass
from llama_core.planning.time.makespan import span
from llama_core.rehearsal.compose import ComposedStep, Hosting, Recording, compose, renamed_layers, situations
from llama_core.rehearsal.device_overhead import DeviceOverhead, device_overhead
from llama_core.rehearsal.trace import trace_rank
from llama_core.rehearsal.transfers import CountedTraffic, summed
from llama_core.schedules.actions import Kind
from llama_core.units import TFLOP, format_bytes, format_duration


@dataclass(frozen=True)
class RankResult:
    """What one rank held, computed and sent in an optimizer step."""

    rank: int
    """The first of the ranks with this place in their pipeline."""
    pp_rank: int
    """That place."""
    layers: tuple[range, ...]
    """Layers of every stage that it hosts."""
    profile: MemoryProfile
    peak_at: str
    """The operator that reached the peak, and the module or gradient before it."""
    flops: int
    """FLOPs of one step as executed: attention in full, recomputation included."""
    traffic: tuple[CountedTraffic, ...]
    """What it sent to and received from other ranks, except for what it received from another rank of its pipeline."""
    idle_share: float | None
    """Share of the step in which it waits for other pipeline ranks, if time goes as FLOPs do and transfers take none;
    None where the other ranks were not rehearsed."""
    device_overhead: DeviceOverhead | None
    """What CUDA takes beside these bytes; None on the CPU."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a record."""
        return self.profile.as_dict() | {
            "rank": self.rank,
            "pp_rank": self.pp_rank,
            "layers": [[layers.start, layers.stop] for layers in self.layers],
            "peak_at": self.peak_at,
            "flops": self.flops,
            "traffic": [traffic.as_dict() for traffic in self.traffic],
            "idle_share": self.idle_share,
            "device_overhead": None if self.device_overhead is None else self.device_overhead.as_dict(),
        }


@dataclass(frozen=True)
class DryRunResult:
    """What a rehearsed optimizer step held and computed on every distinct rank."""

    ranks: tuple[RankResult, ...]
    """The first rank of every pipeline rank, in order."""
    seconds: float
    """Wall time of the rehearsal."""
    device: str
    """What the bytes stand for."""

    @property
    def fullest(self) -> RankResult:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda result: result.profile.peak_bytes)

    @property
    def leanest(self) -> RankResult:
        """The rank with the lowest peak."""
        return min(self.ranks, key=lambda result: result.profile.peak_bytes)

    @property
    def profile(self) -> MemoryProfile:
        """The bytes of the fullest rank."""
        return self.fullest.profile

    @property
    def rank(self) -> int:
        """The fullest rank."""
        return self.fullest.rank

    @property
    def peak_at(self) -> str:
        """Where the fullest rank reached its peak."""
        return self.fullest.peak_at

    @property
    def flops(self) -> int:
        """FLOPs of one step of the fullest rank."""
        return self.fullest.flops

    @property
    def device_overhead(self) -> DeviceOverhead | None:
        """What CUDA takes on the fullest rank beside the counted bytes; None on the CPU."""
        return self.fullest.device_overhead

    def summary(self) -> str:
        """Return the result in one line."""
        where = f" on rank {self.rank}" if len(self.ranks) > 1 else ""
        least = f" (the least {format_bytes(self.leanest.profile.peak_bytes)})" if len(self.ranks) > 1 else ""
        return (
            f"peak {format_bytes(self.profile.peak_bytes)} in the {self.profile.peak_phase}{where}{least}, "
            f"{self.flops / TFLOP:.2f} TFLOP per step; counted in {format_duration(self.seconds)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fullest rank as a flat record, with those of all ranks."""
        return self.fullest.as_dict() | {
            "seconds": self.seconds,
            "device": self.device,
            "fullest_rank": self.rank,
            "leanest_rank": self.leanest.rank,
            "ranks": [result.as_dict() for result in self.ranks],
        }


def rehearse(config: RunConfig, plan: ParallelPlan, rank: int | None = None) -> DryRunResult:
    """Take an optimizer step of every distinct rank of ``plan``, without allocating, and count what it takes.

    Ranks are distinct by their place in the pipeline. Those that differ in another axis run the same operators on
    tensors of the same shapes, up to what does not divide evenly: ``fully_shard`` gives the first ranks the larger
    shards, and in a ring of context-parallel ranks the first one computes the blocks of the others by halves of its
    queries where the last one takes halves of their keys. So the first rank of each place stands for all.

    A few microbatches are traced, and the step is composed of them as ``compose`` says; ranks whose stages
    have the same contents share what was traced.

    Args:
        config: the resolved configuration (no ``auto`` left).
        plan: how the work is divided over ranks and microbatches, and what is recomputed.
        rank: the only rank to rehearse; by default the first one of every pipeline rank.

    Raises:
        PlanError: if the plan leaves its sharding to DeepSpeed, has no such rank, or ranks are connected already.
    """
    if plan.zero_backend == "deepspeed":
        raise PlanError(
            "the dry run rehearses torch's own ZeRO, not DeepSpeed's; use parallel.zero_backend=native to rehearse"
        )
    started = time.perf_counter()
    ranks_per_stage = plan.world_size // plan.pp
    ranks = range(0, plan.world_size, ranks_per_stage) if rank is None else (rank,)
    rehearsal = _Rehearsal(config, plan)
    steps = [rehearsal.step(one) for one in ranks]
    idle = _idle_shares(plan, steps) if rank is None else [None]
    results = tuple(map(rehearsal.result, ranks, steps, idle))
    return DryRunResult(results, time.perf_counter() - started, rehearsal.device(ranks))


class _Rehearsal:
    """The ranks of a plan, of which those with equal contents share what was traced."""

    def __init__(self, config: RunConfig, plan: ParallelPlan) -> None:
        self.config, self.plan = config, plan
        self.schedule = plan.build_schedule()
        self.lists = self.schedule.with_communication()
        self.layers = plan.stage_layers(config.spec)
        self._known: dict[tuple[_Contents, ...], tuple[Recording, int]] = {}  # and the pipeline rank it was made on

    def step(self, rank: int) -> ComposedStep:
        """Return the step of a rank, in which places are named after its own layers."""
        pp_rank = self.plan.coordinate(rank, "pp")
        stages = self.schedule.stages_of(pp_rank)
        wanted = situations(self.lists[pp_rank], Hosting.of(self.plan, self.config.spec, pp_rank))
        contents = tuple(_contents(self.plan, self.config.spec, stage) for stage in stages)
        if contents not in self._known or not self._known[contents][0].knows(wanted):
            self._known[contents] = (trace_rank(self.config, self.plan, rank).recording(), pp_rank)
        recording, traced = self._known[contents]
        step = compose(recording, wanted)
        named = dict(zip(self._layers_of(traced), self._layers_of(pp_rank), strict=True))
        step.places = {phase: renamed_layers(where, named) for phase, where in step.places.items()}
        return step

    def _layers_of(self, pp_rank: int) -> list[int]:
        return [layer for stage in self.schedule.stages_of(pp_rank) for layer in self.layers[stage]]

    def result(self, rank: int, step: ComposedStep, idle_share: float | None) -> RankResult:
        """Return what is told of a rank."""
        pp_rank = self.plan.coordinate(rank, "pp")
        profile = step.profile
        return RankResult(
            rank=rank,
            pp_rank=pp_rank,
            layers=tuple(self.layers[stage] for stage in self.schedule.stages_of(pp_rank)),
            profile=profile,
            peak_at=step.places[profile.peak_phase],
            flops=step.flops,
            traffic=summed(step.transfers),
            idle_share=idle_share,
            device_overhead=device_overhead(self.config, self.plan, pp_rank, profile),
        )

    def device(self, ranks: Sequence[int]) -> str:
        """Return what the bytes of some ranks stand for."""
        world_size = self.plan.world_size
        which = "one device" if world_size == 1 else f"rank {', '.join(map(str, ranks))} of {world_size}"
        return f"{which}, counted on fake tensors; a CUDA context and allocator fragmentation come on top"


class _Contents(NamedTuple):
    """What a rank holds and does in a stage, whichever stage it is."""

    modes: tuple[RecomputeMode, ...]
    """What is recomputed of each layer."""
    is_first: bool
    is_last: bool


def _contents(plan: ParallelPlan, spec: ModelSpec, stage: int) -> _Contents:
    modes = plan.recompute_modes(spec)
    return _Contents(modes[stage], is_first=stage == 0, is_last=stage == len(modes) - 1)


def _idle_shares(plan: ParallelPlan, steps: Sequence[ComposedStep]) -> list[float]:
    """Return how much of a step every pipeline rank waits, if every action takes as long as it has FLOPs."""
    schedule = plan.build_schedule()
    of_stages: dict[int, Counter[Kind]] = {}
    for stages, step in zip(schedule.placement, steps, strict=True):
        for (slot, kind), flops in step.flops_of_one.items():
            of_stages.setdefault(stages[slot], Counter())[kind] = flops
    passes = [
        Pass(flops[Kind.FORWARD], sum(flops.values()) - flops[Kind.FORWARD]) for _, flops in sorted(of_stages.items())
    ]
    makespan = span(plan, passes).makespan
    return [1 - step.flops / makespan for step in steps]
