"""The ranks of a job as a mesh, one axis for each way to divide the work."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from llama_core.planning.plan import ParallelPlan


@dataclass(frozen=True, eq=False)
class Mesh:
    """This rank's place among the ranks of a plan, and the groups it belongs to."""

    plan: ParallelPlan
    weights: DeviceMesh
    """Axes pp, replicate, shard and tp. Context-parallel ranks hold the same weights, so they belong to the shard axis
    or, without sharding, to the replicate axis."""
    experts: DeviceMesh
    """The same for the weights of experts, with an axis ep before tp if expert-parallel ranks divide them. These ranks
    are neighbours among the data-parallel ones, so fewer ranks hold or shard the same expert."""
    cp_group: dist.ProcessGroup | None
    """The ranks that hold the parts of this rank's sequences; None if sequences are whole."""

    @classmethod
    def build(cls, plan: ParallelPlan, device_type: str) -> Self:
        """Arrange the ranks of the default process group, which has as many as the plan. All ranks must call it."""
        replicate, shard = plan.dp_replicate, plan.dp_shard * plan.cp
        if not plan.zero_stage:
            replicate, shard = plan.dp * plan.cp, 1
        weights = init_device_mesh(
            device_type, (plan.pp, replicate, shard, plan.tp), mesh_dim_names=("pp", "replicate", "shard", "tp")
        )
        cp_group = None
        if plan.cp > 1:
            outer = plan.world_size // (plan.cp * plan.tp)
            rows = init_device_mesh(device_type, (outer, plan.cp, plan.tp), mesh_dim_names=("outer", "cp", "tp"))
            cp_group = rows.get_group("cp")
        return cls(plan, weights, _of_experts(plan, device_type) if plan.ep > 1 else weights, cp_group)

    def rank(self, axis: str) -> int:
        """Return this rank's place on one of the plan's ``AXES``."""
        return self.plan.coordinate(dist.get_rank(), axis)

    def pipeline_peer(self, pp_rank: int) -> int:
        """Return the global rank that differs from this one only in its pipeline rank, ``pp_rank``."""
        ranks_per_stage = self.plan.world_size // self.plan.pp
        peer: int = pp_rank * ranks_per_stage + dist.get_rank() % ranks_per_stage
        return peer

    def groups_across_pipeline(self, pp_ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Make the groups of ranks that differ only in their pipeline rank, for the pipeline ranks ``pp_ranks``.

        Every rank of the job must call it; it returns the group of this rank, if any.
        """
        ranks_per_stage = self.plan.world_size // self.plan.pp
        mine = None
        for place in range(ranks_per_stage):
            ranks = [pp_rank * ranks_per_stage + place for pp_rank in pp_ranks]
            group = dist.new_group(ranks)
            mine = group if dist.get_rank() in ranks else mine
        return mine


def _of_experts(plan: ParallelPlan, device_type: str) -> DeviceMesh:
    """Return the mesh of the experts' weights, whose ranks are in another order than those of the other weights."""
    shard = plan.dp_shard // plan.fewer_expert_shards
    replicate = plan.dp // plan.ep // shard
    ranks = torch.arange(plan.world_size).view(plan.pp, replicate, shard, plan.ep, plan.cp, plan.tp)
    sizes = (replicate, shard * plan.cp) if plan.zero_stage else (replicate * plan.cp, 1)
    ranks = ranks.transpose(3, 4).reshape(plan.pp, *sizes, plan.ep, plan.tp)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("pp", "replicate", "shard", "ep", "tp"))


def is_divided_over(tensor: Tensor, axis: str) -> bool:
    """Return whether the ranks of an axis hold different parts of a tensor."""
    return isinstance(tensor, DTensor) and axis in (tensor.device_mesh.mesh_dim_names or ())
