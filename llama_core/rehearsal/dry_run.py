"""The dry run: a real step of the real model on fake tensors, which have shapes and lifetimes but no memory."""

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from llama_core.config.run import RunConfig
from llama_core.errors import PlanError
from llama_core.planning.memory.profile import MemoryProfile
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.kernels import Pass
from llama_core.planning.time.makespan import span
from llama_core.planning.transfers import Traffic
from llama_core.planning.work import Stage, Work
from llama_core.rehearsal.before import whole_step
from llama_core.rehearsal.compose import ComposedStep, Hosting, Recording, Step, compose, renamed_layers, steps
from llama_core.rehearsal.device_overhead import DeviceOverhead, device_overhead
from llama_core.rehearsal.trace import trace_rank
from llama_core.rehearsal.transfers import summed
from llama_core.schedules.actions import Kind
from llama_core.units import TFLOP, format_bytes, format_duration

if TYPE_CHECKING:
    from llama_core.rehearsal.communications import CheckedOrder


@dataclass(frozen=True)
class RankResult:
    """The memory, FLOPs and traffic of one rank in an optimizer step."""

    rank: int
    """The rank that was rehearsed: by default the first one at its pipeline position."""
    pp_rank: int
    """The pipeline position."""
    layers: tuple[range, ...]
    """Layers of every stage that it hosts."""
    profile: MemoryProfile
    peak_at: str
    """The operator that reached the peak, and the module or gradient before it."""
    flops: int
    """FLOPs of one step as executed: attention in full, recomputation included, and a forward before it."""
    traffic: tuple[Traffic, ...]
    """Its transfers with other ranks; a point-to-point receive counts on the sending rank only."""
    idle_share: float | None
    """Share of the step that it waits for other pipeline ranks, if time is proportional to FLOPs and transfers take no
    time; None if the other ranks were not rehearsed."""
    device_overhead: DeviceOverhead | None
    """CUDA memory beyond these bytes; None on the CPU."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a record."""
        return self.profile.as_dict() | {
            "rank": self.rank,
            "pp_rank": self.pp_rank,
            "layers": [[layers.start, layers.stop] for layers in self.layers],
            "peak_at": self.peak_at,
            "flops": self.flops,
            "traffic": [asdict(traffic) for traffic in self.traffic],
            "idle_share": self.idle_share,
            "device_overhead": None if self.device_overhead is None else self.device_overhead.as_dict(),
        }


