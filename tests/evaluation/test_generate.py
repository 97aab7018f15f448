"""Text from a run or a folder: of its weights, with the tokenizer and the template that they were trained with."""

import json
import pickle
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import yaml
from parity import draw_adapters
from safetensors.torch import load_file, save_file
from saved_runs import CHATML_TURNS, SMALL, always, make_lively, save_checkpoints, save_run
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaForCausalLM

from llama_core.chain.prepare import other_tokenizer, prepare_run
from llama_core.config.hardware import gpu_spec
from llama_core.config.run import RunConfig
from llama_core.data.chat import chat_format
from llama_core.data.datasets import load_datasets
from llama_core.data.end_tokens import learnt_template
from llama_core.data.statistics import write_statistics
from llama_core.data.templates.chat_template import LLAMA3, MARKERS
from llama_core.data.tokenizer import load_tokenizer, model_tokenizer
from llama_core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DoesNotFitError,
    EnvironmentMismatchError,
    RunDirectoryError,
    WeightsError,
)
from llama_core.evaluation.conversation import ChatSession
from llama_core.evaluation.generate import TextModel, choose_device, find_model
from llama_core.hugging_face.peft import ADAPTERS
from llama_core.launch.rank.checks import check_settings
from llama_core.machine.detect import Machine
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import write_manifest
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.runs.decay import branch_off
from llama_core.runs.export import export_run
from llama_core.runs.loading import load_config
from llama_core.training.stored_weights import Pretrained

PROMPT = "Once upon"
NUM_TOKENS = 24


def text(source, prompt=PROMPT, *, chat=False, **settings):
    model = text_model(source, **settings)
    return "".join(ChatSession(model).answer(prompt) if chat else model.continue_text(prompt))


