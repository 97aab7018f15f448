"""What the ``config.json`` of each type of models may say, a class each: keys and our traits.

A class reads and writes: its fields are the keys of a file, with the defaults of transformers' own
configuration and, as the text below a key, the error message for any value that it does not admit.
``traits``, ``moe`` and the other properties turn them into those of ``ModelSpec``, and ``keys_of``
turns them back. The required keys and ``rope.py`` are the same for all types.

A relative is a Llama with traits; its ``row`` in ``config/model_types.py`` says which. To add one, write
such a class with a row, and list it in ``FAMILIES``.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, AliasChoices, BaseModel, Field, model_validator

from llama_core.config.config_json.rope import (
    STRICT,
    AnyRope,
    One,
    Positive,
    Rope,
    RopeByLayer,
    RopeInFile,
    Size,
    rope_mapping,
)
from llama_core.config.model_types import (
    GEMMA3_TEXT,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMO3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    ModelType,
)
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import MoE
from llama_core.errors import ConfigError

_Weight = Annotated[float, Field(ge=0)]
_Context = Annotated[int, Field(ge=2)]


def _only_nf4(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse quantised weights of another kind than those that ``hugging_face.quantised`` reads."""
    kind = given.get("quant_method", "an unnamed format")
    if kind == "bitsandbytes":
        # without bnb_4bit_quant_type, transformers takes fp4
        kind = "int8" if given.get("load_in_8bit") else given.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise ConfigError(
            f"quantization_config: weights in {json.dumps(kind)} cannot be read, only those in bitsandbytes' nf4; "
            "give the folder of the unquantised model"
        )
    return given


class LlamaJson(BaseModel):
    """A Llama's file, with the defaults of ``LlamaConfig``; the base class of the others."""

    model_config = STRICT

    row: ClassVar[ModelType] = LLAMA
    """The traits that these models have: ``traits`` reads them, and ``keys_of`` writes them."""
    default_theta: ClassVar[float] = 10_000.0
    """Base of the rotary embedding where a file gives none."""

    model_type: Literal["llama"]
    architectures: list[Literal["LlamaForCausalLM"]] = []
    """only LlamaForCausalLM can be trained"""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    # without the key, every query head has its own, as in llama-7b, which is older than the key
    num_key_value_heads: Size | None = None
    # without the key, the heads divide hidden_size, as in Llama-2-7b-hf, which is older than it
    head_dim: Size | None = None
    rms_norm_eps: Positive = 1e-6
    max_position_embeddings: _Context = 2048
    tie_word_embeddings: bool = False

    rope_theta: Positive | None = None
    rope_scaling: AnyRope | None = None
    rope_parameters: AnyRope | None = None
    original_max_position_embeddings: Size | None = None

    hidden_act: Literal["silu", "swish"] = "silu"
    """the feed-forward of Llama is SwiGLU, with silu"""
    attention_bias: Literal[False] = False
    """Llama's attention has no biases"""
    mlp_bias: Literal[False] = False
    """Llama's feed-forward has no biases"""
    sliding_window: None = None
    """Llama attends to all earlier tokens"""
    partial_rotary_factor: One = 1.0
    """Llama rotates the whole of every head"""
    quantization_config: Annotated[dict[str, Any], AfterValidator(_only_nf4)] | None = None
    """is not a mapping of keys to values"""

    @classmethod
    def architecture(cls) -> str:
        """Return the name of transformers' class for these models."""
        (names,) = get_args(cls.model_fields["architectures"].annotation)
        return str(*get_args(names))

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        return {"attention_bias": False, "mlp_bias": False}

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama, except for experts."""
        return {name: value for name, value in self.row.always.items() if name != "moe"}

    @property
    def moe(self) -> MoE | None:
        """The experts in place of every feed-forward; None without experts."""
        return None

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def width_of_head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def width_of_feed_forward(self) -> int:
        """Width of a feed-forward, or of an expert in its place."""
        return self.intermediate_size

    @property
    def rope(self) -> RopeInFile:
        """All that the file says about the rotary embedding."""
        mappings = {"rope_scaling": self.rope_scaling, "rope_parameters": self.rope_parameters}
        return self._rope_of(mappings, "rope_theta", self.rope_theta)

    def _rope_of(self, mappings: Mapping[str, Rope | None], outer_key: str, outer_theta: float | None) -> RopeInFile:
        return RopeInFile(
            mappings={key: rope for key, rope in mappings.items() if rope is not None},
            outer_key=outer_key,
            outer_theta=outer_theta,
            outer_original_context=self.original_max_position_embeddings,
            max_context=self.max_position_embeddings,
        )

    @property
    def theta(self) -> float:
        """Base of the rotary embedding."""
        return self.rope.theta or self.default_theta

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        problems = list(self._contradictions())
        if problems:
            raise ConfigError(*problems)
        return self

    def _contradictions(self) -> Iterator[str]:
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        if kv_heads and heads % kv_heads:
            yield f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
        if self.head_dim is None and self.hidden_size % heads:
            yield f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}; add head_dim"
        elif self.width_of_head % 2:
            yield f"head_dim={self.width_of_head} is odd, but the rotary embedding rotates pairs"
        try:
            yield from self.rope.contradictions()
        except ConfigError as error:
            yield from error.problems


class MixtralJson(LlamaJson):
    """The same for a mixture of experts, with the defaults of ``MixtralConfig``."""

    row = MIXTRAL
    default_theta = 1_000_000.0

    model_type: Literal["mixtral"]  # type: ignore[assignment]
    architectures: list[Literal["MixtralForCausalLM"]] = []  # type: ignore[assignment]
    """only MixtralForCausalLM can be trained"""
    num_key_value_heads: Size | None = 8
    rms_norm_eps: Positive = 1e-5
    max_position_embeddings: _Context = 131_072
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2
    router_aux_loss_coef: _Weight = 0.001
    # none by default, unlike Mistral's; Mixtral-8x7B-v0.1 writes null
    sliding_window: Size | None = None  # type: ignore[assignment]

    @property
    def moe(self) -> MoE:
        """The experts."""
        return MoE(
            num_experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            balance_loss_coefficient=_balance_loss_coefficient(self),
        )

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama, except for experts."""
        return super().traits | {"sliding_window": self.sliding_window or 0}

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        assert spec.moe is not None
        return {
            "num_local_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "router_aux_loss_coef": _router_aux_loss_coef(spec),
            "router_jitter_noise": 0.0,
            "sliding_window": spec.sliding_window or None,
        }


