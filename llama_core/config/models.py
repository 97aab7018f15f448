"""The models: their weights, one row each, and every LLaMA variant with its sizes and exact parameter count."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal, NamedTuple

from llama_core.config.rope import Llama3Scaling, RopeScaling
from llama_core.config.strategy import EMBEDDING, FEED_FORWARD_MATRICES, HEAD, LoRA, MoE
from llama_core.errors import ConfigError, did_you_mean
from llama_core.units import format_count

Family = Literal["llama", "llama1", "llama2", "llama3", "code_llama"]
"""The generation of a variant; ``llama`` for a model from a folder, whose generation is unknown."""

LONGEST_DEFAULT = 8192
"""Upper limit on the default sequence length of a model from a folder, in tokens."""


Size = Literal["hidden_size", "q_size", "kv_size", "ffn_size", "vocab_size", "num_experts"]
"""A size of a model: the attribute of ``ModelSpec`` that says how large it is."""
Division = Literal["vocabulary", "outputs", "inputs", "stream", "router"]
"""How tensor-parallel ranks divide a weight.

* vocabulary: a table, by its rows
* outputs: a matrix, by its rows; each rank computes some of the outputs
* inputs: a matrix, by its columns; each rank has some of the inputs, and the ranks sum up what they compute
* stream: not at all; it is applied to the residual stream
* router: not at all; it is applied to whole tokens, but gets only a part of its gradient
"""
Beginning = Literal["ones", "normal", "residual"]
"""Initial values: ones, normal, or normal and smaller the deeper the model, for what writes to the residual stream."""


@dataclass(frozen=True)
class Weight:
    """A weight of the model, or one that every layer has."""

    name: str
    """Our name; in a layer, the part after its number."""
    theirs: str
    """Hugging Face's name, likewise; ``{}`` stands for the number of an expert, each of which has a tensor there."""
    shape: tuple[Size, ...]
    """Rows and columns of a matrix, the length of a vector; experts come first."""
    divided: Division
    begins: Beginning = "normal"
    decayed: bool = True
    """Whether it is subject to weight decay."""


# fmt: off
_EMBEDDING = Weight("tok_embeddings.weight", "model.embed_tokens.weight", ("vocab_size", "hidden_size"), "vocabulary")
_FINAL_NORM = Weight("norm.weight", "model.norm.weight", ("hidden_size",), "stream", "ones", decayed=False)
_HEAD = Weight("output.weight", "lm_head.weight", ("vocab_size", "hidden_size"), "vocabulary")
_ATTENTION = (
    Weight("attention_norm.weight", "input_layernorm.weight", ("hidden_size",), "stream", "ones", decayed=False),
    Weight("attention.wq.weight", "self_attn.q_proj.weight", ("q_size", "hidden_size"), "outputs"),
    Weight("attention.wk.weight", "self_attn.k_proj.weight", ("kv_size", "hidden_size"), "outputs"),
    Weight("attention.wv.weight", "self_attn.v_proj.weight", ("kv_size", "hidden_size"), "outputs"),
    Weight("attention.wo.weight", "self_attn.o_proj.weight", ("hidden_size", "q_size"), "inputs", "residual"),
    Weight("ffn_norm.weight", "post_attention_layernorm.weight", ("hidden_size",), "stream", "ones", decayed=False),
)
_FEED_FORWARD = (
    Weight("feed_forward.w1.weight", "mlp.gate_proj.weight", ("ffn_size", "hidden_size"), "outputs"),
    Weight("feed_forward.w2.weight", "mlp.down_proj.weight", ("hidden_size", "ffn_size"), "inputs", "residual"),
    Weight("feed_forward.w3.weight", "mlp.up_proj.weight", ("ffn_size", "hidden_size"), "outputs"),
)
_MIXTURE = (
    Weight("feed_forward.router.weight", "block_sparse_moe.gate.weight", ("num_experts", "hidden_size"), "router"),
    Weight("feed_forward.experts.w1.weight", "block_sparse_moe.experts.{}.w1.weight", ("num_experts", "ffn_size", "hidden_size"), "outputs"),
    Weight("feed_forward.experts.w2.weight", "block_sparse_moe.experts.{}.w2.weight", ("num_experts", "hidden_size", "ffn_size"), "inputs", "residual"),
    Weight("feed_forward.experts.w3.weight", "block_sparse_moe.experts.{}.w3.weight", ("num_experts", "ffn_size", "hidden_size"), "outputs"),
)
# fmt: on
_IN_LAYERS = {weight.name: weight for weight in (*_ATTENTION, *_FEED_FORWARD, *_MIXTURE)}
_OUTSIDE_LAYERS = {weight.name: weight for weight in (_EMBEDDING, _FINAL_NORM, _HEAD)}
_OF_EXPERTS = frozenset(weight.name for weight in _MIXTURE)


