"""The time one device computes on one microbatch of a pipeline stage, without communication.

Matrix products run at a measured share of the device's peak, slower if a side is short. Attention runs at the rate of a
flash kernel, over the scores it does not skip. Everything else runs at the speed of memory, by the bytes its kernels
read and write. The kernels are this engine's on CUDA: norms in torch's fused kernel; rotation and activation in eager
kernels, or fused if the plan compiles; a linear cross-entropy that computes its gradients in the forward.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from llama_core.config.hardware import DeviceSpec
from llama_core.config.models import LayerTraits, ModelSpec
from llama_core.config.run import Precision, RecomputeMode
from llama_core.config.strategy import FEED_FORWARD_MATRICES, HEAD, MATRICES, MoE
from llama_core.planning.memory.tensors import FP32_BYTES, loss_chunk_tokens
from llama_core.planning.plan import KEPT_PRODUCTS, DocumentAttention, ParallelPlan

HALF_RATE_DIM = 128
"""Shortest side at which a matrix product reaches half of its rate; at 4096 it reaches 97 %.

A product is computed in tiles of about this many rows and columns. NVIDIA 2023, *Matrix Multiplication Background
User's Guide*, sections 3 and 4.
"""
MODEL_SHAPES = 0.9
"""Rate of a model's products over that of the best shape, which ``DeviceSpec.matmul_share`` gives.

720 over 794 TFLOP/s on H100: SemiAnalysis 2024, *MI300X vs H100 vs H200 Benchmark Part 1: Training*.
"""
MEMORY_SHARE = 0.85
"""Share of memory bandwidth that kernels are assumed to reach: about 0.9 in long streams, less in others."""
KERNEL_SECONDS = 5e-6
"""Shortest time of a kernel: its launch from Python."""
KERNELS_PER_LAYER = {False: 32, True: 16}
"""Kernels of a layer's forward, eager and compiled.

Eager: 7 products, attention, 2 norms, 18 of the rotation of queries and keys, 2 of the activation, and 2 additions.
"""
BACKWARD_ATTENTION = 2.5
"""Products of attention's backward over those of its forward: five, including recomputed scores, over two."""


class Pass(NamedTuple):
    """Seconds of a forward and of its backward."""

    forward: float
    backward: float

    def plus(self, other: "Pass") -> "Pass":
        """Return the seconds of both passes, one after the other."""
        return Pass(self.forward + other.forward, self.backward + other.backward)


NO_TIME = Pass(0.0, 0.0)


class _Accesses(NamedTuple):
    """How often the kernels of a layer read or write an element, in the activations' dtype and in fp32."""

    stream: tuple[int, int]
    """Residual stream: norms and residual additions."""
    whole: tuple[int, int]
    """Matrix input: adding the gradients of the matrices that share it."""
    rotated: tuple[int, int]
    """Queries and keys: the rotation."""
    queries: tuple[int, int]
    """Attention's output: moving the heads last."""
    ffn: tuple[int, int]
    """Feed-forward: the activation and its product."""


# (compiled, backward). In eager mode, a norm reads its input and writes its output. Its backward reads both gradient
# and input in one kernel, which writes the input's gradient, and again in another for the weight's. An addition reads
# two tensors and writes one. The compiled activation's backward reads its gradient, gate and up, and writes two.
_ACCESSES = {
    (False, False): _Accesses(stream=(10, 0), whole=(0, 0), rotated=(2, 11), queries=(2, 0), ffn=(5, 0)),
    (False, True): _Accesses(stream=(16, 0), whole=(9, 0), rotated=(2, 11), queries=(2, 0), ffn=(9, 0)),
    (True, False): _Accesses(stream=(8, 0), whole=(0, 0), rotated=(2, 0), queries=(2, 0), ffn=(3, 0)),
    (True, True): _Accesses(stream=(10, 0), whole=(3, 0), rotated=(2, 0), queries=(2, 0), ffn=(5, 0)),
}
FP8_ROUNDING_BYTES = {False: 9, True: 5}
"""Bytes read and written to round one bf16 number to fp8, eager and compiled: read for the row's maximum, read again,
and written in one byte; in eager mode the scaled number is also written and read."""
_LOSS_ACCESSES = (3, 0)
"""Of a logit, in the kernel: read for the row's maximum and sum, read again, and overwritten by the gradient."""
_TABLE_ACCESSES = (0, 2)
"""Of an element of the head's gradient, per chunk of tokens: the product adds to it in fp32."""


