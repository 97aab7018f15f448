"""What is before the layers and after them, as programs: the embedding, the final norm, the head with its loss.

Read it beside ``models/llama.py``, ``models/loss.py`` and ``parallel/vocabulary.py``. Tensor-parallel ranks divide the
vocabulary.
"""

from functools import lru_cache
from importlib import import_module

from llama_core.config.models import ModelSpec
from llama_core.config.strategy import EMBEDDING, HEAD
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
        table = self.table(is_trained=spec.trains_table)
        out = self.cast(self.look_up(table), self.itemsize)
        if spec.lora and EMBEDDING in spec.adapted_tables:
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
        self.output = self.norm(self.input, is_trained=spec.trains_final_norm)


class Head(ModelProgram):
    """The head, and the loss of the next token: in chunks of tokens, with its gradients computed in the forward.

    Another objective's program is a subclass with another ``loss``.
    """

    def __init__(self, spec: ModelSpec, setting: Setting) -> None:
        super().__init__(spec, setting)
        self.input = self.stream()
        whole = self.gather(self.input)
        is_trained = spec.trains_head
        elements = spec.embedding_parameters // setting.tp
        size = Size(elements, self.weight_itemsize if is_trained else self.itemsize)
        pairs = [(whole, self.weight(size, is_trained=is_trained))]
        if spec.lora and HEAD in spec.adapted_tables:
            pairs.append(import_module(spec.lora.kind.program).head(self, whole))
        self.output = self.loss(pairs)

    def loss(self, pairs: list[tuple[int, int]]) -> int:
        """Append the linear cross-entropy of the sum of some products of tokens and a matrix.

        Args:
            pairs: the factors of each product.
        """
        spec = self.spec
        vocab_size = spec.vocab_size // self.setting.tp
        tokens = self.tokens
        limit = loss_chunk_tokens(vocab_size, spec.hidden_size, self.itemsize)
        num_chunks = -(-tokens // limit)
        chunk = -(-tokens // num_chunks)
        logits = chunk * vocab_size * self.itemsize
        held = logits + tokens * FP32_BYTES  # logits of one chunk, then their gradients; losses
        moved = 3 * tokens * vocab_size * self.itemsize  # read for the row's sum, read again, replaced by the gradient
        moved_back = 0
        if not self.setting.on_cuda:  # fp32 rows for the softmax; targets, and which of them are ignored
            held += -(-chunk // LOSS_NUM_BLOCKS) * vocab_size * FP32_BYTES + tokens * (INT64_BYTES + 1)
        gradients = []
        products = []
        for left, right in pairs:
            is_trained = right in self.trained
            size = self.sizes[left]
            width = size.elements // tokens
            of_matrix = Size(self.sizes[right].elements if is_trained else 0, FP32_BYTES)
            products.append(Product(tokens, width, vocab_size, 3 if is_trained else 2))
            gradients += [size, of_matrix]
            moved_back += 2 * size.num_bytes + 2 * of_matrix.num_bytes
            if self.sizes[right].itemsize != self.itemsize:
                held += self.sizes[right].elements * self.itemsize
            if is_trained:  # every chunk adds to the matrix's gradient
                moved += 2 * num_chunks * of_matrix.num_bytes
            if is_trained and not self.setting.on_cuda:
                # tokens with the ignored ones zeroed, and rows of the matrix's gradient
                held += size.num_bytes + -(-vocab_size // LOSS_NUM_BLOCKS) * width * self.itemsize
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
