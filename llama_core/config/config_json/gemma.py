"""What the ``config.json`` of Gemma's types may say."""

from typing import Any, Literal

from llama_core.config.config_json.layer_types import RopeByLayerJson
from llama_core.config.config_json.llama import Context
from llama_core.config.config_json.rope import Size
from llama_core.config.model_types import GEMMA3_TEXT
from llama_core.config.models import ModelSpec


class Gemma3TextJson(RopeByLayerJson):
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
    max_position_embeddings: Context = 131_072
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
