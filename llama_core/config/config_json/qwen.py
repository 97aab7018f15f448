"""What the ``config.json`` of Qwen's types may say."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from llama_core.config.config_json.experts import LossWeight, balanced, router_aux_loss_coef
from llama_core.config.config_json.layer_types import LayerTypesJson, layer_types_of
from llama_core.config.config_json.llama import Context
from llama_core.config.config_json.rope import Size
from llama_core.config.model_types import QWEN2, QWEN3, QWEN3_MOE
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import MoE


class _QwenJson(LayerTypesJson):
    """What the types of Qwen share: a window in some layers, which has to be switched on."""

    num_key_value_heads: Size | None = 32
    max_position_embeddings: Context = 32_768
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
        layer_types = layer_types_of(spec)
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
    router_aux_loss_coef: LossWeight = 0.001
    # the default of transformers, though Qwen3-30B-A3B says true
    norm_topk_prob: bool = False
    decoder_sparse_step: Literal[1] = 1
    """only mixtures with experts in every layer can be trained"""
    mlp_only_layers: Annotated[list[int], Field(max_length=0)] = []
    """only mixtures with experts in every layer can be trained"""

    @property
    def moe(self) -> MoE:
        """The experts."""
        moe = MoE(
            num_experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
            # the chosen gates are divided by their sum, which equals a softmax over them alone
            gates="softmax_chosen" if self.norm_topk_prob else "softmax_all",
        )
        return balanced(moe, self.router_aux_loss_coef, self.num_hidden_layers)

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
            "norm_topk_prob": spec.moe.gates == "softmax_chosen",
            "router_aux_loss_coef": router_aux_loss_coef(spec),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
