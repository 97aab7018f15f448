"""A function of whole matrices that ranks divide: each goes to its owner, and a result comes back.

Two divisions may lie over each other, as ``fully_shard`` divides the part of each
tensor-parallel rank: the parts then travel along one axis of the mesh after the other, to one
rank among all. Where ranks hold copies of a matrix, nothing has to travel to its owner, and the
result goes to all of them.

Matrices are dealt to owners by their work, the largest first, each to the owner with the least so
far. They travel in rounds: while owners compute, the parts of the next round are on their way.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from llama_core.optimizers.assignment import dealt, rounds

OnWholeMatrices = Callable[[list[Tensor]], list[Tensor]]
"""A function of whole matrices, each [rows, columns], that returns as many of the same shapes."""

_COPIES = "copies"
Groups = tuple[dist.ProcessGroup, ...]
"""The ranks along each axis of a mesh."""


class Axis(NamedTuple):
    """An axis of a mesh whose ranks divide a matrix, or hold copies of it."""

    group: dist.ProcessGroup
    dim: int | None
    """The dim that they divide: 0 or 1; None if they hold copies."""


@dataclass(frozen=True, eq=False)
class Divided:
    """A matrix of which this rank holds a part."""

    part: Tensor
    """This rank's part, [rows, columns] or fewer of them."""
    shape: tuple[int, int]
    """Rows and columns of the whole."""
    axes: tuple[Axis, ...]
    """How ranks divide it, the last division first."""

    @property
    def groups(self) -> Groups:
        """The groups of ranks along each axis."""
        return tuple(axis.group for axis in self.axes)


