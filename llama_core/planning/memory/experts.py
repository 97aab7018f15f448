"""The tensors of a layer that has experts in place of its feed-forward.

A token goes to its experts as so many copies, and every expert is taken to have the same number of them. Nothing is
dropped and nothing padded. The router keeps what goes into it, and what the experts return, by which it is graded.

Source: Jiang et al. 2024, arXiv:2401.04088, section 2.1.
"""

import math
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
        # probabilities of all experts; of the chosen ones their sum, their gates, and these once more in the
        # activations' dtype; who they are, and the order of their tokens, there and back
        routing = FP32_BYTES * (moe.num_experts + 1) + copies * (FP32_BYTES + self.itemsize + 3 * INT64_BYTES)
        self.routing = tokens * routing
        self.exchanged = 2 * self.entering if plan.ep > 1 else 0  # what is sent, and what arrives before it is sorted
        if self.put_off:  # inputs and gradients of router and experts
            self.put_off += 3 * (self.ffn - dense_ffn) + 2 * self.entering

        experts = moe.num_experts // plan.ep
        self.ffn_parameters *= experts  # w1, w2 and w3 of all experts are a tensor each
        feed_forward = spec.expert_parameters // plan.tp
        self.layer_parameters += spec.hidden_size * moe.num_experts + (experts - 1) * feed_forward
        self.layer_trained = self.layer_parameters
        # an expert is on fewer ranks than the rest, where expert-parallel ones are among those that shard
        apart = math.gcd(plan.ep, plan.dp_shard)
        self.layer_divided = self.layer_parameters + (apart - 1) * experts * feed_forward

    def layer(self, mode: RecomputeMode = "none") -> int:
        """Return what one layer keeps for its backward."""
        kept = super().layer(mode)
        if mode == "full":
            return kept
        if mode == "selective":  # w1's product in place of the dense one's, and what is not sent a second time
            return kept + self.exchanged
        return kept + self.routing + 2 * self.entering  # the experts' inputs and what they return

    def leaving(self, mode: RecomputeMode) -> int:
        """Return what one layer holds at its fullest at the end of its forward beside what it keeps."""
        # what the experts returned, times their gates
        joined = super().leaving("none") + self.exchanged + self.entering * (2 if mode == "full" else 1)
        if mode != "full":
            return joined
        return max(joined, 3 * self.ffn + self.entering + self.stream + self.whole)

    @property
    def layer_before_w2(self) -> int:
        """What is left of a layer after the backward of the experts' last matrices."""
        return super().layer_before_w2 - self.entering

    @property
    def layer_before_norm(self) -> int:
        """What is left of a layer after the backward of all matrices of its experts."""
        return super().layer_before_norm - 2 * self.entering
