"""Low-rank adapters: a model is frozen, and beside some of its matrices small ones are trained.

Source: Hu et al. 2021, arXiv:2106.09685, section 4; names and initial values are PEFT's.
"""

import torch
from torch import Tensor

from llama_core.config.strategy import LoRA
from llama_core.models.hf import matrix_name
from llama_core.models.layers import Linear
from llama_core.models.llama import Llama


class AdaptedLinear(Linear):
    """A frozen matrix W with an adapter beside it: ``x @ W.T + scale * dropout(x) @ A.T @ B.T``.

    Args:
        matrix: the matrix to be frozen.
        lora: the adapters.
        dtype: of A and B, which are trained.
    """

    def __init__(self, matrix: Linear, lora: LoRA, dtype: torch.dtype) -> None:
        super().__init__(matrix.in_features, matrix.out_features)
        self.weight = matrix.weight.requires_grad_(False)
        self.lora_A = Linear(self.in_features, lora.lora_rank).to(dtype)
        self.lora_B = Linear(lora.lora_rank, self.out_features).to(dtype)
        self.scale, self.dropout = lora.scale, lora.lora_dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of what the matrix and its adapter return, in the dtype of ``x``."""
        out = super().forward(x)
        if self.dropout and self.training:
            x, _ = torch.native_dropout(x, self.dropout, train=True)  # its mask is a byte per element on any device
        added: Tensor = self.lora_B(self.lora_A(x) * self.scale)  # scaled where it is narrow
        return out + added


def with_adapters(model: Llama) -> Llama:
    """Return ``model``, frozen and with the adapters that its spec has, if it has any.

    What is frozen is held in the dtype that the model computes in; adapters have the dtype of its parameters.
    """
    lora = model.spec.lora
    if lora is None:
        return model
    dtype = next(model.parameters()).dtype
    model.to(model.compute_dtype).requires_grad_(False)
    for path, module in list(model.layers.named_modules(prefix="layers")):
        if isinstance(module, Linear) and matrix_name(path) in lora.target_modules:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, AdaptedLinear(module, lora, dtype))
    return model