class MistralJson(LlamaJson):
    """The same with a window in every layer, with the defaults of ``MistralConfig``."""

    row = MISTRAL

    model_type: Literal["mistral"]  # type: ignore[assignment]
    architectures: list[Literal["MistralForCausalLM"]] = []  # type: ignore[assignment]
    """only MistralForCausalLM can be trained"""
    num_key_value_heads: Size | None = 8
    max_position_embeddings: _Context = 131_072
    # without the key, a model has Mistral-7B-v0.1's window; with null, it has none, as
    # Mistral-7B-Instruct-v0.2
    sliding_window: Size | None = 4096  # type: ignore[assignment]

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama, except for experts."""
        return {"sliding_window": self.sliding_window or 0}

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        return {"sliding_window": spec.sliding_window or None}


class _LayerTypesJson(LlamaJson):
    """What types share that have a window in some layers, as ``layer_types`` says."""

    sliding_window: Size | None = 4096  # type: ignore[assignment]
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    @property
    def _windowed_by_default(self) -> list[int]:
        """The layers with a window in a file without ``layer_types``."""
        raise NotImplementedError

    @property
    def _windowed(self) -> list[int]:
        """The layers with a window."""
        if self.layer_types is not None:
            return [layer for layer, kind in enumerate(self.layer_types) if kind == "sliding_attention"]
        return self._windowed_by_default

    @property
    def _all_windowed(self) -> bool:
        """Whether all layers have a window."""
        return len(self._windowed) == self.num_hidden_layers

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama, except for experts."""
        if not self._windowed:
            return super().traits
        return super().traits | {
            "sliding_window": self.sliding_window,
            "windowed_layers": () if self._all_windowed else tuple(self._windowed),
        }

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            yield f"layer_types has {len(self.layer_types)} entries, but num_hidden_layers={self.num_hidden_layers}"


def _layer_types(spec: ModelSpec) -> list[str]:
    return ["sliding_attention" if spec.window(layer) else "full_attention" for layer in range(spec.num_layers)]


