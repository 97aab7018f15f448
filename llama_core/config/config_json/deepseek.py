"""What the ``config.json`` of a DeepSeek-V3 may say."""

import math
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from llama_core.config.config_json.experts import LossWeight
from llama_core.config.config_json.llama import Context, LlamaJson
from llama_core.config.config_json.rope import Positive, Size, YarnRope, rope_keys
from llama_core.config.model_types import DEEPSEEK_V3
from llama_core.config.models import ModelSpec
from llama_core.config.rope import YarnScaling, yarn_amplitude
from llama_core.config.strategy import MoE
from llama_core.errors import ConfigError


class DeepseekV3Json(LlamaJson):
    """A DeepSeek-V3, with the defaults of ``DeepseekV3Config``, which has some for the sizes too.

    Its keys and values are made from a latent, and so are its queries unless ``q_lora_rank`` is null. All layers but
    the first have experts, which a bias balances. The modules that predict later tokens are left out, as transformers
    leaves them out; ``architecture.mtp_layers`` asks for them.
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
    moe_layer_freq: Literal[1] = 1
    """all layers from first_k_dense_replace on have experts"""
    n_routed_experts: Size = 256
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 2048
    # together they are one feed-forward of all their widths
    n_shared_experts: int = Field(1, ge=0)
    scoring_func: Literal["sigmoid"] = "sigmoid"
    """the experts of a DeepSeek-V3 are scored by sigmoids"""
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    """the experts of a DeepSeek-V3 are balanced by biases"""
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 2.5
    n_group: Size | None = 8
    topk_group: Size | None = 4
    # of the loss within a sequence, which transformers lacks
    aux_loss_alpha: LossWeight = 0.0
    # modules that predict later tokens, behind the layers
    num_nextn_predict_layers: int = Field(1, ge=0)

    @property
    def width_of_head(self) -> int:
        """Width of a head of queries and keys; ``head_dim`` is that of its rotated part in transformers 5."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def moe(self) -> MoE | None:
        """The experts; None if all layers are dense."""
        if self.first_k_dense_replace >= self.num_hidden_layers:
            return None
        first = self.first_k_dense_replace
        return MoE(
            num_experts=self.n_routed_experts,
            expert_size=0 if self.moe_intermediate_size == self.intermediate_size else self.moe_intermediate_size,
            shared_size=self.n_shared_experts * self.moe_intermediate_size,
            experts_per_token=self.num_experts_per_tok,
            moe_layers=tuple(range(first, self.num_hidden_layers)) if first else None,
            gates="sigmoid_chosen" if self.norm_topk_prob else "sigmoid",
            gate_scale=self.routed_scaling_factor,
            expert_groups=self.n_group or 1,
            groups_per_token=self.topk_group or 1,
            balance_bias=True,
            balance_loss_coefficient=self.aux_loss_alpha,
        )

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

    @classmethod
    def keys_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys that describe a model's traits.

        Raises:
            ConfigError: if scores have a factor that does not follow from YaRN, or experts are not like DeepSeek-V3's.
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
            "num_nextn_predict_layers": spec.mtp_layers,
        }
        return keys | _keys_of_scores(spec) | _keys_of_experts(spec)


def _keys_of_experts(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of a model's experts.

    Raises:
        ConfigError: if no DeepSeek-V3 has such experts.
    """
    moe = spec.moe
    if moe is None:
        return {"first_k_dense_replace": spec.num_layers}
    first = spec.num_layers - spec.num_sparse_layers
    others = {
        f"moe.gates={moe.gates}": not moe.has_sigmoids,
        "moe.balance_bias=false": not moe.balance_bias,
        f"moe.moe_layers={moe.moe_layers}": not all(map(spec.has_experts, range(first, spec.num_layers))),
        f"moe.shared_size={moe.shared_size} beside experts of {spec.expert_size}": moe.shared_size % spec.expert_size
        > 0,
    }
    for trait, is_there in others.items():
        if is_there:
            raise ConfigError(
                f"transformers cannot describe {spec.name}: {DeepseekV3Json.architecture()} has no {trait}"
            )
    return {
        "first_k_dense_replace": first,
        "moe_layer_freq": 1,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": spec.expert_size,
        "n_shared_experts": moe.shared_size // spec.expert_size,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": moe.gates == "sigmoid_chosen",
        "routed_scaling_factor": moe.gate_scale,
        "n_group": moe.expert_groups,
        "topk_group": moe.groups_per_token,
        "aux_loss_alpha": moe.balance_loss_coefficient,
    }


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
