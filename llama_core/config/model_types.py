"""The types of models that transformers has, one row each: how they differ from a Llama, and what files call a weight.

A trait is a field of ``ModelSpec`` that has another value than a plain Llama's; of experts, each setting is one too. A
model is written as the type that states all its traits. A trait that no row states keeps a model from being exported,
so a new field of ``ModelSpec`` belongs into one of these tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

STATED_BY_ALL = frozenset(
    {
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "ffn_size",
        "vocab_size",
        "rope_theta",
        "norm_eps",
        "max_context",
        "tied_embeddings",
        "rope_scaling",
    }
)
"""The fields of ``ModelSpec`` that the configuration of every type states, whatever their value."""

NO_TRAITS: Mapping[str, str] = {
    "name": "what people call it",
    "family": "which chat template belongs to it",
    "default_seq_len": "how long the sequences of a training are",
    "instruct": "the tokenizer's chat template says so",
    "lora": "adapters are merged, or written to a folder of their own",
    "trainable": "which weights are trained",
    "base": "how fast they are trained, and how they begin",
    "moe.z_loss_coefficient": "what is added to the loss of a training",
    "moe.balance_bias_rate": "how fast experts are balanced in a training",
}
"""Those that do not change what its weights compute, with what they are instead."""


class Layout(NamedTuple):
    """How files lay out a weight that is not a tensor there as it is one here."""

    transposed: bool = False
    """Whether columns come before rows."""
    part: int = 0
    """Which of the weights that share one tensor it is; each has as many of its columns, or of a bias's numbers."""
    parts: int = 1
    """How many weights share the tensor."""
    in_turns: bool = False
    """Whether they take its columns in turns, and not one after another."""
    less_one: bool = False
    """Whether files hold one less than what is multiplied by."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor in files that a weight of some shape is in."""
        if self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return (*shape[:-1], shape[-1] * self.parts)


@dataclass(frozen=True)
class ModelType:
    """A type of models in transformers."""

    name: str
    """Its ``model_type``."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """The traits that all of them have, with their values; ``moe`` is True."""
    required: frozenset[str] = frozenset()
    """The traits that all of them have with values of their own, which their configuration states."""
    sometimes: frozenset[str] = frozenset()
    """The traits that some of them have, which their configuration states."""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The values of some of these that it can state, if not any."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What its files call a weight, by our name in a layer, if not as its row does (``Weight.stored_name``)."""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """How its files lay out a weight, by our name in a layer, if not as we do."""
    norms_less_one: bool = False
    """Whether its files hold the weights of norms less one: transformers multiplies by one more than they say.

    Ours are what is multiplied by. In fp32 that is the same number for a weight of a bf16 file that is 0, or from
    2^-16 to 2^23 in size: its last bit is no smaller than that of the sum, so that the sum, and the difference that is
    written back, are exact. A smaller one comes back with an error of at most 2^-24, and so does any of an fp32 file.
    """

    @property
    def of_model(self) -> dict[str, Any]:
        """The fields of ``ModelSpec`` that all of them have, but for their experts."""
        return {trait: value for trait, value in self.always.items() if trait.partition(".")[0] != "moe"}

    @property
    def of_experts(self) -> dict[str, Any]:
        """The settings that the experts of all of them have."""
        return {trait.removeprefix("moe."): value for trait, value in self.always.items() if trait.startswith("moe.")}

    def fits(self, traits: Mapping[str, Any]) -> bool:
        """Return whether a model with these traits has all that these models always have."""
        has_required = traits.keys() >= self.required
        return has_required and all(traits.get(trait) == value for trait, value in self.always.items())

    def lacking(self, traits: Mapping[str, Any]) -> frozenset[str]:
        """Return those of a model's traits that the configuration of these models does not state."""
        return frozenset(trait for trait, value in traits.items() if not self._states(trait, value))

    def _states(self, trait: str, value: Any) -> bool:
        if trait in self.required | self.sometimes:
            return value in self.values.get(trait, (value,))
        return bool(self.always.get(trait) == value)


_SETTINGS_OF_EXPERTS = frozenset({"moe.num_experts", "moe.experts_per_token", "moe.balance_loss_coefficient"})

