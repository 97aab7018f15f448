"""The plans that a request allows: what it asks for as it is, and for each ``auto`` all that is worth a thought.

What never is, whatever the memory and the time:

* the sizes of tp, pp and cp that ``degrees`` refuses;
* ZeRO with nobody to shard over;
* GPipe, which holds more microbatches than 1F1B and idles as long;
* Chimera over two ranks, which are data-parallel ones with a detour, and direct concatenation of more units of
  microbatches than it beats 1F1B with;
* ZB-H1 and ZBV beside what they exclude: anything but the pipeline alone.
"""

from collections.abc import Iterator
from typing import NamedTuple

from llama_core.config.hardware import DeviceSpec
from llama_core.config.run import Offload, RecomputeMode, RunConfig, ZeroStage
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.degrees import Degrees
from llama_core.schedules.registry import DEFAULT_SCHEDULE, schedule_names, schedule_type
from llama_core.schedules.traits import ScheduleType

CHUNKS = (2, 4)
"""Stages per rank of an interleaved pipeline that are tried."""
MAX_MICROBATCH_TOKENS = 32_768
"""Tokens of a microbatch above which its matrix products keep a device no busier, so that more only takes memory."""


class Shape(NamedTuple):
    """How many devices each axis has."""

    tp: int
    pp: int
    cp: int
    dp: int

    def __str__(self) -> str:
        """Return the axes of more than one device."""
        sizes = [f"{axis} {size}" for axis, size in self._asdict().items() if size > 1]
        return " x ".join(sizes) or "one device"


class Sharding(NamedTuple):
    """What data-parallel ranks divide, and how often that is there."""

    zero_stage: ZeroStage
    dp_replicate: int

    def __str__(self) -> str:
        """Return the stage and the number of copies."""
        copies = f" x {self.dp_replicate} copies" if self.dp_replicate > 1 else ""
        return f"ZeRO {self.zero_stage}{copies}"


class Order(NamedTuple):
    """The order of forwards and backwards."""

    schedule: str
    num_chunks: int = 1

    def __str__(self) -> str:
        """Return the schedule, and its chunks where there are several."""
        return f"{self.schedule} x {self.num_chunks}" if self.num_chunks > 1 else self.schedule


class Variant(NamedTuple):
    """Everything about a plan but what it recomputes."""

    shape: Shape
    sharding: Sharding
    order: Order
    microbatch_size: int
    offload: Offload = "none"


