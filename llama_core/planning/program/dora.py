"""What a matrix does whose rows have trained lengths; read it beside ``models/dora.py``."""

from llama_core.config.model_weights import DIVIDED_INPUTS
from llama_core.planning.program.lora import add_low_rank
from llama_core.planning.program.model import ModelProgram
from llama_core.planning.program.operations import FP32_BYTES, BothWays, Product, Size
from llama_core.planning.transfers import NO_TRAFFIC


def linear(program: ModelProgram, name: str, x: int, out: int) -> int:
    """Add the product of an adapter to that of its matrix, and give the rows of both together other lengths.

    Args:
        program: the program to append to.
        name: Hugging Face's name for the matrix.
        x: what it is multiplied with.
        out: the product.
    """
    a, b, magnitude = program.adapter(name)
    total = add_low_rank(program, x, out, a, b)
    inverse = inverse_lengths(program, name)
    scale = program.result("multiply", [magnitude, inverse], program.sizes[inverse])
    scaled = program.result("multiply", [total, program.cast(scale, program.itemsize)], program.sizes[out])
    program.end(x, total, scale)
    return scaled


def inverse_lengths(program: ModelProgram, name: str) -> int:
    """Return one over the length of each row of a matrix and its adapter, which are added up in fp32."""
    columns, rows = program.local_shape(name)
    rank = program.lora.lora_rank
    elements = columns * rows
    held = FP32_BYTES * elements
    if program.weight_itemsize < FP32_BYTES:
        held += FP32_BYTES * rank * (columns + rows)
    # the matrix is read, copied, added to, and read again
    moved = elements * (program.itemsize + 4 * FP32_BYTES)
    lengths = Size(rows, FP32_BYTES)
    sends = NO_TRAFFIC
    if program.setting.tp > 1 and name in DIVIDED_INPUTS:
        sends = program.tensor_parallel("all_reduce", None, lengths.num_bytes)
    return program.result(
        "decide",
        [],
        lengths,
        products=(Product(rows, rank, columns),),
        workspace=BothWays(held, 0),
        traffic=BothWays(moved, 0),
        sends=sends,
        num_kernels=3,
    )
