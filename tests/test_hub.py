"""The names of the Hub. What is downloaded under them is in ``tests/chain/test_downloads.py``."""

from pathlib import Path

import pytest

from llama_core.errors import HubError
from llama_core.hub import HubName, at_revision, folder_of, repository_in_cache


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("meta-llama/Llama-3.2-1B", HubName("meta-llama/Llama-3.2-1B")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@0123456789abcdef0123456789abcdef01234567", HubName("org/name", "0123456789abcdef" * 2 + "01234567")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        *((text, None) for text in ("name", "/org/name", "./org/name", "~/name", "org/name/", "org/na--me", "org/..")),
        *(
            (text, None)
            for text in ("org/name/part", "org/na me", "org/name@", "@a/b", "../name", "tokens/tokenizer.json")
        ),
        ("", None),
    ],
)
def test_a_name_of_a_model_is_an_owner_and_a_name_with_an_optional_revision(text, expected):
    assert HubName.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "revision", "path"),
    [
        ("HuggingFaceFW/fineweb", "main", ""),
        ("HuggingFaceFW/fineweb/sample/10BT", "main", "sample/10BT"),
        ("org/name@v1/data/train-*.parquet", "v1", "data/train-*.parquet"),
        ("org/name@refs/convert/parquet/default/train", "refs/convert/parquet", "default/train"),
    ],
)
def test_a_name_of_a_data_set_may_go_on_with_a_part_of_it(text, revision, path):
    name = HubName.parse(text, "dataset")
    assert (name.revision, name.path, str(name)) == (revision, path, text)


def test_a_part_of_a_data_set_does_not_lead_out_of_it():
    assert HubName.parse("org/name/../other", "dataset") is None


def test_what_is_here_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org/name").mkdir(parents=True)
    assert HubName.of("org/name") is None
    assert HubName.of("org/other") == HubName("org/other")
    assert folder_of("org/name") == Path("org/name")


def test_a_longer_path_in_a_folder_that_is_here_is_a_misspelled_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    assert HubName.of("data/corpora/mine", "dataset") is None
    assert HubName.of("other/corpora/mine", "dataset") is not None


def test_a_folder_of_the_cache_has_the_name_of_its_repository():
    assert repository_in_cache(Path("/hub/models--org--a-name/snapshots/abc")) == "org/a-name"
    assert repository_in_cache(Path("/hub/datasets--org--name/snapshots/abc")) is None
    assert repository_in_cache(Path("/models--org--name/abc")) is None
    assert repository_in_cache(Path("name")) is None


@pytest.mark.parametrize(
    ("named", "revision", "name"),
    [
        ("org/name", "0a1b", "org/name@0a1b"),
        ("org/name", "refs/pr/3", "org/name@refs/pr/3"),
        ("org/name", "main", "org/name"),
        ("org/name", None, "org/name"),
        ("org/name", "", "org/name"),
        ("org/name", 3, "org/name"),
        ("org/name@tag", "0a1b", "org/name@tag"),
        ("/models/name", "0a1b", "/models/name"),
    ],
)
def test_a_revision_beside_a_repository_is_part_of_its_name(named, revision, name):
    assert at_revision(named, revision) == name


def test_without_the_package_a_name_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"^org/name is not here, .* need the package 'huggingface_hub'; pip install"):
        folder_of("org/name")
