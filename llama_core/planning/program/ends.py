"""The ends of a model as programs: the embedding, the final norm, the head with its loss.

Read it beside ``models/llama.py``, ``models/loss.py`` and ``parallel/vocabulary.py``, whose
allocations it counts. Tensor-parallel ranks divide the vocabulary.
"""

from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from llama_core.config.models import ModelSpec
from llama_core.config.strategy import EMBEDDING, HEAD
from llama_core.config.trained_ends import (
    adapted_tables,
    trains_final_norm,
    trains_head,
    trains_table,
)
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
    """Return the most tokens whose logits are held at once, as ``default_chunk_tokens`` does."""
    row_bytes = vocab_size * itemsize
    chunk_bytes = min(max(hidden_size * row_bytes, LOSS_MIN_CHUNK_BYTES), LOSS_MAX_CHUNK_BYTES)
    return max(1, chunk_bytes // row_bytes)


class LookUp(ModelProgram):
    """A program that looks tokens up in the embedding."""

    def embed(self, table: int) -> int:
        """Append the embedding of tokens, and return the stream that begins with it."""
        spec = self.spec
        # ``TokenEmbedding`` casts the rows that it found, not the whole table
        out = self.cast(self.look_up(table), self.itemsize)
        if spec.lora and EMBEDDING in adapted_tables(spec):
            out = import_module(spec.lora.kind.program).embedding(self, out)
        stream = self.scatter(out)
        return self.result("scale", [stream], self.sizes[stream]) if spec.scaled_embedding else stream

    def table_size(self, *, is_trained: bool) -> Size:
        """Return the size of this rank's rows of the embedding, a row per token of the vocabulary."""
        elements = self.spec.embedding_parameters // self.setting.tp
        # a frozen table is held in the dtype of activations
        return Size(elements, self.weight_itemsize if is_trained else self.itemsize)

    def look_up(self, table: int) -> int:
        """Return the rows of the tokens; zeros for those of other ranks."""
        num_rows = self.spec.vocab_size // self.setting.tp
        table_size = self.sizes[table]
        columns = table_size.elements // num_rows
        rows = Size(self.tokens * columns, table_size.itemsize)
        moved = 2 * rows.num_bytes  # read from the table, written
        # torch's backward fills the gradient of the whole table with zeros; then it reads every
        # token's gradient, and reads and writes the row that this is added to
        moved_back = table_size.num_bytes + 3 * rows.num_bytes
        traffic = BothWays(moved, moved_back)
        workspace = BothWays(0, table_size.num_bytes if table in self.borrowed_weights else 0)
        if self.setting.tp == 1:
            of_batch = self.tensor(Size(0, INT64_BYTES))  # which is there anyway
            return self.result("look_up", [table, of_batch], rows, traffic=traffic, workspace=workspace)
        # ``vocab_parallel_embedding``: ids within the rank's rows, and a mask of the other ranks'
        # tokens, whose rows it sets to zero; the backward sets their gradients to zero with it
        ids = Size(self.tokens, INT64_BYTES)
        mask = Size(self.tokens, 1)
        local_ids, is_other_ranks = self.add_operation("decide", [], ids, mask)
        found = self.result("look_up", [table, local_ids], rows, traffic=traffic, workspace=workspace)
        return self.result("mask", [found, is_other_ranks], rows)


class Embedding(LookUp):
    """The embedding: every token's row of the table, and of its adapter."""

    def __init__(self, spec: ModelSpec, setting: Setting) -> None:
        super().__init__(spec, setting)
        self.input = self.tensor(Size(0, INT64_BYTES))  # the batch, which is there anyway
        is_trained = trains_table(spec)
        self.output = self.embed(self.weight(self.table_size(is_trained=is_trained), is_trained=is_trained))


class FinalNorm(ModelProgram):
    """The norm before the head."""

    def __init__(self, spec: ModelSpec, setting: Setting) -> None:
        super().__init__(spec, setting)
        self.input = self.stream()
        self.output = self.norm(self.input, is_trained=trains_final_norm(spec))


class LogitsCost(NamedTuple):
    """What the logits of a forward cost, with their gradients and what makes losses of them."""

    num_chunks: int
    """Chunks of tokens, which have their logits one after another."""
    held_bytes: int
    """Bytes that a chunk holds, with what lasts over all chunks."""
    moved_bytes: int
    """Bytes that all chunks read and write."""


class LogitFactors(NamedTuple):
    """Tokens and a matrix, whose product is the logits or a part of their sum.

    ``_Product`` of ``models.loss`` computes it, and both gradients.
    """

    tokens: Size
    """The hidden states, or what an adapter's first matrix makes of them."""
    width: int
    """Columns of both."""
    gradient: Size
    """That of the matrix; without elements if it is not trained."""
    cast_bytes: int
    """The matrix in the dtype of the tokens, if it is kept in another one."""
    workspace_bytes: int
    """What is held to add a chunk's part to the gradient of the matrix."""

    @property
    def num_products(self) -> int:
        """Products of the forward: the logits, the tokens' gradient, and a trained matrix's."""
        return 3 if self.gradient.elements else 2


class Head(ModelProgram):
    """The head and the loss of the next token, with the gradients computed in the forward.

    ``linear_loss`` of ``models.loss`` runs on a rank with T tokens in chunks of C, and V rows of
    the head with D columns. Numbers of activations have b bytes. What lives when::

                              elements  bytes   forward, chunk by chunk   backward
        logits                C x V     b       |=====================|
        rows of logits, wide  C/16 x V  4       |=====================|              CPU only
        matrix, cast          V x D     b       |=====================|              if it is fp32
        losses                T         4       |=====================|
        gradient of tokens    T x D     b       |=====================|== saved ==|
        gradient of matrix    V x D     4       |=====================|== saved ==|  if trained
        both, scaled          the same                                 |==========>  returned

    All of the forward is allocated before its first chunk. The gradients of a chunk's logits
    overwrite them, so that none are left for the backward, which multiplies what was saved by the
    gradient of the loss.

    Another objective's program is a subclass with another ``loss``.
    """

    def __init__(self, spec: ModelSpec, setting: Setting) -> None:
        super().__init__(spec, setting)
        self.input = self.stream()
        table = _local_table(self, is_trained=trains_head(spec))
        later = self.hidden_of_modules()
        hidden = self.gather(self.input)
        pairs = [(hidden, table)]
        if spec.lora and HEAD in adapted_tables(spec):
            pairs.append(import_module(spec.lora.kind.program).head(self, hidden))
        self.output = self.loss(pairs)
        for hidden in later:
            added = self.loss([(self.gather(hidden), table)])
            self.output = self.result("add", [self.output, added], Size(0, FP32_BYTES))
        self.end(*later)

    def hidden_of_modules(self) -> tuple[int, ...]:
        """Return the normalised hidden states of the prediction modules, which have run before."""
        if not self.spec.mtp_layers:
            return ()
        sizes = [self.sizes[self.input]] * self.spec.mtp_layers
        return self.add_operation("receive", [self.input], *sizes)

    def loss(self, pairs: list[tuple[int, int]]) -> int:
        """Append the linear cross-entropy of the sum of some products of tokens and a matrix.

        Args:
            pairs: the factors of each product.
        """
        logits = self.logits()
        held = logits.held_bytes + self.tokens * FP32_BYTES  # ``losses_T``
        moved = logits.moved_bytes
        moved_back = 0
        inputs: list[int] = []
        gradients: list[Size] = []
        products: list[Product] = []
        for pair, factors in zip(pairs, self.factors(pairs), strict=True):
            inputs += pair
            # outputs of the operation, because ``_LinearLoss`` saves them for its backward
            gradients += [factors.tokens, factors.gradient]
            # equal FLOPs, whichever of the three sides is summed over
            product = Product(self.tokens, factors.width, self.vocab_size, factors.num_products)
            products.append(product)
            held += factors.cast_bytes + factors.workspace_bytes
            moved += 2 * logits.num_chunks * factors.gradient.num_bytes  # every chunk adds to it
            # the backward reads each gradient and writes it multiplied by that of the loss
            moved_back += 2 * factors.tokens.num_bytes + 2 * factors.gradient.num_bytes
        *_, loss = self.add_operation(
            "linear_loss",
            inputs,
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

    def chunks(self) -> tuple[int, int]:
        """Return the number of chunks and the tokens of the largest, as ``even_chunk`` does."""
        limit = loss_chunk_tokens(self.vocab_size, self.spec.hidden_size, self.itemsize)
        num_chunks = -(-self.tokens // limit)
        return num_chunks, -(-self.tokens // num_chunks)

    def logits(self) -> LogitsCost:
        """Return what the logits cost, with what makes losses of them."""
        num_chunks, chunk_tokens = self.chunks()
        # one buffer for all chunks, in ``_chunks_of_logits``; the gradients overwrite the logits
        held = chunk_tokens * self.vocab_size * self.itemsize
        if not self.setting.on_cuda:
            # a CPU widens blocks of rows, in ``block_rows``; CUDA's kernel widens in registers
            block = -(-chunk_tokens // LOSS_NUM_BLOCKS)
            held += block * self.vocab_size * FP32_BYTES
            # ``_SoftmaxInBlocks`` copies the targets, and marks those that are ignored
            held += self.tokens * (INT64_BYTES + 1)
        # read for the sum of exponentials, read again, replaced: ``models/loss_kernels.py``
        moved = 3 * self.tokens * self.vocab_size * self.itemsize
        return LogitsCost(num_chunks, held, moved)

    def factors(self, pairs: list[tuple[int, int]]) -> Iterator[LogitFactors]:
        """Yield the factors of each product whose sum is the logits."""
        for left, right in pairs:
            is_trained = right in self.trained
            tokens = self.sizes[left]
            matrix = self.sizes[right]
            width = tokens.elements // self.tokens
            is_cast = matrix.itemsize != self.itemsize
            # on CUDA, ``add_wide_product`` adds half precision to an fp32 gradient in one kernel
            needs_workspace = is_trained and not self.setting.on_cuda
            yield LogitFactors(
                tokens=tokens,
                width=width,
                # chunks add up in fp32, whatever the dtype of the matrix is
                gradient=Size(matrix.elements if is_trained else 0, FP32_BYTES),
                cast_bytes=matrix.elements * self.itemsize if is_cast else 0,
                workspace_bytes=self.gradient_workspace(tokens, width) if needs_workspace else 0,
            )

    def gradient_workspace(self, tokens: Size, width: int) -> int:
        """Return what ``_Product`` allocates to add to a matrix's gradient in blocks of rows.

        Args:
            tokens: the tokens, of which there is a copy with zeros for those that are ignored.
            width: columns of the matrix.
        """
        rows = -(-self.vocab_size // LOSS_NUM_BLOCKS)
        if not self.setting.is_fp16:
            return tokens.num_bytes + rows * width * self.itemsize
        # the block is fp32, and so are the chunk's tokens and a block of its logits' gradients, which
        # ``_add_product_`` casts to multiply them
        _, chunk_tokens = self.chunks()
        cast = chunk_tokens * (width + rows)
        return tokens.num_bytes + (rows * width + cast) * FP32_BYTES


def _local_table(program: ModelProgram, *, is_trained: bool) -> int:
    """Return this rank's rows of the embedding or the head, a row per token of the vocabulary."""
    elements = program.spec.embedding_parameters // program.setting.tp
    # a frozen table is held in the dtype of activations
    itemsize = program.weight_itemsize if is_trained else program.itemsize
    return program.weight(Size(elements, itemsize), is_trained=is_trained)


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
