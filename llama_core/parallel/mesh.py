"""The ranks of a job as a mesh, one axis for each way to divide the work."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llama_core.parallel.ranks import has_bound_device, split_ranks
from llama_core.planning.plan import ParallelPlan


class Hops(NamedTuple):
    """The two groups through which a rank reaches all that divide experts with it."""

    between_nodes: dist.ProcessGroup
    """The ranks with this one's place in every node, by node."""
    in_node: dist.ProcessGroup
    """The ranks of this one's node."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """This rank's place among the ranks of a plan, and the groups it belongs to."""

    plan: ParallelPlan
    weights: DeviceMesh
    """Axes pp, replicate, shard and tp. Context-parallel ranks hold the same weights, so they belong to the shard axis
    or, without sharding, to the replicate axis."""
    experts: DeviceMesh
    """The same for the weights of experts, with an axis ep before tp if expert-parallel ranks divide them. These ranks
    are neighbours among the data-parallel ones, so fewer ranks hold or shard the same expert. If tensor-parallel ranks
    have whole experts, they are on the axis ep too, and tp has one rank."""
    expert_hops: Hops | None
    """Groups of the axis ep inside nodes and between them; None if tokens go straight to their experts."""
    cp_group: dist.ProcessGroup | None
    """The ranks that hold the parts of this rank's sequences; None if sequences are whole. No other group has its
    communicator, so that the ring does not wait for the transfers of weights and gradients."""
    transfers: Mapping[tuple[int, int], dist.ProcessGroup]
    """On CUDA, the group for sends from one rank of this rank's pipeline to another, by their global ranks; else empty.

    NCCL runs the transfers of a group one after the other. With a group for each direction, a receive that is posted
    early delays no send."""

    @classmethod
    def build(cls, plan: ParallelPlan, device_type: str) -> Self:
        """Arrange the ranks of the default process group, which has as many as the plan. All ranks must call it."""
        ranks = torch.arange(plan.world_size)
        sizes = (plan.pp, plan.num_copies, plan.num_shards, plan.tp)
        weights = _mesh(device_type, ranks.view(sizes), ("pp", "replicate", "shard", "tp"))
        experts = _of_experts(plan, device_type) if plan.ep > 1 else weights
        hops = _hops(plan, experts.mesh) if plan.ep_nodes > 1 else None
        cp_group = split_ranks(_along(ranks.view(-1, plan.cp, plan.tp), 1)) if plan.cp > 1 else None
        transfers = _transfer_groups(plan, device_type) if has_bound_device() else {}
        return cls(plan, weights, experts, hops, cp_group, transfers)

    def rank(self, axis: str) -> int:
        """Return this rank's place on one of the plan's ``AXES``."""
        return self.plan.coordinate(dist.get_rank(), axis)

    def pipeline_peer(self, pp_rank: int) -> int:
        """Return the global rank that differs from this one only in its pipeline rank, ``pp_rank``."""
        ranks_per_stage = self.plan.world_size // self.plan.pp
        peer: int = pp_rank * ranks_per_stage + dist.get_rank() % ranks_per_stage
        return peer

    def groups_across_pipeline(self, pp_ranks: Sequence[int], *, on_host: bool = False) -> dist.ProcessGroup | None:
        """Make the groups of ranks that differ only in their pipeline rank, for the pipeline ranks ``pp_ranks``.

        Every rank of the job must call it; it returns the group of this rank, if any. With ``on_host`` the groups
        transfer host memory.
        """
        ranks_per_stage = self.plan.world_size // self.plan.pp
        places = range(ranks_per_stage)
        partition = [[pp_rank * ranks_per_stage + place for pp_rank in pp_ranks] for place in places]
        return split_ranks(partition, on_host=on_host)

    def send_to_stage(self, tensor: Tensor, pp_rank: int) -> dist.Work:
        """Begin to send a contiguous tensor to the rank that differs from this one only in its pipeline rank."""
        peer = self.pipeline_peer(pp_rank)
        return _begun(dist.isend(tensor, peer, group=self.transfer_group(dist.get_rank(), peer)))

    def receive_from_stage(self, tensor: Tensor, pp_rank: int) -> dist.Work:
        """Begin to receive what that rank sends."""
        peer = self.pipeline_peer(pp_rank)
        return _begun(dist.irecv(tensor, peer, group=self.transfer_group(peer, dist.get_rank())))

    def transfer_group(self, source: int, target: int) -> dist.ProcessGroup:
        """Return the group for sends from one rank of this rank's pipeline to another, given their global ranks."""
        return self.transfers.get((source, target)) or self.weights.get_group("pp")