@dataclass(frozen=True)
class DryRunResult:
    """The result of a rehearsed optimizer step for every distinct rank."""

    ranks: tuple[RankResult, ...]
    """The first rank at every pipeline position, in order, or the only rank that was asked for."""
    seconds: float
    """Wall time of the rehearsal."""
    device: str
    """Which ranks the bytes belong to, and what they leave out."""
    order: "CheckedOrder | None" = None
    """The communications of all ranks in a small copy of the plan; None for one rank, or if they were not checked."""

    @property
    def fullest(self) -> RankResult:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda result: result.profile.peak_bytes)

    @property
    def least_full(self) -> RankResult:
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
        """CUDA memory on the fullest rank beyond the counted bytes; None on the CPU."""
        return self.fullest.device_overhead

    def summary(self) -> str:
        """Return the result in one line."""
        where = f" on rank {self.rank}" if len(self.ranks) > 1 else ""
        least = f" (lowest {format_bytes(self.least_full.profile.peak_bytes)})" if len(self.ranks) > 1 else ""
        return (
            f"peak {format_bytes(self.profile.peak_bytes)} in the {self.profile.peak_phase}{where}{least}, "
            f"{self.flops / TFLOP:.2f} TFLOP per step; counted in {format_duration(self.seconds)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fullest rank's record, extended by the records of all ranks."""
        return self.fullest.as_dict() | {
            "seconds": self.seconds,
            "device": self.device,
            "fullest_rank": self.rank,
            "least_full_rank": self.least_full.rank,
            "ranks": [result.as_dict() for result in self.ranks],
            "order": self.order and self.order.as_dict(),
        }


def rehearse(config: RunConfig, plan: ParallelPlan, rank: int | None = None) -> DryRunResult:
    """Run an optimizer step of every distinct rank of ``plan`` without allocating, and count memory, FLOPs and traffic.

    Ranks are distinct if their pipeline positions differ. Ranks that differ on another axis run the same operators on
    tensors of the same shapes, except where sizes do not divide evenly: ``fully_shard`` gives the first ranks the
    larger shards, and in a context-parallel ring the first rank computes the others' blocks with half of its queries,
    the last rank with half of their keys. So the first rank at each position stands for all.

    A few microbatches are traced, and ``compose`` builds the step from them; ranks whose stages have the same contents
    share a trace.

    Args:
        config: the resolved configuration (no ``auto`` left).
        plan: how the work is divided over ranks and microbatches, and what is recomputed.
        rank: the only rank to rehearse; by default the first one at every pipeline position.

    Raises:
        PlanError: if DeepSpeed shards the model, the plan has no such rank, or a process group exists already.
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
    """Rehearses the ranks of a plan; ranks with equal contents share a trace."""

    def __init__(self, config: RunConfig, plan: ParallelPlan) -> None:
        self.config = config
        self.plan = plan
        self.schedule = plan.build_schedule()
        self.lists = self.schedule.with_communication()
        self.layers = plan.stage_layers(config.spec)
        self.work = Work.of(config, plan)
        self._known: dict[tuple[Stage, ...], tuple[Recording, int]] = {}  # with the pipeline rank that was traced

    def step(self, rank: int) -> ComposedStep:
        """Return a rank's step, with places named after its own layers."""
        pp_rank = self.plan.coordinate(rank, "pp")
        wanted = steps(self.lists[pp_rank], Hosting.of(self.plan, self.config.spec, pp_rank))
        contents = self.work.hosted(pp_rank)
        if contents not in self._known:
            self._known[contents] = (_recorded(self.config, self.plan, rank), pp_rank)
        recording, traced = self._known[contents]
        named = dict(zip(self._layers_of(traced), self._layers_of(pp_rank), strict=True))
        if not recording.knows(wanted):
            more = _recorded(self.config, self.plan, rank, known=recording.changes)
            recording.learn(more, {own: layer for layer, own in named.items()})
        step = compose(recording, wanted)
        step.places = {phase: renamed_layers(where, named.__getitem__) for phase, where in step.places.items()}
        return step

    def _layers_of(self, pp_rank: int) -> list[int]:
        return [layer for stage in self.schedule.stages_of(pp_rank) for layer in self.layers[stage]]

    def result(self, rank: int, step: ComposedStep, idle_share: float | None) -> RankResult:
        """Return the result of a rank."""
        pp_rank = self.plan.coordinate(rank, "pp")
        profile = step.profile
        flops, transfers = whole_step(step, self.work.objective)
        return RankResult(
            rank=rank,
            pp_rank=pp_rank,
            layers=tuple(self.layers[stage] for stage in self.schedule.stages_of(pp_rank)),
            profile=profile,
            peak_at=step.places[profile.peak_phase],
            flops=flops,
            traffic=summed(transfers),
            idle_share=idle_share,
            device_overhead=device_overhead(self.config, self.plan, pp_rank, profile),
        )

    def device(self, ranks: Sequence[int]) -> str:
        """Describe which ranks the bytes belong to, and what they leave out."""
        world_size = self.plan.world_size
        which = "one device" if world_size == 1 else f"rank {', '.join(map(str, ranks))} of {world_size}"
        return f"{which}, counted on fake tensors; excludes the CUDA context and allocator fragmentation"


def _recorded(config: RunConfig, plan: ParallelPlan, rank: int, known: Collection[Step] = ()) -> Recording:
    recording = trace_rank(config, plan, rank, known=known).recording
    if recording is None:
        raise AssertionError("a trace of all layers has nothing to unfold")
    return recording


def _idle_shares(plan: ParallelPlan, steps: Sequence[ComposedStep]) -> list[float]:
    """Return the share of a step that every pipeline rank waits, if an action's time is proportional to its FLOPs."""
    schedule = plan.layout
    of_stages: dict[int, Counter[Kind]] = {}
    for stages, step in zip(schedule.placement, steps, strict=True):
        for (slot, kind), flops in step.flops_of_one.items():
            of_stages.setdefault(stages[slot], Counter())[kind] = flops
    passes = [
        Pass(flops[Kind.FORWARD], sum(flops.values()) - flops[Kind.FORWARD]) for _, flops in sorted(of_stages.items())
    ]
    makespan = span(plan, passes).makespan
    return [1 - step.flops / makespan for step in steps]
