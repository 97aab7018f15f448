"""The matrices of a layer, as they are or as an adapter or NF4 changes them; read it beside ``models/layers.py``."""

from importlib import import_module

from llama_core.config.model_spec import LayerTraits
from llama_core.config.model_weights import UNDIVIDED
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import last_word
from llama_core.planning.program import nf4
from llama_core.planning.program.model import ModelProgram
from llama_core.planning.program.operations import Size
from llama_core.planning.program.setting import Setting

KEPT_PRODUCTS = ("wq", "wv", "wq_a", "wkv_a", "wo", "w1")
"""Matrices whose products selective recomputation keeps, along with attention's output.

It recomputes those of wk and w3, and what is made from latents, which are narrow (DeepSeek-AI 2024, arXiv:2412.19437,
section 3.2.3). No backward reads the product of w2.
"""
COSTLY = frozenset({"q_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj"})
"""Hugging Face's names of ``KEPT_PRODUCTS``."""


class Matrices(ModelProgram):
    """A part of a layer on one rank and microbatch.

    Args:
        spec: the architecture.
        traits: what is sparse, adapted and trained in this layer.
        setting: how it is divided, and which kernels run.
    """

    def __init__(self, spec: ModelSpec, traits: LayerTraits, setting: Setting) -> None:
        super().__init__(spec, setting)
        self.traits = traits

    def linear(self, x: int, name: str) -> int:
        """Multiply by a matrix, as it is or as its adapter changes that."""
        if self.is_packed(name):
            out = nf4.product(self, name, x)
        else:
            columns, rows = self.local_shape(name)
            # of one that is whole on every rank, each has the gradient from the tokens that it has
            is_partial = name in UNDIVIDED and self.setting.sharded_sequence
            out = self.product(x, self.matrix(name, columns * rows, is_partial=is_partial), rows)
        self.matrix_products.add(out)
        if last_word(name) in COSTLY:
            self.costly.add(out)
        if self.spec.lora is None or name not in self.traits.adapted:
            return out
        adapted: int = import_module(self.spec.lora.kind.program).linear(self, name, x, out)
        return adapted

    def is_packed(self, name: str) -> bool:
        """Return whether a matrix of the block is held in NF4."""
        return self.spec.lora is not None and self.spec.lora.base == "nf4" and name not in self.traits.trained

    def projection(self, x: int, name: str) -> int:
        """Multiply by a matrix that may have a bias."""
        product = self.linear(x, name)
        if not self.spec.qkv_bias:
            return product
        _, rows = self.local_shape(name)
        out = self.add_bias(product, self.vector(rows, is_trained=f"{name}.bias" in self.traits.trained))
        self.end(x, product)
        return out

    def matrix(self, name: str, elements: int, *, is_partial: bool = False) -> int:
        """Return a matrix of the block, on this rank."""
        is_trained = name in self.traits.trained
        has_copy = is_trained and self.setting.keeps_cast_weights and self.setting.is_mixed_precision
        itemsize = self.itemsize if not is_trained or has_copy else self.weight_itemsize
        weight = self.weight(Size(elements, itemsize), is_trained=is_trained, is_partial=is_partial)
        if has_copy:
            self.copied.add(weight)
        return weight
