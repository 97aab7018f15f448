"""Every trait that a model can have is stated by the type of transformers' model that it is exported as."""

import json
from dataclasses import dataclass, field, fields, replace

import pytest

from llama_core.config.config_json.reading import read_folder
from llama_core.config.config_json.writing import config_json
from llama_core.config.model_spec import BaseShape
from llama_core.config.model_types import DEEPSEEK_V3, LLAMA4_TEXT, MODEL_TYPES, NO_TRAITS, STATED_BY_ALL
from llama_core.config.model_weights import hugging_face_name, layout_of
from llama_core.config.models import ModelSpec
from llama_core.config.rope import Llama3Scaling, YarnScaling, yarn_amplitude
from llama_core.config.strategy import LoRA, MoE
from llama_core.errors import ConfigError

SPEC = ModelSpec("out", "llama", 64, 2, 4, 2, 16, 96, 128, 1e4, 1e-5, 256, 256)
FIELDS = {trait.name for trait in fields(ModelSpec)} | {f"moe.{key}" for key in MoE.model_fields}
NOT_YET = {
    "attention_soft_cap": {"attention_soft_cap": 30.0},
}
"""The traits that no type states yet, which keep a model from being exported, with another value than a Llama's."""
OTHER = {
    "hidden_size": {"hidden_size": 80},
    "num_layers": {"num_layers": 4},
    "num_heads": {"num_heads": 6},
    "num_kv_heads": {"num_kv_heads": 1},
    "head_dim": {"head_dim": 32},
    "ffn_size": {"ffn_size": 80},
    "vocab_size": {"vocab_size": 130},
    "rope_theta": {"rope_theta": 2e4},
    "norm_eps": {"norm_eps": 1e-6},
    "max_context": {"max_context": 300},
    "tied_embeddings": {"tied_embeddings": True},
    "rope_scaling": {"rope_scaling": Llama3Scaling(4.0, 32)},
    "qkv_bias": {"qkv_bias": True},
    "o_bias": {"o_bias": True},
    "qk_norm": {"qk_norm": True},
    "qk_norm_width": {"qk_norm": True, "qk_norm_width": "all"},
    "norms": {"norms": "post"},
    "activation": {"activation": "gelu_tanh"},
    "attention_sinks": {"attention_sinks": True},
    "scaled_embedding": {"scaled_embedding": True},
    "query_pre_attn_scalar": {"query_pre_attn_scalar": 24},
    "sliding_window": {"sliding_window": 8},
    "windowed_layers": {"sliding_window": 8, "windowed_layers": (1,)},
    "windowed_rope_theta": {"sliding_window": 8, "windowed_layers": (1,), "windowed_rope_theta": 2e4},
    "moe": {"moe": MoE()},
    "moe.biases": {"moe": MoE(biases=True)},
    "moe.num_experts": {"moe": MoE(num_experts=4)},
    "moe.experts_per_token": {"moe": MoE(experts_per_token=1)},
    "moe.gates": {"moe": MoE(gates="softmax_all")},
    "moe.balance_loss_coefficient": {"moe": MoE(balance_loss_coefficient=0.5)},
    "moe.moe_layers": {"moe": MoE(moe_layers=2)},
    "moe.expert_size": {"moe": MoE(expert_size=48, shared_size=48)},
    "moe.shared_size": {"moe": MoE(expert_size=48, shared_size=48)},
    "moe.gate_inputs": {"moe": MoE(gate_inputs=True)},
    "moe.balance_bias": {"moe": MoE(balance_bias=True)},
    "moe.gate_scale": {"moe": MoE(gate_scale=2.5)},
    "moe.expert_groups": {"moe": MoE(expert_groups=4, groups_per_token=2)},
    "moe.groups_per_token": {"moe": MoE(expert_groups=4, groups_per_token=2)},
    "mtp_layers": {"mtp_layers": 1},
    "rope_pairs": {"rope_pairs": "adjacent"},
    "nope_layers": {"nope_layers": (1,)},
    "query_temperature_scale": {"nope_layers": (1,), "query_temperature_scale": 0.1},
    "attention_chunk": {"attention_chunk": 16},
    "qk_norm_weights": {"qk_norm": True, "qk_norm_weights": False},
    "query_temperature_floor": {"query_temperature_floor": 16},
    "kv_rank": {"kv_rank": 24},
    "rope_dim": {"rope_dim": 8},
    "query_rank": {"query_rank": 20},
    "value_dim": {"value_dim": 12},
    "score_factor": {"rope_scaling": YarnScaling(4.0, 32), "score_factor": yarn_amplitude(4.0, 0.7) ** 2},
}
"""Another value than a Llama's of each field, with what it needs."""
BESIDE = {
    "name": {"name": "another"},
    "family": {"family": "llama3"},
    "default_seq_len": {"default_seq_len": 32},
    "instruct": {"instruct": True},
    "lora": {"lora": LoRA()},
    "trainable": {"lora": LoRA(), "trainable": ("*norm*",)},
    "base": {"base": BaseShape(32, 2)},
    "moe.z_loss_coefficient": {"moe": MoE(z_loss_coefficient=0.5)},
    "moe.balance_bias_rate": {"moe": MoE(balance_bias_rate=0.5)},
}
"""The same of the fields that are no traits."""


