"""The models: their weights, one row each, and every LLaMA variant with its sizes and exact parameter count."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, NamedTuple

from llama_core.adapters.registry import ADAPTERS
from llama_core.attention import AttentionNeeds
from llama_core.config import nf4
from llama_core.config.model_types import LLAMA, NO_TRAITS, STATED_BY_ALL, ModelType, nearest_type
from llama_core.config.rope import Llama3Scaling, RopeScaling
from llama_core.config.strategy import EMBEDDING, FEED_FORWARD_MATRICES, HEAD, MATRICES, LoRA, MoE
from llama_core.errors import ConfigError, did_you_mean
from llama_core.optimizers.traits import LAYERS, Trained
from llama_core.units import format_count
from llama_core.weights import INPUTS, Weight

Family = Literal["llama", "llama1", "llama2", "llama3", "code_llama", "mistral", "qwen"]
"""The generation of a variant, or the relatives that it belongs to; ``llama`` for a model from a folder, whose
generation is unknown."""

LONGEST_DEFAULT = 8192
"""Upper limit on the default sequence length of a model from a folder, in tokens."""

# fmt: off
EMBEDDING_WEIGHT = Weight("tok_embeddings.weight", "model.embed_tokens.weight", ("vocab_size", "hidden_size"), "vocabulary")
FINAL_NORM_WEIGHT = Weight("norm.weight", "model.norm.weight", ("hidden_size",), "stream", "ones", decayed=False)
HEAD_WEIGHT = Weight("output.weight", "lm_head.weight", ("vocab_size", "hidden_size"), "vocabulary")
_ATTENTION = (
    Weight("attention_norm.weight", "input_layernorm.weight", ("hidden_size",), "stream", "ones", decayed=False, only_with="norms_before"),
    Weight("attention.wq.weight", "self_attn.q_proj.weight", ("q_size", "hidden_size"), "outputs"),
    Weight("attention.wq.bias", "self_attn.q_proj.bias", ("q_size",), "outputs", "zeros", decayed=False, only_with="qkv_bias"),
    Weight("attention.wk.weight", "self_attn.k_proj.weight", ("kv_size", "hidden_size"), "outputs"),
    Weight("attention.wk.bias", "self_attn.k_proj.bias", ("kv_size",), "outputs", "zeros", decayed=False, only_with="qkv_bias"),
    Weight("attention.wv.weight", "self_attn.v_proj.weight", ("kv_size", "hidden_size"), "outputs"),
    Weight("attention.wv.bias", "self_attn.v_proj.bias", ("kv_size",), "outputs", "zeros", decayed=False, only_with="qkv_bias"),
    Weight("attention.wo.weight", "self_attn.o_proj.weight", ("hidden_size", "q_size"), "inputs", "residual"),
    Weight("attention.q_norm.weight", "self_attn.q_norm.weight", ("q_norm_size",), "heads", "ones", decayed=False, only_with="qk_norm"),
    Weight("attention.k_norm.weight", "self_attn.k_norm.weight", ("k_norm_size",), "heads", "ones", decayed=False, only_with="qk_norm"),
    Weight("attention_post_norm.weight", "post_self_attn_layernorm.weight", ("hidden_size",), "stream", "ones", decayed=False, only_with="norms_after"),
    Weight("ffn_norm.weight", "post_attention_layernorm.weight", ("hidden_size",), "stream", "ones", decayed=False, only_with="norms_before"),
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
_LAST = (
    Weight("ffn_post_norm.weight", "post_mlp_layernorm.weight", ("hidden_size",), "stream", "ones", decayed=False, only_with="norms_after"),
)
# fmt: on
_IN_LAYERS = {weight.name: weight for weight in (*_ATTENTION, *_FEED_FORWARD, *_MIXTURE, *_LAST)}
_OUTSIDE_LAYERS = {weight.name: weight for weight in (EMBEDDING_WEIGHT, FINAL_NORM_WEIGHT, HEAD_WEIGHT)}
_ON_EMBEDDING = EMBEDDING_WEIGHT.name.removesuffix("weight")
_OF_EXPERTS = frozenset(weight.name for weight in _MIXTURE)
DIVIDED_INPUTS = frozenset(
    weight.theirs.split(".")[-2]
    for weight in (EMBEDDING_WEIGHT, *_ATTENTION, *_FEED_FORWARD)
    if weight is EMBEDDING_WEIGHT or weight.divided == "inputs"
)
"""The matrices whose inputs tensor-parallel ranks divide, by Hugging Face's names; of the others they divide the
outputs. The embedding is a matrix over tokens."""


def weight_of(name: str) -> Weight:
    """Return the row of the parameter that we call ``name``, such as ``'layers.0.attention.wq.weight'``.

    Raises:
        NotImplementedError: if it has none.
    """
    row = _find_weight(name)
    if row is None:
        raise NotImplementedError(f"{name} has no row among the weights in config/models.py, nor in adapters")
    return row


def is_decayed(name: str) -> bool:
    """Return whether a parameter is subject to weight decay."""
    row = _find_weight(name)
    return row is None or row.decayed


def _find_weight(name: str) -> Weight | None:
    row = _OUTSIDE_LAYERS.get(name) or _IN_LAYERS.get(_in_layer(name))
    if row is not None:
        return row
    of_adapter = adapter_weight(name)
    return None if of_adapter is None else of_adapter[1]


def adapter_weight(name: str) -> tuple[str, Weight] | None:
    """Return the name of the matrix that an adapter's parameter belongs to, and its row; None for other parameters."""
    for kind in ADAPTERS.values():
        for weight in kind.of_embedding if name.startswith(_ON_EMBEDDING) else kind.weights:
            if name.endswith(f".{weight.name}"):
                return f"{name.removesuffix(weight.name)}weight", weight
    return None


