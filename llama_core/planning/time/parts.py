"""The parts of one optimizer step: the time to compute, and what everything else adds to it.

Weight gathers and gradient reductions overlap the layers that compute meanwhile, except the first gather and the last
reduction of a pass. A hop of the ring overlaps attention to the previous block; a hop of the pipeline overlaps whatever
its receiver does until it needs the data. Tensor- and expert-parallel communication does not overlap, nor do gathers of
keys and values.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from llama_core.config.hardware import PCIE_BANDWIDTH, DeviceSpec
from llama_core.config.run import RecomputeMode
from llama_core.planning.before import forwards_before_step
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.program.passes import Passes
from llama_core.planning.time.communication import Messages, communication
from llama_core.planning.time.compute import StageCompute, of_layers
from llama_core.planning.time.kernels import NO_TIME, Pass
from llama_core.planning.time.links import Links
from llama_core.planning.time.makespan import Span, forwards_alone, span
from llama_core.planning.transfers import OF_EP, PassTraffic, Traffic, merged
from llama_core.planning.work import Stage, Work
from llama_core.records.step_parts import BUBBLE, COLLECTIVES, OPTIMIZER, OTHER_TRANSFERS, POINTWISE
from llama_core.units import GB

Passing = Mapping[Stage, Pass]
"""The time of a forward and of its backward on every kind of stage."""
Part = Literal["compute", "bubble", "tp", "cp", "ep", "dp", "pp", "optimizer", "preparation", "host"]

CONTENTION = 0.19
"""Share of overlapped communication that still costs time: it takes processors and memory bandwidth from computing.

