"""LoRA: the product of two narrow matrices beside a frozen one; its row and source are in ``adapters/lora.py``."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from llama_core.config.models import ModelSpec
from llama_core.config.strategy import LoRA
from llama_core.models import pissa
from llama_core.models.layers import Linear, LowRank, TokenEmbedding, add_product, local_part


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

    def product(self, x: Tensor) -> Tensor:
        """Return the sum of the matrix's and the adapter's results, in the dtype of ``x``."""
        out = super().product(x)
        added: Tensor = self.lora_B.added_to(out, self._inner(x))
        return added

    def low_rank(self, x: Tensor) -> LowRank:
        """Return the adapter's addition, as two factors."""
        return LowRank(self._inner(x), self.lora_B.weight)

    def _inner(self, x: Tensor) -> Tensor:
        if self.dropout and self.training:
            x, _ = torch.native_dropout(x, self.dropout, train=True)  # its mask is a byte per element on any device
        inner: Tensor = self.lora_A(x) * self.scale  # scaled where it is narrow
        return inner


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
        # a rank's own part is transposed, since no view of a DTensor can be made in inference mode
        inner = self.look_up(tokens_BS, local_part(self.lora_A.weight).t()).to(self.out_dtype)
        # a rank multiplies only its own tokens by B, so the gradient of B is a partial sum
        whole = local_part(self.lora_B.weight, Partial())
        return add_product(super().forward(tokens_BS), inner * self.scale, whole)


def adapt(
    module: Linear | TokenEmbedding, spec: ModelSpec, lora: LoRA, dtype: torch.dtype
) -> AdaptedLinear | AdaptedEmbedding:
    """Return a matrix or an embedding with an adapter in its place."""
    if isinstance(module, TokenEmbedding):
        return AdaptedEmbedding(module, spec, lora, dtype)
    return AdaptedLinear(module, lora, dtype)


def merge(matrix_OI: Tensor, adapter: Mapping[str, Tensor], lora: LoRA) -> None:
    """Add to a matrix what its adapter adds: ``W + scale * B A``, with PiSSA to what is left of it."""
    if lora.take_principal_part:
        matrix_OI.copy_(pissa.rest(matrix_OI, pissa.principal(matrix_OI, lora), lora))
    matrix_OI.addmm_(adapter["lora_B.weight"], adapter["lora_A.weight"], alpha=lora.scale)
