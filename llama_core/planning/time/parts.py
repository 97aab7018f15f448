"""The parts of one optimizer step: what computing takes, and what everything else adds to it.

What is hidden: gathering weights and reducing gradients, behind the layers that compute meanwhile, but for the first
gather and the last reduction of a pass; a hop of the ring, behind attention to the block before; a hop of the pipeline,
behind whatever its receiver does until it needs it. What tensor-parallel ranks exchange is not hidden.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from llama_core.config.hardware import PCIE_BANDWIDTH, DeviceSpec
from llama_core.config.models import ModelSpec
from llama_core.config.run import Precision, RecomputeMode
from llama_core.planning.memory.tensors import FP32_BYTES
from llama_core.planning.plan import DocumentAttention, ParallelPlan
from llama_core.planning.time.communication import Messages, PassTraffic
from llama_core.planning.time.compute import NO_TIME, Pass, StageCompute
from llama_core.planning.time.links import Links, Traffic
from llama_core.planning.time.makespan import span
from llama_core.units import GB

Part = Literal["compute", "bubble", "tp", "cp", "dp", "pp", "optimizer"]

CONTENTION = 0.19
"""Part of hidden communication that is paid all the same: it takes processors and memory from what computes meanwhile.

Lee et al. 2025, arXiv:2507.03114: computation is slower by 18.9 % on average while it overlaps communication.
"""
HOST_BANDWIDTH = 25 * GB
"""Bytes per second and device from the host's memory, for an optimizer whose states are there: 200 GB/s for eight."""