Lee et al. 2025, arXiv:2507.03114: computation is slower by 18.9 % on average while it overlaps communication.
"""
HOST_BANDWIDTH = 25 * GB
"""Bytes per second and device from host memory, for an optimizer with its states there: 200 GB/s for eight devices."""


AXES: tuple[Part, ...] = ("tp", "cp", "ep", "dp", "pp")
AXIS_OF: Mapping[str, Part] = {
    "tp": "tp",
    "cp": "cp",
    **dict.fromkeys(OF_EP, "ep"),
    "pp": "pp",
    "shard": "dp",
    "replicate": "dp",
}
"""The part in which the time of a transfer counts, by its axis."""


class StepParts:
    """The time of one step of a plan, by parts.

    Args:
        work: the model, the plan and the sequences.
        device: the device that runs it.
    """

    def __init__(self, work: Work, device: DeviceSpec) -> None:
        self.plan = work.plan
        self.links = Links(work.plan, device)
        self.work = work if work.on_cuda == device.is_gpu else replace(work, on_cuda=device.is_gpu)
        self.messages = Messages(self.work)
        self.compute = StageCompute(self.work, device)

    def seconds(self) -> dict[Part, float]:
        """Return the seconds of every part.

        The schedule is timed with the work of the stages alone, then with each axis of communication added in turn. An
        axis costs the time by which it lengthens the step.
        """
        passes = self._computing()
        alone = self._span(passes)
        parts: dict[Part, float] = {"compute": alone.busy, "bubble": alone.bubble}
        makespan = alone.makespan
        for axis, added in self._adding().items():
            longer = self._with(added, passes)
            parts[axis] = 0.0
            if longer != passes:
                before = makespan
                makespan = self._span(longer).makespan
                parts[axis] = makespan - before
                passes = longer
        with_hops = self._span(passes, self.hop).makespan
        parts["tp"] += self._on_slowest_rank(self.messages.partial_gradients_per_step)
        parts["dp"] += self._weights_per_step(passes)
        parts["pp"] = with_hops - makespan + self._on_slowest_rank(self.messages.shared_gradients)
        parts["optimizer"] = self._optimizer()
        num_forwards = forwards_before_step(self.work.objective)
        if num_forwards:
            parts["preparation"] = num_forwards * self.forwards()
        return parts

    def by_kind(self, parts: Mapping[Part, float]) -> dict[str, float]:
        """Return the seconds of a step by kind of work, as ``records.step_parts`` names them.

        An axis is divided in proportion to the time of its transfers alone, and the forwards of a preparation like
        those of the step.

        Args:
            parts: those of the step, by ``seconds``.
        """
        kinds: dict[str, float] = defaultdict(float)

        def add(seconds: float, weights: Mapping[str, float], otherwise: str) -> None:
            """Add a time, divided in proportion to the weights."""
            whole = sum(weights.values())
            for kind, weight in weights.items() if whole > 0 else [(otherwise, 1.0)]:
                kinds[kind] += seconds * weight / (whole if whole > 0 else 1.0)

        passes = self._kinds_of_slowest_rank()
        add(parts["compute"], {kind: sum(one) for kind, one in passes.items()}, POINTWISE)
        add(parts.get("preparation", 0.0), {kind: one.forward for kind, one in passes.items()}, POINTWISE)
        kinds[BUBBLE] += parts["bubble"]
        sent, updating = self._transfers_of_slowest_rank()
        for axis in AXES:
            add(parts.get(axis, 0.0), sent[axis], OTHER_TRANSFERS)
        update_sent = min(self._update_sent(), parts["optimizer"])
        add(update_sent, updating, OTHER_TRANSFERS)
        kinds[OPTIMIZER] += parts["optimizer"] - update_sent
        return {kind: seconds for kind, seconds in kinds.items() if seconds}

    def _kinds_of_slowest_rank(self) -> dict[str, Pass]:
        """Return how long the rank that computes most takes for each kind of work of one microbatch."""
        of_stages = {stage: self.compute.by_kind(stage) for stage in set(self.work.stages)}
        of_ranks = []
        for rank in range(self.plan.pp):
            of_rank: dict[str, Pass] = defaultdict(lambda: NO_TIME)
            for stage in self.work.hosted(rank):
                for kind, seconds in of_stages[stage].items():
                    of_rank[kind] = of_rank[kind].plus(seconds)
            of_ranks.append(of_rank)
        return max(of_ranks, key=lambda of_rank: sum(sum(seconds) for seconds in of_rank.values()))

    def _transfers_of_slowest_rank(self) -> tuple[dict[Part, dict[str, float]], dict[str, float]]:
        """Return the time of a rank's transfers by axis and kind, without the update's, and the update's by kind."""
        of_ranks = [communication(self.work, pp_rank=rank) for rank in range(self.plan.pp)]
        slowest = max(range(self.plan.pp), key=lambda rank: self.links.seconds(of_ranks[rank]))
        sent: dict[Part, dict[str, float]] = {axis: defaultdict(float) for axis in AXES}
        for part in of_ranks[slowest]:
            sent[AXIS_OF[part.axis]][COLLECTIVES[part.collective]] += self.links.seconds([part])
        updating: dict[str, float] = defaultdict(float)
        for part in merged(self.messages.update(slowest)):
            kind = COLLECTIVES[part.collective]
            seconds = self.links.seconds([part])
            updating[kind] += seconds
            sent[AXIS_OF[part.axis]][kind] = max(0.0, sent[AXIS_OF[part.axis]][kind] - seconds)
        return sent, updating

    def passes(self) -> list[Pass]:
        """Return the seconds of a forward and of its backward on every stage, with what communication adds to them."""
        return self._in_order(self._with_all(self._computing()))

    def forwards(self) -> float:
        """Return the seconds of the forwards of ``plan.num_microbatches`` microbatches without any backward."""
        passes = self._with_all(self._computing())
        alone = forwards_alone(self.plan, [one.forward for one in self._in_order(passes)], self.hop)
        return alone + self._gathered_once(passes)

    @property
    def hop(self) -> float:
        """The seconds in which the output of a pass gets to the next stage."""
        return self.links.seconds([self.messages.hop])

    def _adding(self) -> dict[Part, Callable[[Stage, Pass], Pass]]:
        """Return what each axis adds to a pass of a stage."""
        return {
            "tp": self._tensor_parallel,
            "cp": self._context_parallel,
            **({"ep": self._expert_parallel} if self.plan.ep > 1 else {}),
            "dp": self._weights_per_pass,
        }

    def _computing(self) -> Passing:
        """Return the time in which every kind of stage computes."""
        return {stage: self.compute.stage(stage) for stage in set(self.work.stages)}

    @staticmethod
    def _with(added: Callable[[Stage, Pass], Pass], passes: Passing) -> Passing:
        """Return the passes with the time that communication adds to each."""
        return {stage: before.plus(added(stage, before)) for stage, before in passes.items()}

    def _with_all(self, passes: Passing) -> Passing:
        """Return the passes with the time that all axes add to each."""
        for added in self._adding().values():
            passes = self._with(added, passes)
        return passes

    def _in_order(self, passes: Passing) -> list[Pass]:
        return [passes[stage] for stage in self.work.stages]

    def _span(self, passes: Passing, hop: float = 0.0) -> Span:
        return span(self.plan, self._in_order(passes), hop)

    def _tensor_parallel(self, stage: Stage, before: Pass) -> Pass:
        """Return the time tensor parallelism adds to a pass."""
        if self.plan.tp == 1:
            return NO_TIME
        added = self._exchanged(self.messages.transfers_of_ends(stage))
        added = added.plus(of_layers(stage, lambda layer, mode: self._exchanged(layer.transfers(mode).on("tp"))))
        if self.messages.sums_partial_every_pass:
            added = added.plus(Pass(0.0, self.links.seconds([self.messages.partial_gradients(stage)])))
        return added

    def _exchanged(self, traffic: PassTraffic) -> Pass:
        """Return the time of transfers, and to copy what they divide along the sequence, not their outermost dim."""
        return self._sent(traffic, copies=self.plan.sharded_sequence)

    def _sent(self, traffic: PassTraffic, *, copies: bool) -> Pass:
        """Return the time of transfers, and to copy their tensors."""
        forward, backward = (
            self.links.seconds(way) + (self._copied(way) if copies else 0.0) for way in traffic.both_ways
        )
        return Pass(forward, backward)

    def _copied(self, traffic: Sequence[Traffic]) -> float:
        """Return the time to copy the whole tensors of transfers once."""
        return self.compute.copying(2 * sum(part.num_bytes for part in traffic))

    def _context_parallel(self, stage: Stage, before: Pass) -> Pass:
        """Return the time context parallelism adds to a pass."""
        if not self.work.kernel.divides_rows:
            return NO_TIME
        if self.work.kernel.moves == "ring":
            return of_layers(stage, self._ring_of_layer)
        return of_layers(stage, lambda layer, mode: self._sent(layer.transfers(mode).on("cp"), copies=True))

    def _ring_of_layer(self, layer: Passes, mode: RecomputeMode) -> Pass:
        attention = self.compute.attention()
        ring = layer.transfers(mode).on("cp")
        forward = self.links.seconds(ring.forward)
        # recomputation repeats the ring; if attention's output was kept, there is nothing to overlap it with
        again = forward if mode != "none" else 0.0
        behind_again = attention.forward if mode == "full" else 0.0
        backward = self.links.seconds(ring.backward) - again
        return Pass(
            self._exposed(forward, attention.forward),
            self._exposed(again, behind_again) + self._exposed(backward, attention.backward),
        )

    def _expert_parallel(self, stage: Stage, before: Pass) -> Pass:
        """Return the time the trips of tokens to experts on other ranks add to a pass."""
        return of_layers(stage, lambda layer, mode: self._sent(layer.transfers(mode).on(*OF_EP), copies=False))

    def _weights_per_pass(self, stage: Stage, before: Pass) -> Pass:
        """Return the time weight gathers and gradient reductions add to every pass of a stage."""
        return self._sharding(stage, self.messages.weights_per_pass(stage), before)

    def _gathered_once(self, passes: Passing) -> float:
        """Return the time that the weight gathers of a step's first forward add, on the rank where it is longest."""
        added = {
            stage: self._sharding(stage, self.messages.weights_per_step(stage), before).forward
            for stage, before in passes.items()
        }
        return max(sum(map(added.__getitem__, self.work.hosted(rank))) for rank in range(self.plan.pp))

    def _weights_per_step(self, passes: Passing) -> float:
        """Return the time weight gathers and gradient reductions add once per step, on the rank where it is longest."""
        added = {
            stage: sum(self._sharding(stage, self.messages.weights_per_step(stage), before))
            for stage, before in passes.items()
        }
        return max(sum(map(added.__getitem__, self.work.hosted(rank))) for rank in range(self.plan.pp))

    def _sharding(self, stage: Stage, traffic: PassTraffic, before: Pass) -> Pass:
        num_groups = len(self.messages.groups(stage))
        added = []
        for way, computing in zip(traffic.both_ways, before, strict=True):
            seconds = self._from_host(way)
            # copied into or out of the buffers
            added.append(self._exposed(seconds, computing, seconds / num_groups) + self._copied(way))
        return Pass(*added)

    def _from_host(self, traffic: Sequence[Traffic]) -> float:
        """Return the time of transfers whose shards may first have to come from the host."""
        seconds = self.links.seconds(traffic)
        if self.plan.offload != "parameters":
            return seconds
        shards = sum(part.num_bytes / part.num_ranks for part in traffic if part.collective == "all_gather")
        return max(seconds, shards / PCIE_BANDWIDTH)

    def _on_slowest_rank(self, traffic: Callable[[int], Iterable[Traffic]]) -> float:
        """Return the time of a pipeline rank's transfers where they take longest."""
        return max(self.links.seconds(traffic(rank)) for rank in range(self.plan.pp))

    def _optimizer(self) -> float:
        messages = self.messages
        held = max(map(messages.updated, range(self.plan.pp)), key=sum)
        if self.plan.offload == "none":
            return self.compute.optimizer(held) + self._on_whole_matrices() + self._update_sent()
        # gradients go to the host and weights come back
        moved = sum(held) * (FP32_BYTES + messages.itemsize) / PCIE_BANDWIDTH
        return moved + self.work.optimizer.moved_for(held) / HOST_BANDWIDTH

    def _on_whole_matrices(self) -> float:
        return max(map(self.compute.on_whole_matrices, range(self.plan.pp)))

    def _update_sent(self) -> float:
        """Return the time that transfers add to an update; with states on the host they are not counted."""
        if self.plan.offload != "none":
            return 0.0
        return self._exposed(self._on_slowest_rank(self.messages.update), self._on_whole_matrices())

    def _exposed(self, communication: float, computing: float, least: float = 0.0) -> float:
        """Return the time communication adds to the computing it overlaps; ``least`` of it cannot overlap."""
        if not self.compute.device.is_gpu:  # the cores that compute are those that send
            return communication
        exposed = max(communication - computing, least)
        return exposed + CONTENTION * (communication - exposed)
