"""``generation_config.json`` of a folder, and the tokens in it that end a text."""

import json

import pytest

from llama_core.errors import WeightsError
from llama_core.hugging_face.generation_config import end_tokens, generation_config, with_ends


@pytest.mark.parametrize(("written", "ends"), [(None, ()), (2, (2,)), ([1, 4], (1, 4)), ([], ())])
def test_one_end_token_several_or_none(written, ends):
    assert end_tokens({"eos_token_id": written}) == ends


def test_a_folder_without_the_file_says_nothing(tmp_path):
    assert generation_config(tmp_path) == {}


def test_adapters_generate_as_their_base(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 4], "top_p": 0.9}')
    adapters = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": 1,
        "lora_alpha": 1,
        "target_modules": [],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapters))
    assert generation_config(tmp_path) == {"eos_token_id": [1, 4], "top_p": 0.9}


@pytest.mark.parametrize("content", ["{", "[1]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1, true]}'])
def test_a_file_that_cannot_be_used_is_one_line_with_its_name(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(WeightsError, match=r"generation_config\.json") as refused:
        generation_config(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_link_to_a_file_elsewhere_is_not_followed_into_an_export(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "private.json").write_text("{}")
    (folder / "generation_config.json").symlink_to(tmp_path / "private.json")
    with pytest.raises(WeightsError, match=r"it is a link to .*private\.json; put a copy there"):
        generation_config(folder)


@pytest.mark.parametrize(
    ("described", "generating", "ends"),
    [
        (7, None, 7),
        ([7, 9], None, [7, 9]),
        ([7], None, [7]),
        (7, 9, [9, 7]),
        ([7, 9], 9, [9, 7]),
        (None, [9], [9]),
        (7, [], 7),
        (None, None, None),
    ],
)
def test_a_folder_ends_its_texts_with_every_token_that_either_file_names(tmp_path, described, generating, ends):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": described}))
    if generating is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generating}))
    assert generation_config(tmp_path).get("eos_token_id") == ends


def test_an_end_in_config_json_that_is_no_token_is_told_with_its_file(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": "<eot>"}')
    with pytest.raises(WeightsError, match=r"config\.json: eos_token_id='<eot>' is neither a token's id nor a list"):
        generation_config(tmp_path)


def test_more_ends_follow_and_nothing_is_lost():
    assert with_ends({}, [1]) == {"eos_token_id": 1}
    assert with_ends({"eos_token_id": [1]}, [1]) == {"eos_token_id": [1]}, "a list stays a list"
    assert with_ends({"eos_token_id": [4, 1], "top_p": 0.9}, [1, 6]) == {"eos_token_id": [4, 1, 6], "top_p": 0.9}
    assert with_ends({"eos_token_id": 4}, [1]) == {"eos_token_id": [4, 1]}
    assert with_ends({}, []) == {}