def _in_layer(name: str) -> str:
    """Return the part of a weight's name after the number of its layer."""
    return name.split(".", 2)[-1]


def hugging_face_name(name: str, model_type: ModelType = LLAMA) -> str:
    """Return Hugging Face's name for our parameter ``name``, such as ``'layers.0.attention.wq.weight'``.

    For a tensor of experts, it has ``{}`` in place of the expert's number.

    Args:
        name: our name.
        model_type: the type of the model; it may be left out for adapted matrices, which all types call the same.
    """
    theirs = weight_of(name).theirs
    if name in _OUTSIDE_LAYERS:
        return theirs
    return f"model.layers.{name.split('.')[1]}.{model_type.names.get(_in_layer(name), theirs)}"


def name_in_layer(weight: str, model_type: ModelType) -> str:
    """Return Hugging Face's name for a weight of a layer, such as ``'feed_forward.router.weight'``, inside the layer."""
    return model_type.names.get(weight, _IN_LAYERS[weight].theirs)


def matrix_name(path: str) -> str:
    """Return Hugging Face's name for our matrix within its layer: ``q_proj`` for ``'layers.0.attention.wq'``."""
    return hugging_face_name(f"{path}.weight").split(".")[-2]


def part_name(name: str) -> str:
    """Return Hugging Face's name for a norm, a matrix or a bias within its layer: ``q_proj``, ``q_proj.bias``."""
    theirs = weight_of(name).theirs.removesuffix(".weight")
    return theirs.removeprefix("self_attn.").removeprefix("mlp.")


def matches(name: str, pattern: str, spec: "ModelSpec") -> bool:
    """Return whether a glob pattern matches our name or Hugging Face's of a parameter, with or without ``.weight``."""
    names = (name, hugging_face_name(name, spec.model_type))
    return any(fnmatchcase(one, pattern) or fnmatchcase(one.removesuffix(".weight"), pattern) for one in names)


def is_of_experts(name: str) -> bool:
    """Return whether a parameter belongs to a mixture: its router, or a matrix of its experts."""
    return name not in _OUTSIDE_LAYERS and _in_layer(name) in _OF_EXPERTS


