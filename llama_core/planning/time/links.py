"""The links between the ranks of a plan, and the time that transfers take over them."""

from collections.abc import Iterable

from llama_core.config.hardware import DeviceSpec
from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.transfers import Axis, Other, Traffic

COLLECTIVE_SHARE = 0.8
"""Share of a link's rate that a collective reaches: 370 of 450 GB/s, by NCCL's authors (nccl-tests, issue 212)."""
START_SECONDS = 8.4e-6
"""Time to start a collective."""
LINK_SECONDS, PCIE_SECONDS, NETWORK_SECONDS = 3.4e-6, 5.7e-6, 9.6e-6
"""Latency of one hop of a ring, over NVLink or its like, over PCIe and between nodes.

These and ``START_SECONDS`` are from NCCL's own model (``src/graph/tuning.cc``, ring and protocol Simple).
"""


def node_size(config: RunConfig, in_a_node: int) -> int:
    """Return the number of devices of a run that a fast link connects; ``in_a_node`` is the most there can be."""
    return max(1, min(in_a_node, config.parallel.gpus // config.num_nodes))


class Links:
    """The links between the ranks of a plan, which are numbered in the order of ``plan.AXES``, node by node.

    Args:
        plan: the plan.
        device: the devices, their number per node and their links.
    """

    def __init__(self, plan: ParallelPlan, device: DeviceSpec) -> None:
        self.plan = plan
        self.device = device

    def seconds(self, traffic: Iterable[Traffic]) -> float:
        """Return the time of the transfers, one after the other."""
        return sum(self._seconds(part) for part in traffic if part.num_ranks > 1)

    def _seconds(self, traffic: Traffic) -> float:
        device = self.device
        stride, size = self._extent(traffic.axis)
        in_a_node = min(size, max(1, device.gpus_per_node // stride))
        hops = traffic.num_ranks - 1
        hops_between_nodes = 0 if size <= in_a_node else max(1, traffic.num_ranks // in_a_node - 1)
        if not hops_between_nodes:
            measured = self._measured(traffic)
            if measured is not None:
                return measured
        bandwidth = device.neighbour_bandwidth
        if hops_between_nodes and traffic.collective == "all_to_all":
            return self._between_nodes(traffic, in_a_node)
        latency = LINK_SECONDS if device.link_bandwidth else PCIE_SECONDS
        if hops_between_nodes:
            # a ring through a node uses as many NICs as it has devices there
            nics = 1 if traffic.collective == "send" else in_a_node
            bandwidth = min(bandwidth, nics * device.network_bandwidth)
        passes = 2 if traffic.collective == "all_reduce" else 1
        waiting = passes * ((hops - hops_between_nodes) * latency + hops_between_nodes * NETWORK_SECONDS)
        return traffic.count * (START_SECONDS + waiting) + traffic.sent_bytes / (bandwidth * COLLECTIVE_SHARE)

    def _between_nodes(self, traffic: Traffic, in_a_node: int) -> float:
        """Return the time of all-to-alls between nodes: what leaves a node does so through one NIC of each rank."""
        device = self.device
        others = traffic.num_ranks - in_a_node
        leaving = others / traffic.num_ranks * traffic.num_bytes / device.network_bandwidth
        staying = (in_a_node - 1) / traffic.num_ranks * traffic.num_bytes / device.neighbour_bandwidth
        # to every other rank straight, and all at once
        return traffic.count * (START_SECONDS + NETWORK_SECONDS) + max(leaving, staying) / COLLECTIVE_SHARE

    def _measured(self, traffic: Traffic) -> float | None:
        """Return the time of transfers inside a machine that was measured; None if it was not."""
        rates = self.device.rates(min(self.device.gpus_per_node, self.plan.world_size))
        if rates is None or not traffic.count or self.plan.world_size == 1:
            return None
        sizes = (traffic.num_ranks, max(1, round(traffic.num_bytes / traffic.count)))
        seconds = rates.seconds(f"link {traffic.collective}", sizes)
        return None if seconds is None else traffic.count * seconds

    def _extent(self, axis: Axis | Other) -> tuple[int, int]:
        """Return the distance in ranks between neighbours on an axis, and the number of its ranks."""
        plan = self.plan
        ep_stride = plan.tp_of_experts * plan.cp
        if plan.folds_experts and plan.ep_over_dp == 1:
            ep_stride = 1  # tensor-parallel ranks alone; with more of them, the distance is a mean
        return {
            "tp": (1, plan.tp),
            "cp": (plan.tp, plan.cp),
            "ep": (ep_stride, plan.ep),
            "ep_in_node": (ep_stride, plan.ep // plan.ep_nodes),
            "ep_nodes": (plan.tp_of_experts * plan.cp * (plan.ep // plan.ep_nodes), plan.ep_nodes),
            "shard": (plan.tp, plan.num_shards),
            "replicate": (plan.tp * plan.num_shards, plan.num_copies),
            "pp": (plan.world_size // plan.pp, plan.pp),
        }[axis]