def _begun(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not part of its own pipeline")
    return work


def _mesh(device_type: str, ranks: Tensor, axes: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of all ranks. On CUDA its groups have no gloo; those that DeviceMesh splits by itself have."""
    if not has_bound_device():
        return DeviceMesh(device_type, ranks, mesh_dim_names=axes)
    groups: list[Any] = []
    alone = None
    for dim, size in enumerate(ranks.shape):
        if size == ranks.numel():
            groups.append(dist.group.WORLD)
        elif size == 1:
            alone = alone or split_ranks(_along(ranks, dim))
            groups.append(alone)
        else:
            groups.append(split_ranks(_along(ranks, dim)))
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=axes)


def _along(ranks: Tensor, dim: int) -> list[list[int]]:
    """Return the lists of ranks that differ only in their position on ``dim``."""
    lists: list[list[int]] = ranks.movedim(dim, -1).flatten(end_dim=-2).tolist()
    return lists


def _transfer_groups(plan: ParallelPlan, device_type: str) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Make a group for each direction between two ranks of a pipeline; return those of this rank, as in ``Mesh``."""
    ranks = torch.arange(plan.world_size).view(plan.pp, -1)
    place = dist.get_rank() % ranks.shape[1]
    groups = {}
    for routes in _rounds(plan.layout.routes):
        group = split_ranks([members for route in routes for members in ranks[sorted(route)].T.tolist()])
        own = next((route for route in routes if dist.get_rank() in ranks[list(route)]), None)
        if group is None or own is None:
            continue
        source, target = ranks[list(own), place].tolist()
        groups[source, target] = group
        # Two ranks connect at their first transfer, for which one waits on the host for the other. Here all ranks
        # meet in one order; in a step, a receive could be posted before the other rank can send.
        first = torch.zeros(1, device=device_type)
        if dist.get_rank() == source:
            dist.send(first, target, group=group)
        else:
            dist.recv(first, source, group=group)
    return groups


def _rounds(routes: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return ``routes`` in few rounds, each of which has a rank in at most one route: one split makes a round's groups.

    A pipeline of any length needs four.
    """
    rounds: list[list[tuple[int, int]]] = []
    for route in routes:
        free = (others for others in rounds if not any(set(route) & set(other) for other in others))
        chosen = next(free, None)
        if chosen is None:
            rounds.append([route])
        else:
            chosen.append(route)
    return rounds


def _of_experts(plan: ParallelPlan, device_type: str) -> DeviceMesh:
    """Return the mesh of the experts' weights, whose ranks are in another order than those of the other weights."""
    shard = plan.dp_shard // plan.fewer_expert_shards
    replicate = plan.dp // plan.ep_over_dp // shard
    ranks = torch.arange(plan.world_size).view(plan.pp, replicate, shard, plan.ep_over_dp, plan.cp, plan.tp)
    sizes = (plan.pp, plan.num_expert_copies, plan.num_expert_shards, plan.ep, plan.tp_of_experts)
    ranks = ranks.transpose(3, 4).reshape(sizes)
    return _mesh(device_type, ranks, ("pp", "replicate", "shard", "ep", "tp"))


def _hops(plan: ParallelPlan, experts: Tensor) -> Hops:
    """Return this rank's groups inside nodes and between them, given the ranks of the mesh of experts' weights."""
    *before, ep, tp = experts.shape
    ranks = experts.view(*before, plan.ep_nodes, ep // plan.ep_nodes, tp)
    between_nodes, in_node = (split_ranks(_along(ranks, dim)) for dim in (-3, -2))
    if between_nodes is None or in_node is None:
        raise RuntimeError("this rank is not part of its own mesh")
    return Hops(between_nodes, in_node)


def is_divided_over(tensor: Tensor, axis: str) -> bool:
    """Return whether the ranks of an axis hold different parts of a tensor."""
    return isinstance(tensor, DTensor) and axis in (tensor.device_mesh.mesh_dim_names or ())
