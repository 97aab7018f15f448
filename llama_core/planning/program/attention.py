"""Attention of a layer as a program of sizes; read it beside ``models/attention.py`` and ``latent_attention.py``."""

from llama_core.config.model_spec import LayerTraits
from llama_core.config.models import ModelSpec
from llama_core.planning.program.matrices import Matrices
from llama_core.planning.program.operations import FP32_BYTES, NOTHING, BothWays, Size
from llama_core.planning.program.setting import Setting
from llama_core.planning.transfers import NO_TRAFFIC, Axis, PassTraffic, Traffic

ROTATION_ACCESSES = 11
"""How often eager kernels read or write a number in fp32 to rotate it: casts, four products, two sums, and a copy."""
ROTATION_KERNELS = 9


class AttentionProgram(Matrices):
    """A layer's attention on one rank and microbatch.

    Args:
        spec: the architecture.
        traits: what is sparse, adapted and trained in this layer.
        setting: how it is divided, and which kernels run.
    """

    def __init__(self, spec: ModelSpec, traits: LayerTraits, setting: Setting) -> None:
        super().__init__(spec, traits, setting)
        self.kernel = setting.kernel(traits.attention)

    def attention(self, x: int) -> int:
        """Append causal self-attention."""
        if self.spec.kv_rank:
            return self.latent_attention(x)
        whole = self.gather(x)
        q, k, v = (self.projection(whole, name) for name in ("q_proj", "k_proj", "v_proj"))
        if self.spec.normalises_heads(rotates=self.traits.rotates):
            q = self.norm_of_heads(q, self.spec.q_norm_size, is_trained="q_norm" in self.traits.trained)
            k = self.norm_of_heads(k, self.spec.k_norm_size, is_trained="k_norm" in self.traits.trained)
        if self.spec.query_factor != 1.0:
            q = self.result("scale", [q], self.sizes[q])
        placed_q, placed_k = self.placed(q, k)
        attended = self.attend(placed_q, placed_k, v)
        out = self.to_stream(attended)
        self.end(x, whole, q, k, v, placed_q, placed_k, attended)
        return out

    def to_stream(self, attended: int) -> int:
        """Append the last matrix of attention."""
        out = self.scatter(self.linear(attended, "o_proj"))
        if self.spec.o_bias:
            is_trained = "o_proj.bias" in self.traits.trained
            is_partial = self.setting.sharded_sequence  # a rank adds it to its part of the sequence
            product = out
            bias = self.vector(self.spec.hidden_size, is_trained=is_trained, is_partial=is_partial)
            out = self.add_bias(product, bias)
            self.end(attended, product)
        return out

    def latent_attention(self, x: int) -> int:
        """Append attention whose keys and values are made from latents."""
        q = self.queries_of_latent(x)
        latent, shared = self.latents(x)
        k, v = self.keys_and_values_of_latent(latent, shared)
        attended = self.attend(q, k, v)
        values = attended
        if self.spec.value_head_dim < self.spec.head_dim:  # the zeros behind them are cut off, which copies them
            values = self.result("cut", [attended], self.of_heads(self.spec.value_head_dim))
        out = self.to_stream(values)
        self.end(x, q, latent, shared, k, v, attended)
        return out

    def of_heads(self, width: int) -> Size:
        """Return the size of ``width`` numbers of each head and token that this rank has."""
        return Size(self.tokens * self.spec.num_heads // self.setting.tp * width, self.itemsize)

    def norm_of_latent(self, x: int, width: int, name: str) -> int:
        """Normalise a latent of every token."""
        is_trained = name in self.traits.trained
        return self.normalise(x, width, is_trained=is_trained, is_partial=self.setting.sharded_sequence)

    def queries_of_latent(self, x: int) -> int:
        """Return queries, made from a latent or at once."""
        spec = self.spec
        if spec.query_rank:
            latent = self.norm_of_latent(self.linear(x, "q_a_proj"), spec.query_rank, "q_a_layernorm")
            product = self.linear(self.gather(latent), "q_b_proj")
        else:
            product = self.linear(self.gather(x), "q_proj")
        q = product
        if spec.query_factor != 1.0:
            q = self.result("scale", [product], self.sizes[product])
        if self.traits.rotates:
            kept, turned = self.split(q, self.of_heads(spec.head_dim - spec.rope_dim), self.of_heads(spec.rope_dim))
            out = self.join(kept, self.rotate(turned))
        else:
            out, _ = self.placed(q, q)
        self.end(product, q)
        return out

    def latents(self, x: int) -> tuple[int, int]:
        """Return the latents of whole tokens, and the part of their keys that heads share."""
        spec = self.spec
        down = self.linear(x, "kv_a_proj_with_mqa")
        tokens = self.setting.stream_tokens
        parts = [Size(tokens * width, self.itemsize) for width in (spec.kv_rank, spec.rope_dim)]
        latent, shared = self.split(down, *parts)
        normed = self.gather(self.norm_of_latent(latent, spec.kv_rank, "kv_a_layernorm"))
        shared = self.gather(shared)
        turned = self.rotate(shared) if self.traits.rotates else shared
        self.end(down, shared)
        return normed, turned

    def keys_and_values_of_latent(self, latent: int, shared: int) -> tuple[int, int]:
        """Return keys and values of all heads, which are as wide as keys."""
        spec = self.spec
        made = self.linear(latent, "kv_b_proj")
        widths = (spec.head_dim - spec.rope_dim, spec.value_head_dim)
        kept, values = self.split(made, *map(self.of_heads, widths))
        # of all heads together it has no bytes, and its gradient is a sum over the heads
        expanded = self.result("expand", [shared], self.of_heads(spec.rope_dim), traffic=NOTHING, num_kernels=0)
        self.num_bytes[expanded] = 0
        k = self.join(kept, expanded)
        values = self.result("pad", [values], self.of_heads(spec.head_dim))
        self.end(made)
        return k, values

    def join(self, kept: int, turned: int) -> int:
        """Put the parts of every head side by side."""
        out = self.of_heads(self.spec.head_dim)
        return self.result("join", [kept, turned], out, traffic=BothWays(2 * out.num_bytes, 0))

    def placed(self, q: int, k: int) -> tuple[int, int]:
        """Rotate queries and keys; in a layer without rotation, scale the queries if they have a temperature."""
        if self.traits.rotates:
            return self.rotate(q), self.rotate(k)
        if not self.spec.query_temperature_scale:
            return q, k
        scaled = self.result("scale", [self.cast(q, FP32_BYTES)], Size(self.sizes[q].elements, FP32_BYTES))
        return self.cast(scaled, self.itemsize), k

    def rotate(self, x: int) -> int:
        """Rotate pairs of numbers in fp32: two halves, their four products with cosines and sines, two sums."""
        own = self.sizes[x].num_bytes
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
        if self.kernel.moves == "ring":
            return self.held_by_ring(queries, keys, sums)
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

    def held_by_ring(self, queries: int, keys: int, sums: int) -> BothWays:
        """Return the same for blocks that go around a ring, on its first rank: see ``parallel/ring.py``.

        There, half of the queries see a block of another rank, and all of its keys.
        """
        widening = FP32_BYTES // self.itemsize
        casts = self.setting.is_mixed_precision
        # one block arrives while another is used; from the third rank on, none of them is this rank's own
        blocks = 2 * keys * min(2, self.setting.cp - 1)
        merged = widening * queries
        part = queries // 2
        first = queries + sums
        other = part + (widening * part if casts else 0) + sums
        forward = 2 * keys + blocks + merged + sums + max(first, other) - queries
        # gradients in fp32 of queries, and of keys and values; others travel, to and from this rank
        own = widening * (queries + 2 * keys)
        travelling = 2 * widening * 2 * keys
        grads = part + 2 * keys
        part_grads = grads + (widening * grads if casts else 0) + widening * 2 * keys
        in_middle = part_grads + (travelling if self.setting.cp > 2 else 0)
        at_end = travelling + (queries + 2 * keys if casts else 0)
        backward = blocks + own + max(in_middle, at_end) - queries - 2 * keys
        return BothWays(forward, backward)

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

    def exchange_over(self, axis: Axis, x: int) -> int:
        """Send tokens to other ranks, and get as many."""
        setting = self.setting
        in_node = setting.ep // setting.ep_nodes
        num_ranks = {"cp": setting.cp, "ep": setting.ep, "ep_nodes": setting.ep_nodes, "ep_in_node": in_node}[axis]
        trip = (Traffic("all_to_all", axis, num_ranks, 1, self.num_bytes[x]),)
        return self.result("exchange", [x], self.sizes[x], sends=PassTraffic(trip, trip))
