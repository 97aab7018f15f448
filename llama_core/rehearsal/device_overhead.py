"""CUDA memory beyond the counted bytes: a separate estimate that names the source of each part."""

from dataclasses import asdict, dataclass
from typing import Any

from llama_core.config.hardware import CONTEXT_BYTES, DEFAULT_GPU_TYPE, gpu_spec
from llama_core.config.run import RunConfig
from llama_core.planning.frameworks.peak import RESERVED_OVER_HELD
from llama_core.planning.memory.profile import MemoryProfile
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.work import Work
from llama_core.schedules.actions import Kind
from llama_core.schedules.walk import walk
from llama_core.units import MIB, format_bytes

NCCL_CHANNELS, NCCL_BUFFER_BYTES = 32, 4 * MIB
"""Most channels of a communicator, and a channel's buffer for each neighbour (NCCL's guide, ``NCCL_BUFFSIZE``)."""
MULTIPLYING_THREADS = 2
"""Threads with a cuBLAS handle: the forward's, and autograd's for the backward; both use one stream."""


@dataclass(frozen=True)
class OverheadPart:
    """One consumer of memory other than tensors."""

    name: str
    num_bytes: int
    source: str
    """Where the number comes from."""


@dataclass(frozen=True)
class DeviceOverhead:
    """All parts: an estimate, never added to the counted bytes."""

    parts: tuple[OverheadPart, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    def summary(self) -> str:
        """Return the amount and its parts in one line."""
        parts = ", ".join(f"{part.name} {format_bytes(part.num_bytes)}" for part in self.parts)
        return f"about {format_bytes(self.num_bytes)} more on CUDA ({parts})"

    def as_dict(self) -> dict[str, Any]:
        """Return the overhead as a record."""
        return {"num_bytes": self.num_bytes, "parts": [asdict(part) for part in self.parts]}


def device_overhead(
    config: RunConfig, plan: ParallelPlan, pp_rank: int, profile: MemoryProfile
) -> DeviceOverhead | None:
    """Return a rank's CUDA memory beyond its counted bytes; None for a run on the CPU.

    Args:
        config: the resolved configuration.
        plan: the plan.
        pp_rank: the rank's position in its pipeline.
        profile: its counted bytes.
    """
    if config.launch.device == "cpu":
        return None
    streams = _streams_bytes(profile) if plan.uses_fully_shard else 0
    work = Work.of(config, plan)
    slack = round((RESERVED_OVER_HELD - 1) * profile.peak_bytes)
    parts = (
        OverheadPart("context", CONTEXT_BYTES, "CUDA's context, cuBLAS and cuDNN: config.hardware.CONTEXT_BYTES"),
        OverheadPart(
            "cublas",
            MULTIPLYING_THREADS * gpu_spec(config.launch.gpu_type or DEFAULT_GPU_TYPE).workspace_bytes,
            "workspaces of the handles that forward and backward multiply with: config.hardware.DeviceSpec",
        ),
        OverheadPart(
            "nccl",
            num_connections(plan, pp_rank) * NCCL_CHANNELS * NCCL_BUFFER_BYTES,
            f"at most {NCCL_CHANNELS} channels with {format_bytes(NCCL_BUFFER_BYTES)} for each of two neighbours per "
            "group of ranks, or one per direction of a pipeline: NCCL's guide, NCCL_BUFFSIZE",
        ),
        OverheadPart(
            "streams", streams, "each stream has its own memory pool: the sum of the pools' peaks minus the joint peak"
        ),
        OverheadPart(
            "messages",
            held_messages_bytes(work, pp_rank),
            "the last two tensors of each direction of a pipeline: torch records NCCL's stream on what it transfers, "
            "and the allocator gives that memory away only once it has seen the stream pass",
        ),
        OverheadPart("fragmentation", slack, "slack fitted to published reserved memory: docs/memory.md"),
        OverheadPart(
            "repeated key/value heads",
            _repeated_heads_bytes(work, pp_rank),
            "CUDA's kernels with a document mask or in fp32 need a key/value head for each query head: "
            "models.attention.attend",
        ),
    )
    return DeviceOverhead(tuple(part for part in parts if part.num_bytes))


def num_connections(plan: ParallelPlan, pp_rank: int) -> int:
    """Return the neighbours that a rank is connected to, summed over the communicators that it uses.

    These are two for the group of all ranks and for each smaller group that sums, gathers or passes blocks around, and
    one for each direction in which it sends or receives along the pipeline: see ``parallel.mesh``. NCCL makes no
    connections for groups of a mesh that are never used.
    """
    world = plan.world_size
    sizes = [plan.tp, plan.num_shards, plan.num_copies]
    if plan.ep > 1:
        hops = [plan.ep // plan.ep_nodes, plan.ep_nodes]
        sizes += [*(hops if plan.ep_nodes > 1 else [plan.ep]), plan.num_expert_shards, plan.num_expert_copies]
    own = [plan.cp, plan.layout.num_replicas]  # never the group of all ranks, even if as large
    groups = (world > 1) + sum(1 < size < world for size in sizes) + sum(size > 1 for size in own)
    return 2 * groups + _num_directions(plan, pp_rank)


def _num_directions(plan: ParallelPlan, pp_rank: int) -> int:
    """Return in how many directions a rank sends or receives along the pipeline."""
    return sum(pp_rank in route for route in plan.layout.routes)


def held_messages_bytes(work: Work, pp_rank: int) -> int:
    """Return the bytes of pipeline transfers that outlive their use: two for each direction of a rank."""
    return 2 * _num_directions(work.plan, pp_rank) * work.stream_bytes


def _streams_bytes(profile: MemoryProfile) -> int:
    """Return the extra bytes of keeping tensors in two pools, one for communication, that share no free memory."""
    gathered = [phase.get("communication", 0) for phase in profile.phases.values()]
    others = [
        sum(phase.values()) - communication
        for phase, communication in zip(profile.phases.values(), gathered, strict=True)
    ]
    return max(gathered) + max(others) - profile.peak_bytes


def _repeated_heads_bytes(work: Work, pp_rank: int) -> int:
    """Return the bytes of the repeated heads of all layers in flight; a ring, block by block, and sinks keep none."""
    plan = work.plan
    is_kept = not work.spec.attention_sinks and work.kernel.repeats_heads(has_16_bits=work.precision != "fp32")
    if not is_kept:
        return 0
    missing = (work.spec.q_size - work.spec.kv_size) // plan.tp
    one_layer = 2 * work.setting.tokens * missing * work.itemsize
    keeping = [sum(mode != "full" for mode in stage.modes) for stage in work.stages]
    schedule = plan.build_schedule()
    most = 1
    for turn in walk(schedule, pp_rank):
        if turn.action.kind is Kind.FORWARD:
            own = keeping[turn.action.stage]
            others = zip(schedule.stages_of(pp_rank), turn.held.microbatches, strict=True)
            most = max(most, own + sum(keeping[stage] * count for stage, count in others))
    return most * one_layer
