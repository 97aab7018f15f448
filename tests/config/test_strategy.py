import re
from dataclasses import replace

import pytest
import torch

from llama_core.config.models import model_spec
from llama_core.config.run import RunConfig
from llama_core.config.strategy import MATRICES, LoRA, MoE
from llama_core.errors import ConfigError
from llama_core.models.llama import Llama, with_adapters


def test_adapters_of_a_7b_model_have_the_count_that_peft_documents():
    spec = replace(model_spec("llama1_7b"), lora=LoRA(lora_rank=8, target_modules=("q_proj", "v_proj")))
    assert (spec.num_trainable_parameters, spec.num_parameters) == (4_194_304, 6_742_609_920)


def test_mixtral_8x7b_has_its_published_total_and_active_parameters():
    spec = replace(model_spec("llama3_8b"), vocab_size=32_000, moe=MoE())
    assert (spec.num_parameters, spec.num_active_parameters) == (46_702_792_704, 12_879_925_248)


def test_only_sparse_layers_count_experts():
    dense = model_spec("llama2_13b")
    spec = replace(dense, moe=MoE(num_experts=16, moe_layers=(4, 8, 12)))
    router = 16 * spec.hidden_size
    assert spec.num_parameters - dense.num_parameters == 3 * (15 * spec.expert_parameters + router)
    assert spec.num_active_parameters - dense.num_parameters == 3 * (spec.expert_parameters + router)
    assert spec.num_trainable_parameters == spec.num_parameters


@pytest.mark.parametrize("patterns", [[], ["*norm*"], ["lm_head", "*.wv.*"], ["model.layers.1.*", "tok_embeddings"]])
@pytest.mark.parametrize("strategy", ["lora", "hybrid"])
def test_the_counts_are_those_of_the_model_that_trains(strategy, patterns):
    moe = {"moe": {"num_experts": 2, "moe_layers": 2}} if strategy == "hybrid" else {}
    mapping = {"strategy": strategy, "lora": {"target_modules": "all-linear"}, "trainable": patterns} | moe
    sizes = {"num_layers": 4, "hidden_size": 64, "ffn_size": 96, "vocab_size": 512, "tied_embeddings": False}
    spec = RunConfig.from_mapping(mapping | {"architecture": sizes}).spec
    with torch.device("meta"):
        model = with_adapters(Llama(spec))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapters = sum(parameter.numel() for name, parameter in trained.items() if ".lora_" in name)
    counted = sum(parameter.numel() for parameter in trained.values()), adapters
    assert (spec.num_trainable_parameters, spec.num_adapter_parameters) == counted
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert {name for name in trained if ".lora_" not in name} == spec.trained_in_full


@pytest.mark.parametrize(
    ("qk_norm", "refused", "taken"),
    [
        (True, "*.block_sparse_moe.gate", ["*.mlp.gate", "model.layers.1.mlp.experts.*.up_proj.weight"]),
        (False, "*.mlp.gate", ["*.block_sparse_moe.gate", "model.layers.1.block_sparse_moe.experts.*.w3"]),
    ],
)
def test_patterns_find_the_parts_of_a_mixture_by_the_names_in_its_files(qk_norm, refused, taken):
    mapping = {"strategy": "hybrid", "architecture": {"qk_norm": qk_norm}}
    spec = RunConfig.from_mapping(mapping | {"trainable": taken}).spec
    assert spec.trainable == tuple(taken)
    with pytest.raises(ConfigError, match=re.escape(f"trainable='{refused}' matches no weight")):
        RunConfig.from_mapping(mapping | {"trainable": [refused]})


def test_every_second_layer_begins_with_the_second():
    moe = RunConfig.from_mapping({"strategy": "moe", "moe": {"moe_layers": 2}}).spec.moe
    assert [layer for layer in range(6) if moe.is_sparse(layer)] == [1, 3, 5]


def test_a_strategy_is_configured_in_its_own_section():
    lora = RunConfig.from_mapping({"strategy": "lora", "lora": {"lora_rank": 64, "target_modules": ["q_proj"]}})
    moe = RunConfig.from_mapping({"strategy": "moe", "moe": {"num_experts": 16, "moe_layers": [4, 8]}})
    assert (lora.spec.lora, lora.spec.moe) == (LoRA(lora_rank=64, target_modules=("q_proj",)), None)
    assert (moe.spec.lora, moe.spec.moe) == (None, MoE(num_experts=16, moe_layers=(4, 8)))


@pytest.mark.parametrize("targets", ["all-linear", ["all-linear"]])
def test_all_linear_is_every_matrix_of_a_layer(targets):
    config = RunConfig.from_mapping({"strategy": "lora", "lora": {"target_modules": targets}})
    assert config.lora.target_modules == MATRICES


@pytest.mark.parametrize(
    ("mapping", "learning_rate", "weight_decay", "epochs"),
    [
        ({}, 3e-4, 0.1, 1),
        ({"strategy": "lora"}, 2e-4, 0, 2),
        ({"training": {"init_from": "weights"}}, 2e-5, 0.1, 2),
        ({"strategy": "lora", "training": {"init_from": "weights", "learning_rate": 1e-3}}, 1e-3, 0, 2),
    ],
)
def test_fine_tuning_has_its_own_defaults(mapping, learning_rate, weight_decay, epochs):
    training = RunConfig.from_mapping(mapping).training
    assert (training.learning_rate, training.weight_decay, training.epochs) == (learning_rate, weight_decay, epochs)