def text_model(source, **settings):
    return TextModel(source, **({"device": "cpu", "max_new_tokens": NUM_TOKENS} | settings))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was trained on bytes, with checkpoints of steps 1 and 2."""
    path = tmp_path_factory.mktemp("full") / "run"
    return save_run(path, {}, lambda engine, step: make_lively(engine.model, step), steps=(1, 2))


@pytest.fixture(scope="module")
def exported(run):
    return export_run(run, run.path.with_name("exported"))


@pytest.fixture(scope="module")
def adapted(run):
    """A run with adapters over the weights of step 1 of the other run."""
    base = run.checkpoints / "step-00000001"

    def prepare(engine, step):
        engine.set_weights(Pretrained(engine.model.spec, base).fill)
        draw_adapters(engine.model)

    settings = {"strategy": "lora", "lora": {"lora_rank": 4, "lora_dropout": 0.5}, "training": {"init_from": str(base)}}
    return save_run(run.path.with_name("adapted"), settings, prepare)


def text_of_transformers(folder, ids):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    new = model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False)[0, len(ids) :].tolist()
    return bytes(index for index in new if index < 256).decode(errors="replace")


def test_a_run_its_checkpoint_and_its_export_give_the_text_of_transformers(run, exported):
    expected = text_of_transformers(exported, [256, *PROMPT.encode()])
    assert len(expected) > NUM_TOKENS // 2
    assert text(run.path) == expected
    assert text(run.checkpoints / "step-00000002") == expected
    assert text(exported) == text(exported, tokenizer="bytes") == expected


def with_keys(folder, to, **keys):
    """Copy a folder with some keys of its config.json changed."""
    shutil.copytree(folder, to)
    described = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(described | keys))
    return to


def test_a_folder_that_says_tied_keeps_the_head_that_it_holds_as_in_transformers(exported, adapted, tmp_path):
    folder = with_keys(exported, tmp_path / "says tied", tie_word_embeddings=True)
    told = []
    expected = text_of_transformers(folder, [256, *PROMPT.encode()])
    assert text(folder, tell=told.append) == expected == text(exported)
    note = (
        f"{folder}: the head is lm_head.weight, as in transformers 5, although config.json says "
        "tie_word_embeddings=true: it holds other numbers than the embedding"
    )
    assert told[0] == note
    adapters = export_run(adapted, tmp_path / "adapters")
    described = json.loads((adapters / "adapter_config.json").read_text())
    texts = []
    for base in (exported, folder):
        (adapters / "adapter_config.json").write_text(json.dumps(described | {"base_model_name_or_path": str(base)}))
        told.clear()
        texts.append(text(adapters, tokenizer="bytes", tell=told.append))
    assert told[0] == note
    assert texts[0] == texts[1] != expected


def test_a_setting_of_the_rotary_embedding_that_nothing_reads_is_told(exported, tmp_path):
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    folder = with_keys(exported, tmp_path / "scaled", rope_parameters=None, rope_scaling=scaling | {"attn_factor": 0.5})
    told = []
    assert text(folder, tell=told.append) == text_of_transformers(folder, [256, *PROMPT.encode()]) != text(exported)
    assert told[0].startswith(f"{folder}/config.json: rope_scaling.attn_factor=0.5: ignored, as in transformers; ")


def test_a_step_can_be_named(run):
    assert text(run.path, step=1) == text(run.checkpoints / "step-00000001") != text(run.path)


def test_a_run_with_adapters_gives_the_text_of_its_exports(run, adapted):
    alone, merged = adapted.path.with_name("alone"), adapted.path.with_name("merged")
    expected = text(adapted.path)
    assert expected != text(run.path, step=1)
    assert text(export_run(adapted, merged, merged=True), tokenizer="bytes") == expected
    assert text(export_run(adapted, alone)) == expected, "with the tokenizer of the run below"


@pytest.fixture
def damaged(run, tmp_path):
    """The run, with a flipped byte in its newest checkpoint."""
    shutil.copytree(run.path, tmp_path / "damaged")
    flip(tmp_path / "damaged" / "checkpoints" / "step-00000002" / "__0_0.distcp")
    return RunDirectory(tmp_path / "damaged")


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = r"step-00000002 is damaged \(__0_0\.distcp has the checksum [0-9a-f]{8}, but [0-9a-f]{8} was written\)"


def test_the_checkpoint_before_a_damaged_one_is_taken_with_a_line(run, damaged, tmp_path):
    for take in (
        lambda tell: text(damaged.path, tell=tell),
        lambda tell: export_run(damaged, tmp_path / "out", tell=tell),
    ):
        told = []
        take(told.append)
        assert re.fullmatch(f"checkpoint {DAMAGE}; trying the one before", told[0])
        assert f"{damaged.path}/checkpoints/step-00000001 in fp32" in told[1]
    assert text(tmp_path / "out", tokenizer="bytes") == text(run.path, step=1)


def test_a_damaged_checkpoint_that_was_named_is_refused(damaged, tmp_path):
    named = [
        lambda: text(damaged.path, step=2),
        lambda: text(damaged.checkpoints / "step-00000002"),
        lambda: export_run(damaged, tmp_path / "out", step=2),
    ]
    for take in named:
        with pytest.raises(CheckpointError, match=f"{DAMAGE}; choose another checkpoint of its run"):
            take()
    assert not (tmp_path / "out").exists()


def test_a_run_of_damaged_checkpoints_is_refused_with_what_is_wrong_with_each(damaged):
    (damaged.checkpoints / "step-00000001" / "index.jsonl").unlink()
    with pytest.raises(
        CheckpointError, match=r"none of the 2 .* \(step-00000002: .*; step-00000001: index.jsonl is missing\)"
    ):
        text(damaged.path)


def test_adapters_over_a_damaged_base_are_refused(damaged, adapted, tmp_path):
    shutil.copytree(adapted.path, tmp_path / "adapted")
    for file in (tmp_path / "adapted").rglob("config.yaml"):
        mapping = yaml.safe_load(file.read_text())
        mapping["training"]["init_from"] = str(damaged.checkpoints / "step-00000002")
        file.write_text(yaml.safe_dump(mapping))
    write_manifest(tmp_path / "adapted" / "checkpoints" / "step-00000001", {})
    for take in (
        lambda: text(tmp_path / "adapted"),
        lambda: export_run(RunDirectory(tmp_path / "adapted"), tmp_path / "out", merged=True),
    ):
        with pytest.raises(CheckpointError, match=DAMAGE):
            take()


@pytest.mark.parametrize("content", [b"no tensors", b"PK\x03\x04" + bytes(500), pickle.dumps({"a": 1})])
def test_a_file_of_another_kind_among_the_tensors_is_one_clear_line(damaged, content):
    checkpoint = damaged.checkpoints / "step-00000002"
    (checkpoint / "__0_0.distcp").write_bytes(content)
    write_manifest(checkpoint, {})
    with pytest.raises(CheckpointError) as refused:
        text(damaged.path)
    assert str(refused.value) == (
        f"cannot read tok_embeddings.weight from {checkpoint}: __0_0.distcp does not hold what was saved there; it is "
        "damaged, or a file of another kind"
    )


def test_sixteen_bits_are_read_and_computed_with(adapted):
    assert text(adapted.path, dtype="bf16", max_new_tokens=4)


def test_a_prompt_of_which_the_tokenizer_makes_no_token_is_refused(run, tmp_path):
    words = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=f"^tokenizer '{tmp_path}' makes no token of the prompt; give another text"):
        text(run.path, " ", tokenizer=str(tmp_path))


def test_a_text_ends_where_the_context_does(run):
    told = []
    assert text(run.path, "a" * 60, tell=told.append)
    assert told[1:] == ["the context leaves room for 3 tokens"]


def test_a_text_ends_with_its_document(tmp_path):
    assert text(save_run(tmp_path / "ends", {}, always(257)).path) == ""
    assert text(save_run(tmp_path / "goes-on", {}, always(ord("a"))).path) == "a" * NUM_TOKENS


def test_a_text_ends_with_each_end_token_of_a_folder(tmp_path):
    folder = export_run(save_run(tmp_path / "run", {}, always(ord("a"))), tmp_path / "folder")
    assert text(folder) == "a" * NUM_TOKENS
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, ord("a")]}))
    assert text(folder) == ""


def test_a_run_keeps_how_its_initial_weights_generate_when_they_are_gone(tmp_path, exported):
    folder = shutil.copytree(exported, tmp_path / "folder")
    generation = {"eos_token_id": [1, 4], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    training = {"init_from": str(folder), "steps": 1, "batch_size": 1, "seq_len": 32}
    settings = {"training": training, "data": {"tokenizer": "bytes"}, "launch": {"device": "cpu"}}
    config = RunConfig.from_mapping(settings)
    run = prepare_run(config, tmp_path / "run")
    shutil.rmtree(folder)
    save_checkpoints(run, config, always(4))
    out = export_run(run, tmp_path / "out")
    ends = [1, 4, 257]
    told = json.loads((out / "generation_config.json").read_text())
    assert told == generation | {"eos_token_id": ends, "bos_token_id": 256}
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == ends
    assert LlamaForCausalLM.from_pretrained(out).generation_config.eos_token_id == ends
    assert text(run.path) == text(out) == ""


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}#{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
)


def test_an_answer_ends_with_its_turn(tmp_path):
    (tmp_path / "template").write_text(TEMPLATE)
    run = save_run(tmp_path / "run", {"data": {"chat_template": str(tmp_path / "template")}}, always(ord("#")))
    assert text(run.path) == "#" * NUM_TOKENS
    assert text(run.path, chat=True) == ""


SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>"]


def special_folder(folder, template):
    """A folder with a byte-level tokenizer, whose ids from 256 on are SPECIAL."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML_TURNS, "<|im_end|>"),
        (CHATML_TURNS.replace("<|im_end|>", " {{ eos_token }}"), "</s>"),
        # as Phi-3 does: EOS after the end of the last turn, if nothing follows
        (
            CHATML_TURNS.replace("<|im_end|>", "<|end|>") + "{% if not add_generation_prompt %}</s>{% endif %}",
            "<|end|>",
        ),
    ],
    ids=["chatml", "eos", "eos after the last turn"],
)
def test_a_run_on_conversations_its_export_and_the_next_run_end_where_a_turn_does(tmp_path, template, end):
    tokenizer = special_folder(tmp_path / "tokenizer", template)
    end_id = 256 + SPECIAL.index(end)
    run = save_run(tmp_path / "run", {"data": {"tokenizer": str(tokenizer)}}, always(end_id))
    write_json(run.data, {"chat_template": "its own"})
    out = export_run(run, tmp_path / "out")
    assert text(run.path) == text(out) == text(out, chat=True) == ""
    ends = LlamaForCausalLM.from_pretrained(out).generation_config.eos_token_id
    assert {257, end_id} == set(ends if isinstance(ends, list) else [ends])
    answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    loaded = AutoTokenizer.from_pretrained(out)
    spoken = loaded.apply_chat_template(answered, return_dict=False)
    assert end_id in spoken[spoken.index(loaded.convert_tokens_to_ids("!")) :]
    training = {"init_from": str(run.checkpoints / "step-00000001"), "steps": 1, "batch_size": 1, "seq_len": 32}
    following = RunConfig.from_mapping({"training": training, "launch": {"device": "cpu"}})
    kept = json.loads(prepare_run(following, tmp_path / "next").generation_config.read_text())
    assert kept["eos_token_id"] in (end_id, [end_id])


