"""The layer of a LLaMA model as a program of sizes; read it beside ``models/block.py`` and what that imports.

Adapters, experts, partial training and parallelism change a few of its operations. Python's frames hold arguments and
local variables until they return; ``end`` says so where that makes a tensor live longer than its last use.
"""

from functools import lru_cache
from importlib import import_module
from typing import Literal, get_args

from llama_core.config.model_spec import LayerTraits, OfBoth
from llama_core.config.model_weights import ATTENTION_NORM, ATTENTION_POST_NORM, FFN_NORM, FFN_POST_NORM
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import MoE, last_word
from llama_core.planning.program import nf4
from llama_core.planning.program.model import ModelProgram
from llama_core.planning.program.operations import FP32_BYTES, INT64_BYTES, BothWays, Operation, Size
from llama_core.planning.program.passes import Passes
from llama_core.planning.program.setting import Setting
from llama_core.planning.transfers import NO_TRAFFIC, PassTraffic, Traffic

ROTATION_ACCESSES = 11
"""How often eager kernels read or write a number in fp32 to rotate it: casts, four products, two sums, and a copy."""
ROTATION_KERNELS = 9
CLAMPED_ACCESSES = (16, 44)
"""How often eager kernels read or write a number to clamp and multiply gate and up, and for their gradients."""
CLAMPED_KERNELS = 7
KEPT_PRODUCTS = ("wq", "wv", "wo", "w1")
"""Matrices whose products selective recomputation keeps, along with attention's output.

It recomputes those of wk and w3. No backward reads the product of w2.
"""
COSTLY = frozenset({"q_proj", "v_proj", "o_proj", "gate_proj"})
"""Hugging Face's names of ``KEPT_PRODUCTS``."""
_SHARED = "shared_experts."
"""Before the names of the matrices of a shared expert."""


