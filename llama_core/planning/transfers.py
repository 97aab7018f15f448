"""Transfers between the ranks of a plan: how often, of what kind and how much."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"]
Axis = Literal["tp", "cp", "ep", "ep_nodes", "ep_in_node", "pp", "shard", "replicate"]
"""``ep_nodes`` and ``ep_in_node`` are the parts of ep between nodes and inside them, if tokens travel in two hops."""
OF_EP: tuple[Axis, ...] = ("ep", "ep_nodes", "ep_in_node")
Other = Literal["holders", "vocabulary", "routing", "world"]
"""What else a rehearsal tells apart: the sums of pipeline ranks that hold the same weights; the exchange between
tensor-parallel ranks for every token in the loss; the experts' numbers of tokens; scalars over all ranks."""


@dataclass(frozen=True)
class Traffic:
    """Transfers of one kind over one axis, as seen by one rank."""

    collective: Collective
    axis: Axis | Other
    num_ranks: int
    """Ranks of the group; 2 for a send."""
    count: int
    """Transfers."""
    num_bytes: float
    """Bytes of the whole tensors: the output of a gather, the input of a reduction, the tensor sent."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends when the ranks form a ring."""
        if self.collective == "send":
            return self.num_bytes
        passes = 2 if self.collective == "all_reduce" else 1
        return passes * (self.num_ranks - 1) / self.num_ranks * self.num_bytes

    def times(self, count: int) -> "Traffic":
        """Return ``count`` times these transfers."""
        return replace(self, count=self.count * count, num_bytes=self.num_bytes * count)


@dataclass(frozen=True)
class PassTraffic:
    """The transfers of one forward and its backward."""

    forward: tuple[Traffic, ...] = ()
    backward: tuple[Traffic, ...] = ()

    @property
    def both_ways(self) -> tuple[tuple[Traffic, ...], tuple[Traffic, ...]]:
        """Those of the forward, and those of the backward."""
        return self.forward, self.backward

    def __iter__(self) -> Iterator[Traffic]:
        yield from self.forward
        yield from self.backward

    def on(self, *axes: Axis) -> "PassTraffic":
        """Return those of some axes."""
        return PassTraffic(
            tuple(part for part in self.forward if part.axis in axes),
            tuple(part for part in self.backward if part.axis in axes),
        )


NO_TRAFFIC = PassTraffic()


def merged(traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Return the same transfers, one record per collective, axis and group size."""
    sums: dict[tuple[Collective, Axis | Other, int], list[Traffic]] = defaultdict(list)
    for part in traffic:
        if part.num_ranks > 1 and part.count:
            sums[part.collective, part.axis, part.num_ranks].append(part)
    return tuple(
        Traffic(*key, sum(part.count for part in parts), sum(part.num_bytes for part in parts))
        for key, parts in sorted(sums.items())
    )