@pytest.mark.parametrize("named", ["", "bytes", "special"])
def test_another_tokenizer_than_that_of_the_initial_weights_is_told(tmp_path, exported, named):
    own = special_folder(tmp_path / "special", CHATML_TURNS)
    base = shutil.copytree(exported, tmp_path / "base")
    for file in own.iterdir():
        shutil.copy(file, base)
    data = {"tokenizer": str(own) if named == "special" else named} if named else {}
    training = {"init_from": str(base), "batch_size": 1, "seq_len": 32}
    given = {"training": training | {"steps": 1}, "data": data, "launch": {"device": "cpu"}}
    told = other_tokenizer(RunConfig.from_mapping(given))
    kept = prepare_run(RunConfig.from_mapping(given), tmp_path / "run").generation_config
    assert kept.exists() is (named != "bytes"), "ids of another tokenizer are not kept"
    assert [f"data.tokenizer=bytes is not the tokenizer that {base} has learnt with: 2" in line for line in told] == [
        True
    ] * (named == "bytes")


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_a_base_that_was_replaced_behind_a_run_is_not_taken_for_its_own(run, exported, tmp_path, kind):
    """By other weights of the same model: nothing else would tell."""
    if kind == "folder":
        base = Path(shutil.copytree(exported, tmp_path / "base"))
    else:
        base = Path(shutil.copytree(run.path, tmp_path / "below")) / "checkpoints" / "step-00000001"
    given = {"strategy": "lora", "training": {"init_from": str(base), "batch_size": 1, "seq_len": 32, "steps": 2}}
    given |= {"launch": {"device": "cpu"}, "data": {"tokenizer": "bytes"}}
    config = RunConfig.from_mapping(given)
    adapters = prepare_run(config, tmp_path / "adapters")

    def prepare(engine, step):
        engine.set_weights(Pretrained(engine.model.spec, base).fill)
        draw_adapters(engine.model)

    save_checkpoints(adapters, load_config(adapters), prepare)
    expected = text(adapters.path)
    prepare_run(config, adapters.path, resume=True)
    check_settings(adapters, load_config(adapters))
    shutil.rmtree(base)
    if kind == "folder":
        weights = load_file(exported / "model.safetensors")
        shutil.copytree(exported, base)
        changed = {name: weight + 1e-3 if "layers.0.mlp.up" in name else weight for name, weight in weights.items()}
        save_file(changed, base / "model.safetensors", metadata={"format": "pt"})
    else:
        shutil.copytree(run.checkpoints / "step-00000002", base)
    other = rf"{base} holds other weights than those over which {adapters.path} has trained its adapters"
    following = RunConfig.from_mapping(given | {"training": given["training"] | {"init_from": str(adapters.path)}})
    for refused in (
        lambda: text(adapters.path),
        lambda: export_run(adapters, tmp_path / "merged", merged=True),
        lambda: export_run(adapters, tmp_path / "for-peft"),
        lambda: prepare_run(config, adapters.path, resume=True),
        lambda: prepare_run(following, tmp_path / "following"),
        lambda: check_settings(adapters, load_config(adapters)),
    ):
        with pytest.raises((WeightsError, RunDirectoryError), match=other):
            refused()
    shutil.rmtree(base)
    assert (export_run(adapters, tmp_path / "for-peft") / ADAPTERS).exists(), "adapters alone need no base"
    shutil.copytree(exported if kind == "folder" else run.checkpoints / "step-00000001", base)
    assert text(adapters.path) == expected


