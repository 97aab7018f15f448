"""Random bits of the elements of a parameter, which no plan changes.

They are a hash of the seed, the parameter's name, how often it was updated, and the element's place in the whole
parameter. The Triton kernel of moments in bf16 computes the same.
"""

from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))
"""Shifts and factors of a hash of 32 bits, found by a search for the least bias.

Source: Wellons 2018, nullprogram.com/blog/2018/07/31.
"""
LAST_SHIFT = 16
"""Of the hash."""
OF_COLUMNS = 0x5BD1E995
"""Any number: it makes the hashes of columns others than those of rows."""


class BlockOrigin(NamedTuple):
    """Where a block of a parameter begins. Experts' rows are counted from the first expert on."""

    row: int
    column: int


def random_bits(key: Tensor, place: BlockOrigin, shape: torch.Size) -> Tensor:
    """Return 32 random bits for each element of a block, [rows, columns], as int32.

    Args:
        key: int32 scalar, from which they follow together with an element's row and column in the whole.
        place: where the block begins.
        shape: its rows and columns.
    """
    rows = mixed(torch.arange(place.row, place.row + shape[0], dtype=torch.int32, device=key.device) + key)
    columns = torch.arange(place.column, place.column + shape[1], dtype=torch.int32, device=key.device)
    columns = mixed(columns + mixed(key ^ OF_COLUMNS))
    return mixed(rows[:, None] + columns, rounds=1)  # the sums are random already, but not independent


def key_of(seed: int, name: str) -> int:
    """Return a number of 32 bits for a parameter of a run."""
    return int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=4).digest(), "little", signed=True)


def mixed(numbers: Tensor, rounds: int = 2) -> Tensor:
    """Replace int32 numbers by hashes of them."""
    for shift, factor in MIXING[:rounds]:
        _fold(numbers, shift).mul_(factor)
    return _fold(numbers, LAST_SHIFT)


def _fold(numbers: Tensor, shift: int) -> Tensor:
    """Add upper bits to lower ones; what int32 shifts in from above is the sign, and does not count."""
    return numbers.bitwise_xor_((numbers >> shift).bitwise_and_(2 ** (32 - shift) - 1))