class _QwenJson(_LayerTypesJson):
    """What the types of Qwen share: a window in some layers, which has to be switched on."""

    num_key_value_heads: Size | None = 32
    max_position_embeddings: _Context = 32_768
    # a key of Qwen3, whose models have none; the biases of Qwen2 have no key, since its class
    # always has them
    attention_bias: Literal[False] = False
    """only the biases of Qwen2 can be trained"""

    # false in Qwen2.5-7B, which has no window in spite of sliding_window=131072
    use_sliding_window: bool = False
    # the layers without a window, which come first, whatever the name says; newer versions of
    # transformers write layer_types, and prefer it
    max_window_layers: Annotated[int, Field(ge=0)] = 28

    @property
    def _has_window(self) -> bool:
        """Whether layers can have a window."""
        return self.use_sliding_window and self.sliding_window is not None

    @property
    def _windowed_by_default(self) -> list[int]:
        """The layers with a window in a file without ``layer_types``."""
        return list(range(self.num_hidden_layers))[self.max_window_layers :] if self._has_window else []

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self._windowed and not self._has_window:
            yield "layer_types has sliding_attention, but use_sliding_window or sliding_window says that there is none"

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        if not spec.sliding_window:
            return {"use_sliding_window": False, "sliding_window": None}
        layer_types = _layer_types(spec)
        return {
            "use_sliding_window": True,
            "sliding_window": spec.sliding_window,
            "max_window_layers": layer_types.index("sliding_attention"),  # for readers that know no layer_types
            "layer_types": layer_types,
        }


class Qwen2Json(_QwenJson):
    """The same with biases of queries, keys and values, with the defaults of ``Qwen2Config``."""

    row = QWEN2

    model_type: Literal["qwen2"]  # type: ignore[assignment]
    architectures: list[Literal["Qwen2ForCausalLM"]] = []  # type: ignore[assignment]
    """only Qwen2ForCausalLM can be trained"""


class Qwen3Json(_QwenJson):
    """The same with norms of queries and keys, with the defaults of ``Qwen3Config``."""

    row = QWEN3

    model_type: Literal["qwen3"]  # type: ignore[assignment]
    architectures: list[Literal["Qwen3ForCausalLM"]] = []  # type: ignore[assignment]
    """only Qwen3ForCausalLM can be trained"""
    # no quotient: Qwen3-0.6B has hidden_size=1024 and 16 heads of 128
    head_dim: Size | None = 128

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        return super().keys_of(spec) | {"attention_bias": False}


