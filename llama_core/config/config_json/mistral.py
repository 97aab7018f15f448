"""What the ``config.json`` of Mistral's types may say."""

from typing import Any, Literal

from llama_core.config.config_json.experts import LossWeight, balanced, router_aux_loss_coef
from llama_core.config.config_json.llama import Context, LlamaJson
from llama_core.config.config_json.rope import Positive, Size
from llama_core.config.model_types import MISTRAL, MIXTRAL
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import MoE


class MistralJson(LlamaJson):
    """The same with a window in every layer, with the defaults of ``MistralConfig``."""

    row = MISTRAL

    model_type: Literal["mistral"]  # type: ignore[assignment]
    architectures: list[Literal["MistralForCausalLM"]] = []  # type: ignore[assignment]
    """only MistralForCausalLM can be trained"""
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Context = 131_072
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


class MixtralJson(LlamaJson):
    """The same for a mixture of experts, with the defaults of ``MixtralConfig``."""

    row = MIXTRAL
    default_theta = 1_000_000.0

    model_type: Literal["mixtral"]  # type: ignore[assignment]
    architectures: list[Literal["MixtralForCausalLM"]] = []  # type: ignore[assignment]
    """only MixtralForCausalLM can be trained"""
    num_key_value_heads: Size | None = 8
    rms_norm_eps: Positive = 1e-5
    max_position_embeddings: Context = 131_072
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2
    router_aux_loss_coef: LossWeight = 0.001
    # none by default, unlike Mistral's; Mixtral-8x7B-v0.1 writes null
    sliding_window: Size | None = None  # type: ignore[assignment]

    @property
    def moe(self) -> MoE:
        """The experts."""
        moe = MoE(
            num_experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
        )
        return balanced(moe, self.router_aux_loss_coef, self.num_hidden_layers)

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
            "router_aux_loss_coef": router_aux_loss_coef(spec),
            "router_jitter_noise": 0.0,
            "sliding_window": spec.sliding_window or None,
        }