def stated(kind):
    return {*STATED_BY_ALL, *kind.always, *kind.required, *kind.sometimes}


def test_every_field_of_a_model_is_stated_by_some_type_or_is_no_trait_for_a_reason():
    by_some = set().union(*map(stated, MODEL_TYPES))
    known = by_some | NOT_YET.keys() | NO_TRAITS.keys()
    assert sorted(FIELDS - known) == [], "these belong into config/model_types.py"
    assert sorted(known - FIELDS) == []
    assert sorted(by_some & (NOT_YET.keys() | NO_TRAITS.keys())) == []
    assert (OTHER.keys(), BESIDE.keys()) == (by_some, NO_TRAITS.keys()), "this test needs a value of each field"


def marked(kind, trait=None):
    """Return the changes that make a model one of a kind, with another value of one trait that it may have."""
    changes, experts = {}, {}
    for each in (*kind.always, *kind.required, trait):
        given = OTHER.get(each, {})
        changes |= given
        experts |= given["moe"].model_dump(exclude_unset=True) if "moe" in given else {}
    experts |= kind.of_experts
    if kind is LLAMA4_TEXT:  # it has a shared expert, as wide as the others, and no weights of heads
        experts.setdefault("shared_size", changes.get("ffn_size", SPEC.ffn_size))
        changes |= {"qk_norm_weights": False} if "qk_norm" in changes else {}
    if kind is DEEPSEEK_V3:  # every head has keys and values of its own; biases balance experts, scored by sigmoids
        changes["num_kv_heads"] = changes.get("num_heads", SPEC.num_heads)
        experts |= {"balance_bias": True, "gates": "sigmoid" if trait == "moe.gates" else "sigmoid_chosen"}
        if "shared_size" in experts:
            experts["expert_size"] = experts["shared_size"]
        if "moe_layers" in experts:
            experts["moe_layers"] = (1,)
    return changes | kind.of_model | ({"moe": MoE(**experts)} if "moe" in changes else {})


def read_back(spec, folder):
    written = config_json(spec)
    (folder / "out").mkdir()
    (folder / "out/config.json").write_text(json.dumps(written))
    return written["model_type"], read_folder(str(folder / "out"))


EACH = [pytest.param(kind, trait, id=f"{kind.name}-{trait}") for kind in MODEL_TYPES for trait in sorted(stated(kind))]


@pytest.mark.parametrize(("kind", "trait"), EACH)
def test_a_model_comes_back_from_its_configuration_with_each_trait_that_its_type_states(kind, trait, tmp_path):
    spec = replace(SPEC, **marked(kind, trait))
    assert kind.lacking(spec.traits) == frozenset()
    name, read = read_back(spec, tmp_path)
    # a folder's modules that predict later tokens are left out unless they are asked for
    assert replace(read, default_seq_len=SPEC.default_seq_len, mtp_layers=spec.mtp_layers) == spec
    assert kind.fits(read.traits)
    assert name == spec.model_type.name


