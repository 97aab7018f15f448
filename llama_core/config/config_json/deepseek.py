"""What the ``config.json`` of a DeepSeek-V3 may say."""

import math
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from llama_core.config.config_json.llama import Context, LlamaJson
from llama_core.config.config_json.rope import Size, YarnRope, rope_keys
from llama_core.config.model_types import DEEPSEEK_V3
from llama_core.config.models import ModelSpec
from llama_core.config.rope import YarnScaling, yarn_amplitude
from llama_core.errors import ConfigError


class DeepseekV3Json(LlamaJson):
    """A DeepSeek-V3, with the defaults of ``DeepseekV3Config``, which has some for the sizes too.

    Its keys and values are made from a latent, and so are its queries unless ``q_lora_rank`` is null.
    """

    row = DEEPSEEK_V3

    model_type: Literal["deepseek_v3"]  # type: ignore[assignment]
    architectures: list[Literal["DeepseekV3ForCausalLM"]] = []  # type: ignore[assignment]
    """only DeepseekV3ForCausalLM can be trained"""
    vocab_size: Size = 129_280
    hidden_size: Size = 7168
    intermediate_size: Size = 18_432
    num_hidden_layers: Size = 61
    num_attention_heads: Size = 128
    max_position_embeddings: Context = 4096
    attention_bias: Literal[False] = False
    """only a DeepSeek-V3 without biases can be trained"""

    kv_lora_rank: Size = 512
    q_lora_rank: Size | None = 1536
    qk_rope_head_dim: Size = 64
    qk_nope_head_dim: Size = 128
    v_head_dim: Size = 128
    rope_interleave: bool = True
    # layers from this one on have experts
    first_k_dense_replace: int = Field(3, ge=0)
    # layers that predict later tokens, behind the others
    num_nextn_predict_layers: int = Field(1, ge=0)

    @property
    def width_of_head(self) -> int:
        """Width of a head of queries and keys; ``head_dim`` is that of its rotated part in transformers 5."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama, except for experts."""
        return super().traits | {
            "kv_rank": self.kv_lora_rank,
            "query_rank": self.q_lora_rank or 0,
            "rope_dim": self.qk_rope_head_dim,
            "value_dim": 0 if self.v_head_dim == self.width_of_head else self.v_head_dim,
            "rope_pairs": "adjacent" if self.rope_interleave else "halves",
            "score_factor": self._score_factor,
        }

    @property
    def _score_factor(self) -> float:
        """What transformers multiplies scores by, beside YaRN's factor on cosines and sines."""
        for rope in self.rope.mappings.values():
            if isinstance(rope, YarnRope) and rope.mscale_all_dim:
                return yarn_amplitude(rope.factor, rope.mscale_all_dim) ** 2
        return 1.0

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        heads = self.num_attention_heads
        if self.num_key_value_heads not in (None, heads):
            yield f"num_key_value_heads={self.num_key_value_heads} is not num_attention_heads={heads}"
        if self.qk_rope_head_dim % 2:
            yield f"qk_rope_head_dim={self.qk_rope_head_dim} is odd, but the rotary embedding rotates pairs"
        if self.v_head_dim > self.width_of_head:
            yield f"v_head_dim={self.v_head_dim} is above the {self.width_of_head} numbers of a head of queries"
        if self.first_k_dense_replace < self.num_hidden_layers:
            yield (
                f"first_k_dense_replace={self.first_k_dense_replace}: only a DeepSeek-V3 without experts can be "
                f"trained, whose {self.num_hidden_layers} layers are all dense"
            )

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits.

        Raises:
            ConfigError: if scores have a factor that does not follow from YaRN.
        """
        keys = {
            "attention_bias": False,
            "head_dim": spec.rope_dim,
            "kv_lora_rank": spec.kv_rank,
            "q_lora_rank": spec.query_rank or None,
            "qk_rope_head_dim": spec.rope_dim,
            "qk_nope_head_dim": spec.head_dim - spec.rope_dim,
            "v_head_dim": spec.value_head_dim,
            "rope_interleave": spec.rope_pairs == "adjacent",
            "first_k_dense_replace": spec.num_layers,
            "num_nextn_predict_layers": 0,
        }
        return keys | _keys_of_scores(spec)


def _keys_of_scores(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of the rotary embedding with those from which transformers has the factor on scores.

    Raises:
        ConfigError: if there is a factor, but no YaRN that it could follow from.
    """
    if spec.score_factor == 1.0:
        return {}
    scaling = spec.rope_scaling
    if not isinstance(scaling, YarnScaling) or scaling.factor == 1.0:
        raise ConfigError(
            f"transformers cannot describe {spec.name}: {DeepseekV3Json.architecture()} has no "
            f"architecture.score_factor={spec.score_factor:g} but by YaRN"
        )
    of_scores = math.sqrt(spec.score_factor)
    weights = {"mscale_all_dim": _weight_in_yarn(of_scores, scaling.factor)}
    if scaling.attention_factor is not None:  # without it, transformers takes that of the paper unless it has both
        weights["mscale"] = _weight_in_yarn(scaling.amplitude * of_scores, scaling.factor)
    keys = rope_keys(spec.rope_theta, scaling)
    return keys | {mapping: keys[mapping] | weights for mapping in ("rope_scaling", "rope_parameters")}


def _weight_in_yarn(amplitude: float, factor: float) -> float:
    """Return the weight with which ``yarn_amplitude`` gives an amplitude, without the last digits' noise."""
    return round((amplitude - 1.0) / (yarn_amplitude(factor) - 1.0), 12)