LLAMA = ModelType("llama")
MIXTRAL = ModelType("mixtral", always={"moe": True}, sometimes=_SETTINGS_OF_EXPERTS | {"sliding_window"})
MISTRAL = ModelType("mistral", sometimes=frozenset({"sliding_window"}))
QWEN2 = ModelType("qwen2", always={"qkv_bias": True}, sometimes=frozenset({"sliding_window", "windowed_layers"}))
QWEN3 = ModelType("qwen3", always={"qk_norm": True}, sometimes=frozenset({"sliding_window", "windowed_layers"}))
QWEN3_MOE = ModelType(
    "qwen3_moe",
    always={"qk_norm": True, "moe": True},
    sometimes=_SETTINGS_OF_EXPERTS | {"moe.gates", "sliding_window"},
    values={"moe.gates": ("softmax_all",)},
    names={
        "feed_forward.router.weight": "mlp.gate.weight",
        "feed_forward.experts.w1.weight": "mlp.experts.{}.gate_proj.weight",
        "feed_forward.experts.w2.weight": "mlp.experts.{}.down_proj.weight",
        "feed_forward.experts.w3.weight": "mlp.experts.{}.up_proj.weight",
    },
)
OLMO2 = ModelType(
    "olmo2",
    always={"norms": "post", "qk_norm": True, "qk_norm_width": "all"},
    names={
        "attention_post_norm.weight": "post_attention_layernorm.weight",
        "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
    },
)
OLMO3 = ModelType(
    "olmo3",
    always=OLMO2.always,
    sometimes=frozenset({"sliding_window", "windowed_layers", "windowed_rope_theta"}),
    names=OLMO2.names,
)
GEMMA3_TEXT = ModelType(
    "gemma3_text",
    always={"norms": "both", "qk_norm": True, "activation": "gelu_tanh", "scaled_embedding": True},
    sometimes=OLMO3.sometimes | {"query_pre_attn_scalar"},
    names={
        "attention_post_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
    },
    norms_less_one=True,
)
GPT_OSS = ModelType(
    "gpt_oss",
    always={
        "qkv_bias": True,
        "o_bias": True,
        "attention_sinks": True,
        "activation": "clamped_swiglu",
        "moe": True,
        "moe.biases": True,
    },
    sometimes=_SETTINGS_OF_EXPERTS | {"sliding_window", "windowed_layers"},
    names={
        "feed_forward.router.weight": "mlp.router.weight",
        "feed_forward.router.bias": "mlp.router.bias",
        "feed_forward.experts.w1.weight": "mlp.experts.gate_up_proj",
        "feed_forward.experts.w1.bias": "mlp.experts.gate_up_proj_bias",
        "feed_forward.experts.w2.weight": "mlp.experts.down_proj",
        "feed_forward.experts.w2.bias": "mlp.experts.down_proj_bias",
        "feed_forward.experts.w3.weight": "mlp.experts.gate_up_proj",
        "feed_forward.experts.w3.bias": "mlp.experts.gate_up_proj_bias",
    },
    layouts={
        "feed_forward.experts.w1.weight": Layout(transposed=True, part=0, parts=2, in_turns=True),
        "feed_forward.experts.w1.bias": Layout(part=0, parts=2, in_turns=True),
        "feed_forward.experts.w2.weight": Layout(transposed=True),
        "feed_forward.experts.w3.weight": Layout(transposed=True, part=1, parts=2, in_turns=True),
        "feed_forward.experts.w3.bias": Layout(part=1, parts=2, in_turns=True),
    },
)
LLAMA4_TEXT = ModelType(
    "llama4_text",
    always={"rope_pairs": "adjacent", "moe": True, "moe.gates": "sigmoid", "moe.gate_inputs": True},
    sometimes=_SETTINGS_OF_EXPERTS
    | {"moe.moe_layers", "moe.expert_size", "moe.shared_size", "qk_norm", "qk_norm_weights", "nope_layers"}
    | {"query_temperature_scale", "query_temperature_floor", "attention_chunk"},
    names={
        "feed_forward.w1.weight": "feed_forward.gate_proj.weight",
        "feed_forward.w2.weight": "feed_forward.down_proj.weight",
        "feed_forward.w3.weight": "feed_forward.up_proj.weight",
        "feed_forward.router.weight": "feed_forward.router.weight",
        "feed_forward.shared.w1.weight": "feed_forward.shared_expert.gate_proj.weight",
        "feed_forward.shared.w2.weight": "feed_forward.shared_expert.down_proj.weight",
        "feed_forward.shared.w3.weight": "feed_forward.shared_expert.up_proj.weight",
        "feed_forward.experts.w1.weight": "feed_forward.experts.gate_up_proj",
        "feed_forward.experts.w2.weight": "feed_forward.experts.down_proj",
        "feed_forward.experts.w3.weight": "feed_forward.experts.gate_up_proj",
    },
    layouts={
        "feed_forward.experts.w1.weight": Layout(transposed=True, part=0, parts=2),
        "feed_forward.experts.w2.weight": Layout(transposed=True),
        "feed_forward.experts.w3.weight": Layout(transposed=True, part=1, parts=2),
    },
)
DEEPSEEK_V3 = ModelType(
    "deepseek_v3",
    required=frozenset({"kv_rank", "rope_dim"}),
    sometimes=_SETTINGS_OF_EXPERTS
    | {"query_rank", "value_dim", "rope_pairs", "score_factor", "mtp_layers", "moe"}
    | {"moe.moe_layers", "moe.expert_size", "moe.shared_size", "moe.gates", "moe.gate_scale"}
    | {"moe.expert_groups", "moe.groups_per_token", "moe.balance_bias"},
    values={"moe.gates": ("sigmoid", "sigmoid_chosen")},
    names={
        "feed_forward.router.weight": "mlp.gate.weight",
        "feed_forward.experts.w1.weight": "mlp.experts.{}.gate_proj.weight",
        "feed_forward.experts.w2.weight": "mlp.experts.{}.down_proj.weight",
        "feed_forward.experts.w3.weight": "mlp.experts.{}.up_proj.weight",
    },
)
MODEL_TYPES = (
    *(LLAMA, MIXTRAL, MISTRAL, QWEN2, QWEN3, QWEN3_MOE),
    *(OLMO2, OLMO3, GEMMA3_TEXT, GPT_OSS, LLAMA4_TEXT, DEEPSEEK_V3),
)


def nearest_type(traits: Mapping[str, Any]) -> ModelType:
    """Return the type that states all these traits or, if none does, the one that most of them mark."""

    def likeness(kind: ModelType) -> tuple[bool, int, int]:
        lacking = len(kind.lacking(traits))
        return not lacking, len(kind.always) + len(kind.required), -lacking

    return max((kind for kind in MODEL_TYPES if kind.fits(traits)), key=likeness)


def stated_by_none(traits: Mapping[str, Any]) -> frozenset[str]:
    """Return those of some traits that no type states."""
    return frozenset.intersection(*(kind.lacking(traits) for kind in MODEL_TYPES))
