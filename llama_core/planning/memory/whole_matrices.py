"""What an optimizer that computes on whole matrices holds meanwhile, beside weights, gradients and states.

It follows ``parallel.whole_matrices`` and ``training.muon`` round by round: the matrices of the fullest owner, what
it makes of those of one shape at a time, what it sends back, and the parts of the next round on their way.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from llama_core.optimizers.assignment import dealt, rounds
from llama_core.optimizers.traits import OptimizerType
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.work import Work

Shapes = tuple[tuple[int, int], ...]


def workspace(work: Work, pp_rank: int) -> int:
    """Return the most bytes that a rank holds while its matrices are updated; 0 if the optimizer needs none whole."""
    if work.optimizer.flops is None:
        return 0
    plan = work.plan
    ranks_of_stage = plan.world_size // plan.pp
    of_experts = ranks_of_stage // plan.ep  # the others that divide experts have other ones
    most = 0
    is_mixed_precision = work.itemsize < FP32_BYTES
    for ranks, copies, is_of_experts in (
        (ranks_of_stage, plan.num_copies, False),
        (of_experts, plan.num_expert_copies, True),
    ):
        owners = _Owners(ranks // copies, copies, is_mixed_precision)
        shapes = tuple(work.trained_matrices(pp_rank, of_experts=is_of_experts))
        most = max(most, _most(shapes, work.optimizer, owners))
    return work.itemsize * most


class _Owners(NamedTuple):
    """The ranks that own the matrices of a stage."""

    num_shards: int
    """Ranks that divide a matrix."""
    num_copies: int
    """Ranks that hold the same part."""
    is_mixed_precision: bool
    """Whether they compute in fewer bits than gradients have."""


class _Round(NamedTuple):
    """What an owner holds of a round, in elements."""

    arrived: int
    """Matrices that it owns."""
    computing: int
    """Most that it makes of them."""
    part: int
    """Its part of all matrices of the round."""


@lru_cache(maxsize=512)
def _most(shapes: Shapes, optimizer: OptimizerType, owners: _Owners) -> int:
    """Return the elements of ``workspace``, given the matrices of a rank."""
    if not shapes:
        return 0
    divided = owners.num_shards > 1
    most = 0
    in_rounds = list(_rounds(shapes, optimizer, owners))
    for current, following in zip(in_rounds, [*in_rounds[1:], _Round(0, 0, 0)], strict=True):
        computing = current.computing
        if divided or owners.is_mixed_precision:  # else the optimizer reads the gradients themselves
            computing += current.arrived
        # a matrix that is sent exists twice: with its owner and in the buffer of all_to_all
        returning = 0
        if divided:
            returning = 2 * current.arrived
        if owners.num_copies > 1:
            returning = max(returning, 2 * current.part)
        on_their_way = 0
        if divided:
            on_their_way = following.part // owners.num_copies + following.arrived
        most = max(most, max(computing, returning) + on_their_way)
    return most


def _rounds(shapes: Shapes, optimizer: OptimizerType, owners: _Owners) -> Iterator[_Round]:
    """Yield the rounds, each as its fullest owner sees it."""
    assert optimizer.flops is not None, "only optimizers on whole matrices have owners"
    flops = {shape: optimizer.flops(*shape) for shape in set(shapes)}
    owner_of = dealt(tuple(flops[shape] for shape in shapes), owners.num_shards * owners.num_copies)
    sizes = [math.prod(shape) for shape in shapes]
    for round_ in rounds(owner_of, sizes):
        of_owners: defaultdict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
        for number in round_:
            of_owners[owner_of[number]][shapes[number]] += 1
        part = sum(sizes[number] for number in round_) // owners.num_shards
        of_each = [_Owned(counts) for counts in of_owners.values()]
        yield max((_Round(own.total_elements, own.computing, part) for own in of_each), key=sum)


class _Owned:
    """The matrices of an owner, which computes those of one shape together, in the order in which shapes first come."""

    def __init__(self, counts: Counter[tuple[int, int]]) -> None:
        done = 0
        self.computing = 0
        for (rows, columns), count in counts.items():
            matrices = count * rows * columns
            squares = count * min(rows, columns) ** 2
            # a result beside the one before it, and of a square, itself and the polynomial of it
            self.computing = max(self.computing, done + 2 * matrices + 2 * squares)
            done += matrices
        self.total_elements = done
