"""The tensors of one microbatch on one rank: the bytes of each, and which of them are kept for the backward.

Each term names its tensor in ``llama_core.models``. Tensor-parallel ranks divide the heads, the feed-forward columns
and the vocabulary, and with sequence parallelism the residual stream; the input of a matrix is whole on each of them.
Context-parallel ranks divide every sequence.

Source: Korthikanti et al. 2022, arXiv:2205.05198, for counting activations by saved tensor.
"""

from typing import NamedTuple

from llama_core.config.models import ModelSpec
from llama_core.config.run import RecomputeMode
from llama_core.config.strategy import EMBEDDING, HEAD
from llama_core.planning.plan import KEPT_PRODUCTS, DocumentAttention, ParallelPlan
from llama_core.units import GIB, MIB

FP32_BYTES = 4
INT64_BYTES = 8

LOSS_MIN_CHUNK_BYTES = 128 * MIB
LOSS_MAX_CHUNK_BYTES = GIB
LOSS_NUM_BLOCKS = 16
"""The sizes of ``models.loss``, which would import torch; a test compares the two."""


def loss_chunk_tokens(vocab_size: int, hidden_size: int, itemsize: int) -> int:
    """Return the most tokens whose logits the linear cross-entropy holds at once, by the rule of ``models.loss``."""
    row_bytes = vocab_size * itemsize
    chunk_bytes = min(max(hidden_size * row_bytes, LOSS_MIN_CHUNK_BYTES), LOSS_MAX_CHUNK_BYTES)
    return max(1, chunk_bytes // row_bytes)


DIVIDED_INPUT = ("o_proj", "down_proj", EMBEDDING)
"""The matrices whose input tensor-parallel ranks divide; of the others they divide the output."""


class Adapter(NamedTuple):
    """The parameters of one adapter on one tensor-parallel rank."""

    divided: int
    """Of the side that is divided like its matrix."""
    whole: int
    """Of the other side, whose gradient is a sum over the ranks."""


def adapter_size(spec: ModelSpec, matrix: str, tp: int) -> Adapter:
    """Return the size of an adapter on a matrix; 0 in a model without adapters."""
    if spec.lora is None:
        return Adapter(0, 0)
    columns, rows = spec.target_shapes[matrix]
    divided, whole = (columns, rows) if matrix in DIVIDED_INPUT else (rows, columns)
    return Adapter(spec.lora.lora_rank * divided // tp, spec.lora.lora_rank * whole)


class Tensors:
    """The bytes of the tensors of one forward and backward on one rank, including one dense layer.

    Args:
        spec: the architecture.
        plan: how it is divided.
        seq_len: tokens per sequence.
        itemsize: bytes per element of activations.
        documents: how attention is kept inside packed documents.
        on_cuda: whether CUDA's kernels make the loss and the norms.
    """

    recomputing = 0
    """Bytes a layer holds on top of those it keeps as its recomputation ends, if more than its backward holds."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        *,
        seq_len: int,
        itemsize: int,
        documents: DocumentAttention,
        on_cuda: bool = False,
    ) -> None:
        self.spec, self.itemsize = spec, itemsize
        self.narrow = itemsize < FP32_BYTES
        # copies of weights in the activations' dtype, kept for the backward; fully_shard gathers in that dtype
        casts = self.narrow and not plan.uses_fully_shard
        self.casts = casts and not plan.splits_backward  # a split backward makes its own copies
        self.casts_head = casts and spec.trains_head  # frozen weights are held in the activations' dtype
        tp = plan.tp
        own_seq = seq_len // plan.cp
        tokens = plan.rows_per_forward * own_seq
        self.is_divided = plan.sharded_sequence
        stream_tokens = tokens // tp if self.is_divided else tokens

        self.stream = stream_tokens * spec.hidden_size * itemsize  # the residual stream, [B, S, D]
        self.wide = stream_tokens * spec.hidden_size * FP32_BYTES  # the same in fp32
        self.whole = tokens * spec.hidden_size * itemsize  # the stream with the whole sequence
        self.ffn = tokens * spec.ffn_size // tp * itemsize  # [B, S, F]
        self.queries = tokens * spec.q_size // tp * itemsize  # [B, N, S, H]
        self.keys = tokens * spec.kv_size // tp * itemsize  # keys, or values, [B, K, S, H]
        self._set_norms(plan, stream_tokens, on_cuda=on_cuda)
        # for its backward, attention also keeps a sum per query, or, in the math kernel, which computes in fp32 with
        # as many key heads as query heads, the scores and its inputs in that form
        self.scores = tokens * seq_len * spec.num_heads // tp * FP32_BYTES if plan.attention == "math" else 0
        self.log_sum_exp = tokens * spec.num_heads // tp * FP32_BYTES
        if self.scores:
            self.log_sum_exp = self.scores + 3 * self.queries * FP32_BYTES // itemsize
        self.attended = 0 if self.scores else self.queries + self.log_sum_exp  # kept by selective recomputation
        # inputs of wq to wv, wo, w1 and w3, w2, and the gradients of their outputs
        matrices = 4 * self.stream + 2 * self.queries + 2 * self.keys + 3 * self.ffn
        self.put_off = matrices if plan.splits_backward else 0
        # around a ring, attention to the block of each other rank has a result of its own, over half of the queries
        self.ring = 0 if documents == "varlen" else (plan.cp - 1) * (self.queries + self.log_sum_exp) // 2
        self.attending = self._attending(plan.cp, takes_documents=documents == "varlen")

        self.layer_parameters = spec.layer_matmul_parameters // tp + 2 * spec.hidden_size
        self.layer_trained = self.layer_parameters  # those with gradients
        self.layer_divided = self.layer_parameters  # those that ZeRO divides over all sharding ranks
        self.ffn_parameters = spec.hidden_size * spec.ffn_size // tp  # trained ones, in one of its three matrices
        self.entering = self.whole  # the input of the feed-forward's first two matrices
        self._set_tables(tp)
        num_inputs = 2 if documents == "none" else 3  # token, target, position
        pieces = 2 if plan.cp > 1 else 1  # this rank's columns, and the rows that all ranks of the sequence get
        self.inputs = INT64_BYTES * num_inputs * plan.microbatch_size * plan.num_microbatches
        self.inputs *= seq_len + (own_seq if pieces > 1 else 0)
        rotations = own_seq if documents == "none" else tokens  # without documents all rows share their positions
        self.shared = rotations * spec.head_dim * FP32_BYTES  # cos and sin, [B, 1, S, H/2] each
        # the additive mask, [B, 1, S, S]; around a ring, half of it per block, and all of it for its own block
        if documents == "mask":
            self.shared += tokens * own_seq * itemsize * (plan.cp + 1) // 2
        # the rows of its part of the table that a rank looked up, and the tokens that are not in its part
        self.looked_up = tokens * (INT64_BYTES + 1) if tp > 1 else 0
        self._set_loss(plan, tokens, fused=on_cuda)

    def _attending(self, cp: int, *, takes_documents: bool) -> tuple[int, int]:
        """Return the bytes held in the midst of attention, forward and backward, beside what it keeps.

        Args:
            cp: context-parallel ranks.
            takes_documents: whether the kernel for documents computes it, for which keys and values are gathered.
        """
        if self.scores:  # before the softmax, and masked; their gradients after the softmax and before it
            return 2 * self.scores, 2 * self.scores + 2 * self.queries
        if not takes_documents:
            return 0, 0
        # the kernel's backward adds up the queries' gradients in fp32, and makes those of keys and values for every
        # query head before it sums the heads that share them; it also has a number per query
        seen = self.keys * (2 * cp + 1) // 2 if cp > 1 else self.keys  # the keys or values that a rank's queries see
        repeated = seen * self.queries // self.keys if self.queries > self.keys else 0
        kernel = self.queries * FP32_BYTES // self.itemsize + 2 * repeated + self.log_sum_exp
        # gradients of the output and the queries, of keys and of values
        backward = 2 * self.queries + 2 * seen + kernel
        if cp == 1:
            return 0, backward
        # in the forward, the last keys or values that were gathered, and the keys before their rotation; the backward
        # gathers them again
        return (cp + 1) * self.keys + 2 * seen + self.stream, backward + 2 * seen

    def _set_norms(self, plan: ParallelPlan, stream_tokens: int, *, on_cuda: bool) -> None:
        # fused kernels, CUDA's and those of a compiled block, compute in fp32 without writing it
        self.fuses_norms, self.fuses_activation = on_cuda or plan.compile, plan.compile
        self.widens = self.narrow and not self.fuses_norms  # whether norms copy the stream to fp32
        # the input, in fp32, normalised, and its scale
        self.norm = (self.stream if self.fuses_norms else 2 * self.wide) + stream_tokens * FP32_BYTES
        self.norm_working = 2 * self.stream if self.fuses_norms else 4 * self.wide
        """Bytes of the gradients inside a norm, of its output and its input."""
        self.weight_norm = 0 if self.fuses_norms else self.wide
        """The normalised input: what a norm keeps for the gradient of its weight alone."""
        self.ffn_norm = self.norm
        self.final_norm = self.norm - (0 if self.spec.trains_final_norm else self.weight_norm)

    def _set_tables(self, tp: int) -> None:
        spec = self.spec
        self.table_parameters = spec.embedding_parameters // tp  # of the embedding or the head, without adapters
        tables = spec.adapted_tables
        self.head_adapter = adapter_size(spec, HEAD, tp) if HEAD in tables else Adapter(0, 0)
        beside_embedding = sum(adapter_size(spec, EMBEDDING, tp)) if EMBEDDING in tables else 0
        beside_head = sum(self.head_adapter)
        self.embedding_parameters = self.table_parameters + beside_embedding
        self.head_parameters = self.table_parameters + beside_head
        self.embedding_trained = self.embedding_parameters if spec.trains_table else beside_embedding
        self.head_trained = self.head_parameters if spec.trains_head else beside_head
        self.head_norm_trained = spec.hidden_size if spec.trains_final_norm else 0

    def _set_loss(self, plan: ParallelPlan, tokens: int, *, fused: bool) -> None:
        spec = self.spec
        vocab_size = spec.vocab_size // plan.tp
        limit = loss_chunk_tokens(vocab_size, spec.hidden_size, self.itemsize)
        chunk = -(-tokens // -(-tokens // limit))
        width = tokens * self.itemsize  # bytes of a column
        self.loss_saved = self.whole + (FP32_BYTES * self.table_parameters if spec.trains_head else 0)
        """Gradients of the hidden states and of the head."""
        self.loss_working = (
            self.loss_saved
            + self.whole * self.is_divided  # the hidden states of the whole sequence
            + (self.table_parameters * self.itemsize if self.casts_head else 0)  # the head
            + chunk * vocab_size * self.itemsize  # logits of one chunk, then their gradients
            + tokens * FP32_BYTES  # losses
        )
        if not fused:  # fp32 rows for the softmax; targets, and which of them are ignored
            self.loss_working += -(-chunk // LOSS_NUM_BLOCKS) * vocab_size * FP32_BYTES + tokens * (INT64_BYTES + 1)
        if spec.trains_head:
            if not fused:  # hidden states with ignored targets zeroed, and rows of the head's gradient
                self.loss_working += self.whole + -(-vocab_size // LOSS_NUM_BLOCKS) * spec.hidden_size * self.itemsize
        elif spec.lora and sum(self.head_adapter):
            rank, dropped = spec.lora.lora_rank, spec.lora.lora_dropout > 0
            # A's input and its dropout mask; gradients of A's output and of B; copies of A and B
            kept = self.whole + dropped * self.whole // self.itemsize + width * rank
            kept += FP32_BYTES * self.head_adapter.divided + (self.itemsize * self.head_trained if self.narrow else 0)
            self.loss_saved += kept
            # A's output, scaled, and, unless fused, again with ignored targets zeroed; without dropout A's input is the
            # hidden states, which are there already
            self.loss_working += kept + (2 - fused) * width * rank - (0 if dropped else self.whole)

    def layer(self, mode: RecomputeMode = "none") -> int:
        """Return the bytes one layer keeps for its backward."""
        if mode == "full":
            return self.stream
        if mode == "selective":  # its input, and the output of attention
            products = {"wq": self.queries, "wk": self.keys, "wv": self.keys, "wo": self.whole}
            products |= {"w1": self.ffn, "w3": self.ffn}
            kept = sum(products[name] for name in KEPT_PRODUCTS)
            return self.stream + self.attended + self.ring + kept
        attention = (
            self.norm
            + self.whole  # the norm's output: input of wq, wk, wv
            + self.queries  # rotated
            + 2 * self.keys  # rotated, and values
            + self.queries  # the output: input of wo
            + self.log_sum_exp
        )
        # the norm's output: input of w1 and w3; then the product of silu(gate) and up: input of w2
        feed_forward = self.ffn_norm + self.whole + self.activation + self.ffn
        return attention + feed_forward + (self.itemsize * self.layer_parameters if self.casts else 0)

    @property
    def activation(self) -> int:
        """Bytes kept of gate, up and, unless one kernel makes the product, silu(gate)."""
        return (2 if self.fuses_activation else 3) * self.ffn

    def leaving(self, mode: RecomputeMode) -> int:
        """Return the bytes one layer holds at the end of its forward on top of those it keeps."""
        # the stream before it, w2's output (with a divided sequence also its parts), and their sum
        joined = self.stream * (1 + self.widens) + self.whole * (2 if self.is_divided else 1)
        if mode == "none":
            return joined
        # silu(gate), or gate unless it is kept, up, their product; the norm's output
        inside = 2 if self.fuses_activation and mode == "selective" else 3
        return max(joined, inside * self.ffn + self.stream + self.whole)

    @property
    def layer_before_w2(self) -> int:
        """Bytes left of a layer after the backward of its last matrix."""
        return self.layer() - self.ffn - self.itemsize * self.ffn_parameters * self.casts

    @property
    def layer_before_norm(self) -> int:
        """Bytes left of a layer after the backward of all three matrices of its feed-forward."""
        return self.layer() - self.activation - self.ffn - 3 * self.itemsize * self.ffn_parameters * self.casts

    @property
    def layer_attending(self) -> int:
        """Bytes left of a layer after the backward of its whole feed-forward: those kept before it."""
        return self.layer_before_norm - self.ffn_norm - self.whole