def test_a_checkpoint_of_another_run_is_not_taken_for_one_of_a_run_that_it_was_copied_into(run, tmp_path):
    own = RunDirectory(shutil.copytree(run.path, tmp_path / "own"))
    other = save_run(tmp_path / "other", {"training": {"seed": 1}}, lambda engine, step: None, steps=(3,))
    foreign = Path(shutil.copytree(other.checkpoints / "step-00000003", own.checkpoints / "step-00000003"))
    for refused in (
        lambda: text(own.path),
        lambda: text(own.path, step=3),
        lambda: text(foreign),
        lambda: export_run(own, tmp_path / "out"),
        lambda: export_run(own, tmp_path / "out", average="last:2"),
        lambda: branch_off(own, tmp_path / "out", num_steps=1, step=3),
    ):
        with pytest.raises(
            CheckpointError, match=rf"{foreign} was saved with other .* \(training.seed is 1 there, 0 her"
        ):
            refused()
    assert text(own.path, step=2) == text(run.path)
    alone = shutil.copytree(foreign, tmp_path / "alone")
    assert text(alone, tokenizer="bytes"), "it is in no run"


def test_a_checkpoint_may_have_other_values_of_what_a_run_changes_as_it_goes_on(run, tmp_path):
    own = RunDirectory(shutil.copytree(run.path, tmp_path / "own"))
    own.config.write_text(load_config(own).with_overrides("training.steps=9", "training.learning_rate=1e-9").to_yaml())
    assert text(own.path) == text(run.path)


