"""Who computes what of whole matrices that ranks divide: each has an owner, and they travel to owners in rounds."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush

ROUND_ELEMENTS = 2**24
"""Elements of an owner's matrices in a round; a matrix larger than that has a round of its own."""


@lru_cache(maxsize=64)
def dealt(work: tuple[float, ...], num_owners: int) -> tuple[int, ...]:
    """Return the owner of each matrix: the largest first, each goes to the owner with the least work so far."""
    least = [(0.0, owner) for owner in range(num_owners)]
    owner_of = [0] * len(work)
    for number in sorted(range(len(work)), key=lambda number: -work[number]):
        load, owner_of[number] = heappop(least)
        heappush(least, (load + work[number], owner_of[number]))
    return tuple(owner_of)


def rounds(owner_of: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield matrices in rounds, in each of which no owner has more than ``ROUND_ELEMENTS``, or has one matrix.

    Args:
        owner_of: the owner of each matrix.
        sizes: its elements.
    """
    round_: list[int] = []
    load: dict[int, int] = {}
    for number, (owner, size) in enumerate(zip(owner_of, sizes, strict=True)):
        if owner in load and load[owner] + size > ROUND_ELEMENTS:
            yield round_
            round_ = []
            load = {}
        round_.append(number)
        load[owner] = load.get(owner, 0) + size
    if round_:
        yield round_
