"""Replicas: which ranks hold the same part of the same weights, and a hash by which they see that it still is."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llama_core.parallel.ranks import from_first_rank, on_first_rank, own_rank
from llama_core.planning.plan import ParallelPlan

HASH_BITS = 53
"""Of the hash, so that an fp64 number holds it exactly."""
CHUNK_ELEMENTS = {"cuda": 2**21, "cpu": 2**16}
"""Elements that are hashed at once, by type of device: their products stay in its cache. On a GPU a chunk takes 24 MiB,
once the gradients of the step are gone."""
_SPREAD_32 = -0x61C88647  # 2**32 over the golden ratio, as int32
_SPREAD_64 = 0x1E3779B97F4A7C15


@dataclass(frozen=True)
class ReplicaSets:
    """The sets of ranks that hold the same tensors; the same on every rank, but for ``own``."""

    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each set, at least two, in ascending order."""
    own: Mapping[str, int]
    """The set of each parameter of this rank of which others hold a replica, by name."""
    slots: Mapping[tuple[int, int], int] = field(init=False)
    """The place of a set among those of a rank, by the set and the rank."""

    def __post_init__(self) -> None:
        counts: Counter[int] = Counter()
        slots = {}
        for number, ranks in enumerate(self.ranks):
            for rank in ranks:
                slots[number, rank] = counts[rank]
                counts[rank] += 1
        object.__setattr__(self, "slots", slots)

    @classmethod
    def find(cls, parameters: Iterable[tuple[str, Tensor]], plan: ParallelPlan) -> "ReplicaSets":
        """Return the sets of ranks with the same part of a parameter, and the same place on the tensor-parallel axis.

        Tensor-parallel ranks are not compared with each other. They have little in common but norms, and without
        sequence parallelism each computes the gradients of these by itself.

        All ranks must call it together.

        Args:
            parameters: this rank's parameters, by name.
            plan: how the model is divided.
        """
        tp_rank = plan.coordinate(own_rank(), "tp")
        keys = {name: _key(name, parameter, tp_rank) for name, parameter in parameters}
        holders: dict[int, list[int]] = {}
        for rank, of_rank in enumerate(on_first_rank(tuple(keys.values()))):  # nothing on the other ranks
            for key in of_rank:
                holders.setdefault(key, []).append(rank)
        numbers: dict[tuple[int, ...], int] = {}
        for ranks in holders.values():
            if len(ranks) > 1:
                numbers.setdefault(tuple(ranks), len(numbers))
        of_keys = {key: numbers[tuple(ranks)] for key, ranks in holders.items() if len(ranks) > 1}
        sets, of_keys = from_first_rank((tuple(numbers), of_keys))
        return cls(sets, {name: of_keys[key] for name, key in keys.items() if key in of_keys})

    @property
    def num_slots(self) -> int:
        """The most sets that a rank is in."""
        return max(self.slots.values(), default=-1) + 1

    def differing(self, hashes: Sequence[Sequence[float]]) -> dict[int, tuple[int, ...]]:
        """Return the sets whose ranks do not all have the same hash, with the ranks that may be wrong.

        These are the ranks without the hash of the majority. Without a majority they are all ranks of the set.

        Args:
            hashes: the hash of every rank, for each slot.
        """
        found = {}
        for number, ranks in enumerate(self.ranks):
            values = {rank: hashes[self.slots[number, rank]][rank] for rank in ranks}
            (common, count), *others = Counter(values.values()).most_common()
            if others:
                has_majority = 2 * count > len(ranks)
                found[number] = tuple(rank for rank in ranks if not has_majority or values[rank] != common)
        return found


def _key(name: str, parameter: Tensor, tp_rank: int) -> int:
    """Return a number that ranks with the same part of a parameter have in common."""
    place: list[tuple[str, int]] = [("", tp_rank)]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = mesh.mesh_dim_names or ()
        for number, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                place.append((axes[number], mesh.get_local_rank(number)))
    digest = hashlib.sha256(repr((name, place)).encode()).digest()
    return int.from_bytes(digest[:8])


@torch.no_grad()
def bit_hash(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a hash of the bits of some tensors, a whole number below 2**53 as fp64, [], without waiting for a device.

    It is a sum of all elements as integers, each times an odd factor of its position, with overflow. A single flipped
    bit always changes it, and any other change does with a probability of about 1 - 2**-32.

    Args:
        tensors: the tensors, in an order that all replicas have in common.
        device: where most of them are.
    """
    ordered = sorted(tensors, key=Tensor.element_size)  # few chunks, since a chunk has elements of one size
    size = CHUNK_ELEMENTS[device.type]
    longest = min(size, sum(_num_elements(tensor) for tensor in ordered))
    factors = _odd_factors(longest, _SPREAD_32, torch.int32, device)
    sums = [(chunk * factors[: len(chunk)]).sum(dtype=torch.int32) for chunk in _chunks(ordered, size, device)]
    if not sums:
        return torch.zeros((), dtype=torch.float64, device=device)
    total = torch.stack(sums).long().mul_(_odd_factors(len(sums), _SPREAD_64, torch.int64, device)).sum()
    return total.bitwise_and_(2**HASH_BITS - 1).double()


def _odd_factors(count: int, spread: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, dtype=dtype, device=device).mul_(spread).bitwise_or_(1)


def _chunks(tensors: Iterable[Tensor], size: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the elements of tensors as integers; small tensors share a chunk, because each launch takes its time."""
    waiting: list[Tensor] = []
    num_waiting = 0
    for tensor in tensors:
        for piece in torch.split(_bits(tensor.to(device, non_blocking=True)), size):
            if waiting and (num_waiting + len(piece) > size or waiting[0].dtype != piece.dtype):
                yield _joined(waiting)
                waiting = []
                num_waiting = 0
            waiting.append(piece)
            num_waiting += len(piece)
    if waiting:
        yield _joined(waiting)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers of 32 bits, or of as few as its elements have; a copy if it has gaps."""
    kinds = {1: torch.uint8, 2: torch.int16}
    return tensor.detach().contiguous().view(-1).view(kinds.get(tensor.element_size(), torch.int32))


def _num_elements(tensor: Tensor) -> int:
    """Return as how many integers ``_bits`` returns a tensor."""
    return tensor.numel() * max(1, tensor.element_size() // 4)
