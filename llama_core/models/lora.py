"""Low-rank adapters: freeze a model, and train small matrices beside some of its matrices.

Source: Hu et al. 2021, arXiv:2106.09685, section 4; names and initial values are PEFT's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_core.config.models import ModelSpec
from llama_core.config.strategy import LoRA
from llama_core.models.hf import matrix_name
from llama_core.models.layers import Linear, LowRank, TokenEmbedding
from llama_core.models.llama import Llama


class AdaptedLinear(Linear):
    """A frozen matrix W with an adapter beside it: ``x @ W.T + scale * dropout(x) @ A.T @ B.T``.

    Args:
        matrix: the matrix to freeze.
        lora: the adapters.
        dtype: dtype of A and B, which are trained.
    """

    def __init__(self, matrix: Linear, lora: LoRA, dtype: torch.dtype) -> None:
        super().__init__(matrix.in_features, matrix.out_features)
        self.weight = matrix.weight.requires_grad_(False)
        self.lora_A = Linear(self.in_features, lora.lora_rank).to(dtype)
        self.lora_B = Linear(lora.lora_rank, self.out_features).to(dtype)
        self.scale, self.dropout = lora.scale, lora.lora_dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the matrix's and the adapter's results, in the dtype of ``x``."""
        out = super().forward(x)
        added: Tensor = self.lora_B(self._narrow(x))
        return out + added

    def beside(self, x: Tensor) -> LowRank:
        """Return the adapter's addition, as two factors."""
        return LowRank(self._narrow(x), self.lora_B.weight)

    def _narrow(self, x: Tensor) -> Tensor:
        if self.dropout and self.training:
            x, _ = torch.native_dropout(x, self.dropout, train=True)  # its mask is a byte per element on any device
        narrow: Tensor = self.lora_A(x) * self.scale  # scaled where it is narrow
        return narrow


class AdaptedEmbedding(TokenEmbedding):
    """A frozen embedding with an adapter beside it: ``table[token] + scale * A.T[token] @ B.T``, without dropout.

    Args:
        table: the embedding to freeze.
        spec: the model.
        lora: the adapters.
        dtype: dtype of A and B, which are trained.
    """

    def __init__(self, table: TokenEmbedding, spec: ModelSpec, lora: LoRA, dtype: torch.dtype) -> None:
        super().__init__(spec, table.out_dtype)
        self.weight = table.weight.requires_grad_(False)
        self.lora_A = Linear(self.num_embeddings, lora.lora_rank).to(dtype)
        self.lora_B = Linear(lora.lora_rank, self.embedding_dim).to(dtype)
        self.scale = lora.scale

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return [B, S, D] in ``out_dtype``."""
        narrow = F.embedding(tokens_BS, self.lora_A.weight.t()).to(self.out_dtype)
        added: Tensor = self.lora_B(narrow * self.scale)
        return super().forward(tokens_BS) + added


def with_adapters(model: Llama) -> Llama:
    """Return ``model``, frozen and with the adapters of its spec; unchanged if the spec has none.

    Frozen parameters are cast to the model's compute dtype; adapters have the dtype that its parameters had.
    """
    lora = model.spec.lora
    if lora is None:
        return model
    dtype = next(model.parameters()).dtype
    model.to(model.compute_dtype).requires_grad_(False)
    for path, module in list(model.named_modules()):
        adapted: nn.Module
        if isinstance(module, Linear) and matrix_name(path) in lora.target_modules:
            adapted = AdaptedLinear(module, lora, dtype)
        elif isinstance(module, TokenEmbedding) and matrix_name(path) in lora.target_modules:
            adapted = AdaptedEmbedding(module, model.spec, lora, dtype)
        else:
            continue
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, adapted)
    return model
