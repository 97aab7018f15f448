"""The plans that a request allows: the values it sets, and every value worth trying for each ``auto``.

Never tried, whatever the memory and the time:

* the sizes of tp, pp, cp and ep that ``degrees`` refuses;
* ZeRO without ranks to shard over;
* GPipe, which holds more microbatches than 1F1B and idles as long;
* Chimera over two ranks, which amounts to data parallelism, and its direct concatenation with so many units of
  microbatches that it idles as long as 1F1B;
* ZB-H1 and ZBV with anything but a plain pipeline, as they exclude everything else.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from llama_core.config.hardware import DeviceSpec
from llama_core.config.models import ModelSpec
from llama_core.config.run import MAX_MICROBATCHES, Offload, RecomputeMode, RunConfig, ZeroStage
from llama_core.errors import PlanError
from llama_core.planning.before import spec_before_run, weights_before_run
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.degrees import Degrees
from llama_core.schedules.registry import DEFAULT_SCHEDULE, schedule_type, searched_schedules
from llama_core.schedules.traits import ScheduleType

CHUNKS = (2, 4)
"""Stages per rank to try in an interleaved pipeline."""
MAX_MICROBATCH_TOKENS = 32_768
"""Tokens per rank and microbatch above which matrix products run no faster, so more tokens only take memory."""
MAX_CPU_MICROBATCH_TOKENS = 8192
"""The same on a CPU."""


class Shape(NamedTuple):
    """The number of devices on each axis."""

    tp: int
    pp: int
    cp: int
    dp: int

    def __str__(self) -> str:
        """Return the axes with more than one device."""
        sizes = [f"{axis} {size}" for axis, size in self._asdict().items() if size > 1]
        return " x ".join(sizes) or "one device"


class Sharding(NamedTuple):
    """What data-parallel ranks shard, and in how many copies."""

    zero_stage: ZeroStage
    dp_replicate: int

    def __str__(self) -> str:
        """Return the stage and the number of copies."""
        copies = f" x {self.dp_replicate} copies" if self.dp_replicate > 1 else ""
        return f"ZeRO {self.zero_stage}{copies}"


class ExpertRanks(NamedTuple):
    """The ranks that divide experts."""

    ep: int
    expert_tp: int | None = None
    """Tensor-parallel ranks that divide every expert; None: all of them."""

    def __str__(self) -> str:
        """Return their number, and whether they have whole experts if tensor-parallel ranks could divide them."""
        return f"{self.ep} with expert_tp {self.expert_tp}" if self.expert_tp else str(self.ep)


class ScheduleChoice(NamedTuple):
    """The order of forwards and backwards."""

    schedule: str
    num_chunks: int = 1

    def __str__(self) -> str:
        """Return the schedule, and its chunks if it has several."""
        return f"{self.schedule} x {self.num_chunks}" if self.num_chunks > 1 else self.schedule


class Variant(NamedTuple):
    """Everything in a plan except its recomputation."""

    shape: Shape
    sharding: Sharding
    experts: ExpertRanks
    order: ScheduleChoice
    microbatch_size: int
    offload: Offload = "none"


class Candidates:
    """The plans that one request allows.

    Args:
        config: the request.
        device: the device to plan for; None if it is not in the device table.
    """

    def __init__(self, config: RunConfig, device: DeviceSpec | None) -> None:
        self.config = config
        self.asked = config.parallel
        self._batch_sizes = config.batch_sizes
        self._common_batch = math.gcd(*self._batch_sizes)
        """The largest number of sequences that every step is a multiple of: the batch, if there is no ramp."""
        self.degrees = Degrees(config, device)
        self.node_size = self.degrees.node_size

    def shapes(self) -> list[Shape]:
        """Return the shapes whose data-parallel ranks divide the batch, most data-parallel first."""
        gpus = self.asked.gpus
        sizes = [self.degrees.sizes(axis) for axis in ("tp", "pp", "cp")]
        shapes: list[Shape] = []
        for tp, pp, cp in itertools.product(*sizes):
            ranks_of_model = tp * pp * cp
            if gpus % ranks_of_model == 0:
                shapes.append(Shape(tp, pp, cp, gpus // ranks_of_model))
        dividing = list(filter(self._divides_batch, shapes))
        # if none divides the heads, the plan itself says so
        whole_heads = list(filter(self._divides_heads, dividing)) or dividing
        return sorted(whole_heads, key=lambda shape: (-shape.dp, shape.cp, shape.pp, shape.tp))

    def _divides_heads(self, shape: Shape) -> bool:
        """Return whether exchanged heads, if they are asked for, leave each rank as many key/value heads."""
        ranks = shape.tp * shape.cp if self.asked.attention == "ulysses" else shape.tp
        return self.config.spec.num_kv_heads % ranks == 0

    def _divides_batch(self, shape: Shape) -> bool:
        """Return whether the data-parallel ranks of a shape have equal shares of every batch, in whole microbatches."""
        asked = self.asked
        if self._common_batch % shape.dp:
            return False
        if asked.dp_replicate != "auto" and shape.dp % asked.dp_replicate:
            return False
        share = self._common_batch // shape.dp
        if asked.microbatch_size and asked.num_microbatches:
            return share == asked.microbatch_size * asked.num_microbatches
        return share % (asked.microbatch_size or asked.num_microbatches or 1) == 0

    def microbatch_sizes(self, shape: Shape) -> list[int]:
        """Return the microbatch size asked for, or the divisors of a rank's share of every batch, largest first."""
        asked = self.asked
        share = self._common_batch // shape.dp
        if asked.microbatch_size:
            return [asked.microbatch_size]
        if asked.num_microbatches:
            return [share // asked.num_microbatches]
        on_cpu = self.config.launch.device == "cpu"
        max_tokens = MAX_CPU_MICROBATCH_TOKENS if on_cpu else MAX_MICROBATCH_TOKENS
        max_size = max(1, max_tokens * shape.cp // self.config.seq_len)
        sizes: list[int] = []
        for size in range(min(max_size, share), 0, -1):
            if share % size:
                continue
            # the largest one stays even with too many microbatches: the plan says what is wrong
            if not sizes or self.num_microbatches(shape, size) <= MAX_MICROBATCHES:
                sizes.append(size)
        return sizes

    def num_microbatches(self, shape: Shape, microbatch_size: int) -> int:
        """Return the forward passes per rank and step, the largest of a ramp."""
        return max(self._counts(shape, microbatch_size))

    def _counts(self, shape: Shape, microbatch_size: int) -> list[int]:
        """Return the forward passes per rank and step, at first and for each size of a ramp."""
        return [size // (shape.dp * microbatch_size) for size in self._batch_sizes]

    def shardings(self, shape: Shape) -> list[Sharding]:
        """Return the ways to shard the states, those that communicate least first."""
        # a stage that is asked for may shard nothing: the plan notes it
        asked = self.asked
        may_shard_nothing = asked.zero_stage != "auto" or asked.zero_backend == "deepspeed"
        shardings: list[Sharding] = []
        for stage in self._zero_stages(shape):
            for copies in self._copies(shape, stage):
                has_shards = shape.dp * shape.cp > copies
                if stage == 0 or has_shards or may_shard_nothing:
                    shardings.append(Sharding(stage, copies))
        return shardings

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
        # stage 1 sends and holds less than stage 0, except with whole models, whose gradients
        # DistributedDataParallel sends during the backward
        holds_whole_model = shape.tp == shape.pp == shape.cp == 1
        return (0, 1, 2, 3) if may_copy and holds_whole_model else (1, 2, 3)

    def _copies(self, shape: Shape, zero_stage: ZeroStage) -> list[int]:
        """Return how many copies of the sharding group to try: one, or one per node."""
        if zero_stage == 0:
            return [shape.dp]
        if self.asked.dp_replicate != "auto":
            return [self.asked.dp_replicate]
        if self.asked.zero_backend == "deepspeed":
            return [1]
        in_a_node = max(1, self.node_size // (shape.tp * shape.cp))
        shards = max(size for size in range(1, in_a_node + 1) if shape.dp % size == 0)
        return [1] if shards in {1, shape.dp} else [1, shape.dp // shards]

    def expert_ranks(self, shape: Shape, sharding: Sharding) -> list[ExpertRanks]:
        """Return the divisions of experts to try: ranks that divide them also shard, or hold copies."""
        shards = shape.dp // sharding.dp_replicate
        divisions = self._divisions_of_expert(shape)
        possible: list[ExpertRanks] = []
        for expert_tp in divisions:
            inner = shape.tp if expert_tp == 1 else 1
            for size in self.degrees.sizes("ep"):
                over_dp, rest = divmod(size, inner)
                if not rest and shape.dp % over_dp == 0 and 0 in {shards % over_dp, over_dp % shards}:
                    possible.append(ExpertRanks(size, expert_tp))
        if possible:
            return possible
        # the plan says what is wrong
        return [ExpertRanks(1 if self.asked.ep == "auto" else self.asked.ep, divisions[0])]

    def _divisions_of_expert(self, shape: Shape) -> list[int | None]:
        """Return the numbers of tensor-parallel ranks to try that divide every expert; None: all of them."""
        asked = self.asked
        if asked.expert_tp != "auto":
            return [asked.expert_tp]
        may_be_whole = self.config.spec.moe is not None and shape.tp > 1 and asked.sequence_parallel
        return [None, 1] if may_be_whole else [None]

    def orders(self, shape: Shape, microbatch_size: int) -> list[ScheduleChoice]:
        """Return the schedules to try with this microbatch size."""
        asked = self.asked
        is_open = asked.schedule == "auto"
        if shape.pp == 1:
            return [ScheduleChoice(DEFAULT_SCHEDULE if is_open else asked.schedule, self._chunks or 1)]
        counts = self._counts(shape, microbatch_size)
        orders: list[ScheduleChoice] = []
        for kind in searched_schedules() if is_open else [schedule_type(asked.schedule)]:
            if microbatch_size % kind.parts_per_microbatch:
                continue
            if is_open and not self._is_worth_trying(kind, shape, counts):
                continue
            orders += self._in_chunks(kind, shape.pp, math.gcd(*counts))
        return orders

    def _is_worth_trying(self, kind: ScheduleType, shape: Shape, counts: list[int]) -> bool:
        """Return whether the search tries a schedule with these numbers of microbatches."""
        if min(counts) < kind.min_microbatches:
            return False
        return self.refusal(kind, shape, max(counts), self.recompute) is None

    @property
    def _chunks(self) -> int | None:
        return None if self.asked.num_chunks == "auto" else self.asked.num_chunks

    def _in_chunks(self, kind: ScheduleType, pp: int, count: int) -> Iterator[ScheduleChoice]:
        """Yield a schedule with each number of stages per rank to try."""
        if not kind.takes_chunks:
            if self.asked.schedule != "auto" or self._chunks in {None, 1}:
                yield ScheduleChoice(kind.name, self._chunks or 1)
        elif count % pp == 0 and self._chunks != 1:
            if self._chunks is not None:
                yield ScheduleChoice(kind.name, self._chunks)
                return
            for chunks in CHUNKS:
                if self.degrees.is_even(pp * chunks):
                    yield ScheduleChoice(kind.name, chunks)

    def refusal(
        self,
        kind: ScheduleType,
        shape: Shape,
        count: int,
        recompute: RecomputeMode,
    ) -> str | None:
        """Return why the search skips a schedule; None if it tries it.

        Args:
            kind: the schedule.
            shape: the number of devices on each axis.
            count: microbatches per step.
            recompute: what is recomputed, which makes a backward longer.
        """
        pp = shape.pp
        usual = schedule_type(DEFAULT_SCHEDULE)
        of_shape = self._refusal_of_shape(kind, shape)
        if of_shape is not None:
            return of_shape
        if count <= kind.min_units * pp:
            return f"needs more than {kind.min_units * pp} microbatches at pp {pp}"
        if kind.stages_per_rank > 1 and not self.degrees.is_even(kind.stages_per_rank * pp):
            return f"uneven stages at pp {pp}"
        backward = 3 if recompute == "full" else 2
        if kind is not usual and kind.is_beaten_by(usual, pp, count, backward=backward):
            return f"no faster and no leaner than {usual.name} at pp {pp} with {count} microbatches"
        return None

    def _refusal_of_shape(self, kind: ScheduleType, shape: Shape) -> str | None:
        """Return why the search skips a schedule whatever the number of microbatches; None if it may try it."""
        if kind.splits_backward and not self._has_plain_pipeline(shape):
            return "only without tp, cp, data parallelism, recompute, compile and fp8"
        if shape.pp % kind.replicas:
            return f"needs a multiple of {kind.replicas} pipeline ranks, not pp {shape.pp}"
        if kind.replicas > 1 and shape.pp <= kind.replicas:
            return f"no better than data parallelism at pp {shape.pp}"
        return None

    def _has_plain_pipeline(self, shape: Shape) -> bool:
        """Return whether there is nothing but a pipeline, as schedules that split the backward need it."""
        is_plain = self.asked.compile is not True and self.config.training.precision != "fp8"
        return self.asked.gpus == shape.pp and self.recompute == "none" and is_plain

    def variants(self, offload: Offload = "none") -> Iterator[Variant]:
        """Yield every variant to search, most data-parallel first."""
        for shape in self.shapes():
            for size in self.microbatch_sizes(shape):
                for sharding in self.shardings(shape):
                    for experts in self.expert_ranks(shape, sharding):
                        for order in self.orders(shape, size):
                            yield Variant(shape, sharding, experts, order, size, offload)

    def offloads(self) -> list[Offload]:
        """Return the offloads to try, least first."""
        if self.asked.offload != "auto":
            return [self.asked.offload]
        if self.asked.zero_backend == "deepspeed":
            return ["none", "optimizer", "parameters"]
        return ["none"]

    @property
    def recompute(self) -> RecomputeMode:
        """The recomputation to start from, before memory requires more."""
        return "none" if self.adapts else self.asked.recompute  # type: ignore[return-value]

    @property
    def adapts(self) -> bool:
        """Whether recomputation is added as needed to fit."""
        return self.asked.recompute in {"auto", "adaptive"}

    def adapts_to(self, variant: Variant) -> bool:
        """Return whether a variant may recompute: zero-bubble schedules exclude it, and compiling travelling tokens."""
        if self.asked.compile is True and variant.experts.ep > 1:
            return False
        return self.adapts and not self._splits_backward(variant)

    def compiles(self, variant: Variant) -> bool:
        """Return whether a variant compiles its blocks: as asked, else on CUDA, where nothing excludes it."""
        asked = self.asked
        if asked.compile != "auto":
            return asked.compile
        on_cuda = self.config.launch.device == "cuda" and asked.zero_backend == "native"
        return on_cuda and variant.experts.ep == 1 and not self._splits_backward(variant)

    @staticmethod
    def _splits_backward(variant: Variant) -> bool:
        return variant.shape.pp > 1 and schedule_type(variant.order.schedule).splits_backward

    def nodes_of_experts(self, variant: Variant) -> int:
        """Return the nodes over which tokens travel to experts in two steps; 1 where they go straight to these.

        Raises:
            PlanError: if two steps are asked for where ranks do not divide experts over whole nodes.
        """
        moe = self.config.spec.moe
        shape = variant.shape
        ep = variant.experts.ep
        in_node, rest = divmod(self.degrees.node_size, shape.tp * shape.cp)
        if variant.experts.expert_tp == 1:
            in_node *= shape.tp
        spans_nodes = moe is not None and in_node > 0 and not rest and ep > in_node and not ep % in_node
        asked = self.asked.ep_dispatch
        if asked == "two_step" and not spans_nodes:
            raise PlanError(
                f"ep_dispatch=two_step: ep={ep} does not span whole nodes of {self.degrees.node_size} devices "
                f"(tp={shape.tp}, cp={shape.cp}); use auto"
            )
        if moe is None or not spans_nodes or asked == "direct" or (asked == "auto" and moe.experts_per_token == 1):
            return 1
        return ep // in_node

    def plan(self, variant: Variant, num_microbatches: int | None = None) -> ParallelPlan:
        """Return the plan of ``variant``, for the whole batch or for ``num_microbatches``.

        Raises:
            PlanError: if its choices exclude each other, or it cannot divide the model.
        """
        shape = variant.shape
        asked = self.asked
        config = self.config
        whole_batch = self.num_microbatches(shape, variant.microbatch_size)
        plan = ParallelPlan(
            tp=shape.tp,
            pp=shape.pp,
            cp=shape.cp,
            ep=variant.experts.ep,
            ep_nodes=self.nodes_of_experts(variant),
            expert_tp=variant.experts.expert_tp,
            dp_shard=shape.dp // variant.sharding.dp_replicate,
            dp_replicate=variant.sharding.dp_replicate,
            sequence_parallel=asked.sequence_parallel,
            zero_stage=variant.sharding.zero_stage,
            zero_backend=asked.zero_backend,
            offload=variant.offload,
            schedule=variant.order.schedule,
            num_chunks=variant.order.num_chunks,
            microbatch_size=variant.microbatch_size,
            num_microbatches=num_microbatches or whole_batch,
            recompute=self.recompute,
            gradient_compression=asked.gradient_compression,
            compile=self.compiles(variant),
            attention=asked.attention,
        )
        for seq_len in config.seq_lens:
            plan.check(config.spec, seq_len=seq_len, precision=config.training.precision)
            self._check_before_run(plan, seq_len)
        if config.training.batch_ramp and num_microbatches is None:
            for count in self._counts(shape, variant.microbatch_size):
                replace(plan, num_microbatches=count)  # refuses one that the schedule cannot have
        return plan

    def _check_before_run(self, plan: ParallelPlan, seq_len: int) -> None:
        """Refuse a plan that cannot divide the model whose forward there is before the run, such as a teacher."""
        if self._model_before_run is None:
            return
        try:
            plan.check(self._model_before_run, seq_len=seq_len, precision=self.config.training.precision)
        except PlanError as error:
            raise PlanError(f"training.teacher: {error}") from None

    @cached_property
    def _model_before_run(self) -> ModelSpec | None:
        return None if weights_before_run(self.config) is None else spec_before_run(self.config)
