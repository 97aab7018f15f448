"""What the ``config.json`` of Llama 4's text models may say."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from llama_core.config.config_json.experts import LossWeight, balanced, router_aux_loss_coef
from llama_core.config.config_json.llama import Context, LlamaJson
from llama_core.config.config_json.rope import Positive, Size
from llama_core.config.model_types import LLAMA4_TEXT
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import MoE
from llama_core.errors import ConfigError


class Llama4TextJson(LlamaJson):
    """The text model of a Llama 4, with the defaults of ``Llama4TextConfig``, which has some for the sizes too.

    Most layers rotate adjacent pairs and see chunks; the others have temperatures in place of a rotation. Experts are
    in some layers or all, where a shared one is as wide as each of them.
    """

    row = LLAMA4_TEXT
    default_theta = 500_000.0

    model_type: Literal["llama4_text"]  # type: ignore[assignment]
    architectures: list[Literal["Llama4ForCausalLM"]] = []  # type: ignore[assignment]
    """only Llama4ForCausalLM can be trained"""
    vocab_size: Size = 202_048
    hidden_size: Size = 5120
    # the width of an expert; that of a dense feed-forward has a key of its own
    intermediate_size: Size = 8192
    intermediate_size_mlp: Size = 16_384
    num_hidden_layers: Size = 48
    num_attention_heads: Size = 40
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = 128
    rms_norm_eps: Positive = 1e-5
    max_position_embeddings: Context = 131_072

    num_local_experts: Size = 16
    num_experts_per_tok: Size = 1
    moe_layers: Annotated[list[int], Field(min_length=1)] | None = None
    """only a Llama 4 with experts in some layers can be trained"""
    interleave_moe_layer_step: Size = 1
    router_aux_loss_coef: LossWeight = 0.001

    use_qk_norm: bool = True
    # whatever the name says, 1 of a layer that rotates; empty, as in Llama-4-Scout-17B-16E, if every
    # no_rope_layer_interval-th does not
    no_rope_layers: list[Annotated[int, Field(ge=0, le=1)]] = []
    no_rope_layer_interval: Size = 4
    attention_chunk_size: Size | None = 8192
    layer_types: list[Literal["full_attention", "chunked_attention"]] | None = None
    # a number in some folders, with which transformers 4 does what it does with true
    attn_temperature_tuning: bool | int = True
    attn_scale: Annotated[float, Field(ge=0)] = 0.1
    floor_scale: Size = 8192

    @property
    def _rotating(self) -> list[bool]:
        """Whether each layer rotates queries and keys."""
        if self.no_rope_layers:
            return list(map(bool, self.no_rope_layers))
        return [(layer + 1) % self.no_rope_layer_interval != 0 for layer in range(self.num_hidden_layers)]

    @property
    def _moe_layers(self) -> int | tuple[int, ...] | None:
        """The layers with experts, as a number if they are every n-th."""
        step = self.interleave_moe_layer_step
        if self.moe_layers is not None:
            step = self.moe_layers[0] + 1
            if self.moe_layers != list(range(step - 1, self.num_hidden_layers, step)):
                return tuple(self.moe_layers)
        return step if step > 1 else None

    @property
    def moe(self) -> MoE:
        """The experts."""
        moe = MoE(
            num_experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            moe_layers=self._moe_layers,
            gates="sigmoid",
            gate_inputs=True,
            expert_size=0 if self.intermediate_size == self.intermediate_size_mlp else self.intermediate_size,
            shared_size=self.intermediate_size,
        )
        return balanced(moe, self.router_aux_loss_coef, self.num_hidden_layers)

    @property
    def width_of_feed_forward(self) -> int:
        """Width of the feed-forward of a layer without experts."""
        return self.intermediate_size_mlp

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of ``ModelSpec`` that tell this model from Llama, except for experts."""
        nope_layers = tuple(layer for layer, rotates in enumerate(self._rotating) if not rotates)
        has_temperature = bool(self.attn_temperature_tuning and nope_layers)
        return super().traits | {
            "qk_norm": self.use_qk_norm,
            "qk_norm_weights": not self.use_qk_norm,
            "nope_layers": nope_layers,
            "query_temperature_scale": self.attn_scale if has_temperature else 0.0,
            "query_temperature_floor": self.floor_scale,
            "attention_chunk": self.attention_chunk_size or 0,
        }

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        length = len(self.no_rope_layers)
        if length not in {0, self.num_hidden_layers}:
            yield f"no_rope_layers has {length} entries, but num_hidden_layers={self.num_hidden_layers}"
        elif self.layer_types not in (None, _layer_types(self._rotating, self.attention_chunk_size)):
            yield (
                "layer_types: chunked_attention is of the layers that rotate, if attention_chunk_size is set; the "
                "others have full_attention"
            )

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits.

        Raises:
            ConfigError: if its shared experts are of another width than the others, or norms of queries have weights.
        """
        moe = spec.moe
        assert moe is not None
        others = {
            f"moe.shared_size={moe.shared_size}": moe.shared_size != spec.expert_size,
            "architecture.qk_norm_weights=true": spec.has_qk_weights,
        }
        for trait, is_there in others.items():
            if is_there:
                raise ConfigError(f"transformers cannot describe {spec.name}: {cls.architecture()} has no {trait}")
        layers = range(spec.num_layers)
        rotating = [spec.rotates(layer) for layer in layers]
        sparse_layers = [layer for layer in layers if spec.has_experts(layer)]
        return {
            "attention_bias": False,
            "intermediate_size": spec.expert_size,
            "intermediate_size_mlp": spec.ffn_size,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_layers": sparse_layers,
            # vLLM, SGLang and llama.cpp read this alone, and have experts in every n-th layer
            "interleave_moe_layer_step": sparse_layers[0] + 1,
            "router_aux_loss_coef": router_aux_loss_coef(spec),
            "router_jitter_noise": 0.0,
            "use_qk_norm": spec.qk_norm,
            "no_rope_layers": list(map(int, rotating)),
            "attention_chunk_size": spec.attention_chunk or None,
            "layer_types": _layer_types(rotating, spec.attention_chunk),
            "attn_temperature_tuning": spec.query_temperature_scale > 0,
            "attn_scale": spec.query_temperature_scale,
            "floor_scale": spec.query_temperature_floor,
        }


def _layer_types(rotating: list[bool], attention_chunk_size: int | None) -> list[str]:
    return ["chunked_attention" if rotates and attention_chunk_size else "full_attention" for rotates in rotating]