class StepParts:
    """What the step of a plan takes.

    Args:
        spec: the architecture.
        plan: the plan.
        device: what runs it.
        seq_len: tokens per sequence.
        precision: the dtype of activations.
        documents: what keeps attention inside packed documents.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        device: DeviceSpec,
        *,
        seq_len: int,
        precision: Precision,
        documents: DocumentAttention,
    ) -> None:
        self.plan, self.links = plan, Links(plan, device)
        self.messages = Messages(spec, plan, seq_len=seq_len, precision=precision)
        self.compute = StageCompute(spec, plan, device, seq_len=seq_len, precision=precision, documents=documents)
        self.stages = range(len(self.messages.layers))

    def seconds(self) -> dict[Part, float]:
        """Return the seconds of every part.

        The schedule is clocked with the stages' own work, and again with each axis of communication added to it; an
        axis costs what it makes the step longer.
        """
        passes = [self._computing(stage) for stage in self.stages]
        alone = span(self.plan, passes)
        parts: dict[Part, float] = {"compute": alone.busy, "bubble": alone.bubble}
        makespan = alone.makespan
        adding: dict[Part, Callable[[int, Pass], Pass]] = {
            "tp": self._tensor_parallel,
            "cp": self._ring,
            "dp": self._weights_per_pass,
        }
        for axis, added in adding.items():
            passes = [before.plus(added(stage, before)) for stage, before in zip(self.stages, passes, strict=True)]
            longer = span(self.plan, passes).makespan
            parts[axis], makespan = longer - makespan, longer
        with_hops = span(self.plan, passes, self.links.seconds([self.messages.hop])).makespan
        parts["tp"] += self._partial_per_step()
        parts["dp"] += self._weights_per_step(passes)
        parts["pp"] = with_hops - makespan + max(map(self._shared_gradients, range(self.plan.pp)))
        parts["optimizer"] = self._optimizer()
        return parts

    def _computing(self, stage: int) -> Pass:
        messages = self.messages
        return self.compute.stage(
            messages.modes[stage], is_first=messages.is_first(stage), is_last=messages.is_last(stage)
        )

    def _tensor_parallel(self, stage: int, before: Pass) -> Pass:
        """Return what tensor parallelism adds to a pass."""
        if self.plan.tp == 1:
            return NO_TIME
        added = self._exchanged(self.messages.tensor_parallel_ends(stage))
        for mode in self.messages.modes[stage]:
            added = added.plus(self._exchanged(self.messages.tensor_parallel(mode)))
        if self.messages.sums_partial_every_pass:
            added = added.plus(Pass(0.0, self._partial(stage)))
        return added

    def _partial_per_step(self) -> float:
        """Return what summing partial gradients adds once, on the rank where it is most."""
        if self.messages.sums_partial_every_pass:
            return 0.0
        return max(sum(map(self._partial, hosted)) for hosted in self.messages.placement)

    def _partial(self, stage: int) -> float:
        return self.links.seconds([self.messages.partial_gradients(stage)])

    def _exchanged(self, traffic: PassTraffic) -> Pass:
        return Pass(*(self.links.seconds(way) + self._put_in_order(way) for way in (traffic.forward, traffic.backward)))

    def _put_in_order(self, traffic: Sequence[Traffic]) -> float:
        """Return how long it takes to copy what is divided along the sequence, which is not the outermost dim."""
        return self.compute.copying(2 * sum(part.num_bytes for part in traffic)) if self.plan.sharded_sequence else 0.0

    def _ring(self, stage: int, before: Pass) -> Pass:
        """Return what context parallelism adds to a pass."""
        added = NO_TIME
        if self.plan.cp > 1:
            for mode in self.messages.modes[stage]:
                added = added.plus(self._ring_of_layer(mode))
        return added

    def _ring_of_layer(self, mode: RecomputeMode) -> Pass:
        attention, ring = self.compute.attention(), self.messages.ring(mode)
        forward = self.links.seconds(ring.forward)
        # what is recomputed goes around again, and where attention's outcome was kept there is nothing to hide it
        again = forward if mode != "none" else 0.0
        behind_again = attention.forward if mode == "full" else 0.0
        backward = self.links.seconds(ring.backward) - again
        return Pass(
            _exposed(forward, attention.forward),
            _exposed(again, behind_again) + _exposed(backward, attention.backward),
        )

    def _weights_per_pass(self, stage: int, before: Pass) -> Pass:
        """Return what gathering weights and reducing gradients adds to every pass of a stage."""
        return self._sharding(stage, self.messages.weights_per_pass(stage), before)

    def _weights_per_step(self, passes: Sequence[Pass]) -> float:
        """Return what gathering weights and reducing gradients adds once, on the rank where it is most."""
        added = [
            sum(self._sharding(stage, self.messages.weights_per_step(stage), passes[stage])) for stage in self.stages
        ]
        return max(sum(added[stage] for stage in hosted) for hosted in self.messages.placement)

    def _sharding(self, stage: int, traffic: PassTraffic, before: Pass) -> Pass:
        num_groups = len(self.messages.groups(stage))
        added = []
        for way, computing in zip((traffic.forward, traffic.backward), before, strict=True):
            seconds = self._from_host(way)
            copies = self.compute.copying(2 * sum(part.num_bytes for part in way))  # into or out of what is sent
            added.append(_exposed(seconds, computing, seconds / num_groups) + copies)
        return Pass(*added)

    def _from_host(self, traffic: Sequence[Traffic]) -> float:
        """Return how long transfers take where the shards to gather may have to come from the host."""
        seconds = self.links.seconds(traffic)
        if self.plan.offload != "parameters":
            return seconds
        shards = sum(part.num_bytes / part.num_ranks for part in traffic if part.collective == "all_gather")
        return max(seconds, shards / PCIE_BANDWIDTH)

    def _shared_gradients(self, pp_rank: int) -> float:
        return self.links.seconds(self.messages.shared_gradients(pp_rank))

    def _optimizer(self) -> float:
        messages = self.messages
        held = max(sum(messages.trained_parameters(stage) for stage in hosted) for hosted in messages.placement)
        held /= messages.num_shards
        if self.plan.offload == "none":
            return self.compute.optimizer(held)
        # gradients go to the host and weights come back; there an update reads four numbers and writes three
        moved = held * (FP32_BYTES + messages.itemsize) / PCIE_BANDWIDTH
        return moved + held * 7 * FP32_BYTES / HOST_BANDWIDTH


def _exposed(communication: float, computing: float, least: float = 0.0) -> float:
    """Return what communication adds to the computing that it overlaps; ``least`` of it has nothing to hide behind."""
    exposed = max(communication - computing, least)
    return exposed + CONTENTION * (communication - exposed)
