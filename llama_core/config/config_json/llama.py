"""What the ``config.json`` of a Llama may say, the base class of the other types."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, Field, model_validator

from llama_core.config.config_json.quantised import Quantisation
from llama_core.config.config_json.rope import STRICT, AnyRope, One, Positive, Rope, RopeInFile, Size
from llama_core.config.model_types import LLAMA, ModelType
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import MoE
from llama_core.errors import ConfigError

Context = Annotated[int, Field(ge=2)]
"""``max_position_embeddings``, in tokens."""


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
    max_position_embeddings: Context = 2048
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
    quantization_config: Quantisation | None = None
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
        return self.row.of_model

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
