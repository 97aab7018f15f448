"""The layer of a LLaMA model as a program of sizes; read it beside ``models/block.py`` and what that imports.

Adapters, experts, partial training and parallelism change a few of its operations. Python's frames hold arguments and
local variables until they return; ``end`` says so where that makes a tensor live longer than its last use.
"""

from functools import lru_cache
from typing import get_args

from llama_core.config.model_spec import LayerTraits, OfBoth
from llama_core.config.model_weights import ATTENTION_NORM, ATTENTION_POST_NORM, FFN_NORM, FFN_POST_NORM
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import MoE
from llama_core.planning.crossings import rows_of_hops
from llama_core.planning.program.attention import AttentionProgram
from llama_core.planning.program.matrices import COSTLY
from llama_core.planning.program.operations import FP32_BYTES, INT32_BYTES, INT64_BYTES, BothWays, Operation, Size
from llama_core.planning.program.passes import Passes
from llama_core.planning.program.setting import Setting
from llama_core.planning.transfers import Axis

CLAMPED_ACCESSES = (16, 44)
"""How often eager kernels read or write a number to clamp and multiply gate and up, and for their gradients."""
CLAMPED_KERNELS = 7
_SHARED = "shared_experts."
"""Before the names of the matrices of a shared expert."""


class Layer(AttentionProgram):
    """One layer on one rank and microbatch.

    Args:
        spec: the architecture.
        traits: what is sparse, adapted and trained in this layer.
        setting: how it is divided, and which kernels run.
    """

    def __init__(self, spec: ModelSpec, traits: LayerTraits, setting: Setting) -> None:
        super().__init__(spec, traits, setting)
        self.input = self.stream()
        self.output = self.block(self.input)

    # --- the parts of a block

    def block(self, x: int) -> int:
        """Append attention and feed-forward, each added to the residual stream, and return that."""
        spec = self.spec
        added = self.attention(self.norm_before(x, ATTENTION_NORM))
        x = self.add(x, self.norm_after(added, ATTENTION_POST_NORM))
        inputs = self.norm_before(x, FFN_NORM)
        moe = spec.moe if self.traits.sparse else None
        added = self.feed_forward(inputs) if moe is None else self.mixture(inputs, moe)
        return self.add(x, self.norm_after(added, FFN_POST_NORM))

    def norm_before(self, x: int, name: str) -> int:
        """Append the norm before a part of the block, if it has one."""
        return self.norm(x, is_trained=name in self.traits.trained) if self.spec.norms_before else x

    def norm_after(self, x: int, name: str) -> int:
        """Append the norm after a part of the block, if it has one."""
        return self.norm(x, is_trained=name in self.traits.trained) if self.spec.norms_after else x

    def feed_forward(self, x: int, prefix: str = "") -> int:
        """Append a gated feed-forward: ``down(activation(gate x) * up x)``; a prefix tells which one's matrices."""
        whole = self.gather(x)
        hidden = self.to_hidden(whole, prefix)
        out = self.scatter(self.linear(hidden, f"{prefix}down_proj"))
        self.end(x, whole, hidden)
        return out

    def to_hidden(self, x: int, prefix: str = "") -> int:
        """Append the part of a feed-forward before its last matrix; a prefix tells which one's."""
        gate = self.linear(x, f"{prefix}gate_proj")
        up = self.linear(x, f"{prefix}up_proj")
        return self.gated(gate, up)

    def mixture(self, x: int, moe: MoE) -> int:
        """Append experts, and the one that all tokens share, if there is one."""
        if self.setting.folds_experts:
            return self.mixture_of_whole_experts(x, moe)
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

    def mixture_of_whole_experts(self, x: int, moe: MoE) -> int:
        """Append experts of which tensor-parallel ranks have other ones; the one that all tokens share is divided."""
        out = self.routed(x, moe)
        if moe.shared_size:
            out = self.add(out, self.feed_forward(x, _SHARED))
        self.end(x)
        return out

    def routed(self, whole: int, moe: MoE) -> int:
        """Append a router, which sends copies of tokens through some of the experts, and sums their results."""
        hidden = self.spec.hidden_size
        num_tokens = self.sizes[whole].elements // hidden
        copies = num_tokens * moe.experts_per_token
        # every tensor-parallel rank gets a part of the router's gradient, since it routes all tokens or some
        size = Size(hidden * moe.num_experts, self.weight_itemsize)
        router = self.weight(size, is_trained=True, is_partial=self.setting.tp > 1)
        wide = self.cast(whole, FP32_BYTES)
        logits = self.product(wide, router, moe.num_experts)
        if moe.biases:
            product = logits
            logits = self.add(logits, self.vector(moe.num_experts, is_trained=True, is_partial=self.setting.tp > 1))
            self.end(wide, product)
        if moe.balance_bias:
            self.undivided_bytes += FP32_BYTES * moe.num_experts
        chosen, gates = self.choose_experts(logits, copies, moe)
        sums = self.result("log_sum_exp", [logits], Size(num_tokens, FP32_BYTES))
        log_probabilities = self.log_probabilities(logits, sums, moe)
        probabilities = self.result("exp", [log_probabilities], self.sizes[logits])
        # the auxiliary losses join the gates here; their result is a view of the gates
        self.operations.append(Operation("watch", (gates, probabilities, sums), (gates,)))
        gates = self.cast(gates, self.itemsize)
        if self.setting.ep_nodes > 1:
            out = self.run_experts_over_hops(whole, gates, chosen, moe)
            self.end(logits, gates, chosen)
            return out
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
        index = Size(copies, INT64_BYTES)
        if moe.chooses_by_scores:
            # scores of all experts, and these again with biases or without those of other groups
            workspace = BothWays(2 * self.num_bytes[logits], 0)
            _, chosen = self.add_operation("decide", [logits], size, index, workspace=workspace)
        elif moe.gates == "softmax_all":
            _, chosen = self.add_operation("decide", [logits], size, index)
        else:
            best, chosen = self.add_operation("top", [logits], size, index)
        if moe.gates == "softmax_all":
            of_all = self.result("softmax", [logits], self.sizes[logits])
            gates = self.result("pick", [of_all, chosen], size)
        else:
            if moe.chooses_by_scores:
                best = self.result("pick", [logits, chosen], size)
            gates = self.gates(best, moe)
        if moe.gate_scale != 1.0:
            gates = self.result("scale", [gates], size)
        return chosen, gates

    def gates(self, best: int, moe: MoE) -> int:
        """Return the gates of the chosen experts, which follow from their logits alone."""
        size = self.sizes[best]
        if moe.gates == "sigmoid":
            return self.result("sigmoid", [best], size)
        if moe.gates == "sigmoid_chosen":
            best = self.log_sigmoid(best)
        return self.result("softmax", [best], size)

    def log_sigmoid(self, x: int) -> int:
        """Return the logarithm of a sigmoid."""
        size = self.sizes[x]
        negative = self.result("scale", [x], size)
        return self.result("scale", [self.result("softplus", [negative], size)], size)

    def log_probabilities(self, logits: int, sums: int, moe: MoE) -> int:
        """Return the logarithms of what the auxiliary losses take for probabilities of experts."""
        if moe.has_sigmoids:
            logits = self.log_sigmoid(logits)
            sums = self.result("log_sum_exp", [logits], self.sizes[sums])
        return self.result("add", [logits, sums], self.sizes[logits])

    def run_experts(self, tokens: int, copies: int, moe: MoE) -> int:
        """Send sorted tokens through their experts, on this rank or on others."""
        if self.setting.ep == 1:
            return self.experts(tokens, moe)
        arrived = self.exchange_over("ep", tokens)
        order, place = self.sort(arrived, copies)
        results = self.experts(self.result("rearrange", [arrived, order], self.sizes[arrived]), moe)
        returned = self.exchange_over("ep", self.result("rearrange", [results, place], self.sizes[results]))
        self.end(results)
        return returned

    def run_experts_over_hops(self, whole: int, gates: int, chosen: int, moe: MoE) -> int:
        """Send tokens through experts on other nodes, once to each node and once to each rank."""
        setting = self.setting
        per_token = moe.experts_per_token
        own_tokens = self.sizes[whole].elements // self.spec.hidden_size
        rows = rows_of_hops(moe, own_tokens, num_nodes=setting.ep_nodes, num_ranks=setting.ep)
        tokens = whole
        chosen = self.result("decide", [chosen], Size(own_tokens * per_token, INT32_BYTES))
        ways: list[tuple[Axis, int, int, int, int]] = []
        hops: tuple[tuple[Axis, int, int, int], ...] = (
            ("ep_nodes", setting.ep_nodes, own_tokens, rows.to_nodes),
            ("ep_in_node", setting.ep // setting.ep_nodes, rows.to_nodes, rows.to_ranks),
        )
        for axis, places, num_tokens, num_rows in hops:
            if places == 1:
                continue
            row, token = self.slots(chosen, num_tokens, places, num_rows)
            ways.append((axis, row, token, num_tokens, num_rows))
            arrived = self.exchange_over(axis, self.spread(tokens, row, num_tokens, num_rows))
            its_gates = self.exchange_over(axis, self.spread(gates, row, num_tokens, num_rows))
            its_chosen = self.result("decide", [chosen, token], Size(num_rows * per_token, INT32_BYTES))
            self.end(tokens, gates, chosen)
            tokens = arrived
            gates = its_gates
            chosen = its_chosen
        row, token = self.slots(chosen, rows.to_ranks, per_token, rows.to_experts)
        # a part of the sorted slots
        used = self.result("decide", [chosen], self.sizes[row])
        sorted_gates = self.result("pick", [gates, used], Size(rows.to_experts, self.itemsize))
        sorted_tokens = self.spread(tokens, row, rows.to_ranks, rows.to_experts)
        self.end(tokens, gates, chosen)
        if moe.gate_inputs:
            sorted_tokens = self.result("multiply", [sorted_tokens, sorted_gates], self.sizes[sorted_tokens])
        results = self.experts(sorted_tokens, moe)
        if not moe.gate_inputs:
            results = self.result("multiply", [results, sorted_gates], self.sizes[results])
        results = self.sum_rows(results, token, rows.to_ranks, rows.to_experts)
        for axis, _, token, num_tokens, num_rows in reversed(ways):
            results = self.sum_rows(self.exchange_over(axis, results), token, num_tokens, num_rows)
        self.end(*(x for way in ways for x in way[1:3]), sorted_tokens, sorted_gates)
        return results

    def slots(self, chosen: int, num_tokens: int, slots_of_token: int, num_rows: int) -> tuple[int, int]:
        """Sort the used slots of tokens; return the row of each slot, and the token of each row."""
        sizes = Size(num_tokens * slots_of_token, INT64_BYTES), Size(num_rows, INT64_BYTES)
        row, token = self.add_operation("decide", [chosen], *sizes)
        return row, token

    def spread(self, x: int, row: int, num_tokens: int, num_rows: int) -> int:
        """Copy tokens to their rows; the backward sums these."""
        size = self.sizes[x]
        out = size._replace(elements=size.elements // num_tokens * num_rows)
        workspace = BothWays(0, self.held_by_sum(size, out))
        return self.result("rearrange", [x, row], out, workspace=workspace)

    def sum_rows(self, x: int, token: int, num_tokens: int, num_rows: int) -> int:
        """Sum the rows of each token; the backward copies."""
        size = self.sizes[x]
        out = size._replace(elements=size.elements // num_rows * num_tokens)
        return self.result("rearrange", [x, token], out, workspace=BothWays(self.held_by_sum(out, size), 0))

    @staticmethod
    def held_by_sum(tokens: Size, rows: Size) -> int:
        """Return the bytes that a sum of rows holds: these with one of zeros, and sums in fp32."""
        return rows.num_bytes + FP32_BYTES * tokens.elements

    def experts(self, x: int, moe: MoE) -> int:
        """Append a gated feed-forward with the matrices of each row's expert."""
        gate = self.expert_linear(x, "gate_proj", moe)
        up = self.expert_linear(x, "up_proj", moe)
        return self.expert_linear(self.gated(gate, up), "down_proj", moe)

    # --- their modules

    def expert_linear(self, x: int, name: str, moe: MoE) -> int:
        """Multiply every row by the matrix of its expert."""
        inner = self.spec.expert_size // self.setting.tp_of_experts
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
        is_shared = name == "down_proj" and self.setting.tp_of_experts > 1
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

    def sort(self, keys: int, copies: int) -> tuple[int, int]:
        """Sort, and return the order and its inverse."""
        order, place = self.add_operation("decide", [keys], Size(copies, INT64_BYTES), Size(copies, INT64_BYTES))
        return order, place


@lru_cache(maxsize=4096)
def layer_passes(spec: ModelSpec, traits: LayerTraits, setting: Setting, *, follows_trained: bool = True) -> Passes:
    """Return the forward and the backward of a layer; a search asks for the same few again and again."""
    layer = Layer(spec, traits, setting)
    return Passes(layer, follows_trained=follows_trained, splits_backward=setting.splits_backward)