@pytest.fixture
def with_files(tmp_path):
    """A run on conversations with a tokenizer and a template in files, and a record of both."""
    folder = special_folder(tmp_path / "tokenizer", CHATML_TURNS)
    (tmp_path / "template.jinja").write_text(CHATML_TURNS)
    files = {"tokenizer": str(folder), "chat_template": str(tmp_path / "template.jinja")}
    run = save_run(tmp_path / "run", {"data": files}, always(ord("#")))
    config = load_config(run)
    tokenizer = load_tokenizer(str(folder))
    digests = {
        "tokenizer_digest": model_tokenizer(config.data, config.spec).fingerprint,
        "template_digest": chat_format(config.data, tokenizer, config.spec, files=()).template.digest,
    }
    write_json(run.data, {"chat_template": "template.jinja", **digests})
    return run


def test_a_tokenizer_that_was_replaced_behind_a_run_is_not_taken_for_its_own(with_files, tmp_path):
    run = with_files
    text(run.path)
    folder = tmp_path / "tokenizer"
    other = special_folder(tmp_path / "other", CHATML_TURNS)
    described = json.loads((other / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]  # as many tokens, and all of them known
    (folder / "tokenizer.json").write_text(json.dumps(described))
    changed = rf"tokenizer '{folder}' is not the one that {run.path} has trained with: its files have changed since"
    with pytest.raises(DataError, match=changed):
        text(run.path)
    text(run.path, tokenizer=str(folder))  # on purpose
    told = []
    exported = export_run(run, tmp_path / "exported", tell=told.append)
    assert any(re.search(f"no tokenizer: {changed}", line) for line in told)
    assert not (exported / "tokenizer.json").exists()


def test_a_template_that_was_replaced_behind_a_run_is_not_taken_for_its_own(with_files, tmp_path):
    run = with_files
    text(run.path, chat=True)
    file = tmp_path / "template.jinja"
    file.write_text(f"{CHATML_TURNS} ")
    changed = rf"template '{file}' is not the one that {run.path} has trained with"
    with pytest.raises(DataError, match=changed):
        text(run.path, chat=True)
    with pytest.raises(DataError, match=changed):
        export_run(run, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_template_that_was_removed_behind_a_run_is_not_replaced_by_a_published_one(with_files, tmp_path):
    """The tokenizer's own, without which the family's would do."""
    run = with_files
    config = load_config(run)
    folder = tmp_path / "tokenizer"
    own = config.model_copy(update={"data": config.data.model_copy(update={"chat_template": None})})
    checkpoint = run.checkpoints / "step-00000001"
    learnt_template(checkpoint, own, load_tokenizer(str(folder)))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match=rf"is not the one that {run.path} has trained with"):
        learnt_template(checkpoint, own, load_tokenizer(str(folder)))


def test_a_run_does_not_go_on_with_another_tokenizer_though_its_tokens_are_the_same(with_files, tmp_path):
    run = with_files
    kept = run.data.read_text()
    config = load_config(run)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "to be or not to be"}) + "\n")
    data = config.data.model_copy(update={"source": str(tmp_path / "a.jsonl"), "validation_fraction": 0.0})
    statistics = load_datasets(data, config.spec, seq_len=8).statistics
    write_statistics(run, statistics, data)
    assert json.loads(run.data.read_text())["tokenizer_digest"] == json.loads(kept)["tokenizer_digest"]
    with pytest.raises(DataError, match=r"is not the one that .* has trained with: its files have changed since"):
        write_statistics(run, replace(statistics, tokenizer_digest="other"), data)
    assert json.loads(run.data.read_text())["tokenizer_digest"] == statistics.tokenizer_digest