ATTENTION_NORM, FFN_NORM = "input_layernorm", "post_attention_layernorm"
"""The norms before attention and feed-forward, as Hugging Face calls them in a Llama."""
ATTENTION_POST_NORM, FFN_POST_NORM = "post_self_attn_layernorm", "post_mlp_layernorm"
"""The norms after them, as it calls them in a GLM-4, which has all four."""
NormPlacement = Literal["pre", "post", "both"]
NormWidth = Literal["head", "all"]


class LayerTraits(NamedTuple):
    """How one layer differs from others of its model, with Hugging Face's names for its parts."""

    sparse: bool
    """Whether it has experts in place of its feed-forward."""
    adapted: frozenset[str]
    """Matrices with an adapter; they are frozen."""
    trained: frozenset[str]
    """Matrices, norms and biases trained in full. Experts stand for the feed-forward's matrices, and have a router besides."""
    attention: AttentionNeeds
    """What its attention has to compute."""


class BaseShape(NamedTuple):
    """The sizes of a small model, whose learning rate and initial values a larger one takes over."""

    width: int
    """Its ``hidden_size``."""
    depth: int
    """Its ``num_layers``."""


@dataclass(frozen=True)
class ModelSpec:
    """The architecture of one model: enough to build it, count its parameters and plan for it.

    Raises:
        ConfigError: if ``moe`` or ``windowed_layers`` names layers that do not exist, or a trait lacks another.
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
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    qk_norm: bool = False
    """Whether queries and keys are normalised before they are rotated."""
    qk_norm_width: NormWidth = "head"
    """What is normalised as one: each head of a query or a key, or all of them together."""
    norms: NormPlacement = "pre"
    """Where the norms of a block are: before attention and feed-forward, after them on what they add, or both."""
    sliding_window: int = 0
    """Tokens that a query sees, itself included; 0 for all earlier ones."""
    windowed_layers: tuple[int, ...] = ()
    """The layers with the sliding window; empty for all."""
    attention_soft_cap: float = 0.0
    """Attention's scores become ``cap * tanh(scores / cap)`` before the softmax; 0 leaves them."""
    instruct: bool = False
    """Whether the model is trained on conversations: same sizes, but another template and loss mask."""
    lora: LoRA | None = None
    """Adapters to train, over weights that are frozen but for the experts and ``trainable``; None without adapters."""
    moe: MoE | None = None
    """Experts that replace the feed-forward of some or all layers; None without experts."""
    trainable: tuple[str, ...] = ()
    """Glob patterns of the weights that are trained in full beside adapters; without adapters, all weights are."""
    base: BaseShape | None = None
    """The model that it is scaled up from, see ``config.parametrization``; None if it has its own learning rate."""

    def __post_init__(self) -> None:
        problems = list(self.moe.misfits(self.name, self.num_layers)) if self.moe else []
        outside = [layer for layer in self.windowed_layers if layer not in range(self.num_layers)]
        if outside:
            layers = f"layers 0 to {self.num_layers - 1}"
            problems.append(f"architecture.windowed_layers={outside} are not layers of {self.name}, which has {layers}")
        if self.windowed_layers and not self.sliding_window:
            problems.append("architecture.windowed_layers needs architecture.sliding_window: how many tokens they see")
        if self.qk_norm_width != "head" and not self.qk_norm:
            problems.append(f"architecture.qk_norm_width={self.qk_norm_width} needs architecture.qk_norm=true")
        if problems:
            raise ConfigError(*problems)

    @cached_property
    def traits(self) -> dict[str, Any]:
        """How it differs from a plain Llama of its sizes: traits that types of models have, and their values.

        A setting of experts is a trait of its own, such as ``moe.num_experts``; which layers have them is one unless all
        do.
        """
        traits = {
            trait.name: getattr(self, trait.name)
            for trait in fields(self)
            if trait.name not in STATED_BY_ALL and getattr(self, trait.name) != trait.default
        }
        if self.moe is not None:
            traits["moe"] = True
            in_all = {"moe_layers"} if self.num_sparse_layers == self.num_layers else set()
            settings = self.moe.model_dump(exclude_defaults=True, exclude=in_all)
            traits |= {f"moe.{key}": value for key, value in settings.items()}
        return {trait: value for trait, value in traits.items() if trait not in NO_TRAITS}

    @cached_property
    def model_type(self) -> ModelType:
        """The type of transformers' models that has these traits or, if none has all, most of them."""
        return nearest_type(self.traits)

    @property
    def divided_by_tp(self) -> dict[str, int]:
        """The counts that tensor-parallel ranks must divide evenly, by what they count."""
        counts = {
            "key/value heads": self.num_kv_heads,
            "feed-forward columns": self.ffn_size,
            "tokens of the vocabulary": self.vocab_size,
        }
        if self.packed:
            counts["blocks of NF4 in a row of o_proj"] = self.q_size // nf4.BLOCK
            counts["blocks of NF4 in a row of down_proj"] = self.ffn_size // nf4.BLOCK
        return counts

    @property
    def norms_before(self) -> bool:
        """Whether attention and feed-forward get a normalised residual stream."""
        return self.norms in {"pre", "both"}

    @property
    def norms_after(self) -> bool:
        """Whether what attention and feed-forward add to the residual stream is normalised."""
        return self.norms in {"post", "both"}

    @property
    def q_norm_size(self) -> int:
        """How many numbers of a query are normalised as one, if any are."""
        return self.q_size if self.qk_norm_width == "all" else self.head_dim

    @property
    def k_norm_size(self) -> int:
        """How many numbers of a key are normalised as one, if any are."""
        return self.kv_size if self.qk_norm_width == "all" else self.head_dim

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
        rows = (*_ATTENTION, *(_MIXTURE if sparse else _FEED_FORWARD), *_LAST)
        return tuple(row for row in rows if row.only_with is None or getattr(self, row.only_with))

    def _weights(self) -> Iterator[tuple[str, Weight]]:
        """Yield every weight of the model with its whole name, without adapters or a tied head, in the model's order."""
        yield EMBEDDING_WEIGHT.name, EMBEDDING_WEIGHT
        for layer in range(self.num_layers):
            for weight in self._weights_of_layer(sparse=self.has_experts(layer)):
                yield f"layers.{layer}.{weight.name}", weight
        yield FINAL_NORM_WEIGHT.name, FINAL_NORM_WEIGHT
        if not self.tied_embeddings:
            yield HEAD_WEIGHT.name, HEAD_WEIGHT

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
            name for name in self.parameter_shapes if self.lora is None or is_of_experts(name) or self._is_chosen(name)
        )

    def _is_chosen(self, name: str) -> bool:
        return any(matches(name, pattern, self) for pattern in self.trainable)

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Names of the matrices that have an adapter: the targets that are not trained in full."""
        targets = self.lora.target_modules if self.lora else ()
        frozen = self.parameter_shapes.keys() - self.trained_in_full
        matrices = (name for name in frozen if name.endswith(".weight"))
        return frozenset(name for name in matrices if matrix_name(name.removesuffix(".weight")) in targets)

    @cached_property
    def packed(self) -> frozenset[str]:
        """Names of the matrices that are held in NF4: with ``lora.base=nf4``, the frozen ones inside layers."""
        if self.lora is None or self.lora.base == "plain":
            return frozenset()
        frozen = self.parameter_shapes.keys() - self.trained_in_full
        matrices = (name for name in frozen if name.endswith(".weight"))
        return frozenset(name for name in matrices if matrix_name(name.removesuffix(".weight")) in MATRICES)

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
            traits = LayerTraits(sparse, adapted[layer], whole, self.attention(layer))
            found.append(seen.setdefault(traits, traits))
        return tuple(found)

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding, or an adapter on it, gets gradients."""
        return EMBEDDING_WEIGHT.name in self.trained_in_full or EMBEDDING_WEIGHT.name in self.adapted

    @property
    def trains_table(self) -> bool:
        """Whether the embedding is trained in full."""
        return EMBEDDING_WEIGHT.name in self.trained_in_full

    @property
    def trains_head(self) -> bool:
        """Whether the head, or an embedding in its place, is trained in full."""
        return (EMBEDDING_WEIGHT.name if self.tied_embeddings else HEAD_WEIGHT.name) in self.trained_in_full

    @property
    def trains_final_norm(self) -> bool:
        """Whether the norm before the head is trained."""
        return FINAL_NORM_WEIGHT.name in self.trained_in_full

    @property
    def adapted_tables(self) -> frozenset[str]:
        """The matrices outside the layers that have an adapter: ``embed_tokens``, ``lm_head``, both or none."""
        names = {EMBEDDING_WEIGHT.name: EMBEDDING, HEAD_WEIGHT.name: HEAD}
        return frozenset(names[name] for name in self.adapted.intersection(names))

    @cached_property
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight of adapters by our names, in the order of the matrices; empty without adapters."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.parameter_shapes:
            if self.lora is None or name not in self.adapted:
                continue
            path = name.removesuffix("weight")
            matrix = matrix_name(path.removesuffix("."))
            for weight in self.lora.weights(matrix):
                shapes[f"{path}{weight.name}"] = self.lora.shape(weight, *self.target_shapes[matrix])
        return shapes

    @cached_property
    def num_adapter_parameters(self) -> int:
        """Parameters of all adapters."""
        return sum(map(math.prod, self.adapter_shapes.values()))

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts in place of its feed-forward."""
        return self.moe is not None and self.moe.is_sparse(layer)

    def window(self, layer: int) -> int:
        """Return how many tokens a query of a layer sees, itself included; 0 for all earlier ones."""
        return self.sliding_window if not self.windowed_layers or layer in self.windowed_layers else 0

    def attention(self, layer: int) -> AttentionNeeds:
        """Return what attention of a layer has to compute, over rows of one document each."""
        return AttentionNeeds(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            window=self.window(layer),
            soft_cap=self.attention_soft_cap,
        )

    @cached_property
    def attentions(self) -> frozenset[AttentionNeeds]:
        """What attention of all layers has to compute."""
        return frozenset(map(self.attention, range(self.num_layers)))

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

    def num_parameters_of(self, layers: range) -> int:
        """Return the parameters, adapters included, of the part of the model that has consecutive layers.

        The first layer brings the embedding, and the last one the final norm and the head, even a tied one.
        """
        is_first = layers.start == 0
        is_last = layers.stop == self.num_layers
        own = 0
        for name, shape in (self.parameter_shapes | self.adapter_shapes).items():
            layer = _layer_of(name)
            if layer is not None:
                is_held = layer in layers
            elif name.startswith(EMBEDDING_WEIGHT.name.removesuffix("weight")):
                is_held = is_first or (is_last and self.tied_embeddings)
            else:
                is_held = is_last
            own += math.prod(shape) if is_held else 0
        return own

    @property
    def num_trainable_parameters(self) -> int:
        """Parameters that get gradients and are updated: all or, with adapters, these and what is trained in full."""
        return self.num_adapter_parameters + self.num_trained_in_full if self.lora else self.num_parameters

    @property
    def num_trained_in_full(self) -> int:
        """Parameters that are trained themselves: all but adapters and frozen ones."""
        return sum(math.prod(self.parameter_shapes[name]) for name in self.trained_in_full)

    @cached_property
    def trained_matrices(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Shapes of the trained matrices inside each layer: rows and columns, and before them the number of experts."""
        in_full = {name: shape for name, shape in self.parameter_shapes.items() if name in self.trained_in_full}
        of_layers: list[list[tuple[int, ...]]] = [[] for _ in range(self.num_layers)]
        for name, shape in (in_full | self.adapter_shapes).items():
            if len(shape) > 1 and (layer := _layer_of(name)) is not None:
                of_layers[layer].append(shape)
        return tuple(map(tuple, of_layers))

    @property
    def trained(self) -> Trained:
        """Numbers of trained parameters, as optimizers tell them apart."""
        matrices = sum(math.prod(shape) for shapes in self.trained_matrices for shape in shapes)
        return Trained(matrices, self.num_trainable_parameters - matrices)

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

        A trained parameter takes part in three products. A frozen one has no gradient and takes part in two.
        """
        adapters = self._adapter_matmul_parameters
        return 4 * self.num_matmul_parameters + 2 * self._trained_matmul_parameters + 6 * adapters

    @property
    def forward_matmul_flops_per_token(self) -> int:
        """Those of ``matmul_flops_per_token`` in the forward, which are a third of them if all parameters are trained."""
        return 2 * (self.num_matmul_parameters + self._adapter_matmul_parameters)

    @cached_property
    def _adapter_matmul_parameters(self) -> int:
        """Parameters of adapters that every token is multiplied with: all matrices, but no look-up of tokens."""
        total = 0
        for name, shape in self.adapter_shapes.items():
            is_look_up = name.startswith(_ON_EMBEDDING) and INPUTS in weight_of(name).shape
            if len(shape) == 2 and not is_look_up:
                total += math.prod(shape)
        return total

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
    """Return the matrices, norms and biases of each layer among some parameters, by Hugging Face's names."""
    found: list[set[str]] = [set() for _ in range(num_layers)]
    for name in names:
        if (layer := _layer_of(name)) is not None and not is_of_experts(name):
            found[layer].add(part_name(name))
    return [frozenset(parts) for parts in found]