def weight_of(name: str) -> Weight:
    """Return the row of the parameter that we call ``name``, such as ``'layers.0.attention.wq.weight'``.

    Raises:
        NotImplementedError: if it has none. Neither do the weights of adapters.
    """
    row = _find_weight(name)
    if row is None:
        raise NotImplementedError(f"{name} has no row among the weights in config/models.py")
    return row


def is_decayed(name: str) -> bool:
    """Return whether a parameter is subject to weight decay, as those of adapters are, which have no row."""
    row = _find_weight(name)
    return row is None or row.decayed


def _find_weight(name: str) -> Weight | None:
    return _OUTSIDE_LAYERS.get(name) or _IN_LAYERS.get(_in_layer(name))


def _in_layer(name: str) -> str:
    """Return the part of a weight's name after the number of its layer."""
    return name.split(".", 2)[-1]


def hugging_face_name(name: str) -> str:
    """Return Hugging Face's name for our parameter ``name``, such as ``'layers.0.attention.wq.weight'``.

    For a tensor of experts, it has ``{}`` in place of the expert's number.
    """
    theirs = weight_of(name).theirs
    return theirs if name in _OUTSIDE_LAYERS else f"model.layers.{name.split('.')[1]}.{theirs}"


def matrix_name(path: str) -> str:
    """Return Hugging Face's name for our matrix within its layer: ``q_proj`` for ``'layers.0.attention.wq'``."""
    return hugging_face_name(f"{path}.weight").split(".")[-2]


def matches(name: str, pattern: str) -> bool:
    """Return whether a glob pattern matches our name or Hugging Face's of a parameter, with or without ``.weight``."""
    names = (name, hugging_face_name(name))
    return any(fnmatchcase(one, pattern) or fnmatchcase(one.removesuffix(".weight"), pattern) for one in names)


def is_of_experts(name: str) -> bool:
    """Return whether a parameter belongs to a mixture: its router, or a matrix of its experts."""
    return name not in _OUTSIDE_LAYERS and _in_layer(name) in _OF_EXPERTS


ATTENTION_NORM, FFN_NORM = "input_layernorm", "post_attention_layernorm"
"""The norms of a layer, as Hugging Face calls them."""


class LayerTraits(NamedTuple):
    """How one layer differs from others of its model, with Hugging Face's names for its parts."""

    sparse: bool
    """Whether it has experts in place of its feed-forward."""
    adapted: frozenset[str]
    """Matrices with an adapter; they are frozen."""
    trained: frozenset[str]
    """Matrices and norms trained in full. Experts stand for the feed-forward's matrices, and have a router besides."""


