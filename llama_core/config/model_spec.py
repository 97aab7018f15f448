"""The architecture of one model: enough to build it, plan for it and describe it to others."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from llama_core.attention import AttentionNeeds
from llama_core.config import nf4
from llama_core.config.model_types import NO_TRAITS, STATED_BY_ALL, ModelType, nearest_type
from llama_core.config.model_weights import (
    BALANCE_BIAS,
    EMBEDDING_WEIGHT,
    FINAL_NORM_WEIGHT,
    HEAD_WEIGHT,
    is_of_experts,
    layer_of,
    matches,
    matrix_name,
    part_name,
    rows_of_layer,
)
from llama_core.config.rope import QueryTemperature, RopePairs, RopeScaling, RotaryEmbedding
from llama_core.config.strategy import EMBEDDING, FEED_FORWARD_MATRICES, HEAD, IN_LAYERS, LoRA, MoE
from llama_core.errors import ConfigError
from llama_core.weight_rows import Weight

Family = Literal["llama", "llama1", "llama2", "llama3", "llama4", "code_llama", "mistral", "qwen", "gemma"]
"""The generation of a variant, or the relatives that it belongs to; ``llama`` for a model from a
folder, whose generation is unknown."""
NormPlacement = Literal["pre", "post", "both"]
NormWidth = Literal["head", "all"]
OfGate = Literal["silu", "gelu_tanh"]
"""What a feed-forward makes of its gate, before it multiplies."""
OfBoth = Literal["clamped_swiglu"]
"""What it makes of gate and up at once: with a limit and a slope, ``(up + 1) * gate * sigmoid(slope * gate)``, where
the gate is clamped from above, and up from both sides."""
Activation = Literal[OfGate, OfBoth]
SWIGLU_LIMIT = 7.0
"""Where the clamped SwiGLU clamps."""
SWIGLU_SLOPE = 1.702
"""Its factor within the sigmoid, which makes nearly a GELU of it."""


class LayerTraits(NamedTuple):
    """How one layer differs from others of its model, with Hugging Face's names for its parts."""

    sparse: bool
    """Whether it has experts in place of its feed-forward."""
    adapted: frozenset[str]
    """Matrices with an adapter; they are frozen."""
    trained: frozenset[str]
    """Matrices, norms and biases trained in full; experts stand for the feed-forward's matrices,
    and have a router."""
    attention: AttentionNeeds
    """What its attention has to compute."""
    rotates: bool
    """Whether it rotates queries and keys."""
    predicts: bool = False
    """Whether it is a module of multi-token prediction."""


class BaseShape(NamedTuple):
    """The sizes of a small model whose learning rate and initial values a larger one takes over."""

    width: int
    """Its ``hidden_size``."""
    depth: int
    """Its ``num_layers``."""