class StageCompute:
    """The times of a plan's layers, embedding and head on one rank, for one microbatch passing a stage.

    Args:
        spec: the architecture.
        plan: how it is divided.
        device: the device that computes.
        seq_len: tokens per sequence.
        precision: the dtype of activations and products; ``auto`` counts as bf16.
        documents: how attention is kept inside packed documents. With a mask no score is skipped; otherwise the scores
            after each token are, as if every row were one document.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        device: DeviceSpec,
        *,
        seq_len: int,
        precision: Precision,
        documents: DocumentAttention,
    ) -> None:
        self.spec, self.plan, self.device = spec, plan, device
        self.itemsize = FP32_BYTES if precision == "fp32" else 2
        self.peak = device.fp32_flops if precision == "fp32" else device.bf16_flops
        self.in_fp8 = precision == "fp8"
        self.layer_peak = device.fp8_flops if self.in_fp8 else self.peak
        """The peak rate of the products of a layer's matrices; those of experts are never in fp8."""
        self.tokens = plan.rows_per_forward * seq_len // plan.cp
        self.visible_scores = seq_len if documents == "mask" else seq_len / 2
        self.casts = self.itemsize < FP32_BYTES and not plan.uses_fully_shard

    def stage(
        self, modes: tuple[RecomputeMode, ...], traits: tuple[LayerTraits, ...] = (), *, is_first: bool, is_last: bool
    ) -> Pass:
        """Return the time of a stage.

        Args:
            modes: the recomputation of each layer.
            traits: the traits of each layer; default: those of the model's first.
            is_first: whether it holds the embedding.
            is_last: whether it holds the head.
        """
        kinds = list(zip(modes, traits or self.spec.layers[:1] * len(modes), strict=True))
        layers = {kind: self.layer(*kind) for kind in set(kinds)}
        total = NO_TIME
        for kind in kinds:
            total = total.plus(layers[kind])
        if is_first:
            total = total.plus(self.embedding())
        return total.plus(self.head()) if is_last else total

    def layer(self, mode: RecomputeMode, traits: LayerTraits | None = None) -> Pass:
        """Return the time of a layer with these traits, by default the first, with recomputation in its backward."""
        traits = self.spec.layers[0] if traits is None else traits
        products = {name: self._product(*shape, peak=self.layer_peak) for name, shape in self._shapes().items()}
        attention, elementwise, adapters = self.attention(), self._elementwise(traits), self._beside_frozen(traits)
        if traits.sparse and self.spec.moe is not None:
            products |= self._products_of_experts(self.spec.moe)
            elementwise = elementwise.plus(self._routing(self.spec.moe))
        if self.in_fp8:
            elementwise = elementwise.plus(self._rounding(traits))
        launches = KERNEL_SECONDS * KERNELS_PER_LAYER[self.plan.compile]
        once = sum(products.values())
        # a frozen matrix has no gradient of its own, but passes gradients on
        names = dict(zip(self._shapes(), MATRICES, strict=True))
        back = once + sum(seconds for name, seconds in products.items() if names[name] in traits.trained)
        forward = max(once + attention.forward + elementwise.forward + adapters.forward, launches)
        backward = max(back + attention.backward + elementwise.backward + adapters.backward, 2 * launches)
        if mode == "none":
            return Pass(forward, backward)
        kept = () if mode == "full" else KEPT_PRODUCTS
        again = forward - sum(products[name] for name in ("w2", *kept))  # no backward reads the last product
        return Pass(forward, backward + again - (attention.forward if mode == "selective" else 0))

    def _products_of_experts(self, moe: MoE) -> dict[str, float]:
        """Return the times of the matrices of the experts on this rank, which get equal numbers of tokens.

        Expert-parallel ranks have fewer experts, and more tokens for each.
        """
        rows, num_experts = self.tokens * moe.experts_per_token, moe.num_experts // self.plan.ep
        shapes = {name: shape for name, shape in self._shapes().items() if name in {"w1", "w2", "w3"}}
        return {name: num_experts * self._product(*shape, tokens=rows / num_experts) for name, shape in shapes.items()}

    def _routing(self, moe: MoE) -> Pass:
        """Return the time of a layer's routing, and of the elementwise work on further copies of its tokens."""
        ffn = self.tokens * (moe.experts_per_token - 1) * self.spec.ffn_size / self.plan.tp
        copies = self.tokens * moe.experts_per_token * self.spec.hidden_size
        forward, backward = (_ACCESSES[self.plan.compile, backward].ffn for backward in (False, True))
        # tokens are widened for the router, spread, brought together, weighted and added up
        moved = self._memory(copies, narrow=8, wide=0) + self._memory(self.tokens * self.spec.hidden_size, 1, 2)
        moved += self._memory(copies, narrow=4, wide=0) if self.plan.ep > 1 else 0
        weights = Pass(0.0, 0.0)
        if self.casts:
            more = (moe.num_experts // self.plan.ep - 1) * self.spec.expert_parameters / self.plan.tp
            weights = Pass(self._memory(more, 1, 1), self._memory(more, 1, 4))
        return Pass(self._memory(ffn, *forward) + moved, self._memory(ffn, *backward) + moved).plus(weights)

    def _rounding(self, traits: LayerTraits) -> Pass:
        """Return the time to round the operands of a layer's products to fp8."""
        forward = backward = 0.0
        for matrix, (columns, rows) in zip(MATRICES, self._shapes().values(), strict=True):
            if traits.sparse and matrix in FEED_FORWARD_MATRICES:
                continue
            given, weight, returned = self.tokens * columns, columns * rows, self.tokens * rows
            forward += given + weight
            backward += returned + weight + (returned + given) * (matrix in traits.trained)
        bytes_of_one = FP8_ROUNDING_BYTES[self.plan.compile]
        return Pass(self.copying(bytes_of_one * forward), self.copying(bytes_of_one * backward))

    def _beside_frozen(self, traits: LayerTraits) -> Pass:
        """Return the time of a layer's adapters: two narrow products each, and adding their output."""
        spec, forward, backward = self.spec, 0.0, 0.0
        if spec.lora is None:
            return NO_TIME
        for matrix, (columns, rows) in zip(MATRICES, self._shapes().values(), strict=True):
            if matrix in traits.adapted:
                products = self._product(columns, spec.lora.lora_rank) + self._product(spec.lora.lora_rank, rows)
                forward += products + self._memory(self.tokens * rows, narrow=3, wide=0)
                backward += 2 * products + self._memory(self.tokens * columns, narrow=3, wide=0)
        return Pass(forward, backward)

    def attention(self) -> Pass:
        """Return the time of one layer's attention: its scores and their products with the values."""
        flops = 4 * self.tokens * self.visible_scores * self.spec.q_size / self.plan.tp
        forward = flops / (self.peak * self.device.attention_share)
        return Pass(forward, BACKWARD_ATTENTION * forward)

    def embedding(self) -> Pass:
        """Return the time to look up every token, and to add their gradients to the table's."""
        looked_up = self._memory(self.tokens * self.spec.hidden_size, narrow=1, wide=2)
        if not self.spec.trains_embedding:
            return Pass(looked_up, 0.0)
        if self.spec.lora and not self.spec.trains_table:
            product = self._product(self.spec.lora.lora_rank, self.spec.hidden_size)
            side = self._memory(self.spec.lora.lora_rank * self.spec.vocab_size / self.plan.tp, narrow=0, wide=4)
            return Pass(looked_up + product, 2 * product + side)
        return Pass(looked_up, looked_up + self._memory(self._table_size, narrow=0, wide=4))

    def head(self) -> Pass:
        """Return the time of the last product and the loss, which computes its gradients in the forward."""
        vocab_size = self.spec.vocab_size // self.plan.tp
        chunk = loss_chunk_tokens(vocab_size, self.spec.hidden_size, self.itemsize)
        num_chunks = -(-self.tokens // chunk)
        product = self._product(self.spec.hidden_size, vocab_size)
        loss = self._memory(self.tokens * vocab_size, *_LOSS_ACCESSES)
        hidden = self._memory(self.tokens * self.spec.hidden_size, narrow=2, wide=0)
        if not self.spec.trains_head:
            narrow = wide = 0.0
            if self.spec.lora and HEAD in self.spec.adapted_tables:
                narrow = self._product(self.spec.hidden_size, self.spec.lora.lora_rank)
                wide = self._product(self.spec.lora.lora_rank, vocab_size)
            return Pass(2 * product + loss + narrow + 3 * wide, hidden + 2 * narrow)
        table = num_chunks * self._memory(self._table_size, *_TABLE_ACCESSES)
        return Pass(3 * product + loss + table, hidden + self._memory(self._table_size, narrow=0, wide=2))

    def optimizer(self, num_parameters: float) -> float:
        """Return the time to clip and update ``num_parameters`` with AdamW, all in fp32."""
        # the norm reads the gradient; clipping reads and writes it; the update reads it and reads and writes three more
        return self._memory(num_parameters, narrow=0, wide=1 + 2 + 7)

    def copying(self, num_bytes: float) -> float:
        """Return the time to read or write ``num_bytes``."""
        return num_bytes / (self.device.memory_bandwidth * MEMORY_SHARE)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Return the columns and rows of a layer's matrices on one rank."""
        spec, tp = self.spec, self.plan.tp
        hidden, queries, keys, ffn = spec.hidden_size, spec.q_size // tp, spec.kv_size // tp, spec.ffn_size // tp
        return {
            "wq": (hidden, queries),
            "wk": (hidden, keys),
            "wv": (hidden, keys),
            "wo": (queries, hidden),
            "w1": (hidden, ffn),
            "w3": (hidden, ffn),
            "w2": (ffn, hidden),
        }  # in the order of MATRICES

    def _product(self, columns: int, rows: int, tokens: float | None = None, peak: float | None = None) -> float:
        """Return the time to multiply the tokens by one matrix; its gradients take twice as long."""
        tokens = self.tokens if tokens is None else tokens
        shortest = min(tokens, columns, rows)
        rate = (peak or self.peak) * self.device.matmul_share * MODEL_SHAPES * shortest / (shortest + HALF_RATE_DIM)
        return 2 * tokens * columns * rows / rate

    def _elementwise(self, traits: LayerTraits) -> Pass:
        """Return the time of one layer outside products and attention."""
        forward, backward = (sum(self._elementwise_parts(backward)) for backward in (False, True))
        if not self.casts:
            return Pass(forward, backward)
        # each weight is read in fp32 and written narrow; its gradient is widened and accumulated
        shapes = self.spec.matrix_shapes
        weights = sum(math.prod(shapes[name]) for name in traits.trained.intersection(shapes)) / self.plan.tp
        return Pass(forward + self._memory(weights, 1, 1), backward + self._memory(weights, 1, 4))

    def _elementwise_parts(self, backward: bool) -> Iterator[float]:
        spec, tp, tokens = self.spec, self.plan.tp, self.tokens
        accesses = _ACCESSES[self.plan.compile, backward]
        stream_tokens = tokens / tp if self.plan.sharded_sequence else tokens
        yield self._memory(stream_tokens * spec.hidden_size, *accesses.stream)
        yield self._memory(tokens * spec.hidden_size, *accesses.whole)
        yield self._memory(tokens * (spec.q_size + spec.kv_size) / tp, *accesses.rotated)
        yield self._memory(tokens * spec.q_size / tp, *accesses.queries)
        yield self._memory(tokens * spec.ffn_size / tp, *accesses.ffn)

    @property
    def _table_size(self) -> float:
        return self.spec.embedding_parameters / self.plan.tp

    def _memory(self, num_elements: float, narrow: int, wide: int) -> float:
        """Return the time to access elements ``narrow`` times in the activations' dtype and ``wide`` times in fp32."""
        return self.copying(num_elements * (narrow * self.itemsize + wide * FP32_BYTES))
