"""An exported tokenizer has the templates that the run was trained with, in transformers too."""

import json
import shutil

import pytest
from saved_runs import always, save_run
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from llama_core.data.tokenizer import load_tokenizer
from llama_core.records.files import write_json
from llama_core.runs.export import export_run

DEFAULT = "{% for message in messages %}{{ message.content }}</s>{% endfor %}"
OTHERS = {"tool_use": f"{{{{ tools | length }}}} tools {DEFAULT}", "rag": f"documents {DEFAULT}"}


@pytest.fixture
def tokenizer(tmp_path):
    """A function that writes a tokenizer with some templates, as transformers 4 or 5 spells them."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    bare.add_special_tokens(["<s>", "</s>"])
    bare.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    def write(templates, *, in_files):
        with_templates = AutoTokenizer.from_pretrained(folder)
        with_templates.chat_template = templates
        with_templates.save_pretrained(folder, save_jinja_files=in_files)
        return folder

    return write


@pytest.fixture
def exported(tmp_path):
    """A function that exports a run which was trained on conversations, and returns the folder and what was told."""

    def export(tokenizer, **data):
        run = save_run(tmp_path / "run", {"data": {"tokenizer": str(tokenizer)} | data}, always(ord("a")))
        write_json(run.data, {"chat_template": "of the run"})
        told = []
        return export_run(run, tmp_path / "out", tell=told.append), told

    return export


def templates_of(folder):
    return AutoTokenizer.from_pretrained(folder).chat_template


@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize("names", [[], ["tool_use"], ["rag"], ["rag", "tool_use"]], ids=str)
def test_every_template_of_the_tokenizer_is_in_its_export(tokenizer, exported, names, in_files):
    templates = {"default": DEFAULT} | {name: OTHERS[name] for name in names}
    there = tokenizer(templates if names else DEFAULT, in_files=in_files)
    out, told = exported(there)
    assert templates_of(out) == templates_of(there)
    assert load_tokenizer(str(out)).chat_template[::2] == load_tokenizer(str(there)).chat_template[::2]
    assert not [line for line in told if "left out" in line]


@pytest.mark.parametrize("in_files", [True, False])
def test_templates_that_the_run_did_not_learn_are_left_out_with_a_line(tokenizer, exported, in_files):
    out, told = exported(tokenizer({"default": DEFAULT} | OTHERS, in_files=in_files), chat_template="chatml")
    assert templates_of(out).startswith("\n{%- for message in messages -%}")
    assert "left out the tokenizer's templates rag, tool_use: the run was trained with ChatML alone" in told
    # what does not prefer the file would take this one
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())


def test_templates_of_a_repository_in_the_cache_are_copied_and_those_behind_other_links_are_not(
    tokenizer, exported, tmp_path
):
    there = tokenizer({"default": DEFAULT} | OTHERS, in_files=True)
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123"
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    for file in there.rglob("*.*"):
        link = snapshot / file.relative_to(there)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(shutil.copy(file, blobs / file.name))
    (snapshot / "additional_chat_templates" / "secret.jinja").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("secret")
    out, told = exported(snapshot)
    assert templates_of(out) == {"default": DEFAULT} | OTHERS
    assert [line.partition(":")[0] for line in told if "left out" in line] == ["left out secret.jinja"]


def test_a_folder_of_templates_that_is_a_link_is_left_out_with_a_line(tokenizer, exported, tmp_path):
    there = tokenizer({"default": DEFAULT} | OTHERS, in_files=True)
    (there / "additional_chat_templates").rename(tmp_path / "elsewhere")
    (there / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    out, told = exported(there)
    assert templates_of(out) == DEFAULT
    assert any(line.startswith("left out additional_chat_templates: it is a link; ") for line in told)