@dataclass(frozen=True)
class ModelSpec:
    """The architecture of one model.

    A block, and the fields that change each of its parts::

        x                          hidden_size
        |
        +----------+
        |          |
        |   attention_norm         norms (pre, both), norm_eps
        |   queries, keys, values  num_heads, num_kv_heads, head_dim, qkv_bias; through latents with
        |                          kv_rank, query_rank, rope_dim, value_dim
        |   q_norm, k_norm         qk_norm, qk_norm_width, qk_norm_weights
        |   rotation               rope_theta, rope_scaling, windowed_rope_theta, rope_pairs; none in
        |                          nope_layers, with query_temperature_scale and _floor in its place
        |   attention              sliding_window, windowed_layers, attention_chunk,
        |                          attention_soft_cap, attention_sinks, query_pre_attn_scalar,
        |                          score_factor
        |   output projection      o_bias
        |   attention_post_norm    norms (post, both)
        |          |
        + <--------+
        |
        +----------+
        |          |
        |   ffn_norm               norms (pre, both)
        |   feed_forward           ffn_size, activation; moe: experts in its place
        |   ffn_post_norm          norms (post, both)
        |          |
        + <--------+
        |

    ``models.block.Block`` draws the three placements of norms side by side. Before the first of
    ``num_layers`` blocks is the embedding of ``vocab_size`` tokens, times a factor if
    ``scaled_embedding``, and after the last a norm and the head, which is the same matrix if
    ``tied_embeddings``. With ``mtp_layers``, as many further blocks follow the last one, and use both
    embedding and head, see ``models.mtp``.

    Raises:
        ConfigError: if ``moe``, ``windowed_layers`` or ``nope_layers`` names layers that do not exist, or a trait lacks
            another.
    """

    name: str
    family: Family

    # sizes
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int

    # positions, and norm_eps, since the rows of config/models.py give these four in this order
    rope_theta: float
    norm_eps: float
    max_context: int
    """Longest sequence the position embedding was made for, in tokens."""
    default_seq_len: int
    """Default sequence length of training, in tokens."""
    rope_scaling: RopeScaling | None = None
    rope_pairs: RopePairs = "halves"
    """Which numbers of a head are rotated together: i and i + ``head_dim`` / 2, or 2i and 2i + 1."""
    nope_layers: tuple[int, ...] = ()
    """The layers that do not rotate queries and keys, and so know positions only by what they see."""
    query_temperature_scale: float = 0.0
    """In these layers, a query at position p of its document is multiplied by 1 + this * log(1 + floor((p + 1) /
    ``query_temperature_floor``)); 0 leaves it."""
    query_temperature_floor: int = 8192
    """After how many positions that begins, in tokens."""

    # embedding and head
    tied_embeddings: bool = False
    scaled_embedding: bool = False
    """Whether the residual stream begins as the embedding times the root of ``hidden_size``."""

    # attention
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    o_bias: bool = False
    """Whether the projection of attention's output has one."""
    qk_norm: bool = False
    """Whether queries and keys are normalised before they are rotated."""
    qk_norm_width: NormWidth = "head"
    """What is normalised as one: each head of a query or a key, or all of them together."""
    qk_norm_weights: bool = True
    """Whether these norms multiply by weights. Those that do not are only in layers that rotate, as in Llama 4."""
    sliding_window: int = 0
    """Tokens that a query sees, itself included; 0 for all earlier ones."""
    windowed_layers: tuple[int, ...] = ()
    """The layers with the sliding window; empty for all."""
    windowed_rope_theta: float = 0.0
    """Base of the rotary embedding of these layers, which is not scaled; 0 if they rotate as the others do."""
    attention_chunk: int = 0
    """Tokens of a chunk of a document: queries of layers that rotate see only keys of their own; 0 for all earlier."""
    query_pre_attn_scalar: int = 0
    """Attention's scores are products of queries and keys over the root of this; 0 for ``head_dim``."""
    score_factor: float = 1.0
    """What attention's scores are multiplied by beside that, such as DeepSeek's factor for YaRN."""
    attention_soft_cap: float = 0.0
    """Attention's scores become ``cap * tanh(scores / cap)`` before the softmax; 0 leaves them."""
    attention_sinks: bool = False
    """Whether each query head has a learned logit that joins the softmax's denominator and has no value."""

    # latents (multi-head latent attention)
    kv_rank: int = 0
    """Width of the latent that keys and values of all heads are made from; 0: they are made from the residual
    stream."""
    query_rank: int = 0
    """Width of the latent that queries are made from, beside that one; 0: they are made from the residual stream."""
    rope_dim: int = 0
    """With ``kv_rank``: how many numbers of a head are rotated, the last ones, which all heads of a key share."""
    value_dim: int = 0
    """With ``kv_rank``: the width of a head's values; 0 for ``head_dim``."""

    # feed-forward
    activation: Activation = "silu"
    """What a feed-forward, or an expert in its place, makes of its gate before it multiplies, or of gate and up."""

    # later tokens
    mtp_layers: int = 0
    """Modules of multi-token prediction after the last layer: the k-th predicts the token k places after the next one.
    Their numbers follow those of the layers."""

    # norms of the residual stream
    norms: NormPlacement = "pre"
    """Where the norms of a block are: before attention and feed-forward, after them on what they
    add, or both."""

    # experts
    moe: MoE | None = None
    """Experts that replace the feed-forward of some or all layers; None without experts."""

    # what is trained, on what, and how fast
    lora: LoRA | None = None
    """Adapters to train, over weights that are frozen but for the experts and ``trainable``; None
    without adapters."""
    trainable: tuple[str, ...] = ()
    """Glob patterns of the weights that are trained in full beside adapters; without adapters, all
    weights are."""
    instruct: bool = False
    """Whether the model is trained on conversations: same sizes, but another template and loss
    mask."""
    base: BaseShape | None = None
    """The model that it is scaled up from, see ``config.parametrization``; None if it has its own
    learning rate."""

    def __post_init__(self) -> None:
        problems = list(self.moe.misfits(self.name, self.num_layers)) if self.moe else []
        for trait in ("windowed_layers", "nope_layers"):
            outside = [layer for layer in getattr(self, trait) if layer not in range(self.num_layers)]
            if outside:
                layers = f"layers 0 to {self.num_layers - 1}"
                problems.append(f"architecture.{trait}={outside} are not layers of {self.name}, which has {layers}")
        if self.query_temperature_scale and not self.nope_layers:
            problems.append(
                f"architecture.query_temperature_scale={self.query_temperature_scale:g} needs "
                "architecture.nope_layers: which layers it is for"
            )
        if self.windowed_layers and not self.sliding_window:
            problems.append("architecture.windowed_layers needs architecture.sliding_window: how many tokens they see")
        if self.windowed_rope_theta and not self.windowed_layers:
            problems.append(
                f"architecture.windowed_rope_theta={self.windowed_rope_theta:g} needs architecture.windowed_layers: "
                "which layers it is for; set architecture.rope_theta if all have a window, or none"
            )
        if self.qk_norm_width != "head" and not self.qk_norm:
            problems.append(f"architecture.qk_norm_width={self.qk_norm_width} needs architecture.qk_norm=true")
        if not self.qk_norm_weights and not (self.qk_norm and self.qk_norm_width == "head"):
            problems.append(
                "architecture.qk_norm_weights=false needs architecture.qk_norm=true and architecture.qk_norm_width=head"
            )
        problems += self._misfits_of_latents()
        if problems:
            raise ConfigError(*problems)

    def _misfits_of_latents(self) -> Iterator[str]:
        """Yield what latent attention lacks, or has no place for."""
        if not self.kv_rank:
            for trait in ("query_rank", "rope_dim", "value_dim"):
                if value := getattr(self, trait):
                    yield f"architecture.{trait}={value} needs architecture.kv_rank: the width of a latent"
            return
        latents = f"architecture.kv_rank={self.kv_rank}"
        if not 0 < self.rope_dim < self.head_dim or self.rope_dim % 2:
            yield (
                f"{latents} needs architecture.rope_dim={self.rope_dim} to be even, above 0 and below "
                f"architecture.head_dim={self.head_dim}: how many of a head's numbers are rotated"
            )
        if self.value_dim > self.head_dim:
            yield f"architecture.value_dim={self.value_dim} is above architecture.head_dim={self.head_dim}"
        if self.num_kv_heads != self.num_heads:
            yield (
                f"{latents} makes keys and values of every head: set architecture.num_kv_heads={self.num_heads}, not "
                f"{self.num_kv_heads}"
            )
        for trait in ("qkv_bias", "qk_norm"):
            if getattr(self, trait):
                yield f"{latents} does not go with architecture.{trait}=true; leave one of them out"
        if self.base is not None:
            yield (
                f"{latents} does not go with training.parametrization=completep, which does not say how latents scale; "
                "use standard"
            )

    # Which relative of Llama is it?

    @cached_property
    def traits(self) -> dict[str, Any]:
        """How it differs from a plain Llama of its sizes: traits of types of models, and their values.

        A setting of experts is a trait of its own, such as ``moe.num_experts``; which layers have
        them is one unless all do.
        """
        traits: dict[str, Any] = {}
        for trait in fields(self):
            value = getattr(self, trait.name)
            if trait.name not in STATED_BY_ALL and value != trait.default:
                traits[trait.name] = value
        if self.moe is not None:
            traits["moe"] = True
            # there are several ways to say that all layers have experts, and files need none
            in_all = {"moe_layers"} if self.num_sparse_layers == self.num_layers else set()
            settings = self.moe.model_dump(exclude_defaults=True, exclude=in_all)
            traits |= {f"moe.{key}": value for key, value in settings.items()}
        return {trait: value for trait, value in traits.items() if trait not in NO_TRAITS}

    @cached_property
    def model_type(self) -> ModelType:
        """The type of transformers' models with these traits or, if none has all, most of them."""
        return nearest_type(self.traits)

    # Sizes that follow from others

    @property
    def joined_size(self) -> int:
        """Width of a token's embedding and hidden state side by side, which a prediction module reads."""
        return 2 * self.hidden_size

    @property
    def q_size(self) -> int:
        """Width of the queries of one layer."""
        return self.num_heads * self.head_dim

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by, since kernels divide scores by the root of ``head_dim``."""
        return self.score_factor * math.sqrt(self.head_dim / (self.query_pre_attn_scalar or self.head_dim))

    @property
    def kv_size(self) -> int:
        """Width of the keys (or of the values) of one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def has_query_matrix(self) -> bool:
        """Whether one matrix makes queries of the residual stream."""
        return not self.query_rank

    @property
    def has_key_matrix(self) -> bool:
        """Whether one matrix makes keys of it, and another one values."""
        return not self.kv_rank

    @property
    def rotated_dim(self) -> int:
        """How many numbers of a head are rotated, in layers that rotate."""
        return self.rope_dim or self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of a head's values."""
        return self.value_dim or self.head_dim

    @property
    def attended_size(self) -> int:
        """Width of attention's result for all heads of one layer."""
        return self.num_heads * self.value_head_dim

    @property
    def kv_down_size(self) -> int:
        """Width of the latent of keys and values, with the rotated numbers of a key beside it."""
        return self.kv_rank + self.rope_dim

    @property
    def kv_up_size(self) -> int:
        """Width of what is made from that latent: of every head, what is not rotated of a key, and a value."""
        return self.num_heads * (self.head_dim - self.rope_dim + self.value_head_dim)

    def latent_widths(self, tp: int) -> dict[str, int]:
        """Return the widths of what latent attention multiplies, on each of some tensor-parallel ranks, by name."""
        if not self.kv_rank:
            return {}
        widths = {"numbers of a latent of queries": self.query_rank} if self.query_rank else {}
        return widths | {
            "numbers of a latent of keys and values": self.kv_rank,
            "rows of kv_a_proj_with_mqa": self.kv_down_size,
            f"rows of kv_b_proj over tp={tp}": self.kv_up_size // tp,
            f"columns of o_proj over tp={tp}": self.attended_size // tp,
        }

    def latents_of_heads(self, head_dim: int, num_heads: int) -> dict[str, Any]:
        """Return the traits of latents for other heads, of a multiple of 4 numbers: all that are there, but small."""
        if not self.kv_rank:
            return {}
        return {
            "num_kv_heads": num_heads,
            "kv_rank": 2 * head_dim,
            "query_rank": 3 * head_dim if self.query_rank else 0,
            "rope_dim": head_dim // 2,
            "value_dim": head_dim // 4 * 3 if self.value_dim else 0,
        }

    @property
    def q_norm_size(self) -> int:
        """How many numbers of a query are normalised as one, if any are."""
        return self.q_size if self.qk_norm_width == "all" else self.head_dim

    @property
    def k_norm_size(self) -> int:
        """How many numbers of a key are normalised as one, if any are."""
        return self.kv_size if self.qk_norm_width == "all" else self.head_dim

    @property
    def has_qk_weights(self) -> bool:
        """Whether norms of queries and keys multiply by weights; if so, all layers have them."""
        return self.qk_norm and self.qk_norm_weights

    def normalises_heads(self, *, rotates: bool) -> bool:
        """Return whether layers that rotate, or those that do not, normalise queries and keys."""
        return self.qk_norm and (self.qk_norm_weights or rotates)

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has some; 1 without experts."""
        return self.moe.num_experts if self.moe else 1

    @property
    def expert_size(self) -> int:
        """Width of an expert, if there are some."""
        return (self.moe.expert_size if self.moe else 0) or self.ffn_size

    @property
    def expert_biases(self) -> bool:
        """Whether routers and experts have biases."""
        return self.moe is not None and self.moe.biases

    @property
    def shared_size(self) -> int:
        """Width of the feed-forward beside the experts; 0 if there is none."""
        return self.moe.shared_size if self.moe else 0

    @property
    def dense_widths(self) -> dict[str, int]:
        """The widths of the feed-forwards that every token of their layer goes through, by what they count."""
        widths = {}
        if self.num_sparse_layers < self.num_layers:
            widths["feed-forward columns"] = self.ffn_size
        if self.shared_size:
            widths["columns of the shared expert"] = self.shared_size
        return widths

    def divided_by_tp(self, *, whole_experts: bool = False) -> dict[str, int]:
        """Return the counts that tensor-parallel ranks must divide evenly, by what they count.

        Args:
            whole_experts: whether they have whole experts.
        """
        counts = {"key/value heads": self.num_kv_heads, "tokens of the vocabulary": self.vocab_size}
        counts |= self.dense_widths
        if self.moe and not whole_experts and self.expert_size not in counts.values():
            counts["columns of an expert"] = self.expert_size
        if self.packed:
            # the inputs of these two are divided: a rank has a part of each row, in whole blocks
            counts["blocks of NF4 in a row of o_proj"] = self.attended_size // nf4.BLOCK
            counts["blocks of NF4 in a row of down_proj"] = self.ffn_size // nf4.BLOCK
            if self.shared_size:
                counts["blocks of NF4 in a row of shared_experts.down_proj"] = self.shared_size // nf4.BLOCK
        return counts

    # What is in which block?

    @property
    def norms_before(self) -> bool:
        """Whether attention and feed-forward get a normalised residual stream."""
        return self.norms in {"pre", "both"}

    @property
    def norms_after(self) -> bool:
        """Whether what attention and feed-forward add to the residual stream is normalised."""
        return self.norms in {"post", "both"}

    @property
    def num_blocks(self) -> int:
        """The layers, and the modules of multi-token prediction after them."""
        return self.num_layers + self.mtp_layers

    @property
    def embeds_at_end(self) -> bool:
        """Whether the end of the model needs the embedding too: as its head, or for what prediction modules read."""
        return self.tied_embeddings or self.mtp_layers > 0

    def _layer_like(self, block: int) -> int:
        """Return the layer that a block is built as: a prediction module is built as the last one."""
        return min(block, self.num_layers - 1)

    def window(self, layer: int) -> int:
        """Return how many tokens a query of a layer sees, with itself; 0 for all earlier ones."""
        has_window = not self.windowed_layers or self._layer_like(layer) in self.windowed_layers
        return self.sliding_window if has_window else 0

    def rotates(self, layer: int) -> bool:
        """Return whether a layer rotates queries and keys."""
        return self._layer_like(layer) not in self.nope_layers

    def positions(self, layer: int) -> RotaryEmbedding | QueryTemperature | None:
        """Return what a layer makes of positions: a rotation; else a factor on its queries, or nothing."""
        if self.rotates(layer):
            return self.rope(layer)
        if not self.query_temperature_scale:
            return None
        return QueryTemperature(self.query_temperature_scale, self.query_temperature_floor)

    def rope(self, layer: int) -> RotaryEmbedding:
        """Return the rotary embedding of a layer, if it rotates."""
        if self.windowed_rope_theta and self.window(layer):
            return RotaryEmbedding(self.rotated_dim, self.windowed_rope_theta, None)
        return RotaryEmbedding(self.rotated_dim, self.rope_theta, self.rope_scaling)

    def attention(self, layer: int) -> AttentionNeeds:
        """Return what attention of a layer has to compute, over rows of one document each."""
        return AttentionNeeds(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            window=self.window(layer),
            chunk=self.attention_chunk if self.rotates(layer) else 0,
            soft_cap=self.attention_soft_cap,
            sinks=self.attention_sinks,
        )

    @cached_property
    def attentions(self) -> frozenset[AttentionNeeds]:
        """What attention of all layers has to compute."""
        return frozenset(map(self.attention, range(self.num_layers)))

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts in place of its feed-forward."""
        return self.moe is not None and self.moe.is_sparse(self._layer_like(layer))

    @property
    def num_sparse_layers(self) -> int:
        """Layers that have experts."""
        return sum(map(self.has_experts, range(self.num_layers))) if self.moe else 0

    @cached_property
    def layers(self) -> tuple[LayerTraits, ...]:
        """The traits of every layer, and of every prediction module after them; equal ones are one object."""
        adapted = _by_layer(self.adapted, self.num_blocks)
        trained = _by_layer(self.trained_in_full, self.num_blocks)
        seen: dict[LayerTraits, LayerTraits] = {}
        found = []
        for layer in range(self.num_blocks):
            sparse = self.has_experts(layer)
            whole = trained[layer] | frozenset(FEED_FORWARD_MATRICES if sparse else ())
            predicts = layer >= self.num_layers
            traits = LayerTraits(sparse, adapted[layer], whole, self.attention(layer), self.rotates(layer), predicts)
            found.append(seen.setdefault(traits, traits))
        return tuple(found)

    def with_few_layers(self, num_layers: int) -> Self:
        """Return the model with fewer layers, among them one of each kind that it has if there is room for two."""
        sparse = self.moe.moe_layers if self.moe else None
        if isinstance(sparse, int):
            sparse = min(sparse, num_layers)
        elif sparse:
            sparse = self._among_few(sparse, num_layers)
        moe = self.moe and self.moe.model_copy(update={"moe_layers": sparse})
        windowed = self.windowed_layers and self._among_few(self.windowed_layers, num_layers)
        nope = self.nope_layers and self._among_few(self.nope_layers, num_layers)
        return replace(self, num_layers=num_layers, windowed_layers=windowed, nope_layers=nope, moe=moe)

    def shortened(self, num_layers: object) -> Self:
        """Return the model without its last layers, if ``num_layers`` is a smaller number of layers than its own.

        It has no experts if all layers that have some are left out.
        """
        if not isinstance(num_layers, int) or not 0 < num_layers < self.num_layers:
            return self
        moe = self.moe
        if moe is not None and isinstance(moe.moe_layers, tuple):
            sparse = _below(num_layers, moe.moe_layers)
            moe = moe.model_copy(update={"moe_layers": sparse}) if sparse else None
        # without a layer in it, windowed_layers would mean all of them
        windowed = _below(num_layers, self.windowed_layers)
        nope = _below(num_layers, self.nope_layers)
        window = self.sliding_window if windowed or not self.windowed_layers else 0
        return replace(
            self,
            num_layers=num_layers,
            sliding_window=window,
            windowed_layers=windowed,
            windowed_rope_theta=self.windowed_rope_theta if windowed else 0.0,
            nope_layers=nope,
            query_temperature_scale=self.query_temperature_scale if nope else 0.0,
            moe=moe,
        )

    def _among_few(self, layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
        """Return which of a few layers stand for some of this model's: one at least, and not all unless these are."""
        kept = [layer for layer in range(num_layers) if layer in layers] or [num_layers - 1]
        if len(kept) == num_layers > 1 and len(layers) < self.num_layers:
            kept.pop()
        return tuple(kept)

    # Weights: their names and shapes

    def shape_of(self, weight: Weight) -> tuple[int, ...]:
        """Return the shape of a weight in this model."""
        return tuple(getattr(self, size) for size in weight.shape)

    @cached_property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by our names, without adapters or a tied head, in order."""
        return {name: self.shape_of(weight) for name, weight in self._weights()}

    @cached_property
    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight that is no parameter by our names: the balance biases, which no gradient moves."""
        if self.moe is None or not self.moe.balance_bias:
            return {}
        sparse = filter(self.has_experts, range(self.num_blocks))
        return {f"layers.{layer}.{BALANCE_BIAS.name}": self.shape_of(BALANCE_BIAS) for layer in sparse}

    @cached_property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of all that files hold of the model by our names: its parameters and buffers, without adapters."""
        return self.parameter_shapes | self.buffer_shapes

    @cached_property
    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Columns and rows of each matrix of a layer that is no router and of no expert, by Hugging Face's names."""
        shapes: dict[str, tuple[int, int]] = {}
        for sparse in (False, True):
            for weight in self.weights_of_layer(sparse=sparse):
                if weight.is_matrix and not is_of_experts(f"layers.0.{weight.name}"):
                    rows, columns = self.shape_of(weight)
                    shapes[part_name(f"layers.0.{weight.name}")] = (columns, rows)
        return shapes

    @property
    def target_shapes(self) -> dict[str, tuple[int, int]]:
        """Columns and rows of all matrices that can have an adapter; an embedding is one over tokens."""
        tables = {
            EMBEDDING: (self.vocab_size, self.hidden_size),
            HEAD: (self.hidden_size, self.vocab_size),
        }
        return self.matrix_shapes | tables

    @cached_property
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight of adapters by our names, in the order of the matrices."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.parameter_shapes:
            if self.lora is None or name not in self.adapted:
                continue
            path = name.removesuffix("weight")
            matrix = matrix_name(path.removesuffix("."))
            rows, columns = self.parameter_shapes[name]
            if matrix == EMBEDDING:  # a matrix over tokens
                rows, columns = columns, rows
            for weight in self.lora.weights(matrix):
                shapes[f"{path}{weight.name}"] = self.lora.shape(weight, columns, rows)
        return shapes

    def _weights(self) -> Iterator[tuple[str, Weight]]:
        """Yield every weight with its whole name, without adapters or a tied head, in order."""
        yield EMBEDDING_WEIGHT.name, EMBEDDING_WEIGHT
        for layer in range(self.num_blocks):
            predicts = layer >= self.num_layers
            for weight in self.weights_of_layer(sparse=self.has_experts(layer), predicts=predicts):
                yield f"layers.{layer}.{weight.name}", weight
        yield FINAL_NORM_WEIGHT.name, FINAL_NORM_WEIGHT
        if not self.tied_embeddings:
            yield HEAD_WEIGHT.name, HEAD_WEIGHT

    def weights_of_layer(self, *, sparse: bool, predicts: bool = False) -> list[Weight]:
        """Return the weights of a layer or a prediction module, with experts or dense, in the model's order."""
        rows = rows_of_layer(sparse=sparse, predicts=predicts)
        return [row for row in rows if row.only_with is None or getattr(self, row.only_with)]

    # Which of them are trained, adapted or held in NF4?

    @cached_property
    def trained_in_full(self) -> frozenset[str]:
        """Names of the parameters trained themselves: all, or experts and ``trainable`` ones."""
        if self.lora is None:
            return frozenset(self.parameter_shapes)
        trained = set()
        for name in self.parameter_shapes:
            # adapters are of dense matrices: experts and their router are trained beside them
            if is_of_experts(name) or any(matches(name, pattern, self.model_type) for pattern in self.trainable):
                trained.add(name)
        return frozenset(trained)

    @cached_property
    def saved_in_full(self) -> frozenset[str]:
        """Names of the weights that a checkpoint holds themselves: those trained in full, and the balance biases."""
        return self.trained_in_full | self.buffer_shapes.keys()

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Names of the matrices that have an adapter: the targets that are not trained in full."""
        return self._frozen_matrices((*self.lora.in_layers, *self.lora.outside_layers) if self.lora else ())

    @property
    def named_lora(self) -> LoRA | None:
        """The adapters, whose targets are matrices of latents where they stand for these."""
        if self.lora is None or not self.kv_rank:
            return self.lora
        lacking = {"k_proj", "v_proj"} | ({"q_proj"} if self.query_rank else {"q_a_proj", "q_b_proj"})
        targets = (*self.lora.in_layers, *self.lora.outside_layers)
        named = tuple(target for target in targets if target not in lacking)
        return self.lora.model_copy(update={"target_modules": named})

    @cached_property
    def packed(self) -> frozenset[str]:
        """Names of the matrices held in NF4: with ``lora.base=nf4``, the frozen ones inside layers."""
        is_packed = self.lora is not None and self.lora.base == "nf4"
        return self._frozen_matrices(IN_LAYERS if is_packed else ())

    def _frozen_matrices(self, among: tuple[str, ...]) -> frozenset[str]:
        """Return the names of the frozen matrices that Hugging Face calls one of ``among``."""
        if not among:
            return frozenset()
        found = set()
        for name in self.parameter_shapes.keys() - self.trained_in_full:
            if name.endswith(".weight") and matrix_name(name.removesuffix(".weight")) in among:
                found.add(name)
        return frozenset(found)

    # How many parameters has it? More counts are in config/parameter_counts.py

    @property
    def num_parameters(self) -> int:
        """All parameters of the model: adapters, experts and prediction modules too; a tied head counts once."""
        return sum(map(math.prod, self.parameter_shapes.values())) + self.num_adapter_parameters

    @property
    def num_trainable_parameters(self) -> int:
        """Parameters that get gradients and are updated: adapters, and what is trained in full."""
        in_full = sum(math.prod(self.parameter_shapes[name]) for name in self.trained_in_full)
        return in_full + self.num_adapter_parameters

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all except the experts that it is not routed to."""
        num_sparse = sum(map(self.has_experts, range(self.num_blocks)))
        return self.num_parameters - num_sparse * self.idle_parameters

    @cached_property
    def num_adapter_parameters(self) -> int:
        """Parameters of all adapters."""
        return sum(map(math.prod, self.adapter_shapes.values()))

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding; an untied head has as many."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def layer_parameters(self) -> int:
        """All parameters of one dense layer, without adapters."""
        return sum(math.prod(self.shape_of(weight)) for weight in self.weights_of_layer(sparse=False))

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 without experts."""
        if self.moe is None:
            return 0
        of_experts = [weight for weight in self.weights_of_layer(sparse=True) if weight.is_of_each_expert]
        return sum(math.prod(self.shape_of(weight)) for weight in of_experts) // self.num_experts

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts of a layer that a token is not routed to."""
        return (self.num_experts - self.moe.experts_per_token) * self.expert_parameters if self.moe else 0


def _below(num_layers: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return those of some layers that a model with fewer layers has."""
    return tuple(layer for layer in layers if layer < num_layers)


def _by_layer(names: frozenset[str], num_layers: int) -> list[frozenset[str]]:
    """Return which parts of each layer are among some parameters, by Hugging Face's names."""
    found: list[set[str]] = [set() for _ in range(num_layers)]
    for name in names:
        layer = layer_of(name)
        if layer is not None and not is_of_experts(name):
            found[layer].add(part_name(name))
    return [frozenset(parts) for parts in found]