@dataclass(frozen=True)
class ModelSpec:
    """The architecture of one model: enough to build it, count its parameters and plan for it.

    Raises:
        ConfigError: if ``moe`` names layers that do not exist.
    """

    name: str
    family: Family
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    max_context: int
    """Longest sequence the position embedding was made for, in tokens."""
    default_seq_len: int
    """Default sequence length of training, in tokens."""
    tied_embeddings: bool = False
    rope_scaling: RopeScaling | None = None
    instruct: bool = False
    """Whether the model is trained on conversations: same sizes, but another template and loss mask."""
    lora: LoRA | None = None
    """Adapters to train, over weights that are frozen but for the experts and ``trainable``; None without adapters."""
    moe: MoE | None = None
    """Experts that replace the feed-forward of some or all layers; None without experts."""
    trainable: tuple[str, ...] = ()
    """Glob patterns of the weights that are trained in full beside adapters; without adapters, all weights are."""

    def __post_init__(self) -> None:
        problems = list(self.moe.misfits(self.name, self.num_layers)) if self.moe else []
        if problems:
            raise ConfigError(*problems)

    @property
    def q_size(self) -> int:
        """Width of the queries of one layer."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or of the values) of one layer."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding; an untied head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has some; 1 without experts."""
        return self.moe.num_experts if self.moe else 1

    def shape_of(self, weight: Weight) -> tuple[int, ...]:
        """Return the shape of a weight in this model."""
        return tuple(getattr(self, size) for size in weight.shape)

    def _weights_of_layer(self, *, sparse: bool) -> tuple[Weight, ...]:
        """Return the weights of a layer with experts, or of a dense one, in the model's order."""
        return (*_ATTENTION, *(_MIXTURE if sparse else _FEED_FORWARD))

    def _weights(self) -> Iterator[tuple[str, Weight]]:
        """Yield every weight of the model with its whole name, without adapters or a tied head, in the model's order."""
        yield _EMBEDDING.name, _EMBEDDING
        for layer in range(self.num_layers):
            for weight in self._weights_of_layer(sparse=self.has_experts(layer)):
                yield f"layers.{layer}.{weight.name}", weight
        yield _FINAL_NORM.name, _FINAL_NORM
        if not self.tied_embeddings:
            yield _HEAD.name, _HEAD

    @cached_property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by our names, without adapters or a tied head."""
        return {name: self.shape_of(weight) for name, weight in self._weights()}

    @cached_property
    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Columns and rows of each matrix of a dense layer, by Hugging Face's names."""
        shapes: dict[str, tuple[int, int]] = {}
        for weight in self._weights_of_layer(sparse=False):
            match self.shape_of(weight):
                case rows, columns:
                    shapes[weight.theirs.split(".")[-2]] = (columns, rows)
        return shapes

    @property
    def target_shapes(self) -> dict[str, tuple[int, int]]:
        """Columns and rows of every matrix that can have an adapter; the embedding is a matrix over tokens."""
        tables = {EMBEDDING: (self.vocab_size, self.hidden_size), HEAD: (self.hidden_size, self.vocab_size)}
        return self.matrix_shapes | tables

    @cached_property
    def layer_matmul_parameters(self) -> int:
        """Parameters of one dense layer that are multiplied with activations: attention and feed-forward matrices."""
        return sum(map(math.prod, self.matrix_shapes.values()))

    @cached_property
    def layer_parameters(self) -> int:
        """All parameters of one dense layer, without adapters."""
        return sum(math.prod(self.shape_of(weight)) for weight in self._weights_of_layer(sparse=False))

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of one feed-forward: that of a dense layer, or one expert."""
        return 3 * self.hidden_size * self.ffn_size

    @cached_property
    def trained_in_full(self) -> frozenset[str]:
        """Names of the parameters that are trained themselves: all, or experts and ``trainable`` beside adapters."""
        return frozenset(
            name
            for name in self.parameter_shapes
            if self.lora is None or is_of_experts(name) or any(matches(name, pattern) for pattern in self.trainable)
        )

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Names of the matrices that have an adapter: the targets that are not trained in full."""
        targets = self.lora.target_modules if self.lora else ()
        frozen = self.parameter_shapes.keys() - self.trained_in_full
        return frozenset(name for name in frozen if matrix_name(name.removesuffix(".weight")) in targets)

    @cached_property
    def layers(self) -> tuple[LayerTraits, ...]:
        """The traits of every layer; equal ones are one object."""
        adapted = _by_layer(self.adapted, self.num_layers)
        trained = _by_layer(self.trained_in_full, self.num_layers)
        seen: dict[LayerTraits, LayerTraits] = {}
        found = []
        for layer in range(self.num_layers):
            sparse = self.has_experts(layer)
            whole = trained[layer] | frozenset(FEED_FORWARD_MATRICES if sparse else ())
            traits = LayerTraits(sparse, adapted[layer], whole)
            found.append(seen.setdefault(traits, traits))
        return tuple(found)

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding, or an adapter on it, gets gradients."""
        return _EMBEDDING.name in self.trained_in_full or _EMBEDDING.name in self.adapted

    @property
    def trains_table(self) -> bool:
        """Whether the embedding is trained in full."""
        return _EMBEDDING.name in self.trained_in_full

    @property
    def trains_head(self) -> bool:
        """Whether the head, or an embedding in its place, is trained in full."""
        return (_EMBEDDING.name if self.tied_embeddings else _HEAD.name) in self.trained_in_full

    @property
    def trains_final_norm(self) -> bool:
        """Whether the norm before the head is trained."""
        return _FINAL_NORM.name in self.trained_in_full

    @property
    def adapted_tables(self) -> frozenset[str]:
        """The matrices outside the layers that have an adapter: ``embed_tokens``, ``lm_head``, both or none."""
        names = {_EMBEDDING.name: EMBEDDING, _HEAD.name: HEAD}
        return frozenset(names[name] for name in self.adapted.intersection(names))

    @property
    def num_adapter_parameters(self) -> int:
        """Parameters of all adapters."""
        targets = [*self.adapted_tables, *(matrix for layer in self.layers for matrix in layer.adapted)]
        return sum(self.lora.lora_rank * sum(self.target_shapes[matrix]) for matrix in targets) if self.lora else 0

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts in place of its feed-forward."""
        return self.moe is not None and self.moe.is_sparse(layer)

    def active_parameters(self, layer: int) -> int:
        """Return the parameters of a layer that one token uses, without adapters."""
        if self.moe is None or not self.has_experts(layer):
            return self.layer_parameters
        router = self.hidden_size * self.moe.num_experts
        return self.layer_parameters + router + (self.moe.experts_per_token - 1) * self.expert_parameters

    @property
    def num_sparse_layers(self) -> int:
        """Layers that have experts."""
        return sum(map(self.has_experts, range(self.num_layers))) if self.moe else 0

    @property
    def num_parameters(self) -> int:
        """All parameters of the model, adapters and experts included; a tied head counts once."""
        return sum(map(math.prod, self.parameter_shapes.values())) + self.num_adapter_parameters

    @property
    def num_trainable_parameters(self) -> int:
        """Parameters that get gradients and are updated: all or, with adapters, these and what is trained in full."""
        return self.num_adapter_parameters + self.num_trained_in_full if self.lora else self.num_parameters

    @property
    def num_trained_in_full(self) -> int:
        """Parameters that are trained themselves: all but adapters and frozen ones."""
        return sum(math.prod(self.parameter_shapes[name]) for name in self.trained_in_full)

    @property
    def num_frozen_parameters(self) -> int:
        """Parameters that get no gradients."""
        return self.num_parameters - self.num_trainable_parameters

    @property
    def parameter_counts(self) -> str:
        """Which parameters are trained and how many, as a phrase."""
        if self.lora is None:
            return "all trained"
        whole = f"{format_count(self.num_trained_in_full)} trained in full, " if self.num_trained_in_full else ""
        adapters = format_count(self.num_adapter_parameters)
        frozen = format_count(self.num_frozen_parameters)
        return f"{adapters} in adapters, {whole}{frozen} frozen"

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all except the experts that it is not routed to."""
        idle = self.moe.num_experts - self.moe.experts_per_token if self.moe else 0
        return self.num_parameters - self.num_sparse_layers * idle * self.expert_parameters

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with: all layers and the head, but not the embedding look-up.

        The router and the experts that a token is routed to count. Adapters do not: see ``matmul_flops_per_token``.
        """
        dense = self.num_layers * self.layer_matmul_parameters + self.embedding_parameters
        return dense + self._beside_one_expert(self.moe.experts_per_token if self.moe else 1)

    @property
    def matmul_flops_per_token(self) -> int:
        """FLOPs of a token's products with parameters, forward and backward: 2 per parameter and product.

        A trained parameter takes part in three products. A frozen one has no gradient and takes part in two. For an
        adapter on the embedding, A is a look-up and counts no FLOPs.
        """
        adapters = self.num_adapter_parameters
        if self.lora and EMBEDDING in self.adapted_tables:
            adapters -= self.lora.lora_rank * self.vocab_size
        return 4 * self.num_matmul_parameters + 2 * self._trained_matmul_parameters + 6 * adapters

    @property
    def _trained_matmul_parameters(self) -> int:
        """Those of ``num_matmul_parameters`` that are trained in full."""
        if self.lora is None:
            return self.num_matmul_parameters
        total = self.embedding_parameters if self.trains_head else 0
        for layer in self.layers:
            copies = self.moe.experts_per_token if self.moe and layer.sparse else 1
            for matrix in layer.trained.intersection(self.matrix_shapes):
                total += math.prod(self.matrix_shapes[matrix]) * (copies if matrix in FEED_FORWARD_MATRICES else 1)
            total += self.hidden_size * self.moe.num_experts if self.moe and layer.sparse else 0
        return total

    def _beside_one_expert(self, num_experts: int) -> int:
        """Return the parameters that experts add to dense layers: routers, and ``num_experts`` less one per layer."""
        router = self.hidden_size * self.moe.num_experts if self.moe else 0
        return self.num_sparse_layers * ((num_experts - 1) * self.expert_parameters + router)


