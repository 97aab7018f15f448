"""Copies of a rank's fp32 matrices in the dtype of activations, refreshed once a step.

``fully_shard`` gathers weights in that dtype. Where a rank holds them whole, each microbatch would cast them anew, and
keep what it cast for its backward.
"""

import torch
from torch import Tensor

from llama_core.models.layers import BLOCK_MATRICES, Linear, local_part
from llama_core.models.llama import Llama
from llama_core.models.moe import ExpertLinear


class CastWeights:
    """The copies of a rank's trained matrices, which its blocks then read.

    The router has none, because it multiplies in fp32, and adapters have none, because they are small.

    Args:
        model: this rank's part of a model, with memory; its weights may still be undefined.
    """

    def __init__(self, model: Llama) -> None:
        self._weights: list[Tensor] = []
        self.copies: list[Tensor] = []
        """A copy of every trained matrix of a block, or of this rank's part of it."""
        for path, module in model.layers.named_modules():
            if not isinstance(module, Linear | ExpertLinear) or path.rpartition(".")[2] not in BLOCK_MATRICES:
                continue
            weight = local_part(module.weight).detach()
            if module.weight.requires_grad and weight.dtype != model.compute_dtype:
                module.cast_weight = torch.empty_like(weight, dtype=model.compute_dtype)
                self._weights.append(weight)
                self.copies.append(module.cast_weight)

    @torch.no_grad()
    def refresh(self) -> None:
        """Set every copy to its weight. Call it whenever weights have changed."""
        if self.copies:
            torch._foreach_copy_(self.copies, self._weights)
