"""What is before the layers and after them, as programs: the embedding, the final norm, the head with its loss.

Read it beside ``models/llama.py``, ``models/loss.py`` and ``parallel/vocabulary.py``. Tensor-parallel ranks divide the
vocabulary.
"""

from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from llama_core.config.models import ModelSpec
from llama_core.config.strategy import EMBEDDING, HEAD
from llama_core.config.trained_ends import adapted_tables, trains_final_norm, trains_head, trains_table
from llama_core.planning.program.model import ModelProgram
from llama_core.planning.program.operations import FP32_BYTES, INT64_BYTES, BothWays, Product, Size
from llama_core.planning.program.passes import Passes
from llama_core.planning.program.setting import Setting
from llama_core.units import GIB, MIB

LOSS_MIN_CHUNK_BYTES = 128 * MIB
LOSS_MAX_CHUNK_BYTES = GIB
LOSS_NUM_BLOCKS = 16
"""The sizes of ``models.loss``, which would import torch; a test compares the two."""


def loss_chunk_tokens(vocab_size: int, hidden_size: int, itemsize: int) -> int:
    """Return the most tokens whose logits the linear cross-entropy holds at once, by the rule of ``models.loss``."""
    row_bytes = vocab_size * itemsize
    chunk_bytes = min(max(hidden_size * row_bytes, LOSS_MIN_CHUNK_BYTES), LOSS_MAX_CHUNK_BYTES)
    return max(1, chunk_bytes // row_bytes)


class Embedding(ModelProgram):
    """The embedding: every token's row of the table, and of its adapter."""

    def __init__(self, spec: ModelSpec, setting: Setting) -> None:
        super().__init__(spec, setting)
        self.input = self.tensor(Size(0, INT64_BYTES))  # the batch, which is there anyway
        table = self.table(is_trained=trains_table(spec))
        out = self.cast(self.look_up(table), self.itemsize)
        if spec.lora and EMBEDDING in adapted_tables(spec):
            out = import_module(spec.lora.kind.program).embedding(self, out)
        self.output = self.scatter(out)

    def table(self, *, is_trained: bool) -> int:
        """Return the rank's rows of a table, a row per token of the vocabulary."""
        elements = self.spec.embedding_parameters // self.setting.tp
        return self.weight(Size(elements, self.weight_itemsize if is_trained else self.itemsize), is_trained=is_trained)

    def look_up(self, table: int) -> int:
        """Return the rows of the tokens; zeros for those of other ranks."""
        num_rows = self.spec.vocab_size // self.setting.tp
        rows = Size(self.tokens * self.sizes[table].elements // num_rows, self.sizes[table].itemsize)
        # the gradient of the whole table is filled with zeros, and the tokens' are added
        traffic = BothWays(2 * rows.num_bytes, 3 * rows.num_bytes + self.sizes[table].num_bytes)
        if self.setting.tp == 1:
            return self.result("look_up", [table, self.input], rows, traffic=traffic)
        size_of_mask = Size(self.tokens, 1)
        places, elsewhere = self.add_operation("decide", [], Size(self.tokens, INT64_BYTES), size_of_mask)
        found = self.result("look_up", [table, places], rows, traffic=traffic)
        return self.result("mask", [found, elsewhere], rows)


class FinalNorm(ModelProgram):
    """The norm before the head."""

    def __init__(self, spec: ModelSpec, setting: Setting) -> None:
        super().__init__(spec, setting)
        self.input = self.stream()
        self.output = self.norm(self.input, is_trained=trains_final_norm(spec))


class LogitFactors(NamedTuple):
    """Tokens and a matrix, whose product is the logits or a part of their sum."""

    tokens: Size
    width: int
    """Columns of both."""
    gradient: Size
    """That of the matrix; without elements if it is not trained."""
    cast_bytes: int
    """The matrix in the dtype of the tokens, if it is kept in another one."""
    workspace_bytes: int
    """What is held to add a chunk's part to the gradient of the matrix."""


class Head(ModelProgram):
    """The head, and the loss of the next token: in chunks of tokens, with its gradients computed in the forward.

    Another objective's program is a subclass with another ``loss``.
    """

    def __init__(self, spec: ModelSpec, setting: Setting) -> None:
        super().__init__(spec, setting)
        self.input = self.stream()
        whole = self.gather(self.input)
        is_trained = trains_head(spec)
        elements = spec.embedding_parameters // setting.tp
        size = Size(elements, self.weight_itemsize if is_trained else self.itemsize)
        pairs = [(whole, self.weight(size, is_trained=is_trained))]
        if spec.lora and HEAD in adapted_tables(spec):
            pairs.append(import_module(spec.lora.kind.program).head(self, whole))
        self.output = self.loss(pairs)

    def loss(self, pairs: list[tuple[int, int]]) -> int:
        """Append the linear cross-entropy of the sum of some products of tokens and a matrix.

        Args:
            pairs: the factors of each product.
        """
        num_chunks, held, moved = self.logits()
        held += self.tokens * FP32_BYTES  # the losses
        moved_back = 0
        gradients = []
        products = []
        for factors in self.factors(pairs):
            num_products = 3 if factors.gradient.elements else 2
            products.append(Product(self.tokens, factors.width, self.vocab_size, num_products))
            gradients += [factors.tokens, factors.gradient]
            held += factors.cast_bytes + factors.workspace_bytes
            moved += 2 * num_chunks * factors.gradient.num_bytes  # every chunk adds to it
            moved_back += 2 * factors.tokens.num_bytes + 2 * factors.gradient.num_bytes
        *_, loss = self.add_operation(
            "linear_loss",
            [factor for pair in pairs for factor in pair],
            *gradients,
            Size(0, FP32_BYTES),
            products=tuple(products),
            workspace=BothWays(held, 0),
            traffic=BothWays(moved, moved_back),
        )
        return loss

    @property
    def vocab_size(self) -> int:
        """The rank's part of the vocabulary."""
        return self.spec.vocab_size // self.setting.tp

    def logits(self) -> tuple[int, int, int]:
        """Return how many chunks of tokens have their logits one after another, what one holds, and what all move.

        Both are bytes: of the logits, of their gradients in the same place, and of what makes losses of them.
        """
        vocab_size = self.vocab_size
        limit = loss_chunk_tokens(vocab_size, self.spec.hidden_size, self.itemsize)
        num_chunks = -(-self.tokens // limit)
        chunk = -(-self.tokens // num_chunks)
        held = chunk * vocab_size * self.itemsize
        if not self.setting.on_cuda:  # fp32 rows for the softmax; targets, and which of them are ignored
            held += -(-chunk // LOSS_NUM_BLOCKS) * vocab_size * FP32_BYTES + self.tokens * (INT64_BYTES + 1)
        moved = 3 * self.tokens * vocab_size * self.itemsize  # read for the row's sum, read again, replaced
        return num_chunks, held, moved

    def factors(self, pairs: list[tuple[int, int]]) -> Iterator[LogitFactors]:
        """Yield the factors of each product whose sum is the logits."""
        for left, right in pairs:
            is_trained = right in self.trained
            tokens = self.sizes[left]
            matrix = self.sizes[right]
            width = tokens.elements // self.tokens
            workspace = 0
            if is_trained and not self.setting.on_cuda:
                # tokens with the ignored ones zeroed, and rows of the matrix's gradient
                workspace = tokens.num_bytes + -(-self.vocab_size // LOSS_NUM_BLOCKS) * width * self.itemsize
            yield LogitFactors(
                tokens=tokens,
                width=width,
                gradient=Size(matrix.elements if is_trained else 0, FP32_BYTES),
                cast_bytes=matrix.elements * self.itemsize if matrix.itemsize != self.itemsize else 0,
                workspace_bytes=workspace,
            )


@lru_cache(maxsize=512)
def embedding_passes(spec: ModelSpec, setting: Setting) -> Passes:
    """Return the forward and the backward of the embedding."""
    return Passes(Embedding(spec, setting), follows_trained=False)


@lru_cache(maxsize=512)
def final_norm_passes(spec: ModelSpec, setting: Setting) -> Passes:
    """Return the forward and the backward of the norm before the head."""
    return Passes(FinalNorm(spec, setting))


@lru_cache(maxsize=512)
def head_passes(spec: ModelSpec, setting: Setting, program: str) -> Passes:
    """Return the forward and the backward of the head and the loss.

    Args:
        spec: the architecture.
        setting: how it is divided, and which kernels run.
        program: the module of the objective's ``Head``.
    """
    head: ModelProgram = import_module(program).Head(spec, setting)
    return Passes(head)