def _by_layer(names: frozenset[str], num_layers: int) -> list[frozenset[str]]:
    """Return the matrices and norms of each layer among some parameters, by Hugging Face's names."""
    found: list[set[str]] = [set() for _ in range(num_layers)]
    for name in names:
        if name.startswith("layers.") and not is_of_experts(name):
            found[int(name.split(".")[1])].add(matrix_name(name.removesuffix(".weight")))
    return [frozenset(matrices) for matrices in found]


_SCALED_8 = Llama3Scaling(factor=8.0, original_context=8192)
_SCALED_32 = Llama3Scaling(factor=32.0, original_context=8192)

# fmt: off
_VARIANTS = (
    #         name                      family        hidden layers heads kv hd   ffn    vocab    theta eps   context  default
    ModelSpec("tiny_llama3_50m",       "llama3",       256,  16,   4,   2,  64,  1152, 128_256, 5e5, 1e-5,   2048,  2048, tied_embeddings=True),
    ModelSpec("tiny_llama3_150m",      "llama3",       768,   8,  12,   4,  64,  2048, 128_256, 5e5, 1e-5,   8192,  8192, tied_embeddings=True),
    ModelSpec("llama1_7b",             "llama1",      4096,  32,  32,  32, 128, 11008,  32_000, 1e4, 1e-6,   2048,  2048),
    ModelSpec("llama2_7b",             "llama2",      4096,  32,  32,  32, 128, 11008,  32_000, 1e4, 1e-5,   4096,  4096),
    ModelSpec("llama2_13b",            "llama2",      5120,  40,  40,  40, 128, 13824,  32_000, 1e4, 1e-5,   4096,  4096),
    ModelSpec("llama2_70b",            "llama2",      8192,  80,  64,   8, 128, 28672,  32_000, 1e4, 1e-5,   4096,  4096),
    ModelSpec("llama3_8b",             "llama3",      4096,  32,  32,   8, 128, 14336, 128_256, 5e5, 1e-5,   8192,  8192),
    ModelSpec("llama3_8b_instruct",    "llama3",      4096,  32,  32,   8, 128, 14336, 128_256, 5e5, 1e-5,   8192,  8192, instruct=True),
    ModelSpec("llama3_70b",            "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5,   8192,  8192),
    ModelSpec("llama3_70b_instruct",   "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5,   8192,  8192, instruct=True),
    ModelSpec("llama3_1_8b",           "llama3",      4096,  32,  32,   8, 128, 14336, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8),
    ModelSpec("llama3_1_70b",          "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8),
    ModelSpec("llama3_405b",           "llama3",     16384, 126, 128,   8, 128, 53248, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8),
    ModelSpec("llama3_2_1b",           "llama3",      2048,  16,  32,   8,  64,  8192, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_32, tied_embeddings=True),
    ModelSpec("llama3_2_3b",           "llama3",      3072,  28,  24,   8, 128,  8192, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_32, tied_embeddings=True),
    ModelSpec("llama3_3_70b_instruct", "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8, instruct=True),
    ModelSpec("code_llama_7b",         "code_llama",  4096,  32,  32,  32, 128, 11008,  32_016, 1e6, 1e-5,  16384, 16384),
    ModelSpec("code_llama_13b",        "code_llama",  5120,  40,  40,  40, 128, 13824,  32_016, 1e6, 1e-5,  16384, 16384),
    ModelSpec("code_llama_34b",        "code_llama",  8192,  48,  64,   8, 128, 22016,  32_000, 1e6, 1e-5,  16384, 16384),
)
# fmt: on
_REGISTRY = {spec.name: spec for spec in _VARIANTS}


def model_names() -> list[str]:
    """Return the names of all variants, in the registry's order."""
    return list(_REGISTRY)


def model_spec(name: str) -> ModelSpec:
    """Return the architecture of the variant called ``name``.

    Raises:
        ConfigError: if there is no such variant; the message names the nearest ones.
    """
    if name not in _REGISTRY:
        nearest = did_you_mean(name, _REGISTRY) or f"; choose one of {', '.join(_REGISTRY)}"
        raise ConfigError(f"unknown model {name!r}{nearest}")
    return _REGISTRY[name]
