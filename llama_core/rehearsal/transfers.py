"""The transfers between ranks, as operators show them: what travels in which group, and which axis that group is."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from llama_core.parallel.mesh import Mesh

WORLD, HOLDERS, VOCABULARY = "world", "holders", "vocabulary"


class Transfer(NamedTuple):
    """One transfer that this rank takes part in."""

    collective: str
    group: str
    """The group's name or, after ``on_axes``, its axis."""
    num_ranks: int
    """Ranks of the group; 2 for a send."""
    num_bytes: int
    """Bytes of the whole tensors: what a gather yields, what a reduction is made from, what is sent."""


@dataclass(frozen=True)
class CountedTraffic:
    """All transfers of one kind that one rank takes part in within a step, over one axis."""

    collective: str
    axis: str
    """An axis of the weights' mesh; ``cp``; ``holders``: pipeline ranks that hold the same weights; ``vocabulary``:
    what tensor-parallel ranks tell each other of every token in the loss; or ``world``: single numbers of all ranks."""
    num_ranks: int
    """Ranks of the group; 2 for a send."""
    count: int
    """Transfers."""
    num_bytes: int
    """Bytes of the whole tensors."""

    def as_dict(self) -> dict[str, Any]:
        """Return the traffic as a flat record."""
        return asdict(self)


# of each operator: what it does, where its group is among the arguments, and the whole tensors, from arguments and
# result; of a receive nothing counts, as it is another rank's send
_OPERATORS: Mapping[str, tuple[str, int, Callable[[tuple[Any, ...], Any], Any]]] = {
    "c10d::_allgather_base_": ("all_gather", 2, lambda args, out: [args[0]]),
    "c10d::allgather_": ("all_gather", 2, lambda args, out: args[0][0]),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 2, lambda args, out: [args[1]]),
    "c10d::allreduce_": ("all_reduce", 1, lambda args, out: args[0]),
    "c10d::broadcast_": ("broadcast", 1, lambda args, out: args[0]),
    "c10d::send": ("send", 1, lambda args, out: args[0]),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 2, lambda args, out: [out]),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 3, lambda args, out: [args[0]]),
    "_c10d_functional::all_reduce": ("all_reduce", 2, lambda args, out: [args[0]]),
}


def transfer_of(func: Any, args: tuple[Any, ...], out: Any) -> Transfer | None:
    """Return the transfer that an operator with these arguments and this result was, if it was one."""
    if func.namespace not in {"c10d", "_c10d_functional"} or func._schema.name not in _OPERATORS:
        return None
    collective, place, whole = _OPERATORS[func._schema.name]
    found = args[place]
    group = _resolve_process_group(GroupName(found)) if isinstance(found, str) else ProcessGroup.unbox(found)
    num_ranks = 2 if collective == "send" else group.size()
    tensors: list[Tensor] = list(whole(args, out))
    # a single number is added up over all ranks, whose group may be that of an axis too
    name = WORLD if all(tensor.dim() == 0 for tensor in tensors) else group.group_name
    if func is torch.ops.c10d.allgather_.default:  # into a list of tensors: the loss alone does that
        name = VOCABULARY
    return Transfer(collective, name, num_ranks, sum(tensor.nbytes for tensor in tensors))


def axes_by_group(mesh: Mesh | None) -> dict[tuple[str, bool], str]:
    """Return the axis of every group of ``mesh``, by its name and by whether something is sent from rank to rank in it.

    Context-parallel ranks may be just those that shard the weights, and one group then: its sends are the ring's.
    """
    if mesh is None:
        return {}
    axes: dict[tuple[str, bool], str] = {
        (mesh.weights.get_group(axis).group_name, False): axis for axis in ("replicate", "shard", "tp")
    }
    axes[mesh.weights.get_group("pp").group_name, True] = "pp"
    if mesh.cp_group is not None:
        axes[mesh.cp_group.group_name, True] = "cp"
    return axes


def on_axes(transfers: Mapping[Transfer, int], axes: Mapping[tuple[str, bool], str]) -> Counter[Transfer]:
    """Return transfers with the axis of each group for its name.

    Args:
        transfers: calls of every transfer.
        axes: what ``axes_by_group`` returned; any other group is of pipeline ranks that hold the same weights.
    """
    renamed: Counter[Transfer] = Counter()
    for transfer, count in transfers.items():
        axis = transfer.group
        if axis not in {WORLD, VOCABULARY}:
            axis = axes.get((transfer.group, transfer.collective == "send"), HOLDERS)
        renamed[transfer._replace(group=axis)] += count
    return renamed


def summed(transfers: Mapping[Transfer, int]) -> tuple[CountedTraffic, ...]:
    """Return transfers on axes, and how often each was, by what they do and over which axis; none of a rank alone."""
    counts: Counter[tuple[str, str, int]] = Counter()
    sizes: Counter[tuple[str, str, int]] = Counter()
    for transfer, count in transfers.items():
        kind = transfer[:3]
        counts[kind] += count
        sizes[kind] += count * transfer.num_bytes
    return tuple(CountedTraffic(*kind, counts[kind], sizes[kind]) for kind in sorted(counts) if kind[2] > 1)
