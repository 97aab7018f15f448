"""``export-hf``: what is checked before others use an export, and what is pushed to the Hub."""

import json
import sys

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from saved_runs import make_lively, save_run
from toy_hub import ToyHub
from transformers.models.llama import modeling_llama

from llama_core.records.files import write_json
from llama_core.training import stored_weights
from training_infra import cli

PUSH = ["--push=org/mine", "--license=apache-2.0"]
WEIGHTS = "model.safetensors"


@pytest.fixture
def run(tmp_path):
    """A saved run on bytes, which held no documents out."""
    return save_run(tmp_path / "mine", {}, lambda engine, step: make_lively(engine.model, step))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that lets one token write."""
    with ToyHub().serving() as hub:
        values = {"ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "may-write")
        monkeypatch.setattr(hub, "sent", lambda: sum(asked.method == "PUT" for asked in hub.requests), raising=False)
        yield hub


def export(run, *options):
    return cli.main(["export-hf", str(run.path), *map(str, options)])


def files_of(hub, name="org/mine"):
    repository = hub.repositories[f"models/{name}"]
    return repository.commits[repository.branches["main"]]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_transformers_computes_from_an_export_what_the_run_has_learnt(run, tmp_path, capsys, dtype):
    assert export(run, "--out", tmp_path / "out", "--check", "--dtype", dtype) == 0
    told = capsys.readouterr().out
    assert "computes the same from these files as this engine" in told
    assert "AutoTokenizer cuts 4 texts into the tokens that the run learnt" in told


def test_one_row_is_counted_as_one(tmp_path, capsys):
    text = tmp_path / "one.jsonl"
    text.write_text('{"text": "hello"}\n')
    settings = {"data": {"validation": str(text)}, "training": {"seq_len": 64}}
    run = save_run(tmp_path / "mine", settings, lambda engine, step: make_lively(engine.model, step))
    assert export(run, "--out", tmp_path / "out", "--check") == 0
    assert "in 64 places of 1 row (held out)" in capsys.readouterr().out


def with_wrong_files(monkeypatch, change):
    """Let exports write something else than they should."""
    write = stored_weights.write_hugging_face

    def write_wrong(checkpoint, spec, folder, **named):
        write(checkpoint, spec, folder, **named)
        change(folder)

    monkeypatch.setattr(stored_weights, "write_hugging_face", write_wrong)


def in_json(name, change):
    def apply(folder):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def in_weights(change):
    def apply(folder):
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def swap_two_letters(tokenizer):
    ids = tokenizer["model"]["vocab"]
    ids["e"], ids["o"] = ids["o"], ids["e"]


def turn_slower(config):
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 4e5


WRONG = {
    "frequency": (in_json("config.json", turn_slower), "predicts"),
    "weight": (in_weights(lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].mul_(1.01)), "predicts"),
    "extra": (in_weights(lambda tensors: tensors.update(other=torch.ones(2))), "transformers finds unexpected keys"),
    "missing": (in_weights(lambda tensors: tensors.pop("model.norm.weight")), "transformers finds missing keys"),
    "tokens": (in_json("tokenizer.json", swap_two_letters), "is wrong: AutoTokenizer cuts"),
    "no model": (in_json("config.json", lambda config: config.update(model_type="none")), "transformers cannot open"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_export_is_told_and_not_pushed(run, hub, tmp_path, capsys, monkeypatch, wrong):
    change, said = WRONG[wrong]
    with_wrong_files(monkeypatch, change)
    assert export(run, "--out", tmp_path / "out", *PUSH, "--check") == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert files_of(hub) == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, ""),
        (lambda text: text.replace("assistant", "model"), "its chat template begins an answer with ["),
        (
            lambda text: "{{ raise_exception('no roles here') }}",
            "transformers cannot render its chat template: no roles",
        ),
    ],
)
def test_a_conversation_begins_for_others_as_the_run_learnt(tmp_path, capsys, monkeypatch, change, said):
    settings = {"data": {"chat_template": "chatml"}}
    run = save_run(tmp_path / "mine", settings, lambda engine, step: make_lively(engine.model, step))
    write_json(run.data, {"chat_template": "ChatML"})
    if change is not None:
        with_wrong_files(monkeypatch, lambda folder: change_text(folder / "chat_template.jinja", change))
    assert export(run, "--out", tmp_path / "out", "--check") == (0 if change is None else 2)
    assert said in capsys.readouterr().err


def change_text(file, change):
    file.write_text(change(file.read_text()))


def test_a_package_that_computes_something_else_is_told(run, tmp_path, capsys, monkeypatch):
    right = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda *tensors: 1.01 * right(*tensors))
    assert export(run, "--out", tmp_path / "out", "--check") == 2
    assert "transformers computes other logits from it than this engine" in capsys.readouterr().err


def test_a_push_is_private_and_has_a_card_and_what_the_folder_has(run, hub, tmp_path, capsys):
    assert export(run, "--out", tmp_path / "out", *PUSH, "--check") == 0
    files = files_of(hub)
    here = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert files == here
    assert hub.repositories["models/org/mine"].is_private
    card = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert card["license"] == "apache-2.0"
    assert card["library_name"] == "transformers"
    assert f"{hub.endpoint}/org/mine/commit/" in capsys.readouterr().out


def test_a_push_needs_no_folder_and_leaves_none(run, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert export(run, *PUSH, "--public") == 0
    assert not hub.repositories["models/org/mine"].is_private
    assert WEIGHTS in files_of(hub)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_push_that_was_interrupted_changes_nothing_and_the_next_one_sends_the_rest(run, hub, tmp_path, capsys):
    hub.most_uploads = 0
    assert export(run, "--out", tmp_path / "first", *PUSH) == 2
    assert "run the same command again" in capsys.readouterr().err
    assert files_of(hub) == {}
    hub.most_uploads = None
    assert export(run, "--out", tmp_path / "second", *PUSH) == 0
    before = hub.sent()
    assert export(run, "--out", tmp_path / "third", *PUSH) == 0
    assert hub.sent() == before  # the same weights are there


def test_files_of_other_weights_go_and_all_others_stay(run, hub, tmp_path, capsys):
    shard = "model-00002-of-00002.safetensors"
    card = {"README.md": b"by hand"}
    others = {"model.gguf": b"quantised", "notes/model.safetensors": b"kept", "plot.png": b"a plot"}
    old = {shard: b"old", "tokenizer.model": b"old", "additional_chat_templates/rag.jinja": b"old"}
    hub.add("models/org/mine", others | old | card, is_private=True)
    assert export(run, "--out", tmp_path / "out", *PUSH) == 0
    files = files_of(hub)
    assert others.items() <= files.items()
    assert not old.keys() & files.keys()
    told = capsys.readouterr().out
    assert f"removes additional_chat_templates/rag.jinja, {shard}, tokenizer.model" in told
    assert "replaces README.md of org/mine" in told


def test_a_public_repository_shows_no_weights_that_were_not_said_to_be_public(run, hub, tmp_path, capsys):
    hub.add("models/org/mine", {"README.md": b"read me"})
    assert export(run, "--out", tmp_path / "out", *PUSH) == 2
    assert "is there already, and public; add --public" in capsys.readouterr().err
    assert files_of(hub) == {"README.md": b"read me"}
    assert not (tmp_path / "out").exists()  # refused before anything was written


@pytest.mark.parametrize("token", [None, "may-read"])
def test_a_token_that_may_not_write_is_found_out_before_the_weights_are_written(
    run, hub, tmp_path, capsys, monkeypatch, token
):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    assert export(run, "--out", tmp_path / "out", *PUSH) == 2
    error = capsys.readouterr().err
    assert "with a token that may write there" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("token", ["may\x0b-write", "may-wr\u00efte"])
def test_a_token_that_no_request_can_carry_is_told_and_not_shown(run, hub, tmp_path, capsys, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    assert export(run, "--out", tmp_path / "out", *PUSH) == 2
    told = "".join(capsys.readouterr())
    assert "the token has characters that no token has; log in" in told
    assert "may" not in told.replace("may write", "")


def test_a_package_that_the_check_needs_is_missed_before_anything_is_written(run, hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert export(run, "--out", tmp_path / "out", *PUSH, "--check") == 2
    assert "--check opens the export with transformers: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not hub.repositories


def test_no_repository_is_created_for_an_export_that_is_refused(run, hub, capsys):
    assert export(run, "--out", run.path, *PUSH) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert not hub.repositories


def test_a_licence_that_the_hub_does_not_know_is_refused_before_the_weights_are_sent(run, hub, tmp_path, capsys):
    assert export(run, "--out", tmp_path / "out", "--push=org/mine", "--license=none-such") == 2
    assert 'refuses a file: Invalid metadata in README.md. - "license" must be' in capsys.readouterr().err
    assert hub.sent() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nowhere to write to; name a folder with --out, a repository with --push, or both"),
        (["--out=out", "--public"], "--public is about a repository"),
        (["--push=org/mine"], "--push needs the licence of the weights"),
        (["--push=mine", "--license=mit"], "--push mine is no repository"),
        *(
            ([f"--push={name}", "--license=mit"], f"--push {name} is no repository")
            for name in ("org/x.git", "org-/x", "o/x.")
        ),
        (["--out=out", "--license="], "--license '' is no licence that the Hub knows; write --license apache-2.0"),
        (["--out=out", "--license=mit\nbase_model: x"], r"--license 'mit\nbase_model: x' is no licence"),
        (["--push=org/mine@main", "--license=mit"], "--push org/mine@main is no repository"),
        (["--push=org/mine/part", "--license=mit"], "--push org/mine/part is no repository"),
    ],
)
def test_options_that_need_one_another_are_refused_in_one_line(run, tmp_path, capsys, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    assert export(run, *options) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_hub_that_is_away_is_one_line(run, hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert export(run, "--out", tmp_path / "out", *PUSH) == 2
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err


def test_adapters_are_opened_with_peft_over_their_base(tmp_path, capsys):
    base = save_run(tmp_path / "base", {}, lambda engine, step: make_lively(engine.model, step))
    folder = tmp_path / "weights"
    assert export(base, "--out", folder) == 0

    def train(engine, step):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in engine.model.named_parameters():
            if "lora" in name:
                parameter.data.normal_(std=0.2, generator=generator)

    settings = {"strategy": "lora", "training": {"init_from": str(folder)}, "model": str(folder), "architecture": {}}
    adapters = save_run(tmp_path / "adapters", settings, train)
    assert export(adapters, "--out", tmp_path / "out", "--check") == 0
    assert "peft" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 16
