"""Transfers between ranks, recognised from operators: their bytes, their group, and the group's axis."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from llama_core.parallel.mesh import Mesh
from llama_core.planning.transfers import Axis, Collective, Other, Traffic, merged

WORLD: Other = "world"
HOLDERS: Other = "holders"
VOCABULARY: Other = "vocabulary"
ROUTING: Other = "routing"


class Transfer(NamedTuple):
    """One transfer that this rank takes part in."""

    collective: Collective
    group: str
    """The group's name or, after ``on_axes``, its axis."""
    num_ranks: int
    """Ranks of the group; 2 for a send."""
    num_bytes: int
    """Bytes of the whole tensors: the output of a gather, the input of a reduction, the tensor sent."""


# For each operator: the collective, the position of the group among the arguments, and a function from arguments and
# result to the whole tensors. A receive is missing because it counts as another rank's send.
_OPERATORS: Mapping[str, tuple[Collective, int, Callable[[tuple[Any, ...], Any], Any]]] = {
    "c10d::_allgather_base_": ("all_gather", 2, lambda args, out: [args[0]]),
    "c10d::allgather_": ("all_gather", 2, lambda args, out: args[0][0]),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 2, lambda args, out: [args[1]]),
    "c10d::allreduce_": ("all_reduce", 1, lambda args, out: args[0]),
    "c10d::broadcast_": ("broadcast", 1, lambda args, out: args[0]),
    "c10d::alltoall_base_": ("all_to_all", 2, lambda args, out: [args[1]]),
    "c10d::send": ("send", 1, lambda args, out: args[0]),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 2, lambda args, out: [out]),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 3, lambda args, out: [args[0]]),
    "_c10d_functional::all_reduce": ("all_reduce", 2, lambda args, out: [args[0]]),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 2, lambda args, out: args[0]),
    "_c10d_functional::all_to_all_single": ("all_to_all", 3, lambda args, out: [args[0]]),
}


def transfer_of(func: Any, args: tuple[Any, ...], out: Any) -> Transfer | None:
    """Return the transfer made by an operator with these arguments and this result; None if it is not a transfer."""
    if func.namespace not in {"c10d", "_c10d_functional"} or func._schema.name not in _OPERATORS:
        return None
    collective, place, whole = _OPERATORS[func._schema.name]
    found = args[place]
    group = _resolve_process_group(GroupName(found)) if isinstance(found, str) else ProcessGroup.unbox(found)
    num_ranks = 2 if collective == "send" else group.size()
    tensors: list[Tensor] = list(whole(args, out))
    # scalars are summed over all ranks, and the group of all ranks may also be that of an axis
    name = WORLD if all(tensor.dim() == 0 for tensor in tensors) else group.group_name
    # fully_shard gathers weights of several dtypes as bytes
    is_of_numbers = any(tensor.is_floating_point() or tensor.dtype is torch.uint8 for tensor in tensors)
    if name != WORLD and not is_of_numbers:
        name = ROUTING
    if func is torch.ops.c10d.allgather_.default:  # only the loss gathers into a list of tensors
        name = VOCABULARY
    return Transfer(collective, name, num_ranks, sum(tensor.nbytes for tensor in tensors))


def axes_by_group(mesh: Mesh | None) -> dict[tuple[str, bool], str]:
    """Return the axis of every group of ``mesh``, by the group's name and by whether the transfer is a send."""
    if mesh is None:
        return {}
    axes: dict[tuple[str, bool], str] = {
        (mesh.weights.get_group(axis).group_name, False): axis for axis in ("replicate", "shard", "tp")
    }
    if mesh.experts is not mesh.weights:
        axes |= {(mesh.experts.get_group(axis).group_name, False): axis for axis in ("replicate", "shard", "ep")}
    if mesh.expert_hops is not None:
        between_nodes, in_node = mesh.expert_hops
        axes |= {(between_nodes.group_name, False): "ep_nodes", (in_node.group_name, False): "ep_in_node"}
    axes[mesh.weights.get_group("pp").group_name, True] = "pp"
    if mesh.cp_group is not None:
        axes |= {(mesh.cp_group.group_name, is_send): "cp" for is_send in (False, True)}
    return axes


def on_axes(transfers: Mapping[Transfer, int], axes: Mapping[tuple[str, bool], str]) -> Counter[Transfer]:
    """Return transfers with each group's name replaced by its axis.

    Args:
        transfers: calls of every transfer.
        axes: the result of ``axes_by_group``; any other group is one of pipeline ranks that hold the same weights.
    """
    renamed: Counter[Transfer] = Counter()
    for transfer, count in transfers.items():
        axis = transfer.group
        if axis not in {WORLD, VOCABULARY, ROUTING}:
            axis = axes.get((transfer.group, transfer.collective == "send"), HOLDERS)
        renamed[transfer._replace(group=axis)] += count
    return renamed


def summed(transfers: Mapping[Transfer, int]) -> tuple[Traffic, ...]:
    """Return the calls of transfers, whose groups are axes, as one record per collective, axis and number of ranks."""
    return merged(
        Traffic(one.collective, cast("Axis | Other", one.group), one.num_ranks, count, count * one.num_bytes)
        for one, count in transfers.items()
    )
