"""The parts of one optimizer step: the time to compute, and what everything else adds to it.

Weight gathers and gradient reductions overlap the layers that compute meanwhile, except the first gather and the last
reduction of a pass. A hop of the ring overlaps attention to the previous block; a hop of the pipeline overlaps whatever
its receiver does until it needs the data. Tensor- and expert-parallel communication does not overlap, nor do gathers of
keys and values.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from llama_core.config.hardware import PCIE_BANDWIDTH, DeviceSpec
from llama_core.config.run import RecomputeMode
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.program.passes import Passes
from llama_core.planning.time.communication import Messages
from llama_core.planning.time.compute import StageCompute
from llama_core.planning.time.kernels import NO_TIME, Pass
from llama_core.planning.time.links import Links
from llama_core.planning.time.makespan import span
from llama_core.planning.transfers import PassTraffic, Traffic
from llama_core.planning.work import Work
from llama_core.units import GB

Value = TypeVar("Value")
Part = Literal["compute", "bubble", "tp", "cp", "ep", "dp", "pp", "optimizer"]

CONTENTION = 0.19
"""Share of overlapped communication that still costs time: it takes processors and memory bandwidth from computing.

Lee et al. 2025, arXiv:2507.03114: computation is slower by 18.9 % on average while it overlaps communication.
"""
HOST_BANDWIDTH = 25 * GB
"""Bytes per second and device from host memory, for an optimizer with its states there: 200 GB/s for eight devices."""


class StepParts:
    """The time of one step of a plan, by parts.

    Args:
        work: the model, the plan and the sequences.
        device: the device that runs it.
    """

    def __init__(self, work: Work, device: DeviceSpec) -> None:
        self.plan = work.plan
        self.links = Links(work.plan, device)
        self.messages = Messages(replace(work, on_cuda=True))
        self.compute = StageCompute(work, device)
        self._alike = self.messages.alike()

    def seconds(self) -> dict[Part, float]:
        """Return the seconds of every part.

        The schedule is timed with the work of the stages alone, then with each axis of communication added in turn. An
        axis costs the time by which it lengthens the step.
        """
        passes = self._of_stages(self._computing)
        alone = span(self.plan, passes)
        parts: dict[Part, float] = {"compute": alone.busy, "bubble": alone.bubble}
        makespan = alone.makespan
        for axis, added in self._adding().items():
            longer = self._with(added, passes)
            parts[axis] = 0.0
            if longer != passes:
                before = makespan
                makespan = span(self.plan, longer).makespan
                parts[axis] = makespan - before
                passes = longer
        with_hops = span(self.plan, passes, self.hop).makespan
        parts["tp"] += self._partial_per_step()
        parts["dp"] += self._weights_per_step(passes)
        parts["pp"] = with_hops - makespan + max(map(self._shared_gradients, range(self.plan.pp)))
        parts["optimizer"] = self._optimizer()
        return parts

    def passes(self) -> list[Pass]:
        """Return the seconds of a forward and of its backward on every stage, with what communication adds to them."""
        passes = self._of_stages(self._computing)
        for added in self._adding().values():
            passes = self._with(added, passes)
        return passes

    @property
    def hop(self) -> float:
        """The seconds in which the output of a pass gets to the next stage."""
        return self.links.seconds([self.messages.hop])

    def _adding(self) -> dict[Part, Callable[[int, Pass], Pass]]:
        """Return what each axis adds to a pass of a stage."""
        return {
            "tp": self._tensor_parallel,
            "cp": self._context_parallel,
            **({"ep": self._expert_parallel} if self.plan.ep > 1 else {}),
            "dp": self._weights_per_pass,
        }

    def _of_stages(self, made: Callable[[int], Value]) -> list[Value]:
        """Return a value for every stage, made once for those that are alike."""
        values = {stage: made(stage) for stage in set(self._alike)}
        return [values[stage] for stage in self._alike]

    def _with(self, added: Callable[[int, Pass], Pass], passes: Sequence[Pass]) -> list[Pass]:
        """Return the passes with the time that communication adds to each."""
        return self._of_stages(lambda stage: passes[stage].plus(added(stage, passes[stage])))

    def _computing(self, stage: int) -> Pass:
        messages = self.messages
        return self.compute.stage(
            messages.layers[stage],
            messages.modes[stage],
            is_first=messages.is_first(stage),
            is_last=messages.is_last(stage),
        )

    def _tensor_parallel(self, stage: int, before: Pass) -> Pass:
        """Return the time tensor parallelism adds to a pass."""
        if self.plan.tp == 1:
            return NO_TIME
        added = self._exchanged(self.messages.transfers_of_ends(stage))
        for (layer, mode), count in self._layers(stage):
            added = added.plus(self._exchanged(layer.transfers(mode).on("tp")).times(count))
        if self.messages.sums_partial_every_pass:
            added = added.plus(Pass(0.0, self.links.seconds([self.messages.partial_gradients(stage)])))
        return added

    def _partial_per_step(self) -> float:
        """Return the time summing partial gradients adds once per step, on the rank where it takes longest."""
        ranks = range(self.plan.pp)
        return max(self.links.seconds(self.messages.partial_gradients_per_step(rank)) for rank in ranks)

    def _exchanged(self, traffic: PassTraffic) -> Pass:
        return Pass(*(self.links.seconds(way) + self._put_in_order(way) for way in (traffic.forward, traffic.backward)))

    def _put_in_order(self, traffic: Sequence[Traffic]) -> float:
        """Return the time to copy tensors divided along the sequence, which is not their outermost dim."""
        return self._copied(traffic) if self.plan.sharded_sequence else 0.0

    def _copied(self, traffic: Sequence[Traffic]) -> float:
        """Return the time to copy the whole tensors of transfers once."""
        return self.compute.copying(2 * sum(part.num_bytes for part in traffic))

    def _context_parallel(self, stage: int, before: Pass) -> Pass:
        """Return the time context parallelism adds to a pass."""
        added = NO_TIME
        if self.plan.cp > 1:
            of_layer = self._gathering_of_layer if self.messages.work.documents == "varlen" else self._ring_of_layer
            for (layer, mode), count in self._layers(stage):
                added = added.plus(of_layer(layer, mode).times(count))
        return added

    def _layers(self, stage: int) -> Iterable[tuple[tuple[Passes, RecomputeMode], int]]:
        """Return the kinds of a stage's layers with their recomputation, and how many there are of each."""
        return Counter(zip(self.messages.layers[stage], self.messages.modes[stage], strict=True)).items()

    def _gathering_of_layer(self, layer: Passes, mode: RecomputeMode) -> Pass:
        traffic = layer.transfers(mode).on("cp")
        return Pass(*(self.links.seconds(way) + self._copied(way) for way in (traffic.forward, traffic.backward)))

    def _ring_of_layer(self, layer: Passes, mode: RecomputeMode) -> Pass:
        attention = self.compute.attention()
        ring = layer.transfers(mode).on("cp")
        forward = self.links.seconds(ring.forward)
        # recomputation repeats the ring; if attention's output was kept, there is nothing to overlap it with
        again = forward if mode != "none" else 0.0
        behind_again = attention.forward if mode == "full" else 0.0
        backward = self.links.seconds(ring.backward) - again
        return Pass(
            _exposed(forward, attention.forward),
            _exposed(again, behind_again) + _exposed(backward, attention.backward),
        )

    def _expert_parallel(self, stage: int, before: Pass) -> Pass:
        """Return the time the trips of tokens to experts on other ranks add to a pass."""
        added = NO_TIME
        for (layer, mode), count in self._layers(stage):
            trips = layer.transfers(mode).on("ep")
            added = added.plus(Pass(self.links.seconds(trips.forward), self.links.seconds(trips.backward)).times(count))
        return added

    def _weights_per_pass(self, stage: int, before: Pass) -> Pass:
        """Return the time weight gathers and gradient reductions add to every pass of a stage."""
        return self._sharding(stage, self.messages.weights_per_pass(stage), before)

    def _weights_per_step(self, passes: Sequence[Pass]) -> float:
        """Return the time weight gathers and gradient reductions add once per step, on the rank where it is longest."""
        added = self._of_stages(
            lambda stage: sum(self._sharding(stage, self.messages.weights_per_step(stage), passes[stage]))
        )
        return max(sum(added[stage] for stage in hosted) for hosted in self.messages.placement)

    def _sharding(self, stage: int, traffic: PassTraffic, before: Pass) -> Pass:
        num_groups = len(self.messages.groups(stage))
        added = []
        for way, computing in zip((traffic.forward, traffic.backward), before, strict=True):
            seconds = self._from_host(way)
            # copied into or out of the buffers
            added.append(_exposed(seconds, computing, seconds / num_groups) + self._copied(way))
        return Pass(*added)

    def _from_host(self, traffic: Sequence[Traffic]) -> float:
        """Return the time of transfers whose shards may first have to come from the host."""
        seconds = self.links.seconds(traffic)
        if self.plan.offload != "parameters":
            return seconds
        shards = sum(part.num_bytes / part.num_ranks for part in traffic if part.collective == "all_gather")
        return max(seconds, shards / PCIE_BANDWIDTH)

    def _shared_gradients(self, pp_rank: int) -> float:
        return self.links.seconds(self.messages.shared_gradients(pp_rank))

    def _optimizer(self) -> float:
        messages = self.messages
        held = max(sum(messages.updated_parameters(stage) for stage in hosted) for hosted in messages.placement)
        if self.plan.offload == "none":
            gathered = max(self.links.seconds(messages.update(rank)) for rank in range(self.plan.pp))
            return self.compute.optimizer(held) + gathered
        # gradients go to the host and weights come back
        moved = held * (FP32_BYTES + messages.itemsize) / PCIE_BANDWIDTH
        return moved + held * messages.work.optimizer.moved_bytes / HOST_BANDWIDTH


def _exposed(communication: float, computing: float, least: float = 0.0) -> float:
    """Return the time communication adds to the computing it overlaps; ``least`` of it cannot overlap."""
    exposed = max(communication - computing, least)
    return exposed + CONTENTION * (communication - exposed)
