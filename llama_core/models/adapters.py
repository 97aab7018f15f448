"""What a kind of adapter computes: the module of an adapted matrix, and the matrix that it is merged into."""

# Shape suffixes: I columns of a matrix, O its rows

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor, nn

from llama_core.adapters.traits import AdapterType
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import LoRA
from llama_core.models.layers import Linear, TokenEmbedding
from llama_core.weight_rows import Weight


class AdapterMethod(Protocol):
    """What the module of a kind of adapter has."""

    def adapt(self, module: Linear | TokenEmbedding, spec: ModelSpec, lora: LoRA, dtype: torch.dtype) -> nn.Module:
        """Return what takes the place of a module: a subclass of its class, with its weight and the adapter's.

        Args:
            module: holds the matrix to freeze, under the name ``weight``.
            spec: the model.
            lora: the adapters.
            dtype: dtype of the weights that are trained.
        """

    def merge(self, matrix_OI: Tensor, adapter: Mapping[str, Tensor], lora: LoRA) -> None:
        """Change a matrix in place to one that computes what it computes with its adapter.

        Args:
            matrix_OI: the matrix, in fp32; of the embedding, a matrix over tokens.
            adapter: the weights of its adapter in fp32, by the names of their rows.
            lora: the adapters.
        """

    def begin(self, weight: Weight, matrix_OI: Tensor) -> Tensor:
        """Return the initial values of a weight that begins ``adapted``; needed only if one does.

        Args:
            weight: the row of the weight.
            matrix_OI: the whole matrix that is adapted, in fp32 or wider.
        """


def method_of(kind: AdapterType) -> AdapterMethod:
    """Return the functions of a kind of adapter."""
    method: AdapterMethod = import_module(kind.module)
    return method