def _layer_of(name: str) -> int | None:
    """Return the number of the layer that a parameter is in; None if it is outside the layers."""
    return int(name.split(".")[1]) if name.startswith(LAYERS) else None


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
    ModelSpec("mistral_7b",            "mistral",     4096,  32,  32,   8, 128, 14336,  32_000, 1e4, 1e-5,  32768,  8192, sliding_window=4096),
    ModelSpec("qwen2_5_0_5b",          "qwen",         896,  24,  14,   2,  64,  4864, 151_936, 1e6, 1e-6,  32768,  8192, tied_embeddings=True, qkv_bias=True),
    ModelSpec("qwen2_5_1_5b",          "qwen",        1536,  28,  12,   2, 128,  8960, 151_936, 1e6, 1e-6, 131072,  8192, tied_embeddings=True, qkv_bias=True),
    ModelSpec("qwen2_5_3b",            "qwen",        2048,  36,  16,   2, 128, 11008, 151_936, 1e6, 1e-6,  32768,  8192, tied_embeddings=True, qkv_bias=True),
    ModelSpec("qwen2_5_7b",            "qwen",        3584,  28,  28,   4, 128, 18944, 152_064, 1e6, 1e-6, 131072,  8192, qkv_bias=True),
    ModelSpec("qwen2_5_14b",           "qwen",        5120,  48,  40,   8, 128, 13824, 152_064, 1e6, 1e-5, 131072,  8192, qkv_bias=True),
    ModelSpec("qwen2_5_32b",           "qwen",        5120,  64,  40,   8, 128, 27648, 152_064, 1e6, 1e-5, 131072,  8192, qkv_bias=True),
    ModelSpec("qwen2_5_72b",           "qwen",        8192,  80,  64,   8, 128, 29568, 152_064, 1e6, 1e-5, 131072,  8192, qkv_bias=True),
    ModelSpec("qwen3_0_6b",            "qwen",        1024,  28,  16,   8, 128,  3072, 151_936, 1e6, 1e-6,  40960,  8192, tied_embeddings=True, qk_norm=True),
    ModelSpec("qwen3_1_7b",            "qwen",        2048,  28,  16,   8, 128,  6144, 151_936, 1e6, 1e-6,  40960,  8192, tied_embeddings=True, qk_norm=True),
    ModelSpec("qwen3_4b",              "qwen",        2560,  36,  32,   8, 128,  9728, 151_936, 1e6, 1e-6,  40960,  8192, tied_embeddings=True, qk_norm=True),
    ModelSpec("qwen3_8b",              "qwen",        4096,  36,  32,   8, 128, 12288, 151_936, 1e6, 1e-6,  40960,  8192, qk_norm=True),
    ModelSpec("qwen3_14b",             "qwen",        5120,  40,  40,   8, 128, 17408, 151_936, 1e6, 1e-6,  40960,  8192, qk_norm=True),
    ModelSpec("qwen3_32b",             "qwen",        5120,  64,  64,   8, 128, 25600, 151_936, 1e6, 1e-6,  40960,  8192, qk_norm=True),
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
