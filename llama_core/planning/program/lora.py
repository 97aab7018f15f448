"""What a matrix with two narrow ones beside it does; read it beside ``models/lora.py``."""

from llama_core.config.strategy import EMBEDDING, HEAD
from llama_core.planning.program.ends import Embedding
from llama_core.planning.program.model import ModelProgram


def linear(program: ModelProgram, name: str, x: int, out: int) -> int:
    """Add the product of an adapter to that of its matrix.

    Args:
        program: the program to append to.
        name: Hugging Face's name for the matrix.
        x: what it is multiplied with.
        out: the product.
    """
    a, b = program.adapter(name)
    return add_low_rank(program, x, out, a, b)


def add_low_rank(program: ModelProgram, x: int, out: int, a: int, b: int) -> int:
    """Add to ``out`` the product of ``x`` with A and B."""
    inner = to_inner(program, x, a)
    if program.setting.splits_backward:  # the product of B has a gradient that is deferred
        added = program.product(inner, b, program.sizes[b].elements // program.lora.lora_rank)
        total = program.add(out, added)
        program.end(x, out, added)
        return total
    total = program.add_product(out, inner, b)
    program.end(x, out, inner)
    return total


def embedding(program: Embedding, out: int) -> int:
    """Add what an adapter adds to the rows of the tokens."""
    a, b = program.adapter(EMBEDDING)
    inner = program.cast(program.look_up(a), program.itemsize)
    return program.add_product(out, program.result("scale", [inner], program.sizes[inner]), b)


def head(program: ModelProgram, x: int) -> tuple[int, int]:
    """Return the factors of what an adapter adds to the logits."""
    a, b = program.adapter(HEAD)
    return to_inner(program, x, a), b


def to_inner(program: ModelProgram, x: int, a: int) -> int:
    """Multiply by A, after a dropout, and scale the product, which is narrow."""
    dropped = program.dropped(x, program.lora.lora_dropout)
    inner = program.product(dropped, a, program.lora.lora_rank)
    scaled = program.result("scale", [inner], program.sizes[inner])
    if dropped != x:
        program.end(dropped, dropped + 1)  # native_dropout's mask, too, has a name until the function returns
    return scaled
