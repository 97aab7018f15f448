from dataclasses import replace

import pytest

from llama_core.config.models import model_names, model_spec
from llama_core.config.rope import LinearScaling, Llama3Scaling
from llama_core.config.run import RunConfig
from llama_core.config.strategy import MoE
from llama_core.errors import ConfigError

PARAMETERS = {
    "tiny_llama3_50m": 50_143_488,
    "tiny_llama3_150m": 148_845_312,
    "llama1_7b": 6_738_415_616,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_instruct": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_70b_instruct": 70_553_706_496,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "llama3_3_70b_instruct": 70_553_706_496,
    "code_llama_7b": 6_738_546_688,
    "code_llama_13b": 13_016_028_160,
    "code_llama_34b": 33_743_970_304,
    "mistral_7b": 7_241_732_096,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "llama4_scout": 107_769_861_120,
    "llama4_maverick": 400_711_848_960,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "moonlight_16b_a3b": 15_960_108_544,
    "deepseek_v3": 671_026_404_352,
}


def test_the_parameter_count_of_each_variant_is_written_down():
    assert PARAMETERS.keys() == set(model_names())


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_each_variant_has_its_published_parameter_count(name, count):
    assert model_spec(name).num_parameters == count


@pytest.mark.parametrize("name", model_names())
def test_heads_divide_into_key_value_groups(name):
    spec = model_spec(name)
    assert spec.num_heads % spec.num_kv_heads == 0


def test_llama_3_has_a_stretched_rotary_embedding_from_release_3_1_on():
    llamas = [name for name in model_names() if model_spec(name).family == "llama3"]
    stretched = {name for name in llamas if model_spec(name).rope_scaling}
    assert stretched == {
        "llama3_405b",
        *(name for name in model_names() if name.startswith(("llama3_1_", "llama3_2_", "llama3_3_"))),
    }


@pytest.mark.parametrize("name", model_names())
def test_no_variant_trains_beyond_its_context_or_beyond_16384_tokens_by_default(name):
    spec = model_spec(name)
    assert spec.default_seq_len <= min(spec.max_context, 16_384)


@pytest.mark.parametrize(
    ("scaling", "settings", "complaint"),
    [
        (LinearScaling, {"factor": 0.5}, "rope_scaling.factor=0.5 would shorten the context; use at least 1"),
        (Llama3Scaling, {"factor": 0.5, "original_context": 8192}, "rope_scaling.factor=0.5 would shorten"),
        (
            Llama3Scaling,
            {"factor": 8, "original_context": 8192, "low_freq_factor": 5.0},
            "rope_scaling.high_freq_factor=4 must be at least low_freq_factor=5",
        ),
    ],
)
def test_a_scaling_that_stretches_nothing_is_refused(scaling, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        scaling(**settings)


def test_a_misspelt_model_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown model 'lama3_8b'; did you mean 'llama3_8b'"):
        model_spec("lama3_8b")


def test_a_name_close_to_no_model_lists_them_all():
    with pytest.raises(ConfigError, match=r"choose one of tiny_llama3_50m, .*code_llama_7b"):
        model_spec("gpt")


@pytest.mark.parametrize(
    ("asked", "strategy"), [({}, "moe"), ({"strategy": "moe"}, "moe"), ({"strategy": "hybrid"}, "hybrid")]
)
def test_a_variant_that_is_a_mixture_brings_its_experts(asked, strategy):
    config = RunConfig.from_mapping({"model": "gpt_oss_20b", **asked, "launch": {"device": "cuda"}})
    assert config.strategy == strategy
    assert config.spec.moe == model_spec("gpt_oss_20b").moe
    other = RunConfig.from_mapping(
        {"model": "gpt_oss_20b", **asked, "launch": {"device": "cuda"}}, ["moe.num_experts=4"]
    )
    assert other.spec.moe == config.spec.moe.model_copy(update={"num_experts": 4})
    assert RunConfig.from_mapping(other.model_dump()).spec == other.spec


def test_a_variant_that_is_a_mixture_is_no_dense_model():
    with pytest.raises(ConfigError, match="gpt_oss_20b is a mixture of experts; use strategy=moe or hybrid"):
        RunConfig.from_mapping({"model": "gpt_oss_20b", "strategy": "lora", "launch": {"device": "cuda"}})


@pytest.mark.parametrize("some", [(0, 1, 2, 4), (3,), (5, 4)])
def test_few_layers_of_a_model_have_a_layer_of_each_kind(some):
    spec = replace(
        model_spec("llama3_8b"), num_layers=6, sliding_window=8, windowed_layers=some, moe=MoE(moe_layers=some)
    )
    few = spec.with_few_layers(2)
    assert sorted(few.window(layer) for layer in range(2)) == [0, 8]
    assert few.num_sparse_layers == 1
    assert spec.with_few_layers(1).num_layers == 1


def test_few_layers_of_a_model_with_equal_layers_are_equal():
    spec = replace(model_spec("mistral_7b"), moe=MoE(moe_layers=tuple(range(32))))
    assert len(set(spec.with_few_layers(2).layers)) == 1
    every_fourth = replace(spec, moe=MoE(moe_layers=4))
    assert every_fourth.with_few_layers(2).num_sparse_layers == 1


@pytest.mark.parametrize(
    ("name", "num_layers", "traits"),
    [
        ("olmo3_7b", 6, {"windowed_layers": (0, 1, 2, 4, 5), "windowed_rope_theta": 5e5}),
        ("gemma3_1b", 4, {"windowed_layers": (0, 1, 2, 3), "sliding_window": 512}),
        ("gpt_oss_20b", 3, {"windowed_layers": (0, 2), "num_sparse_layers": 3}),
        ("llama4_scout", 3, {"nope_layers": (), "query_temperature_scale": 0.0}),
        ("llama4_maverick", 4, {"nope_layers": (3,), "query_temperature_scale": 0.1, "num_sparse_layers": 2}),
        ("deepseek_v3", 5, {"num_sparse_layers": 2}),
        ("llama3_8b", 40, {"num_layers": 40}),
    ],
)
def test_a_model_with_fewer_layers_is_the_first_of_them(name, num_layers, traits):
    strategy = {"strategy": "moe"} if model_spec(name).moe else {}
    spec = RunConfig.from_mapping({"model": name, "architecture": {"num_layers": num_layers}} | strategy).spec
    assert {trait: getattr(spec, trait) for trait in traits} == traits
    for ours, published in zip(spec.layers[: min(num_layers, 32)], model_spec(name).layers, strict=False):
        assert ours == published


def test_layers_without_an_expert_of_a_mixture_are_refused():
    with pytest.raises(
        ConfigError, match=r"moe_layers=\[3, 4, 5, ...\] are not layers of deepseek_v3, which has layers 0"
    ):
        RunConfig.from_mapping({"model": "deepseek_v3", "strategy": "moe", "architecture": {"num_layers": 3}})
