"""What the ``config.json`` of a GPT-OSS may say."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from llama_core.config.config_json.experts import LossWeight, balanced, router_aux_loss_coef
from llama_core.config.config_json.layer_types import LayerTypesJson, layer_types_of
from llama_core.config.config_json.llama import Context
from llama_core.config.config_json.rope import Positive, RopeInFile, Size, YarnRope
from llama_core.config.model_spec import SWIGLU_LIMIT, SWIGLU_SLOPE
from llama_core.config.model_types import GPT_OSS
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import MoE

_DEFAULT_ROPE = YarnRope(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)
"""The rotary embedding of a file that gives none."""


class GptOssJson(LayerTypesJson):
    """A GPT-OSS, with the defaults of ``GptOssConfig``, which has some for the sizes too.

    It has experts with a clamped SwiGLU in every layer, biases everywhere but in the head, a sink for each head, and a
    window in every other layer, the first among them.
    """

    row = GPT_OSS
    default_theta = 150_000.0

    model_type: Literal["gpt_oss"]  # type: ignore[assignment]
    architectures: list[Literal["GptOssForCausalLM"]] = []  # type: ignore[assignment]
    """only GptOssForCausalLM can be trained"""
    vocab_size: Size = 201_088
    hidden_size: Size = 2880
    intermediate_size: Size = 2880
    num_hidden_layers: Size = 36
    num_attention_heads: Size = 64
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = 64
    rms_norm_eps: Positive = 1e-5
    max_position_embeddings: Context = 131_072
    sliding_window: Size | None = 128
    # transformers takes either name
    num_local_experts: Size = Field(128, validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: Size = 4
    router_aux_loss_coef: LossWeight = 0.001

    attention_bias: Literal[True] = True  # type: ignore[assignment]
    """only a GPT-OSS with biases can be trained"""
    # no keys of transformers 4, which has the same numbers in its code
    swiglu_limit: Annotated[float, Field(ge=SWIGLU_LIMIT, le=SWIGLU_LIMIT)] = SWIGLU_LIMIT
    """the experts of GPT-OSS clamp at 7.0"""
    swiglu_alpha: Annotated[float, Field(ge=SWIGLU_SLOPE, le=SWIGLU_SLOPE)] = SWIGLU_SLOPE
    """the sigmoid in the experts of GPT-OSS has the slope 1.702"""

    @property
    def _windowed_by_default(self) -> list[int]:
        """The layers with a window in a file without ``layer_types``: the first, and every other one."""
        return list(range(0, self.num_hidden_layers, 2))

    @property
    def rope(self) -> RopeInFile:
        """All that the file says about the rotary embedding, which is scaled if it says nothing."""
        if self.rope_scaling is None and self.rope_parameters is None:
            return self._rope_of({"rope_parameters": _DEFAULT_ROPE}, "rope_theta", self.rope_theta)
        return super().rope

    @property
    def moe(self) -> MoE:
        """The experts."""
        moe = MoE(
            num_experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            **self.row.of_experts,
        )
        return balanced(moe, self.router_aux_loss_coef, self.num_hidden_layers)

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        yield from self._windows_without_size()

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits."""
        assert spec.moe is not None
        return {
            "attention_bias": True,
            # a number even if no layer has a window, since transformers makes the mask of one
            "sliding_window": spec.sliding_window or spec.max_context,
            "layer_types": layer_types_of(spec),
            "num_local_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "router_aux_loss_coef": router_aux_loss_coef(spec),
            "swiglu_limit": SWIGLU_LIMIT,
            "swiglu_alpha": SWIGLU_SLOPE,
        }