class Layer(ModelProgram):
    """One layer on one rank and microbatch.

    Args:
        spec: the architecture.
        traits: what is sparse, adapted and trained in this layer.
        setting: how it is divided, and which kernels run.
    """

    def __init__(self, spec: ModelSpec, traits: LayerTraits, setting: Setting) -> None:
        super().__init__(spec, setting)
        self.traits = traits
        self.kernel = setting.kernel(traits.attention)

        x = self.input = self.stream()
        added = self.attention(self.norm_before(x, ATTENTION_NORM))
        x = self.add(x, self.norm_after(added, ATTENTION_POST_NORM))
        inputs = self.norm_before(x, FFN_NORM)
        moe = spec.moe if traits.sparse else None
        added = self.feed_forward(inputs) if moe is None else self.mixture(inputs, moe)
        self.output = self.add(x, self.norm_after(added, FFN_POST_NORM))

    # --- the parts of a block

    def norm_before(self, x: int, name: str) -> int:
        """Append the norm before a part of the block, if it has one."""
        return self.norm(x, is_trained=name in self.traits.trained) if self.spec.norms_before else x

    def norm_after(self, x: int, name: str) -> int:
        """Append the norm after a part of the block, if it has one."""
        return self.norm(x, is_trained=name in self.traits.trained) if self.spec.norms_after else x

    def attention(self, x: int) -> int:
        """Append causal self-attention."""
        whole = self.gather(x)
        q, k, v = (self.projection(whole, name) for name in ("q_proj", "k_proj", "v_proj"))
        if self.spec.normalises_heads(rotates=self.traits.rotates):
            q = self.norm_of_heads(q, self.spec.q_norm_size, is_trained="q_norm" in self.traits.trained)
            k = self.norm_of_heads(k, self.spec.k_norm_size, is_trained="k_norm" in self.traits.trained)
        if self.spec.query_factor != 1.0:
            q = self.result("scale", [q], self.sizes[q])
        placed_q, placed_k = self.placed(q, k)
        attended = self.attend(placed_q, placed_k, v)
        out = self.scatter(self.linear(attended, "o_proj"))
        if self.spec.o_bias:
            is_trained = "o_proj.bias" in self.traits.trained
            is_partial = self.setting.sharded_sequence  # a rank adds it to its part of the sequence
            product = out
            bias = self.vector(self.spec.hidden_size, is_trained=is_trained, is_partial=is_partial)
            out = self.add_bias(product, bias)
            self.end(attended, product)
        self.end(x, whole, q, k, v, placed_q, placed_k, attended)
        return out

    def placed(self, q: int, k: int) -> tuple[int, int]:
        """Rotate queries and keys; in a layer without rotation, scale the queries if they have a temperature."""
        if self.traits.rotates:
            return self.rotate(q), self.rotate(k)
        if not self.spec.query_temperature_scale:
            return q, k
        scaled = self.result("scale", [self.cast(q, FP32_BYTES)], Size(self.sizes[q].elements, FP32_BYTES))
        return self.cast(scaled, self.itemsize), k

    def feed_forward(self, x: int) -> int:
        """Append a gated feed-forward: ``down(activation(gate x) * up x)``."""
        whole = self.gather(x)
        hidden = self.to_hidden(whole)
        out = self.scatter(self.linear(hidden, "down_proj"))
        self.end(x, whole, hidden)
        return out

    def to_hidden(self, x: int, prefix: str = "") -> int:
        """Append the part of a feed-forward before its last matrix; a prefix tells which one's."""
        gate = self.linear(x, f"{prefix}gate_proj")
        up = self.linear(x, f"{prefix}up_proj")
        return self.gated(gate, up)

    def mixture(self, x: int, moe: MoE) -> int:
        """Append experts, and the one that all tokens share, if there is one."""
        whole = self.gather(x)
        out = self.routed(whole, moe)
        if moe.shared_size:
            hidden = self.to_hidden(whole, _SHARED)
            shared = self.linear(hidden, f"{_SHARED}down_proj")
            self.end(hidden)
            out = self.add(out, shared)
        out = self.scatter(out)
        self.end(x, whole)
        return out

    def routed(self, whole: int, moe: MoE) -> int:
        """Append a router, which sends copies of every token through some of the experts, and sums their results."""
        hidden = self.spec.hidden_size
        copies = self.tokens * moe.experts_per_token
        # every tensor-parallel rank routes all tokens, and gets a part of the router's gradient
        size = Size(hidden * moe.num_experts, self.weight_itemsize)
        router = self.weight(size, is_trained=True, is_partial=self.setting.tp > 1)
        wide = self.cast(whole, FP32_BYTES)
        logits = self.product(wide, router, moe.num_experts)
        if moe.biases:
            product = logits
            logits = self.add(logits, self.vector(moe.num_experts, is_trained=True, is_partial=self.setting.tp > 1))
            self.end(wide, product)
        chosen, gates = self.choose_experts(logits, copies, moe)
        sums = self.result("log_sum_exp", [logits], Size(self.tokens, FP32_BYTES))
        log_probabilities = self.log_probabilities(logits, sums, moe)
        probabilities = self.result("exp", [log_probabilities], self.sizes[logits])
        # the auxiliary losses join the gates here; their result is a view of the gates
        self.operations.append(Operation("watch", (gates, probabilities, sums), (gates,)))
        gates = self.cast(gates, self.itemsize)
        order, place = self.sort(chosen, copies)
        sorted_tokens = Size(copies * hidden, self.itemsize)
        # the backward puts the gradients of a token's copies side by side before it sums them
        workspace = BothWays(0, sorted_tokens.num_bytes)
        tokens = self.result("rearrange", [whole, place], sorted_tokens, workspace=workspace)
        if moe.gate_inputs:
            sorted_gates = self.result("rearrange", [gates, place], self.sizes[gates])
            tokens = self.result("multiply", [tokens, sorted_gates], self.sizes[tokens])
        sorted_results = self.run_experts(tokens, copies, moe)
        results = self.result("rearrange", [sorted_results, order], self.sizes[tokens])
        if not moe.gate_inputs:
            results = self.result("multiply", [results, gates], self.sizes[results])
        out = self.result("reduce", [results], self.sizes[whole])
        self.end(logits, gates, chosen, order, place, tokens, sorted_results, results)
        return out

    def choose_experts(self, logits: int, copies: int, moe: MoE) -> tuple[int, int]:
        """Return the experts of every token, and their gates."""
        size = Size(copies, FP32_BYTES)
        if moe.gates == "softmax_chosen":
            best, chosen = self.add_operation("top", [logits], size, Size(copies, INT64_BYTES))
            return chosen, self.result("softmax", [best], size)
        if moe.gates == "sigmoid":
            best, chosen = self.add_operation("top", [logits], size, Size(copies, INT64_BYTES))
            return chosen, self.result("sigmoid", [best], size)
        _, chosen = self.add_operation("decide", [logits], size, Size(copies, INT64_BYTES))
        of_all = self.result("softmax", [logits], self.sizes[logits])
        return chosen, self.result("pick", [of_all, chosen], size)

    def log_probabilities(self, logits: int, sums: int, moe: MoE) -> int:
        """Return the logarithms of what the auxiliary losses take for probabilities of experts."""
        size = self.sizes[logits]
        if moe.gates == "sigmoid":
            negative = self.result("scale", [logits], size)
            logits = self.result("scale", [self.result("softplus", [negative], size)], size)
            sums = self.result("log_sum_exp", [logits], self.sizes[sums])
        return self.result("add", [logits, sums], size)

    def run_experts(self, tokens: int, copies: int, moe: MoE) -> int:
        """Send sorted tokens through their experts, on this rank or on others."""
        if self.setting.ep == 1:
            return self.experts(tokens, moe)
        arrived = self.exchange_over("ep", tokens)
        order, place = self.sort(arrived, copies)
        results = self.experts(self.result("rearrange", [arrived, order], self.sizes[arrived]), moe)
        return self.exchange_over("ep", self.result("rearrange", [results, place], self.sizes[results]))

    def experts(self, x: int, moe: MoE) -> int:
        """Append a gated feed-forward with the matrices of each row's expert."""
        gate = self.expert_linear(x, "gate_proj", moe)
        up = self.expert_linear(x, "up_proj", moe)
        return self.expert_linear(self.gated(gate, up), "down_proj", moe)

    # --- their modules

    def linear(self, x: int, name: str) -> int:
        """Multiply by a matrix, as it is or as its adapter changes that."""
        if self.is_packed(name):
            out = nf4.product(self, name, x)
        else:
            columns, rows = self.local_shape(name)
            out = self.product(x, self.matrix(name, columns * rows), rows)
        self.matrix_products.add(out)
        if last_word(name) in COSTLY:
            self.costly.add(out)
        if self.spec.lora is None or name not in self.traits.adapted:
            return out
        adapted: int = import_module(self.spec.lora.kind.program).linear(self, name, x, out)
        return adapted

    def is_packed(self, name: str) -> bool:
        """Return whether a matrix of the block is held in NF4."""
        return self.spec.lora is not None and self.spec.lora.base == "nf4" and name not in self.traits.trained

    def projection(self, x: int, name: str) -> int:
        """Multiply by a matrix that may have a bias."""
        product = self.linear(x, name)
        if not self.spec.qkv_bias:
            return product
        _, rows = self.local_shape(name)
        out = self.add_bias(product, self.vector(rows, is_trained=f"{name}.bias" in self.traits.trained))
        self.end(x, product)
        return out

    def matrix(self, name: str, elements: int) -> int:
        """Return a matrix of the block, on this rank."""
        is_trained = name in self.traits.trained
        has_copy = is_trained and self.setting.keeps_cast_weights and self.setting.is_mixed_precision
        itemsize = self.itemsize if not is_trained or has_copy else self.weight_itemsize
        weight = self.weight(Size(elements, itemsize), is_trained=is_trained)
        if has_copy:
            self.copied.add(weight)
        return weight

    def expert_linear(self, x: int, name: str, moe: MoE) -> int:
        """Multiply every row by the matrix of its expert."""
        inner = self.spec.expert_size // self.setting.tp
        num_experts = moe.num_experts // self.setting.ep
        weight = self.matrix(name, num_experts * self.spec.hidden_size * inner)
        self.of_experts.add(weight)
        if weight not in self.copied and not self.casts(weight, x):
            self.transposed.add(weight)
        outputs = self.spec.hidden_size if name == "down_proj" else inner
        out = self.product(x, weight, outputs, groups=num_experts)
        if name in COSTLY:
            self.costly.add(out)
        return self.add_expert_biases(x, out, outputs, name, num_experts) if moe.biases else out

    def add_expert_biases(self, x: int, product: int, outputs: int, name: str, num_experts: int) -> int:
        """Add the bias of its expert to every row of the product of ``x``; ranks share one that is added to a sum."""
        is_shared = name == "down_proj" and self.setting.tp > 1
        bias = self.vector(num_experts * outputs, is_trained=True, is_partial=is_shared)
        self.of_experts.add(bias)
        if is_shared:
            bias = self.result("scale", [bias], self.sizes[bias])
        rows = self.sizes[product].elements // outputs
        index = BothWays(rows * (INT64_BYTES + FP32_BYTES), 0)
        inputs = [product, self.cast(bias, self.itemsize)]
        out = self.result("add_bias", inputs, self.sizes[product], workspace=index)
        self.end(x, product)
        return out

    def gated(self, gate: int, up: int) -> int:
        """Return ``activation(gate) * up``, or what an activation makes of both."""
        if self.spec.activation in get_args(OfBoth):
            return self.activate_both(gate, up)
        if self.setting.compiles:
            return self.result("gated", [gate, up], self.sizes[gate])
        activated = self.result(self.spec.activation, [gate], self.sizes[gate])
        out = self.result("multiply", [activated, up], self.sizes[gate])
        self.end(gate, up)
        return out

    def activate_both(self, gate: int, up: int) -> int:
        """Append what an activation makes of gate and up at once: a function of our own, or one compiled kernel."""
        size = self.sizes[gate]
        if self.setting.compiles:
            return self.result(self.spec.activation, [gate, up], size)
        held = BothWays(size.num_bytes, 2 * size.num_bytes + 2 * size.elements)  # with a mask each of what is clamped
        traffic = BothWays(*(accesses * size.num_bytes for accesses in CLAMPED_ACCESSES))
        return self.result(
            self.spec.activation, [gate, up], size, workspace=held, traffic=traffic, num_kernels=CLAMPED_KERNELS
        )

    def rotate(self, x: int) -> int:
        """Rotate pairs of numbers in fp32: two halves, their four products with cosines and sines, two sums."""
        own = self.num_bytes[x]
        wide = self.sizes[x].elements * FP32_BYTES
        held = BothWays(2 * wide - own, 2 * wide - own)
        if self.setting.is_mixed_precision:  # the input is cast; a gradient is dropped once it is cast
            held = BothWays(held.forward + wide, held.backward + wide - own)
        moved = 2 * own
        num_kernels = 1
        if not self.setting.compiles:
            moved += ROTATION_ACCESSES * wide
            num_kernels = ROTATION_KERNELS
        traffic = BothWays(moved, moved)
        return self.result("rotate", [x], self.sizes[x], workspace=held, traffic=traffic, num_kernels=num_kernels)

    def attend(self, q: int, k: int, v: int) -> int:
        """Append softmax attention."""
        needs = self.traits.attention
        if self.kernel.holds_scores and (needs.soft_cap or needs.sinks):
            return self.attend_with_own_scores(q, k, v)
        if self.kernel.holds_scores:
            return self.attend_with_all_scores(q, k, v)
        if self.kernel.moves == "exchange":
            parts = [self.to_heads(x) for x in (q, k, v)]
            out = self.to_tokens(self.attend_with_fused(*parts))
            self.end(*parts)
            return out
        return self.attend_with_fused(q, k, v)

    def to_heads(self, x: int) -> int:
        """Exchange this rank's tokens of all heads for all tokens of some heads."""
        arrived = self.exchange_over("cp", self.result("arrange", [x], self.sizes[x]))
        # of one row, what arrives from the ranks is whole as it is
        return arrived if self.setting.rows == 1 else self.result("arrange", [arrived], self.sizes[x])

    def to_tokens(self, x: int) -> int:
        """Exchange them back."""
        sent = x if self.setting.rows == 1 else self.result("arrange", [x], self.sizes[x])
        return self.result("arrange", [self.exchange_over("cp", sent)], self.sizes[x])

    def attend_with_fused(self, q: int, k: int, v: int) -> int:
        """Append attention by a kernel that holds no scores."""
        if self.kernel.moves == "ring":
            self.add_operation("ring", [k, v], sends=self.passed_around(k))
        num_heads = self.spec.num_heads // self.setting.tp
        sums = Size(self.tokens * num_heads, FP32_BYTES)
        moved = 2 * self.num_bytes[q]  # the heads, to the end of a token's row
        traffic = BothWays(moved, moved)
        workspace = self.held_by_kernel(self.num_bytes[q], self.num_bytes[k], sums.num_bytes)
        sinks = []
        if self.traits.attention.sinks:
            sinks = [self.vector(num_heads, is_trained="sinks" in self.traits.trained)]
            traffic = BothWays(*map(sum, zip(traffic, self.moved_by_sinks(q), strict=True)))
            # one after the other
            workspace = BothWays(*map(max, workspace, self.held_by_sinks(q, k, sums.num_bytes)))
        out, sum_of_exponentials = self.add_operation(
            "attention",
            [q, k, v, *sinks],
            self.sizes[q],
            sums,
            workspace=workspace,
            scores=4 * self.sizes[q].elements * self.setting.seq_len,
            share_in_window=self.share_in_window(),
            sends=self.gathered_keys(k) if self.kernel.moves == "gather" else NO_TRAFFIC,
            traffic=traffic,
        )
        self.costly.update((out, sum_of_exponentials))
        if self.kernel.moves == "ring":
            # attention to the block of each other rank has a result of its own, over half of the queries
            result = (self.num_bytes[q] + sums.num_bytes) // 2
            self.costly.add(self.result("decide", [], Size((self.setting.cp - 1) * result, 1)))
        return out

    def share_in_window(self) -> float:
        """Return the share of the causal scores that attention's kernel computes; under a mask it computes all."""
        return self.traits.attention.share_of_causal(self.setting.seq_len) if self.kernel.skips_hidden else 1.0

    def passed_around(self, keys: int) -> PassTraffic:
        """Return the hops of keys and values around a ring; in the backward their fp32 gradients follow."""
        hops = self.setting.cp - 1
        elements = 2 * self.sizes[keys].elements
        blocks = Traffic("send", "cp", 2, 1, elements * self.itemsize).times(hops)
        gradients = Traffic("send", "cp", 2, 1, elements * FP32_BYTES).times(hops)
        return PassTraffic((blocks,), (blocks, gradients))

    def gathered_keys(self, keys: int) -> PassTraffic:
        """Return the gathers of keys and values, which the backward repeats, and the sums of their fp32 gradients."""
        cp = self.setting.cp
        elements = 2 * cp * self.sizes[keys].elements
        gather = Traffic("all_gather", "cp", cp, 2, elements * self.itemsize)
        sums = Traffic("reduce_scatter", "cp", cp, 2, elements * FP32_BYTES)
        return PassTraffic((gather,), (gather, sums))

    def held_by_kernel(self, queries: int, keys: int, sums: int) -> BothWays:
        """Return the bytes that attention's kernel holds beside inputs and outputs."""
        cp = 1 if self.kernel.has_whole_rows else self.setting.cp
        if not self.kernel.skips_hidden:
            return BothWays(0, sums)
        # the keys or values that a rank's queries see
        seen = keys * (2 * cp + 1) // 2 if cp > 1 else keys
        # the kernel's backward makes the gradients of keys and values for every query head, and then sums the heads
        # that share them; it adds up the queries' gradients in fp32
        repeated = seen * queries // keys if queries > keys else 0
        backward = queries * FP32_BYTES // self.itemsize + 2 * repeated + sums + 2 * (seen - keys)
        if cp == 1:
            return BothWays(0, backward)
        # what is gathered: in the forward the last keys or values, and the keys before their rotation
        stream = self.num_bytes[self.input]
        return BothWays((cp + 1) * keys + 2 * seen + stream, backward + 2 * seen)

    def held_by_sinks(self, q: int, k: int, sums: int) -> BothWays:
        """Return what taking the share of a sink holds beside inputs and outputs; see ``models/sinks.py``."""
        own = self.num_bytes[q]
        wide = self.sizes[q].elements * FP32_BYTES
        casts = wide if self.setting.is_mixed_precision else 0
        # the kernel's result, its product with the shares that sinks leave, and these, which are gone before a cast
        shares = 0 if casts or self.setting.compiles else sums
        forward = own + casts + shares
        # the gradient and its product with the result, before there are gradients of queries, keys and values
        return BothWays(forward, wide + casts - own - 2 * self.num_bytes[k])

    def moved_by_sinks(self, q: int) -> BothWays:
        """Return the bytes that its kernels move."""
        own = self.num_bytes[q]
        if self.setting.compiles:
            return BothWays(2 * own, 2 * own)
        casts = self.sizes[q].elements * FP32_BYTES if self.setting.is_mixed_precision else 0
        return BothWays(2 * own + 2 * casts, 4 * own + 4 * casts)

    def attend_with_all_scores(self, q: int, k: int, v: int) -> int:
        """Append attention as torch's math kernel computes it: in fp32, with as many key heads as query heads."""
        wide = Size(self.sizes[q].elements, FP32_BYTES)
        scores = Size(self.tokens * self.setting.seq_len * self.spec.num_heads // self.setting.tp, FP32_BYTES)
        q, k, v = held = [self.cast(x, FP32_BYTES) for x in (q, k, v)]
        q = self.result("scale", [q], wide)
        bias = self.result("decide", [], Size(self.setting.seq_len**2, FP32_BYTES))
        if self.sizes[k].elements < self.sizes[q].elements:
            k = self.result("repeat", [k], wide)
            v = self.result("repeat", [v], wide)
        k = self.result("scale", [k], wide)
        flops = 2 * self.sizes[q].elements * self.setting.seq_len
        masked = self.result("add", [self.result("product", [q, k], scores, scores=flops), bias], scores)
        weights = self.result("softmax", [masked], scores)
        out = self.cast(self.result("product", [weights, v], wide, scores=flops), self.itemsize)
        self.end(*held, q, k, v)
        return out

    def attend_with_own_scores(self, q: int, k: int, v: int) -> int:
        """Append attention with a soft cap or sinks: in fp32, with as many key heads as query heads."""
        needs = self.traits.attention
        seq_len = self.setting.seq_len
        wide = Size(self.sizes[q].elements, FP32_BYTES)
        scores = Size(self.tokens * seq_len * self.spec.num_heads // self.setting.tp, FP32_BYTES)
        flops = 2 * self.sizes[q].elements * seq_len
        if self.sizes[k].elements < self.sizes[q].elements:
            k, v = (self.result("repeat", [self.cast(x, FP32_BYTES)], wide) for x in (k, v))
        else:
            k, v = (self.lay_out(x, FP32_BYTES) for x in (k, v))
        q = self.lay_out(q, FP32_BYTES)
        scaled = self.result("scale", [self.result("product", [q, k], scores, scores=flops)], scores)
        if needs.soft_cap:
            scaled = self.result("scale", [self.result("tanh", [scaled], scores)], scores)
        hidden = [] if self.kernel.told == "mask" else [self.result("decide", [], Size(seq_len**2, FP32_BYTES))]
        masked = self.result("add", [scaled, *hidden], scores)
        weights = self.softmax_with_sinks(masked) if needs.sinks else self.result("softmax", [masked], scores)
        out = self.result("product", [weights, v], wide, scores=flops)
        laid_out = self.lay_out(out, self.itemsize)
        self.end(q, k, v, weights, out)
        return laid_out

    def softmax_with_sinks(self, scores: int) -> int:
        """Append a softmax that leaves a share to the sink of each head."""
        num_heads = self.spec.num_heads // self.setting.tp
        sinks = self.cast(self.vector(num_heads, is_trained="sinks" in self.traits.trained), FP32_BYTES)
        # of each query: the log-sum-exp, by how much it exceeds the sink, and the share that this leaves
        held = BothWays(3 * num_heads * self.tokens * FP32_BYTES, 0)
        return self.result("sink_softmax", [scores, sinks], self.sizes[scores], workspace=held)

    def lay_out(self, x: int, itemsize: int) -> int:
        """Copy a tensor into another order of its dims, and into another dtype if it has not that."""
        if self.sizes[x].itemsize != itemsize:
            return self.cast(x, itemsize)
        return self.result("arrange", [x], self.sizes[x])

    def exchange_over(self, axis: Literal["cp", "ep"], x: int) -> int:
        """Send tokens to other ranks, and get as many."""
        trip = (Traffic("all_to_all", axis, getattr(self.setting, axis), 1, self.num_bytes[x]),)
        return self.result("exchange", [x], self.sizes[x], sends=PassTraffic(trip, trip))

    def sort(self, keys: int, copies: int) -> tuple[int, int]:
        """Sort, and return the order and its inverse."""
        order, place = self.add_operation("decide", [keys], Size(copies, INT64_BYTES), Size(copies, INT64_BYTES))
        return order, place


@lru_cache(maxsize=4096)
def layer_passes(spec: ModelSpec, traits: LayerTraits, setting: Setting, *, follows_trained: bool = True) -> Passes:
    """Return the forward and the backward of a layer; a search asks for the same few again and again."""
    layer = Layer(spec, traits, setting)
    return Passes(layer, follows_trained=follows_trained, splits_backward=setting.splits_backward)
