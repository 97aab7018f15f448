import pytest

from llama_core.config.models import model_names, model_spec
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
    "llama3_405b": 405_853_388_800,
    "code_llama_7b": 6_738_546_688,
}


def test_the_registry_holds_these_variants_and_no_others():
    assert set(model_names()) == set(PARAMETERS)


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_each_variant_has_its_published_parameter_count(name, count):
    assert model_spec(name).num_parameters == count


@pytest.mark.parametrize("name", model_names())
def test_heads_divide_into_key_value_groups(name):
    spec = model_spec(name)
    assert spec.num_heads % spec.num_kv_heads == 0


def test_only_the_405b_stretches_its_rotary_embedding():
    assert [name for name in model_names() if model_spec(name).rope_scaling] == ["llama3_405b"]


def test_a_misspelt_model_is_answered_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown model 'lama3_8b'; did you mean 'llama3_8b'"):
        model_spec("lama3_8b")


def test_a_model_like_no_other_is_answered_with_the_whole_list():
    with pytest.raises(ConfigError, match=r"choose one of tiny_llama3_50m, .*code_llama_7b"):
        model_spec("gpt")
