"""Gradients across ranks: sum those that several ranks share, and compute the global norm."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from llama_core.config.models import ModelSpec
from llama_core.models.layers import local_part
from llama_core.models.llama import Llama
from llama_core.parallel.mesh import Mesh, is_divided_over
from llama_core.planning.plan import ParallelPlan


class Update(NamedTuple):
    """The outcome of an attempt to update the weights."""

    grad_norm: Tensor
    """Global gradient norm before clipping, fp32 scalar; there is no update if it is not finite."""
    updated: Tensor
    """Whether the weights were updated, a boolean scalar; they are not if the loss or the norm is not finite."""


class Gradients:
    """The gradients of one rank's part of a model, and how they relate to those of the other ranks.

    Args:
        model: this rank's part, with its final parameters.
        plan: the plan.
        mesh: the ranks; None if there is only this one. All ranks must build this object at the same time.
    """

    def __init__(self, model: Llama, plan: ParallelPlan, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self._device = next(model.parameters()).device
        self._shared: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        self._by_copies: dict[int, list[nn.Parameter]] = defaultdict(list)
        self._averaged_too_little: list[nn.Parameter] = []
        self._ep_over_dp = plan.ep_over_dp
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if mesh is None:
            self._by_copies[1] = list(trained.values())
            return
        holders = pipeline_holders(plan, model.spec)
        for ranks in sorted({ranks for ranks in holders.values() if len(ranks) > 1}):
            group = mesh.groups_across_pipeline(ranks)
            shared = [parameter for name, parameter in trained.items() if holders[_module_of(name)] == ranks]
            if group is not None:
                self._shared.append((group, shared))
        ranks_per_stage = plan.world_size // plan.pp
        for name, parameter in trained.items():
            copies = ranks_per_stage // _num_shards(parameter) * len(holders[_module_of(name)])
            self._by_copies[copies].append(parameter)
            if is_divided_over(parameter, "ep"):
                self._averaged_too_little.append(parameter)

    def complete(self) -> None:
        """Sum the gradients that several ranks share, so that each of them holds the sum; average those of experts.

        Ranks share the gradients of norms, which each tensor-parallel rank computes over a part of the sequence, of an
        embedding that the end of the model uses on another pipeline rank and, with Chimera, of every stage.
        """
        _sum_partial([parameter for parameters in self._by_copies.values() for parameter in parameters])
        for parameter in self._averaged_too_little:
            # the tokens of all data-parallel ranks reach an expert, but fewer of these ranks hold it and average
            if parameter.grad is not None:
                local_part(parameter.grad).div_(self._ep_over_dp)
        for group, parameters in self._shared:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            _all_reduce_together([local_part(p.grad) for p in parameters if p.grad is not None], group)

    def norm(self) -> Tensor:
        """Return the norm of the whole model's gradient, the same on every rank."""
        square = torch.zeros((), device=self._device)
        for copies, parameters in self._by_copies.items():
            gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
            if self.mesh is None:
                return norm
            square = square + norm**2 / copies
        dist.all_reduce(square)
        return square.sqrt()


def _sum_partial(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients that are partial on some ranks over these, where ``fully_shard`` has not done so."""
    partial: dict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor):
            continue
        sums = [axis for axis, place in enumerate(grad.placements) if place.is_partial()]
        for axis in sums:
            partial[grad.device_mesh.get_group(axis)].append(grad.to_local())
        if sums:
            parameter.grad = DTensor.from_local(
                grad.to_local(),
                grad.device_mesh,
                [Replicate() if place.is_partial() else place for place in grad.placements],
                run_check=False,
                shape=grad.shape,
                stride=grad.stride(),
            )
    for group, gradients in partial.items():
        _all_reduce_together(gradients, group)


def _all_reduce_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over ``group`` in place, with one collective for all tensors of a dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    for alike in by_dtype.values():
        torch.ops._c10d_functional.all_reduce_coalesced_(alike, "sum", group.group_name)
        for tensor in alike:
            torch.ops._c10d_functional.wait_tensor(tensor)


def pipeline_holders(plan: ParallelPlan, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the pipeline ranks that hold each module with its own parameters: ``layers.0``, ``norm`` and so on."""
    schedule = plan.build_schedule()
    stages = plan.stage_layers(spec)
    holders: dict[str, set[int]] = defaultdict(set)
    for rank in range(plan.pp):
        for layer in (layer for stage in schedule.stages_of(rank) for layer in stages[stage]):
            holders[f"layers.{layer}"].add(rank)
    first = holders["layers.0"]
    last = holders[f"layers.{spec.num_blocks - 1}"]
    holders["tok_embeddings"] = first | last if spec.embeds_at_end else first
    holders["norm"] = holders["output"] = last
    return {module: tuple(sorted(ranks)) for module, ranks in holders.items()}


def _module_of(parameter_name: str) -> str:
    parts = parameter_name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def _num_shards(parameter: nn.Parameter) -> int:
    """Return the number of ranks that together hold one copy of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(mesh.size(axis) for axis, place in enumerate(parameter.placements) if not place.is_replicate())
