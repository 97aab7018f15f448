"""What a matrix does that is held in NF4; read it beside ``models/nf4.py``."""

from llama_core.config.nf4 import BLOCK, num_scales, packed_bytes
from llama_core.planning.program.model import ModelProgram
from llama_core.planning.program.operations import FP32_BYTES, BothWays, Product, Size
from llama_core.units import MIB

UNPACKED_AT_ONCE = 4 * MIB
"""Most elements that are unpacked at once, but for those of a longer row; their scratch fits the cache of most GPUs."""
SCRATCH_BYTES = 2 + FP32_BYTES
"""Of each of these elements: half of an index, and the number in fp32."""
KERNELS_OF_SCALES = 8
KERNELS_OF_ROWS = 3


def product(program: ModelProgram, name: str, x: int) -> int:
    """Multiply by a matrix, which forward and backward each unpack to the dtype of activations.

    Args:
        program: the program to append to.
        name: Hugging Face's name for the matrix.
        x: what it is multiplied with.
    """
    columns, rows = program.local_shape(name)
    elements = columns * rows
    itemsize = program.itemsize
    weight = program.weight(Size(packed_bytes(elements) // itemsize, itemsize), is_trained=False)
    # the numbers of all groups of the whole matrix, and what is added to every scale
    program.undivided_bytes += FP32_BYTES * num_scales(elements * program.setting.tp)
    factor = program.sizes[x]
    tokens = factor.elements // columns
    result = Size(tokens * rows, itemsize)

    unpacked = elements * itemsize
    scratch = 0
    moved = packed_bytes(elements) + unpacked
    num_kernels = 1
    if not (program.setting.on_cuda or program.setting.compiles):
        # without a kernel of their own, the scales are written, and indices and numbers of some rows
        rows_at_once = min(rows, max(1, UNPACKED_AT_ONCE // columns))
        scratch = elements // BLOCK * FP32_BYTES + rows_at_once * columns * SCRATCH_BYTES
        moved += 2 * elements * SCRATCH_BYTES
        num_kernels = KERNELS_OF_SCALES + KERNELS_OF_ROWS * -(-rows // rows_at_once)
    # the scratch has gone when the product makes its result
    in_forward = unpacked + max(0, scratch - result.num_bytes)
    in_backward = unpacked + max(0, scratch - factor.num_bytes)
    return program.result(
        "packed_product",
        [x, weight],
        result,
        products=(Product(tokens, columns, rows),),
        workspace=BothWays(in_forward, in_backward),
        traffic=BothWays(moved, moved),
        num_kernels=1 + num_kernels,
    )