def mark_copies(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Say of every parameter that the ranks of a group hold copies of it.

    A plain tensor does not tell.
    """
    for parameter in model.parameters():
        setattr(parameter, _COPIES, group)


def matrices_of(parameter: Tensor, values: Tensor) -> list[Divided]:
    """Return the matrices of a parameter: one, or one of each expert that this rank has a part of.

    Args:
        parameter: [rows, columns], or experts as [experts, rows, columns].
        values: numbers for this rank's part of it, which the matrices share.
    """
    rows, columns = parameter.shape[-2:]
    axes = tuple(_axes(parameter))
    parts = [values] if parameter.ndim == 2 else list(values.unbind())
    return [Divided(part, (rows, columns), axes) for part in parts]


def _axes(parameter: Tensor) -> Iterator[Axis]:
    if not isinstance(parameter, DTensor):
        copies = getattr(parameter, _COPIES, None)
        if copies is not None:
            yield Axis(copies, None)
        return
    stacked = parameter.ndim - 2
    for number, placement in enumerate(parameter.placements):
        if parameter.device_mesh.size(number) == 1:
            continue
        group = parameter.device_mesh.get_group(number)
        if not isinstance(placement, Shard | _StridedShard):
            yield Axis(group, None)
        elif placement.dim >= stacked:  # others have other experts
            yield Axis(group, placement.dim - stacked)


def at_owners(
    matrices: Sequence[Divided],
    function: OnWholeMatrices,
    *,
    work: Callable[[tuple[int, int]], float],
    dtype: torch.dtype,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the place of every matrix, and this rank's part of the function of it, as they come.

    All ranks that divide the matrices, or hold copies of them, must call it with the same ones in
    the same order.

    Args:
        matrices: this rank's parts of the matrices.
        function: what an owner computes of whole matrices.
        work: how long it takes for a matrix with so many rows and columns, in any unit.
        dtype: the dtype in which they travel, and in which owners compute.
    """
    together: dict[Groups, list[int]] = {}
    for place, matrix in enumerate(matrices):
        together.setdefault(matrix.groups, []).append(place)
    for groups, places in together.items():
        sizes_of_groups = [range(group.size()) for group in groups]
        owners = list(product(*sizes_of_groups))
        shapes = [matrices[place].shape for place in places]
        owner_of = dealt(tuple(map(work, shapes)), len(owners))
        travels: list[_Travel] = []
        for place, owner in zip(places, owner_of, strict=True):
            travels.append(_Travel(matrices[place], owners[owner], place))
        numbers_of_rounds = rounds(owner_of, [math.prod(shape) for shape in shapes])
        in_rounds = ([travels[number] for number in numbers] for numbers in numbers_of_rounds)
        for sent, results in _in_rounds(in_rounds, groups, function, dtype):
            # no loop, whose variables would hold the last result while the next round is computed
            yield from ((one.place, result) for one, result in zip(sent, results, strict=True))


class _Travel:
    """A matrix on its way to its owner.

    Args:
        matrix: this rank's part.
        owner: the place of the owner along each axis.
        place: which of the matrices it is.
    """

    def __init__(self, matrix: Divided, owner: tuple[int, ...], place: int) -> None:
        self.part = matrix.part
        self.axes = matrix.axes
        self.owner = owner
        self.place = place
        shapes = [matrix.shape]
        for axis in reversed(self.axes):
            shapes.append(_shape_of_part(shapes[-1], axis, axis.group.rank()))
        self.shapes = shapes[::-1]
        """Shape of this rank's part after the divisions from each axis on; last, the whole's."""

    def part_of(self, number: int, rank: int) -> tuple[int, int]:
        """Return the shape of the part of a rank along one of the axes."""
        return _shape_of_part(self.shapes[number + 1], self.axes[number], rank)


def _shape_of_part(shape: tuple[int, int], axis: Axis, rank: int) -> tuple[int, int]:
    """Return the shape of a rank's part."""
    if axis.dim is None:
        return shape
    own = _lengths(shape[axis.dim], axis.group.size())[rank]
    return (own, shape[1]) if axis.dim == 0 else (shape[0], own)


@lru_cache(maxsize=256)
def _lengths(length: int, num_ranks: int) -> tuple[int, ...]:
    """Return the lengths of the ranks' parts; as of ``torch.chunk``, the last may be shorter."""
    most = -(-length // num_ranks)
    return tuple(max(0, min(most, length - rank * most)) for rank in range(num_ranks))


def _in_rounds(
    in_rounds: Iterable[list[_Travel]],
    groups: Groups,
    function: OnWholeMatrices,
    dtype: torch.dtype,
) -> Iterator[tuple[list[_Travel], list[Tensor]]]:
    """Yield the matrices of each round, and this rank's parts of the results."""
    if not groups:
        for travels in in_rounds:
            yield travels, function([travel.part.to(dtype) for travel in travels])
        return
    before: _Sent | None = None
    for travels in in_rounds:
        # they travel while the owners compute those before
        sent = _Sent(travels, [travel.part for travel in travels], groups, 0, dtype)
        if before is not None:
            yield before.travels, _computed(before, function)
        before = sent
    if before is not None:
        yield before.travels, _computed(before, function)


def _computed(sent: "_Sent", function: OnWholeMatrices) -> list[Tensor]:
    """Return this rank's part of the function of each matrix that was sent."""
    if sent.number + 1 == len(sent.groups):
        return sent.returned(function(sent.arrived()))
    return sent.returned(_computed(sent.sent_on(), function))


class _Sent:
    """Parts of some matrices, sent along one axis: each to the rank that its owner is, or is among.

    Args:
        travels: the matrices, the same ones on all ranks of the axis.
        parts: this rank's part of each, along this axis and those after it.
        groups: the ranks along each axis.
        number: the axis.
        dtype: the dtype in which they travel.
    """

    def __init__(
        self,
        travels: list[_Travel],
        parts: list[Tensor],
        groups: Groups,
        number: int,
        dtype: torch.dtype,
    ) -> None:
        self.travels = travels
        self.parts = parts
        self.groups = groups
        self.number = number
        self.dtype = dtype
        self.group = groups[number]
        self.rank = self.group.rank()
        self.ranks = range(self.group.size())
        self.places: list[list[int]] = [[] for _ in self.ranks]
        """Which of the matrices each rank of the axis gets."""
        # of a matrix of which the ranks hold copies, the owner has its own
        divided: list[list[int]] = [[] for _ in self.ranks]
        sent: list[list[Tensor]] = [[] for _ in self.ranks]
        for place, travel in enumerate(travels):
            owner = travel.owner[number]
            self.places[owner].append(place)
            if self._is_divided(place):
                divided[owner].append(place)
                sent[owner].append(parts[place])
        self._own_divided = divided[self.rank]
        self._arriving = [self._shapes(self._own_divided, rank) for rank in self.ranks]
        self._received: Tensor | None = None
        if any(divided):
            self._received = self._exchange(sent, self._arriving)

    def _is_divided(self, place: int) -> bool:
        return self.travels[place].axes[self.number].dim is not None

    def _exchange(self, sent: list[list[Tensor]], arriving: list[list[tuple[int, int]]]) -> Tensor:
        """Send tensors to each rank; what arrives is waited for when it is used."""
        to_send = [sum(map(Tensor.numel, tensors)) for tensors in sent]
        to_receive = [sum(map(math.prod, shapes)) for shapes in arriving]
        buffer = torch.empty(sum(to_send), dtype=self.dtype, device=self.travels[0].part.device)
        _fill(buffer, list(chain.from_iterable(sent)))
        sent.clear()  # what is in the buffer is needed no more
        exchanged: Tensor = all_to_all_single(buffer, to_receive, to_send, self.group)
        return exchanged

    def _shapes(self, places: list[int], rank: int) -> list[tuple[int, int]]:
        return [self.travels[place].part_of(self.number, rank) for place in places]

    @property
    def own(self) -> list[_Travel]:
        """The matrices that this rank gets."""
        return [self.travels[place] for place in self.places[self.rank]]

    def arrived(self) -> list[Tensor]:
        """Return what the ranks of the axis together hold of each matrix that this rank gets.

        It keeps nothing of them.
        """
        places = self.places[self.rank]
        whole: dict[int, Tensor] = {}
        for place in places:
            if not self._is_divided(place):
                whole[place] = self.parts[place].to(self.dtype)
        self.parts = []
        if self._received is not None:
            of_ranks = _split(self._received, self._arriving)
            self._received = None
            for number, place in enumerate(self._own_divided):
                whole[place] = torch.cat([parts[number] for parts in of_ranks], self._dim(place))
        return [whole[place] for place in places]

    def returned(self, results: list[Tensor]) -> list[Tensor]:
        """Return this rank's part of every matrix's result, given those that it got itself."""
        if not self.travels:
            return []
        sent = [self._parts_for(rank, results) for rank in self.ranks]
        # the parts are views: nothing else may hold a result when the exchange drops them
        results.clear()
        arriving = [self._shapes(places, self.rank) for places in self.places]
        of_ranks = _split(self._exchange(sent, arriving), arriving)
        parts: dict[int, Tensor] = {}
        for places, received in zip(self.places, of_ranks, strict=True):
            parts |= zip(places, received, strict=True)
        return [parts[place] for place in range(len(self.travels))]

    def sent_on(self) -> "_Sent":
        """Send what the ranks of this axis together hold along the next axis."""
        return _Sent(self.own, self.arrived(), self.groups, self.number + 1, self.dtype)

    def _parts_for(self, rank: int, results: list[Tensor]) -> list[Tensor]:
        """Return the parts of the results that go to a rank of the axis."""
        own = self.places[self.rank]
        return [self._part(place, result, rank) for place, result in zip(own, results, strict=True)]

    def _dim(self, place: int) -> int:
        dim = self.travels[place].axes[self.number].dim
        assert dim is not None, "only parts of divided matrices travel to an owner"
        return dim

    def _part(self, place: int, result: Tensor, rank: int) -> Tensor:
        """Return the part of a result that goes to a rank of the axis."""
        if not self._is_divided(place):
            return result
        dim = self._dim(place)
        lengths = _lengths(result.shape[dim], len(self.ranks))
        return result.narrow(dim, sum(lengths[:rank]), lengths[rank])


def _fill(buffer: Tensor, tensors: list[Tensor]) -> None:
    """Copy tensors into a buffer, one after another."""
    places = torch.split(buffer, [tensor.numel() for tensor in tensors])
    for place, tensor in zip(places, tensors, strict=True):
        place.view(tensor.shape).copy_(tensor)


def _split(buffer: Tensor, shapes: list[list[tuple[int, int]]]) -> list[list[Tensor]]:
    """Return the tensors of each rank in a buffer."""
    sizes = [math.prod(shape) for shape in chain.from_iterable(shapes)]
    tensors = iter(torch.split(buffer, sizes))
    return [[next(tensors).view(shape) for shape in of_rank] for of_rank in shapes]