@pytest.mark.parametrize("kind", MODEL_TYPES[1:], ids=lambda kind: kind.name)
def test_a_model_is_of_the_type_whose_traits_it_has(kind):
    changes = {}
    for trait in sorted(kind.sometimes):
        changes |= OTHER[trait]
    if kind is DEEPSEEK_V3:
        changes |= marked(kind, "moe.gates")
    assert replace(SPEC, **changes | marked(kind)).model_type == kind


@pytest.mark.parametrize("trait", BESIDE)
def test_what_is_no_trait_changes_no_key_of_the_configuration(trait):
    plain = replace(SPEC, moe=MoE()) if trait.startswith("moe.") else SPEC
    assert config_json(replace(SPEC, **BESIDE[trait])) == config_json(plain)


def refusal(spec):
    with pytest.raises(ConfigError) as refused:
        config_json(spec)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("trait", NOT_YET)
def test_a_trait_that_no_type_states_yet_keeps_a_model_from_being_exported(trait):
    _, _, lacking = refusal(replace(SPEC, **NOT_YET[trait])).partition("no model there has ")
    assert f"{trait}=" in lacking


def test_a_type_that_states_a_trait_is_not_taken_for_another_value_than_it_can_state():
    mixture = replace(SPEC, qk_norm=True, moe=MoE(gates="softmax_all"))
    assert config_json(mixture)["model_type"] == "qwen3_moe"
    assert "moe.gates=sigmoid" in refusal(replace(mixture, moe=MoE(gates="sigmoid")))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"qk_norm": True}, "Llama4ForCausalLM has no architecture.qk_norm_weights=true"),
        ({"moe": MoE(gates="sigmoid", gate_inputs=True, shared_size=48)}, "has no moe.shared_size=48"),
        ({"moe": MoE(gates="sigmoid", gate_inputs=True)}, "has no moe.shared_size=0"),
    ],
)
def test_a_llama_4_has_no_weights_of_heads_and_a_shared_expert_as_wide_as_the_others(changes, said):
    assert said in refusal(replace(SPEC, **marked(LLAMA4_TEXT) | changes))


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        ({"gates": "softmax_all"}, "moe.gates=softmax_all"),
        ({"balance_bias": False}, "DeepseekV3ForCausalLM has no moe.balance_bias=false"),
        ({"moe_layers": (0,)}, "DeepseekV3ForCausalLM has no moe.moe_layers=(0,)"),
        ({"expert_size": 48, "shared_size": 40}, "has no moe.shared_size=40 beside experts of 48"),
    ],
)
def test_a_deepseek_has_biases_and_sigmoids_and_experts_in_its_last_layers(experts, said):
    changes = marked(DEEPSEEK_V3, "moe")
    assert said in refusal(replace(SPEC, **changes | {"moe": changes["moe"].model_copy(update=experts)}))


@dataclass(frozen=True)
class NewerSpec(ModelSpec):
    """A model with two fields that no table knows."""

    post_norm: bool = False
    depth_of_router: int = field(kw_only=True)


def newer(**changes):
    given = {trait.name: getattr(SPEC, trait.name) for trait in fields(SPEC)}
    return NewerSpec(**given | changes)


def test_a_new_field_keeps_every_model_with_another_value_from_being_exported():
    assert refusal(newer(depth_of_router=1)).endswith("out: no model there has depth_of_router=1")
    both = "no model there has depth_of_router=1 or post_norm=True"
    assert refusal(newer(depth_of_router=1, post_norm=True, qk_norm=True)).endswith(both)


@pytest.mark.parametrize("kind", MODEL_TYPES, ids=lambda kind: kind.name)
def test_a_type_names_weights_that_its_models_have(kind):
    spec = replace(SPEC, **marked(kind, "moe" if "moe" in kind.sometimes else None))
    if kind is LLAMA4_TEXT:  # it names weights of layers with experts, and of those without
        spec = replace(spec, moe=spec.moe.model_copy(update={"moe_layers": (1,)}))
    assert kind.names.keys() <= {name.partition(".")[2].partition(".")[2] for name in spec.parameter_shapes}
    theirs = [(hugging_face_name(name, kind), layout_of(name, kind).part) for name in spec.parameter_shapes]
    assert len(set(theirs)) == len(theirs)
