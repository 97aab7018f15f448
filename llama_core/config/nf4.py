"""The sizes of a matrix in NF4, without torch; ``models/nf4.py`` has the format."""

BLOCK = 64
"""Consecutive numbers of a row that share a scale."""
BLOCK_BYTES = BLOCK // 2 + 1
"""A byte for every two numbers of a block, and one for its scale."""
GROUP = 256
"""Consecutive blocks of a matrix whose scales, codes themselves, share a number."""


def packed_bytes(elements: int) -> int:
    """Return the bytes that hold the elements of some whole blocks."""
    return elements // BLOCK * BLOCK_BYTES


def num_groups(num_blocks: int) -> int:
    """Return the groups of a matrix's blocks, of which the last may be smaller."""
    return -(-num_blocks // GROUP)


def num_scales(elements: int) -> int:
    """Return the fp32 numbers beside the bytes of a whole matrix: one of every group, and one added to every scale."""
    return num_groups(elements // BLOCK) + 1
