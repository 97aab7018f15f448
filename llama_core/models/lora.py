"""Low-rank adapters: freeze a model, or most of it, and train small matrices beside some of its matrices.

Source: Hu et al. 2021, arXiv:2106.09685, section 4; names and initial values are PEFT's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_core.config.models import ModelSpec
from llama_core.config.strategy import LoRA
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
        self.scale = lora.scale
        self.dropout = lora.lora_dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the matrix's and the adapter's results, in the dtype of ``x``."""
        out = super().forward(x)
        added: Tensor = self.lora_B.added_to(out, self._narrow(x))
        return added

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
        added: Tensor = self.lora_B.added_to(super().forward(tokens_BS), narrow * self.scale)
        return added


def with_adapters(model: Llama) -> Llama:
    """Return ``model``, frozen and with the adapters of its spec; unchanged if the spec has none.

    Parameters that the spec trains in full stay as they are. Frozen ones are cast to the model's compute dtype, and
    adapters have the dtype that they had.
    """
    spec = model.spec
    lora = model.spec.lora
    if lora is None:
        return model
    dtype = next(model.parameters()).dtype
    for name, parameter in model.named_parameters():
        if name not in spec.trained_in_full:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(model.compute_dtype)
    for path, module in list(model.named_modules()):
        adapted: nn.Module
        if f"{path}.weight" not in spec.adapted:
            continue
        if isinstance(module, TokenEmbedding):
            adapted = AdaptedEmbedding(module, spec, lora, dtype)
        elif isinstance(module, Linear):
            adapted = AdaptedLinear(module, lora, dtype)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, adapted)
    return model
