"""The tensors of a layer that has experts in place of its feed-forward.

A token is copied to each of its experts, and the load is assumed balanced, without drops or padding. The router keeps
its input in fp32, and the output of the experts, which its gradient needs.

Source: Jiang et al. 2024, arXiv:2401.04088, section 2.1.
"""

from typing import Any

from llama_core.config.models import ModelSpec
from llama_core.config.run import RecomputeMode
from llama_core.config.strategy import MoE
from llama_core.planning.memory.tensors import FP32_BYTES, INT64_BYTES, Tensors
from llama_core.planning.plan import ParallelPlan


class ExpertTensors(Tensors):
    """The sizes of one layer that has experts in place of its feed-forward.

    Args:
        moe: the experts.
        spec, plan, sizes: as in ``Tensors``.
    """

    def __init__(self, moe: MoE, spec: ModelSpec, plan: ParallelPlan, **sizes: Any) -> None:
        super().__init__(spec, plan, **sizes)
        copies, tokens = moe.experts_per_token, self.whole // (spec.hidden_size * self.itemsize)
        dense_ffn = self.ffn
        self.ffn *= copies
        self.entering = copies * self.whole
        # the router's input, which is also fp32 in 16 bits, in place of the input of a feed-forward
        self.widened = tokens * spec.hidden_size * FP32_BYTES - self.whole
        # logits and probabilities of all experts, and their log-sum-exp; for the chosen ones the gates, the gates again
        # in the activations' dtype, their indices, and the order of their tokens, there and back, here and elsewhere
        ordered = (3 + 2 * (plan.ep > 1)) * INT64_BYTES
        routing = FP32_BYTES * (2 * moe.num_experts + 1) + copies * (FP32_BYTES + self.itemsize * self.narrow + ordered)
        # the router is not cast as other weights are, but widened if it was gathered in the activations' dtype
        copy = FP32_BYTES * (self.narrow and plan.uses_fully_shard) - self.itemsize * self.casts
        self.routing = tokens * routing + copy * spec.hidden_size * moe.num_experts
        self.exchanged = 2 * self.entering if plan.ep > 1 else 0  # tokens sent, and tokens received before sorting
        if self.put_off:  # inputs and gradients of router and experts
            router = tokens * FP32_BYTES * (spec.hidden_size + moe.num_experts)
            self.put_off += 3 * (self.ffn - dense_ffn) + 2 * (self.entering - self.stream) + router

        experts = moe.num_experts // plan.ep
        self.ffn_parameters *= experts  # w1, w2 and w3 of all experts are one tensor each
        feed_forward = spec.expert_parameters // plan.tp
        more = spec.hidden_size * moe.num_experts + (experts - 1) * feed_forward
        self.layer_parameters += more
        self.layer_trained += more
        self.layer_divided = self.layer_parameters + (plan.fewer_expert_shards - 1) * experts * feed_forward

    def layer(self, mode: RecomputeMode = "none") -> int:
        """Return the bytes one layer keeps for its backward."""
        kept = super().layer(mode)
        if mode == "full":
            return kept
        if mode == "selective":  # w1's product in place of the dense one's; tokens are sent again
            return kept
        return kept + self.widened + self.routing + 2 * self.entering  # the inputs and outputs of the experts

    def leaving(self, mode: RecomputeMode) -> int:
        """Return the most bytes one layer holds at the end of its forward on top of those it keeps."""
        # the experts' outputs, times their gates
        joined = super().leaving("none") + self.exchanged + self.entering * (2 if mode == "full" else 1)
        if mode != "full":
            return joined
        return max(joined, 3 * self.ffn + self.entering + self.stream + self.whole)

    @property
    def layer_before_w2(self) -> int:
        """Bytes left of a layer after the backward of the experts' last matrices."""
        return super().layer_before_w2 - self.entering

    @property
    def layer_before_norm(self) -> int:
        """Bytes left of a layer after the backward of all matrices of its experts."""
        return super().layer_before_norm - 2 * self.entering