class Candidates:
    """The plans that one request allows.

    Args:
        config: the request.
        device: what it is planned for; None where that is not a device of the table.
    """

    def __init__(self, config: RunConfig, device: DeviceSpec | None) -> None:
        self.config, self.asked = config, config.parallel
        self.degrees = Degrees(config, device)
        self.node_size = self.degrees.node_size

    def shapes(self) -> list[Shape]:
        """Return the shapes whose data-parallel ranks divide the batch, the most data-parallel first."""
        gpus = self.asked.gpus
        shapes = [
            Shape(tp, pp, cp, gpus // (tp * pp * cp))
            for tp in self.degrees.sizes("tp")
            for pp in self.degrees.sizes("pp")
            for cp in self.degrees.sizes("cp")
            if gpus % (tp * pp * cp) == 0
        ]
        return sorted(filter(self._divides, shapes), key=lambda shape: (-shape.dp, shape.cp, shape.pp, shape.tp))

    def _divides(self, shape: Shape) -> bool:
        batch, asked = self.config.batch_size, self.asked
        if batch % shape.dp or (asked.dp_replicate != "auto" and shape.dp % asked.dp_replicate):
            return False
        share, product = batch // shape.dp, (asked.microbatch_size or 1) * (asked.num_microbatches or 1)
        return share == product if asked.microbatch_size and asked.num_microbatches else share % product == 0

    def microbatch_sizes(self, shape: Shape) -> list[int]:
        """Return the microbatch asked for, or the divisors of a rank's share of the batch, the largest first."""
        asked, share = self.asked, self.config.batch_size // shape.dp
        if asked.microbatch_size or asked.num_microbatches:
            return [asked.microbatch_size or share // (asked.num_microbatches or 1)]
        most = max(1, MAX_MICROBATCH_TOKENS * shape.cp // self.config.seq_len)
        return [size for size in range(min(most, share), 0, -1) if share % size == 0]

    def num_microbatches(self, shape: Shape, microbatch_size: int) -> int:
        """Return the forward passes of a rank."""
        return self.config.batch_size // (shape.dp * microbatch_size)

    def shardings(self, shape: Shape) -> list[Sharding]:
        """Return the ways to divide the states, those that exchange least first."""
        return [
            Sharding(stage, copies)
            for stage in self._zero_stages(shape)
            for copies in self._copies(shape, stage)
            if self.asked.zero_stage != "auto"
            or stage == 0
            or shape.dp * shape.cp > copies
            or self.asked.zero_backend == "deepspeed"
        ]

    def _zero_stages(self, shape: Shape) -> tuple[ZeroStage, ...]:
        asked = self.asked
        if asked.zero_stage != "auto":
            return (asked.zero_stage,)
        if asked.zero_backend == "deepspeed":
            return (1, 2, 3)
        may_copy = asked.dp_replicate in {"auto", shape.dp}
        has_nobody = shape.cp == 1 and shape.dp in {1, asked.dp_replicate}
        if asked.gradient_compression == "powersgd" or has_nobody:
            return (0,) if may_copy else ()
        # stage 1 sends and holds less than stage 0, but for whole models, whose gradients go while the rest is made
        return (0, 1, 2, 3) if may_copy and shape.tp == shape.pp == shape.cp == 1 else (1, 2, 3)

    def _copies(self, shape: Shape, zero_stage: ZeroStage) -> list[int]:
        """Return how many copies of the sharding group there may be: one, or one in every node."""
        if zero_stage == 0:
            return [shape.dp]
        if self.asked.dp_replicate != "auto":
            return [self.asked.dp_replicate]
        in_a_node = max(1, self.node_size // (shape.tp * shape.cp))
        shards = max(size for size in range(1, in_a_node + 1) if shape.dp % size == 0)
        return [1] if shards in {1, shape.dp} or self.asked.zero_backend == "deepspeed" else [1, shape.dp // shards]

    def orders(self, shape: Shape, microbatch_size: int) -> list[Order]:
        """Return the schedules for so large a microbatch."""
        asked, pp, count = self.asked, shape.pp, self.num_microbatches(shape, microbatch_size)
        if pp == 1:
            return [Order(DEFAULT_SCHEDULE if asked.schedule == "auto" else asked.schedule, self._chunks or 1)]
        kinds = map(schedule_type, schedule_names()) if asked.schedule == "auto" else [schedule_type(asked.schedule)]
        return [
            order
            for kind in kinds
            if microbatch_size % kind.parts_per_microbatch == 0
            and (asked.schedule != "auto" or self.refusal(kind, shape, count, self.recompute) is None)
            for order in self._in_chunks(kind, pp, count)
        ]

    @property
    def _chunks(self) -> int | None:
        return None if self.asked.num_chunks == "auto" else self.asked.num_chunks

    def _in_chunks(self, kind: ScheduleType, pp: int, count: int) -> Iterator[Order]:
        """Yield a schedule with every number of stages per rank that it may have."""
        if not kind.takes_chunks:
            if self.asked.schedule != "auto" or self._chunks in {None, 1}:
                yield Order(kind.name, self._chunks or 1)
        elif count % pp == 0 and self._chunks != 1:
            if self._chunks is not None:
                yield Order(kind.name, self._chunks)
            else:
                yield from (Order(kind.name, chunks) for chunks in CHUNKS if self.degrees.is_even(pp * chunks))

    def refusal(self, kind: ScheduleType, shape: Shape, count: int, recompute: RecomputeMode) -> str | None:
        """Return why a schedule that is left open is not tried; None if it is.

        Args:
            kind: the schedule.
            shape: how many devices each axis has.
            count: microbatches of a step.
            recompute: what is recomputed, by which a backward takes longer.
        """
        pp, usual = shape.pp, schedule_type(DEFAULT_SCHEDULE)
        is_alone = self.asked.gpus == pp and not self.asked.compile and self.recompute == "none"
        backward = 3 if recompute == "full" else 2
        reasons = {
            "excludes tp, cp, data parallelism, recomputation and compilation": kind.splits_backward and not is_alone,
            f"has no pairs at pp {pp}": bool(pp % kind.replicas),
            f"is data parallelism with a detour at pp {pp}": kind.replicas > 1 and pp <= kind.replicas,
            f"needs more than {kind.min_units * pp} microbatches at pp {pp}": count <= kind.min_units * pp,
            f"makes stages uneven at pp {pp}": (
                kind.stages_per_rank > 1 and not self.degrees.is_even(kind.stages_per_rank * pp)
            ),
            f"idles as long as {usual.name} at pp {pp} and {count} microbatches, and holds as much": (
                kind is not usual and kind.is_beaten_by(usual, pp, count, backward=backward)
            ),
        }
        return next((reason for reason, refuses in reasons.items() if refuses), None)

    def variants(self, offload: Offload = "none") -> Iterator[Variant]:
        """Yield everything that may be searched, the most data-parallel first."""
        for shape in self.shapes():
            for size in self.microbatch_sizes(shape):
                for sharding in self.shardings(shape):
                    for order in self.orders(shape, size):
                        yield Variant(shape, sharding, order, size, offload)

    def offloads(self) -> list[Offload]:
        """Return what may be kept in host memory, the least first."""
        if self.asked.offload != "auto":
            return [self.asked.offload]
        return ["none", "optimizer", "parameters"] if self.asked.zero_backend == "deepspeed" else ["none"]

    @property
    def recompute(self) -> RecomputeMode:
        """What to recompute before memory asks for more."""
        return "none" if self.adapts else self.asked.recompute  # type: ignore[return-value]

    @property
    def adapts(self) -> bool:
        """Whether what is recomputed follows from what fits."""
        return self.asked.recompute in {"auto", "adaptive"}

    def adapts_to(self, variant: Variant) -> bool:
        """Return whether a variant may recompute: zero-bubble schedules exclude it."""
        return self.adapts and (variant.shape.pp == 1 or not schedule_type(variant.order.schedule).splits_backward)

    def plan(self, variant: Variant, num_microbatches: int | None = None) -> ParallelPlan:
        """Return the plan of ``variant``, of the whole batch or of so many microbatches.

        Raises:
            PlanError: if its choices exclude each other, or the model cannot be divided so.
        """
        shape, asked, config = variant.shape, self.asked, self.config
        plan = ParallelPlan(
            tp=shape.tp,
            pp=shape.pp,
            cp=shape.cp,
            ep=asked.ep,
            dp_shard=shape.dp // variant.sharding.dp_replicate,
            dp_replicate=variant.sharding.dp_replicate,
            sequence_parallel=asked.sequence_parallel,
            zero_stage=variant.sharding.zero_stage,
            zero_backend=asked.zero_backend,
            offload=variant.offload,
            schedule=variant.order.schedule,
            num_chunks=variant.order.num_chunks,
            microbatch_size=variant.microbatch_size,
            num_microbatches=num_microbatches or self.num_microbatches(shape, variant.microbatch_size),
            recompute=self.recompute,
            gradient_compression=asked.gradient_compression,
            compile=asked.compile,
            attention=asked.attention,
        )
        plan.check(config.spec, seq_len=config.seq_len, precision=config.training.precision)
        return plan