def test_an_export_holds_no_private_file_that_a_run_calls_its_template(tmp_path):
    (tmp_path / "id_ed25519").write_text("-----BEGIN OPENSSH PRIVATE KEY-----")
    settings = {"data": {"chat_template": str(tmp_path / "id_ed25519")}}
    run = save_run(tmp_path / "run", settings, always(ord("#")))
    write_json(run.data, {"chat_template": "mine"})
    with pytest.raises(DataError, match=r"id_ed25519' has no Jinja that uses messages"):
        export_run(run, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_an_export_tells_the_end_of_a_turn_that_is_several_tokens(tmp_path):
    (tmp_path / "template").write_text(TEMPLATE.replace("#", "###"))
    run = save_run(tmp_path / "run", {"data": {"chat_template": str(tmp_path / "template")}}, always(ord("#")))
    write_json(run.data, {"chat_template": "template"})
    told = []
    out = export_run(run, tmp_path / "out", tell=told.append)
    assert text(run.path) == ""
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 257
    assert [line for line in told if "a turn ends with 3 tokens [35, 35, 35]" in line]


def test_adapters_of_conversations_say_where_a_turn_ends(tmp_path, exported):
    tokenizer = special_folder(tmp_path / "tokenizer", CHATML_TURNS)
    base = shutil.copytree(exported, tmp_path / "base")

    def prepare(engine, step):
        engine.set_weights(Pretrained(engine.model.spec, base).fill)
        draw_adapters(engine.model)

    training = {"init_from": str(base)}
    settings = {"strategy": "lora", "training": training, "data": {"tokenizer": str(tokenizer)}}
    run = save_run(tmp_path / "run", settings, prepare)
    write_json(run.data, {"chat_template": "its own"})
    told = []
    out = export_run(run, tmp_path / "out", tell=told.append)
    assert [line for line in told if line.startswith("a turn ends with token 259, which generation_config.json of the")]
    model = TextModel(out, device="cpu", tokenizer=str(tokenizer))
    assert model.ends == TextModel(run.path, device="cpu").ends == {(257,), (259,)}


def test_a_chat_continues_what_the_template_makes_of_the_prompt(tmp_path, exported):
    (tmp_path / "template").write_text(TEMPLATE)
    settings = {"data": {"chat_template": str(tmp_path / "template")}}
    chatting = save_run(tmp_path / "run", settings, lambda engine, step: make_lively(engine.model, step), steps=(2,))
    expected = text_of_transformers(exported, list(b"user: Once upon#assistant:")).partition("#")[0]
    assert len(expected) > 3
    assert text(chatting.path, chat=True) == expected


@pytest.fixture
def instruct(tmp_path, exported):
    """A folder with a tokenizer of Llama 3's kind and its chat template, whose model likes to end its turn."""
    folder = Path(shutil.copytree(exported, tmp_path / "folder"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", *MARKERS["llama3"][1:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = LLAMA3.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][tokenizer.token_to_id("<|eot_id|>")] *= 1.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_an_answer_of_a_hugging_face_folder_is_that_of_transformers(instruct):
    tokenizer = AutoTokenizer.from_pretrained(instruct)
    asked = [{"role": "user", "content": "Hé?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    model = LlamaForCausalLM.from_pretrained(instruct, dtype=torch.float32)
    ends = tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>"])
    told = model.generate(**ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=0)[0]
    answer = told[ids["input_ids"].shape[1] :]
    assert answer[-1] == ends[1]
    assert len(answer) > 3
    assert text(instruct, "Hé?", chat=True) == tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.parametrize("knows", ["instruct", "conversations"])
def test_instruct_models_and_those_trained_on_conversations_have_their_familys_template(tmp_path, knows):
    settings = {"architecture": SMALL["architecture"] | {"instruct": knows == "instruct", "max_context": 256}}
    run = save_run(tmp_path / "run", settings, always(ord("a")))
    write_json(run.data, {"chat_template": "Llama 3's format" if knows == "conversations" else None})
    assert text(run.path, chat=True) == "a" * NUM_TOKENS


def test_the_weights_are_told_of(run):
    told = []
    text(run.path, tell=told.append)
    assert told == [f"{run.checkpoints / 'step-00000002'} in fp32 on cpu, tokenizer bytes"]


@pytest.mark.parametrize(
    ("settings", "error", "complaint"),
    [
        ({"prompt": ""}, DataError, "the prompt is empty; give some text"),
        ({"prompt": "\udcff"}, DataError, "the prompt is invalid UTF-8 (lone surrogate at character 1)"),
        ({"prompt": "a" * 63}, DataError, "the prompt has 64 tokens, which fill the context of llama3_405b (64)"),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens=0: generate at least 1"),
        ({"temperature": -1.0}, ConfigError, "temperature=-1: use 0"),
        ({"step": 7}, RunDirectoryError, "has no checkpoint of step 7; there are 1, 2"),
        ({"tokenizer": "/gone"}, DataError, "no tokenizer '/gone'"),
        ({"chat": True}, DataError, "has no chat template: neither an instruct model, nor trained on conversations"),
        ({"device": "cuda"}, EnvironmentMismatchError, "--device cuda: this machine has no CUDA device"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(run, monkeypatch, settings, error, complaint):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(error) as refused:
        text(run.path, **settings)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "settings", "error", "complaint"),
    [
        (lambda path: None, {}, WeightsError, "is no folder here; name a run's directory, or a folder of Hugging Face"),
        (Path.mkdir, {}, WeightsError, "holds no model; name a run's directory, or a folder of Hugging Face or PEFT"),
        (Path.mkdir, {"step": 3}, RunDirectoryError, "is no run's directory, so it has no step 3; drop --step"),
        (
            lambda path: save_run(path, {}, None, steps=()),
            {},
            RunDirectoryError,
            "has no checkpoint; train the run until it saves one",
        ),
        (
            lambda path: save_run(path, {"data": {"source": "dataloader"}}, always(1)),
            {},
            DataError,
            "was trained on a dataloader, so its tokenizer is unknown; name it with --tokenizer",
        ),
    ],
    ids=["nothing", "empty", "empty, a step", "no checkpoint", "dataloader"],
)
def test_a_source_that_cannot_be_used_is_refused(tmp_path, make, settings, error, complaint):
    make(tmp_path / "source")
    with pytest.raises(error) as refused:
        text(tmp_path / "source", **settings)
    assert complaint in str(refused.value)


def test_a_folder_without_a_tokenizer_asks_for_one(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "folder", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(DataError, match=r"holds no tokenizer.json; name one with --tokenizer, or bytes if"):
        text(tmp_path / "folder")


def test_a_model_larger_than_the_memory_is_refused_before_it_is_read(tmp_path, exported):
    config = json.loads((exported / "config.json").read_text()) | {"vocab_size": 10**10}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DoesNotFitError, match=r"take .* in fp32, more than the .* of cpu memory here"):
        text(tmp_path, tokenizer="bytes")


@pytest.mark.parametrize(("gpu_type", "refused"), [(None, False), (gpu_spec("h100"), True)])
def test_only_a_gpu_of_known_memory_is_too_small(monkeypatch, gpu_type, refused):
    machine = Machine(("NVIDIA GPU",), gpu_type, True, memory_bytes=1, available_memory_bytes=1, cores=1)
    monkeypatch.setattr("llama_core.evaluation.generate.detect_machine", lambda: machine)
    config = RunConfig.from_mapping({"model": "llama3_405b"})
    with pytest.raises(DoesNotFitError, match="of cuda memory here") if refused else nullcontext():
        assert choose_device(None, config, "bf16") == "cuda"


def test_a_model_that_is_too_large_for_one_gpu_may_be_divided_where_there_can_be_several(monkeypatch):
    machine = Machine(("H100",) * 8, gpu_spec("h100"), True, memory_bytes=1, available_memory_bytes=1, cores=1)
    monkeypatch.setattr("llama_core.evaluation.generate.detect_machine", lambda: machine)
    config = RunConfig.from_mapping({"model": "llama3_70b"})
    with pytest.raises(DoesNotFitError, match=r"or divide the model \(--gpus 2 --tensor-parallel 2\)"):
        choose_device(None, config, "bf16", ParallelPlan())
    assert choose_device(None, config, "bf16", ParallelPlan(tp=2)) == "cuda"


def record_prompts(model):
    """Return a list to which each prompt that the model continues will be added."""
    prompts = []
    continues = model.pieces_after
    model.pieces_after = lambda ids, ends: [prompts.append(bytes(ids).decode()), continues(ids, ends)][1]
    return prompts


@pytest.fixture
def chatting(tmp_path):
    """A run whose model says nothing but a's, in a template of its own."""
    (tmp_path / "template").write_text(TEMPLATE)
    settings = {"data": {"chat_template": str(tmp_path / "template")}}
    return save_run(tmp_path / "chatting", settings, always(ord("a")))


def test_a_conversation_remembers_the_system_prompt_and_each_turn(chatting):
    model = text_model(chatting.path, max_new_tokens=2)
    prompts = record_prompts(model)
    conversation = ChatSession(model, "S")
    assert ["".join(conversation.answer(message)) for message in ("x", "y")] == ["aa", "aa"]
    assert prompts == ["system: S#user: x#assistant:", "system: S#user: x#assistant: aa#user: y#assistant:"]


def test_a_conversation_remembers_of_an_answer_that_was_ended_what_was_shown(chatting):
    model = text_model(chatting.path)
    prompts = record_prompts(model)
    conversation = ChatSession(model)
    answer = conversation.answer("x")
    assert next(answer) == "a"
    answer.close()
    next(conversation.answer("y"))
    assert prompts[-1] == "user: x#assistant: a#user: y#assistant:"


def test_a_conversation_that_fills_the_context_begins_anew_with_a_line(chatting):
    told = []
    model = text_model(chatting.path, tell=told.append)
    prompts = record_prompts(model)
    conversation = ChatSession(model, "S")
    for message in ("first", "second"):
        assert "".join(conversation.answer(message)) == "a" * NUM_TOKENS
    assert told[1:] == ["the conversation fills the context of llama3_405b (64 tokens) and begins anew"]
    assert prompts[1] == "system: S#user: second#assistant:"


def test_a_message_that_fills_the_context_alone_is_refused_and_the_conversation_goes_on(chatting):
    model = text_model(chatting.path, max_new_tokens=1)
    prompts = record_prompts(model)
    conversation = ChatSession(model)
    "".join(conversation.answer("x"))
    with pytest.raises(DataError, match=r"the message has 77 tokens, which fill the context of llama3_405b \(64\)"):
        conversation.answer("y" * 60)
    next(conversation.answer("z"))
    assert prompts[-1] == "user: x#assistant: a#user: z#assistant:"


@pytest.mark.parametrize(
    ("system", "complaint"),
    [("", "the system prompt is empty"), ("s" * 64, "the system prompt has 91 tokens, which fill the context")],
)
def test_a_system_prompt_that_cannot_be_used_is_refused_before_the_first_message(chatting, system, complaint):
    with pytest.raises(DataError, match=complaint):
        ChatSession(text_model(chatting.path), system)


@pytest.mark.parametrize("given", ["run", "run/checkpoints/step-00000001"])
def test_a_run_may_be_named_by_a_relative_path(tmp_path, monkeypatch, given):
    save_run(tmp_path / "run", {}, lambda engine, step: None)
    monkeypatch.chdir(tmp_path)
    weights, _ = find_model(Path(given), None, print)
    assert weights == Path("run/checkpoints/step-00000001")