class Qwen3MoeJson(_QwenJson):
    """The same for a mixture of experts, with the defaults of ``Qwen3MoeConfig``."""

    row = QWEN3_MOE

    model_type: Literal["qwen3_moe"]  # type: ignore[assignment]
    architectures: list[Literal["Qwen3MoeForCausalLM"]] = []  # type: ignore[assignment]
    """only Qwen3MoeForCausalLM can be trained"""
    # the width of a dense feed-forward, of which Qwen3-30B-A3B has none, though it writes 6144
    intermediate_size: Size = 6144
    num_key_value_heads: Size | None = 4
    moe_intermediate_size: Size = 768
    # transformers 5 renamed the key
    num_experts: Size = Field(128, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Size = 8
    router_aux_loss_coef: _Weight = 0.001
    # the default of transformers, though Qwen3-30B-A3B says true
    norm_topk_prob: bool = False
    decoder_sparse_step: Literal[1] = 1
    """only mixtures with experts in every layer can be trained"""
    mlp_only_layers: Annotated[list[int], Field(max_length=0)] = []
    """only mixtures with experts in every layer can be trained"""

    @property
    def moe(self) -> MoE:
        """The experts."""
        return MoE(
            num_experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
            # the chosen gates are divided by their sum, which equals a softmax over them alone
            gate_softmax="chosen" if self.norm_topk_prob else "all",
            balance_loss_coefficient=_balance_loss_coefficient(self),
        )

    @property
    def width_of_feed_forward(self) -> int:
        """Width of a feed-forward, or of an expert in its place."""
        return self.moe_intermediate_size

    @property
    def _windowed(self) -> list[int]:
        """The layers with a window: all or none, since this type has no ``layer_types``."""
        return list(range(self.num_hidden_layers)) if self._has_window else []

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        assert spec.moe is not None
        return {
            "attention_bias": False,
            "use_sliding_window": spec.sliding_window > 0,
            "sliding_window": spec.sliding_window or None,
            "moe_intermediate_size": spec.ffn_size,
            "num_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "norm_topk_prob": spec.moe.gate_softmax == "chosen",
            "router_aux_loss_coef": _router_aux_loss_coef(spec),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


class Olmo2Json(LlamaJson):
    """The same with norms after attention and feed-forward, and of all heads of a query or a key as one.

    It has the defaults of ``Olmo2Config``.
    """

    row = OLMO2

    model_type: Literal["olmo2"]  # type: ignore[assignment]
    architectures: list[Literal["Olmo2ForCausalLM"]] = []  # type: ignore[assignment]
    """only Olmo2ForCausalLM can be trained"""
    rms_norm_eps: Positive = 1e-5

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        return {"attention_bias": False}


class _RopeByLayerJson(_LayerTypesJson):
    """What types share whose layers with a window may rotate differently from the others."""

    default_windowed_theta: ClassVar[float]
    """Base of the rotary embedding of layers with a window where a file gives none."""

    # the mappings of transformers 5; in transformers 4, rope_scaling is of layers without a window
    rope_parameters: RopeByLayer | None = None  # type: ignore[assignment]
    # its key for the base of the others, if the type has one
    rope_local_base_freq: Positive | None = None

    @property
    def rope(self) -> RopeInFile:
        """All that the file says about the rotary embedding of layers without a window; of all, if all have one."""
        if self._all_windowed:
            return self._windowed_rope
        by_layer = self.rope_parameters or RopeByLayer()
        mappings = {"rope_scaling": self.rope_scaling, "rope_parameters.full_attention": by_layer.full_attention}
        return self._rope_of(mappings, "rope_theta", self.rope_theta)

    @property
    def theta(self) -> float:
        """Base of the rotary embedding of layers without a window; of all, if all have one."""
        return self._windowed_theta if self._all_windowed else super().theta

    @property
    def _windowed_rope(self) -> RopeInFile:
        """All that the file says about the rotary embedding of layers with a window."""
        by_layer = self.rope_parameters or RopeByLayer()
        mappings = {"rope_parameters.sliding_attention": by_layer.sliding_attention}
        return self._rope_of(mappings, "rope_local_base_freq", self.rope_local_base_freq)

    @property
    def _windowed_theta(self) -> float:
        """Base of the rotary embedding of layers with a window."""
        return self._windowed_rope.theta or self.default_windowed_theta

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama, except for experts."""
        if self._all_windowed or not self._windowed or self._rotate_alike:
            return super().traits
        return super().traits | {"windowed_rope_theta": self._windowed_theta}

    @property
    def _rotate_alike(self) -> bool:
        """Whether layers with a window rotate as those without."""
        windowed = (self._windowed_theta, self._windowed_rope.scaling)
        return windowed == (self.theta, self.rope.scaling)

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if not self._windowed:
            return
        if self.sliding_window is None:
            yield "sliding_window=null: layers with sliding_attention, of which this model has some, need its size"
        rope = self._windowed_rope
        if not self._all_windowed:
            yield from rope.contradictions()
            if rope.scaling is not None and not self._rotate_alike:
                yield "rope_parameters.sliding_attention: only the scaling of full_attention can be trained, or none"
        for mapping in rope.mappings.values():
            for key in mapping.model_extra or {}:
                yield f"rope_parameters.sliding_attention.{key}: not a setting of its rotary embedding"

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        layer_types = _layer_types(spec)
        ropes = {kind: spec.rope(layer) for layer, kind in enumerate(layer_types)}
        mappings = {}
        for kind in ("full_attention", "sliding_attention"):
            rope = ropes.get(kind, spec.rope(0))  # transformers wants both, even if all layers are of one kind
            mappings[kind] = rope_mapping(rope.theta, rope.scaling)
        return {
            "attention_bias": False,
            # a number even if no layer has a window, since transformers makes the mask of one
            "sliding_window": spec.sliding_window or spec.max_context,
            "layer_types": layer_types,
            "rope_parameters": mappings,
        }


class Olmo3Json(_RopeByLayerJson):
    """An OLMo 2 with windows in some layers, which may rotate differently, with the defaults of ``Olmo3Config``."""

    row = OLMO3
    default_theta = 500_000.0
    default_windowed_theta = default_theta

    model_type: Literal["olmo3"]  # type: ignore[assignment]
    architectures: list[Literal["Olmo3ForCausalLM"]] = []  # type: ignore[assignment]
    """only Olmo3ForCausalLM can be trained"""
    rms_norm_eps: Positive = 1e-5
    rope_local_base_freq: None = None
    """not a key of OLMo 3"""

    @property
    def _windowed_by_default(self) -> list[int]:
        """The layers with a window in a file without ``layer_types``: all but every fourth."""
        return [layer for layer in range(self.num_hidden_layers) if layer % 4 != 3]

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self._windowed and self._windowed_rope.theta is None and self.rope_theta not in {None, self.default_theta}:
            yield (
                f"rope_theta={self.rope_theta:g} is read by transformers 4 for all layers, and by 5 for those without "
                "a window; add rope_parameters.sliding_attention.rope_theta"
            )


class Gemma3TextJson(_RopeByLayerJson):
    """The text model of a Gemma 3, with the defaults of ``Gemma3TextConfig``, which has some for the sizes too.

    It has GeGLU, a scaled embedding, norms before and after attention and feed-forward and of each head of queries and
    keys, and windows in most layers, which rotate faster.
    """

    row = GEMMA3_TEXT
    default_theta = 1_000_000.0
    default_windowed_theta = 10_000.0

    model_type: Literal["gemma3_text"]  # type: ignore[assignment]
    architectures: list[Literal["Gemma3ForCausalLM"]] = []  # type: ignore[assignment]
    """only Gemma3ForCausalLM can be trained"""
    vocab_size: Size = 262_208
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Size = 26
    num_attention_heads: Size = 8
    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    max_position_embeddings: _Context = 131_072
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: Size = 256
    sliding_window_pattern: Size = 6

    # hidden_act is no key of its own, but may stand beside hidden_activation, as it did in Gemma 1
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"  # type: ignore[assignment]
    """the feed-forward of Gemma 3 is GeGLU, with gelu_pytorch_tanh"""
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    """the feed-forward of Gemma 3 is GeGLU, with gelu_pytorch_tanh"""
    attention_bias: Literal[False] = False
    """only a Gemma 3 without biases can be trained"""
    attn_logit_softcapping: None = None
    """only a Gemma 3 without caps can be trained"""
    final_logit_softcapping: None = None
    """only a Gemma 3 without caps can be trained"""
    use_bidirectional_attention: Literal[False] = False
    """only a Gemma 3 that attends to earlier tokens alone can be trained"""

    @property
    def _windowed_by_default(self) -> list[int]:
        """The layers with a window in a file without ``layer_types``: all but every sixth."""
        return [layer for layer in range(self.num_hidden_layers) if (layer + 1) % self.sliding_window_pattern]

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama, except for experts."""
        is_usual = self.query_pre_attn_scalar == self.width_of_head
        return super().traits | {"query_pre_attn_scalar": 0 if is_usual else self.query_pre_attn_scalar}

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        keys = super().keys_of(spec)
        activation = "gelu_pytorch_tanh"
        return keys | {
            "hidden_act": activation,
            "hidden_activation": activation,
            "query_pre_attn_scalar": spec.query_pre_attn_scalar or spec.head_dim,
            "rope_local_base_freq": keys["rope_parameters"]["sliding_attention"]["rope_theta"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        }


def _balance_loss_coefficient(config: MixtralJson | Qwen3MoeJson) -> float:
    """Return the weight of our balance loss that stands for a file's ``router_aux_loss_coef``.

    transformers has one loss over the tokens of all layers together, which is K for even experts.
    Ours is a sum over layers, each 1 for even experts.
    """
    return config.router_aux_loss_coef * config.num_experts_per_tok / config.num_hidden_layers


def _router_aux_loss_coef(spec: ModelSpec) -> float:
    """Return the inverse: transformers' weight for that of ``spec``."""
    assert spec.moe is not None
    return spec.moe.balance_loss_coefficient * spec.num_sparse_layers / spec.moe.experts_per_token


FAMILIES: dict[str, type[LlamaJson]] = {
    family.row.name: family
    for family in (
        *(LlamaJson, MixtralJson, MistralJson, Qwen2Json, Qwen3Json, Qwen3MoeJson),
        *(Olmo2Json, Olmo3Json, Gemma3TextJson),
    )
}
"""The types of models that can be read and written, by ``model_type``."""