def test_overriding_the_strategy_changes_defaults_but_not_explicit_settings():
    asked = RunConfig.from_mapping({"training": {"epochs": 5}})
    adapters = asked.with_overrides("strategy=lora")
    assert adapters.fine_tuning_defaults == {"learning_rate": 2e-4, "weight_decay": 0}
    assert adapters.training.epochs == 5
    assert adapters.with_overrides("strategy=standard") == asked


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"model": "llama3_70b_instruct"}, True),
        ({"strategy": "lora"}, True),
        ({"strategy": "lora", "training": {"init_from": "weights"}}, False),
        ({}, False),
    ],
)
def test_fine_tuning_random_weights_is_detected(mapping, expected):
    assert RunConfig.from_mapping(mapping).has_random_base == expected


def test_other_adapters_make_another_run():
    ranks = [RunConfig.from_mapping({"strategy": "lora", "lora": {"lora_rank": rank}}) for rank in (8, 16)]
    assert len({config.fingerprint() for config in (*ranks, RunConfig())}) == 3


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        ({"lora": {"lora_rank": 8}}, "lora.lora_rank=8 needs strategy=lora or hybrid, not standard"),
        (
            {"strategy": "lora", "lora": {"target_modules": ["q_proj", "wq"]}},
            "target_modules=['q_proj', 'wq'] must name some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
            "down_proj, or all-linear, and otherwise only embed_tokens or lm_head",
        ),
        (
            {"strategy": "lora", "lora": {"target_modules": ["lm_head"]}},
            "target_modules=['lm_head'] must name some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
            "down_proj, or all-linear, and otherwise only embed_tokens or lm_head",
        ),
        (
            {"strategy": "lora", "lora": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}},
            "lora.target_modules has embed_tokens and lm_head, but this model uses one matrix as both embedding and "
            "head, so the adapter could not be merged; leave it out",
        ),
        (
            {"strategy": "lora", "lora": {"target_modules": ["q_porj"]}},
            "target_modules=['q_porj'] must name some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
            "down_proj, or all-linear, and otherwise only embed_tokens or lm_head; did you mean 'q_proj'?",
        ),
        (
            {"strategy": "lora", "lora": {"lora_rank": 129, "target_modules": ["q_proj", "v_proj"]}},
            "lora.lora_rank=129 is above the largest rank of v_proj; use at most 128",
        ),
        (
            {"strategy": "moe", "trainable": ["*norm*"]},
            "trainable=['*norm*'] needs strategy=lora or hybrid; moe trains every weight",
        ),
        (
            {"strategy": "lora", "architecture": {"num_layers": 1}, "trainable": ["*.nrom"]},
            "trainable='*.nrom' matches no weight of tiny_llama3_50m; weights are tok_embeddings.weight, "
            "layers.0.attention_norm.weight, layers.0.attention.wq.weight, layers.0.attention.wk.weight, "
            "layers.0.attention.wv.weight, layers.0.attention.wo.weight, layers.0.ffn_norm.weight, "
            "layers.0.feed_forward.w1.weight, layers.0.feed_forward.w2.weight, layers.0.feed_forward.w3.weight, "
            "norm.weight",
        ),
        (
            {"strategy": "hybrid", "lora": {"target_modules": ["up_proj"]}},
            "lora.target_modules=['up_proj'] leaves no matrix for adapters: experts replace it, or trainable=[] trains "
            "it in full; choose others, or strategy=moe",
        ),
        (
            {"strategy": "moe", "moe": {"num_experts": 4, "experts_per_token": 5}},
            "experts_per_token=5 is not between 1 and num_experts=4",
        ),
        (
            {"strategy": "moe", "moe": {"num_experts": 8, "expert_groups": 3}},
            "expert_groups=3 does not divide num_experts=8; use one of 1, 2, 4, 8",
        ),
        (
            {"strategy": "moe", "moe": {"balance_bias_rate": 0.1}},
            "moe.balance_bias_rate=0.1 has no effect without moe.balance_bias=true",
        ),
        (
            {"strategy": "moe", "moe": {"num_experts": 8, "groups_per_token": 2}},
            "groups_per_token=2 is not between 1 and expert_groups=1",
        ),
        (
            {"strategy": "moe", "moe": {"num_experts": 8, "expert_groups": 4, "experts_per_token": 3}},
            "experts_per_token=3 is more than the 2 experts of groups_per_token=1: choose more of the expert_groups=4, "
            "or fewer experts",
        ),
        (
            {"strategy": "moe", "moe": {"moe_layers": [3, 16]}},
            "moe_layers=[16] are not layers of tiny_llama3_50m, which has layers 0 to 15",
        ),
        (
            {"strategy": "moe", "moe": {"moe_layers": 17}},
            "moe_layers=17 is above the 16 layers of tiny_llama3_50m, so none would have experts",
        ),
        (
            {"strategy": "moe", "moe": {"moe_layers": 0}},
            "moe_layers=0 is not at least 1; 1 gives every layer experts",
        ),
        (
            {"strategy": "moe", "moe": {"moe_layers": "even"}},
            "moe.moe_layers='even': input should be a list of layers, or n for every n-th layer",
        ),
        (
            {"strategy": "moe", "moe": {"moe_layers": [3, 3]}},
            "moe_layers=[3, 3] must name at least one layer, and none twice",
        ),
    ],
)
def test_each_mistake_is_one_line(mapping, problem):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping(mapping)
    assert caught.value.problems == (problem,)
