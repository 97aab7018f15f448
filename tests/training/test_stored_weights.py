"""Weights in and out: every rank of every plan has those of the file, and exports them bit for bit."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from threading import Event

import pytest
import sentencepiece
import torch
import torch.distributed.checkpoint as dcp
from distributed import run_ranks
from parity import native_engine, own_microbatches
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from llama_core.config.config_json.writing import config_json
from llama_core.config.model_weights import hugging_face_name
from llama_core.config.run import RunConfig
from llama_core.data.tokenizer import load_tokenizer
from llama_core.errors import CheckpointError, RunDirectoryError, TrainingInfraError, WeightsError
from llama_core.hugging_face.pretrained import resolve_pretrained
from llama_core.models.llama import Llama, build_llama, with_adapters
from llama_core.parallel.deepspeed import DeepSpeedModel
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import LAYOUT, checkpoint_name, write_manifest
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.retention import Retention
from llama_core.runs.export import export_run, only_one
from llama_core.runs.loading import load_config
from llama_core.training.checkpoint import Checkpointer
from llama_core.training.engine import build_engine, train_step
from llama_core.training.index import INDEX
from llama_core.training.stored_weights import Pretrained, write_hugging_face

pytestmark = pytest.mark.xdist_group("weights")

# 46 and 66 do not divide evenly over four ranks
SIZES = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
ODD_SIZES = SIZES | {"ffn_size": 46, "vocab_size": 66}
UNTIED = RunConfig.from_mapping({"model": "llama3_405b", "architecture": ODD_SIZES})
TIED = RunConfig.from_mapping({"model": "tiny_llama3_50m", "architecture": ODD_SIZES})
ADAPTED = RunConfig.from_mapping(UNTIED.model_dump() | {"strategy": "lora"})
PLANS = {
    "dp4": (ParallelPlan(dp_replicate=4), UNTIED),
    "zero3 dp4": (ParallelPlan(dp_shard=4, zero_stage=3), TIED),
    "hsdp": (ParallelPlan(dp_shard=2, dp_replicate=2, zero_stage=2), UNTIED),
    "tp2 zero1 dp2": (ParallelPlan(tp=2, dp_shard=2, zero_stage=1, num_microbatches=2), UNTIED),
    "tp2 cp2": (ParallelPlan(tp=2, cp=2, num_microbatches=4), TIED),
    "tp2 pp2": (ParallelPlan(tp=2, pp=2, num_microbatches=4), TIED),
    "pp2 zero3 dp2": (ParallelPlan(pp=2, dp_shard=2, zero_stage=3, num_microbatches=2), TIED),
    "pp4 chimera": (ParallelPlan(pp=4, schedule="chimera", num_microbatches=4), TIED),
    "pp2 interleaved dp2": (
        ParallelPlan(pp=2, schedule="interleaved", num_chunks=2, dp_replicate=2, num_microbatches=2),
        UNTIED,
    ),
    "tp2 zero3 dp2, with adapters": (ParallelPlan(tp=2, dp_shard=2, zero_stage=3, num_microbatches=2), ADAPTED),
}
ALONE = ParallelPlan(num_microbatches=4)


def lively(spec, seed=0):
    """A model whose weights are far from initial ones, so that every one of them matters."""
    model = Llama(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.25, generator=generator)
    return model


def save_folder(folder, model, dtype=torch.float32):
    """Write two shards and an index, as on the Hugging Face hub."""
    folder.mkdir()
    weights = {hugging_face_name(name): weight.detach().to(dtype) for name, weight in model.named_parameters()}
    names, weight_map = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config_json(model.spec)))
    return folder


def filled(spec, source):
    """Return a whole model with the weights of ``source``, and adapters if it has any."""
    model = with_adapters(Llama(spec))
    Pretrained(spec, Path(source)).fill(model)
    return model


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def differing(model, expected):
    """Return the parameters of a rank's part of a model that differ in any bit from the whole model."""
    weights = dict(expected.named_parameters())
    parts = {name: whole(parameter) for name, parameter in model.named_parameters()}
    assert parts
    return [name for name, part in parts.items() if not torch.equal(part, weights[name])]


def fill_under_every_plan(folders):
    """Return, for each plan and source, the parameters of this rank that differ from the source."""
    wrong = {}
    for name, (plan, config) in PLANS.items():
        for kind, source in folders[config.model].items():
            engine = native_engine(plan, config.spec, seed=3)
            engine.set_weights(Pretrained(config.spec, source).fill)
            wrong[f"{kind} under {name}"] = differing(engine.model, filled(config.spec, source))
    return wrong


def save_run(run, engine, config, step):
    run.config.write_text(config.to_yaml())
    # given, not read from the file, which other ranks write
    checkpointer = Checkpointer(run, keep=Retention(3), settings=config.to_yaml())
    checkpointer.save(step, engine, {})
    checkpointer.finish()


def new_run(path, config):
    run = RunDirectory(path)
    run.create()
    run.config.write_text(config.to_yaml())
    return run


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For a tied and an untied model, a folder in bf16 and a checkpoint of a run that trained alone."""
    found = {}
    for config in (UNTIED, TIED):
        path = tmp_path_factory.mktemp(config.model)
        folder = save_folder(path / "folder", lively(config.spec), torch.bfloat16)
        run = new_run(path / "run", config)
        engine = native_engine(ALONE, config.spec)
        engine.set_weights(Pretrained(config.spec, folder).fill)
        train(engine, steps=1)
        save_run(run, engine, config, 1)
        found[config.model] = {"folder": folder, "checkpoint": run.checkpoints / "step-00000001"}
    return found


def train(engine, steps, plan=ALONE):
    for step in range(steps):
        train_step(engine, own_microbatches(step, plan), learning_rate=1e-2, max_grad_norm=1.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A tied and an untied run that have not started."""
    return {config.model: new_run(tmp_path_factory.mktemp("trained") / "run", config) for config in (UNTIED, TIED)}


@pytest.fixture(scope="module")
def four_ranks(folders, runs):
    """Each of four ranks' wrong parameters, then its weights trained under tp 2 x pp 2."""
    return run_ranks(4, on_a_rank, folders, runs)


def on_a_rank(folders, runs):
    logging.disable(logging.WARNING)  # torch warns about gathering a sharded tensor for the comparison
    trained = {
        config.model: train_under_a_plan(folders[config.model]["folder"], runs[config.model], config)
        for config in (UNTIED, TIED)
    }
    return fill_under_every_plan(folders), trained


def train_under_a_plan(folder, run, config):
    """Start with the weights of a folder, train under tp 2 x pp 2, save, and return this rank's weights."""
    plan, _ = PLANS["tp2 pp2"]
    engine = native_engine(plan, config.spec)
    engine.set_weights(Pretrained(config.spec, folder).fill)
    train(engine, 3, plan)
    save_run(run, engine, config, 3)
    return {name: whole(parameter).numpy() for name, parameter in engine.model.named_parameters()}


@pytest.mark.nightly
def test_every_rank_of_every_plan_has_the_weights_of_one_process_bit_for_bit(four_ranks):
    for rank, (wrong, _) in enumerate(four_ranks):
        assert len(wrong) == 2 * len(PLANS)
        assert not any(wrong.values()), f"rank {rank}: {wrong}"


@pytest.mark.nightly
@pytest.mark.parametrize("config", [UNTIED, TIED], ids=["untied", "tied"])
def test_weights_trained_under_tp2_pp2_are_exported_and_loaded_bit_for_bit(four_ranks, folders, runs, tmp_path, config):
    trained = {
        name: torch.from_numpy(weight) for _, weights in four_ranks for name, weight in weights[config.model].items()
    }
    exported = filled(config.spec, export_run(runs[config.model], tmp_path / "out"))
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, trained.pop(name)), name
    assert trained == {}
    began_with = filled(config.spec, folders[config.model]["folder"])
    assert len(differing(began_with, exported)) == len(list(exported.parameters()))


@pytest.mark.parametrize("config", [UNTIED, TIED], ids=["untied", "tied"])
def test_weights_match_the_file_converted_to_the_parameters_dtype(folders, config):
    folder = folders[config.model]["folder"]
    stored = {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = Llama(config.spec).to(dtype)
        Pretrained(config.spec, folder).fill(model)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, stored[hugging_face_name(name)].to(dtype)), name


def test_replaced_files_are_read_again(tmp_path):
    for seed in (0, 1):
        model = lively(TIED.spec, seed)
        folder = save_folder(tmp_path / "folder", model)
        assert differing(filled(TIED.spec, folder), model) == []
        shutil.rmtree(folder)


def test_reading_reports_its_progress(folders, caplog, monkeypatch):
    monkeypatch.setattr("llama_core.training.stored_weights.SECONDS_BETWEEN_LINES", 0.0)
    source = folders[TIED.model]["folder"]
    pretrained, model = Pretrained(TIED.spec, source), Llama(TIED.spec)
    with caplog.at_level(logging.INFO):
        pretrained.fill(model)
        pretrained.done()
    assert re.fullmatch(r"reading weights: [\d.]+ KiB, at tok_embeddings.weight", caplog.messages[0])
    assert len(caplog.messages) == len(list(model.parameters())) + 1
    assert caplog.messages[-1].startswith(f"weights of {source} read: ")


def test_files_with_unaligned_tensors_can_be_read(tmp_path):
    model = lively(TIED.spec)
    file = save_folder(tmp_path / "folder", model) / "model-00001-of-00002.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])
    assert differing(filled(TIED.spec, file.parent), model) == []


@pytest.fixture(scope="module")
def run(folders):
    """The run of the tied model."""
    return RunDirectory(folders[TIED.model]["checkpoint"].parents[1])


def logits_of_transformers(folder, tokens):
    model, report = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("config", [UNTIED, TIED], ids=["untied", "tied"])
def test_logits_match_transformers_before_training_and_after_an_export(folders, tmp_path, config):
    tokens = torch.randint(0, 66, (2, 48), generator=torch.Generator().manual_seed(1))
    source = folders[config.model]
    exported = export_run(RunDirectory(source["checkpoint"].parents[1]), tmp_path / "out")
    for folder, ours in ((source["folder"], source["folder"]), (exported, source["checkpoint"])):
        with torch.no_grad():
            logits = filled(config.spec, ours)(tokens)
        assert logits.std() > 1
        torch.testing.assert_close(logits, logits_of_transformers(folder, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_export_in_16_bits_is_rounded_once(run, tmp_path, dtype):
    weights = load_file(export_run(run, tmp_path / "out", dtype=dtype) / "model.safetensors")
    theirs = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for name, parameter in filled(TIED.spec, resolve_pretrained(str(run.path))).named_parameters():
        assert torch.equal(weights[hugging_face_name(name)], parameter.to(theirs)), name
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == theirs


def test_many_small_files_hold_the_same_weights_as_one(run, tmp_path):
    checkpoint, told = Path(resolve_pretrained(str(run.path))), []
    for name, size in (("one", 10**9), ("many", 10_000)):
        (tmp_path / name).mkdir()
        write_hugging_face(checkpoint, TIED.spec, tmp_path / name, dtype="fp32", shard_bytes=size, on_file=told.append)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert told == ["model.safetensors", *files]
    assert len(files) > 10
    assert all((tmp_path / "many" / file).stat().st_size < 10_000 + 2_000 for file in files)
    expected = filled(TIED.spec, tmp_path / "one")
    assert differing(filled(TIED.spec, tmp_path / "many"), expected) == []
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in expected.parameters())


def test_the_exported_folder_has_the_files_transformers_needs(run, tmp_path):
    out = export_run(run, tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 257, "bos_token_id": 256}
    assert list(tmp_path.iterdir()) == [out]


def run_with(tmp_path, checkpoint, **data):
    """A run on other data, with the weights of a checkpoint."""
    config = RunConfig.from_mapping(TIED.model_dump() | {"data": data})
    run, engine = new_run(tmp_path / "run", config), native_engine(ALONE, TIED.spec)
    engine.set_weights(Pretrained(TIED.spec, checkpoint).fill)
    save_run(run, engine, config, 7)
    return run


@pytest.mark.parametrize("config", [None, {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 99}])
def test_the_tokenizer_of_a_run_is_exported_with_its_weights(folders, tmp_path, config):
    from tokenizers import Tokenizer, models

    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    run = run_with(tmp_path, folders[TIED.model]["checkpoint"], tokenizer=str(tmp_path))
    out = export_run(run, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded("ab")["input_ids"] == [2, 3]
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 1, "bos_token_id": 0}


def sentencepiece_model():
    trainer = sentencepiece.SentencePieceTrainer
    model = BytesIO()
    trainer.train(
        sentence_iterator=iter(["some words"]),
        model_writer=model,
        vocab_size=20,
        hard_vocab_limit=False,
        model_type="bpe",
        minloglevel=2,
    )
    return model


@pytest.mark.parametrize("forced", [None, True, False])
@pytest.mark.parametrize("kind", ["bytes", "json", "model", "model with a configuration"])
def test_an_export_begins_its_texts_as_the_run_did(folders, tmp_path, kind, forced):
    from tokenizers import Tokenizer, models

    source = tmp_path / "tokenizer"
    source.mkdir()
    if kind == "json":
        tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, []))
        tokenizer.add_special_tokens(["<s>", "</s>"])
        tokenizer.save(str(source / "tokenizer.json"))
    elif kind != "bytes":
        (source / "tokenizer.model").write_bytes(sentencepiece_model().getvalue())
    if kind == "model with a configuration":
        (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    named = "bytes" if kind == "bytes" else str(source)
    run = run_with(tmp_path, folders[TIED.model]["checkpoint"], tokenizer=named, add_bos_token=forced)
    told = []
    out = export_run(run, tmp_path / "out", tell=told.append)
    theirs = AutoTokenizer.from_pretrained(out)
    config = load_config(run)
    own = load_tokenizer(config.data.tokenizer, adds_bos=config.data.add_bos_token)
    [trained] = own.encode_documents(["ab"])
    assert [*theirs("ab")["input_ids"], theirs.eos_token_id] == trained.tolist()
    begins = kind in {"bytes", "model"} if forced is None else forced
    assert (trained[0] == theirs.bos_token_id) == begins
    assert not [line for line in told if "tokenizer" in line]


@pytest.mark.parametrize("named", ["", "tokenizer.model"])
def test_a_sentencepiece_model_is_exported_as_it_is(folders, tmp_path, named):
    model = sentencepiece_model()
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    run = run_with(tmp_path, folders[TIED.model]["checkpoint"], tokenizer=str(tmp_path / named))
    out = export_run(run, tmp_path / "out")
    assert (out / "tokenizer.model").read_bytes() == model.getvalue()
    assert not (out / "tokenizer.json").exists()
    assert (
        load_tokenizer(str(out)).decode(AutoTokenizer.from_pretrained(out)("some words")["input_ids"]) == "some words"
    )
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 2, "bos_token_id": 1}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"tokenizer": "/gone/tokenizer.json"}, "no tokenizer: no tokenizer '/gone/tokenizer.json'"),
        (
            {"source": "dataloader"},
            "no tokenizer: the run trained on a dataloader; add the tokenizer that made its tokens",
        ),
    ],
)
def test_weights_are_exported_without_an_unknown_tokenizer(folders, tmp_path, data, said):
    told = []
    out = export_run(run_with(tmp_path, folders[TIED.model]["checkpoint"], **data), tmp_path / "out", tell=told.append)
    assert any(line.startswith(said) for line in told)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] is None
    assert (out / "model.safetensors").exists()


def test_an_earlier_checkpoint_can_be_exported(folders, tmp_path):
    run, engine = new_run(tmp_path / "run", TIED), native_engine(ALONE, TIED.spec)
    save_run(run, engine, TIED, 1)
    train(engine, 1)
    save_run(run, engine, TIED, 2)
    first, second = (filled(TIED.spec, export_run(run, tmp_path / str(step), step=step)) for step in (1, 2))
    assert differing(second, engine.model) == []
    assert differing(first, engine.model)
    with pytest.raises(RunDirectoryError, match=r"has no checkpoint of step 3; there are 1, 2$"):
        export_run(run, tmp_path / "3", step=3)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A run with checkpoints of steps 1, 2 and 3, of which the second has the lowest held-out loss."""
    run, engine = new_run(tmp_path_factory.mktemp("several") / "run", TIED), native_engine(ALONE, TIED.spec)
    checkpointer = Checkpointer(run, keep=Retention(3))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        train(engine, 1)
        checkpointer.save(step, engine, {"eval_loss": loss})
    checkpointer.finish()
    return run


def weights_of(run, *steps):
    models = [filled(TIED.spec, run.checkpoints / checkpoint_name(step)) for step in steps]
    return [{name: parameter.detach() for name, parameter in model.named_parameters()} for model in models]


@pytest.mark.parametrize(("average", "steps"), [("last:2", (2, 3)), ("3,1", (1, 3))])
def test_an_average_is_the_mean_of_the_weights_in_fp32(several, tmp_path, average, steps):
    exported = filled(TIED.spec, export_run(several, tmp_path / "out", average=average))
    averaged = weights_of(several, *steps)
    for name, parameter in exported.named_parameters():
        exact = torch.stack([weights[name].double() for weights in averaged]).mean(0)
        torch.testing.assert_close(parameter.detach().double(), exact, rtol=1e-6, atol=1e-8, msg=name)


def test_an_average_in_16_bits_is_rounded_once(several, tmp_path):
    exact = load_file(export_run(several, tmp_path / "exact", average="last:3") / "model.safetensors")
    rounded = load_file(export_run(several, tmp_path / "out", average="last:3", dtype="bf16") / "model.safetensors")
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in exact.items())


def test_the_best_checkpoint_can_be_exported(several, tmp_path):
    exported = filled(TIED.spec, export_run(several, tmp_path / "out", step="best"))
    assert differing(exported, filled(TIED.spec, several.checkpoints / checkpoint_name(2))) == []


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"average": "last:4"}, r"average=last:4: .* has 3 checkpoints \(steps: 1, 2, 3\); give 1 or more"),
        ({"average": "last:0"}, r"average=last:0: .* give 1 or more, but not more than there are"),
        ({"average": "1,7"}, r"has no checkpoint of step 7; there are 1, 2, 3$"),
        ({"average": "1,2,1"}, r"average=1,2,1 names a step twice; name each once$"),
        ({"average": "newest"}, r"average=newest: give last:5 for the newest five checkpoints, or steps, as in 1000"),
        ({"average": "last:2", "step": 1}, r"step=1 and average=last:2 choose other checkpoints; give one of them$"),
    ],
)
def test_checkpoints_that_cannot_be_averaged_are_refused_in_one_line(several, tmp_path, choice, problem):
    with pytest.raises(TrainingInfraError, match=problem) as caught:
        export_run(several, tmp_path / "out", **choice)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_not_averaged(tmp_path):
    run, engine = new_run(tmp_path / "run", TIED), native_engine(ALONE, TIED.spec)
    save_run(run, engine, TIED, 1)
    with torch.no_grad():
        engine.model.tok_embeddings.weight[3, 4] = float("nan")
    save_run(run, engine, TIED, 2)
    with pytest.raises(WeightsError, match=r"tok_embeddings.weight of .*step-00000002 is not finite; average other"):
        export_run(run, tmp_path / "out", average="last:2")
    assert not (tmp_path / "out").exists()


def test_a_run_that_was_not_evaluated_has_no_best_checkpoint(run, tmp_path):
    with pytest.raises(RunDirectoryError, match=r"has no checkpoint with a held-out loss, so none is the best"):
        export_run(run, tmp_path / "out", step="best")


def test_a_folder_with_files_is_left_alone_and_an_empty_one_is_used(run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("full", "file"):
        with pytest.raises(WeightsError, match=f"{name} exists and is not an empty folder; choose another --out"):
            export_run(run, tmp_path / name)
    assert (export_run(run, tmp_path / "empty") / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_of_two_exports_at_the_same_time_one_is_whole_and_the_other_is_refused(run, tmp_path):
    first_has_written, second_has_begun, first_is_over = Event(), Event(), Event()

    def of_first(text):
        if text.startswith("wrote"):
            first_has_written.set()
            second_has_begun.wait(60)

    def of_second(text):
        if text.startswith("wrote"):
            second_has_begun.set()
            first_is_over.wait(60)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(export_run, run, tmp_path / "out", tell=of_first)
        first_has_written.wait(60)
        second = threads.submit(export_run, run, tmp_path / "out", dtype="bf16", tell=of_second)
        wait([first], 60)
        first_is_over.set()
    assert first.result() == tmp_path / "out"
    assert {path.name for path in first.result().iterdir()} == {path.name for path in alone(run, tmp_path).iterdir()}
    with pytest.raises(WeightsError, match=r"out exists and is not an empty folder; choose another --out"):
        second.result()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def alone(run, tmp_path):
    return export_run(run, tmp_path / "alone")


def test_what_a_killed_export_has_left_is_removed_and_what_another_writes_is_not(run, tmp_path):
    left, at_work = (tmp_path / f".out.{name}.writing" for name in ("left", "at-work"))
    for folder in (left, at_work):
        folder.mkdir()
        (folder / "config.json").touch()
        os.utime(folder, (0, 0))
    with only_one(at_work):
        export_run(run, tmp_path / "out")
    assert (left.exists(), at_work.exists()) == (False, True)


def test_a_run_that_never_saved_has_nothing_to_export(tmp_path):
    with pytest.raises(RunDirectoryError, match="has no checkpoint; train the run until it saves one"):
        export_run(new_run(tmp_path / "run", TIED), tmp_path / "out")


def configured(config, **changes):
    """What gives a checkpoint and its run other settings than it was saved with."""
    settings = RunConfig.from_mapping(config.model_dump() | changes).to_yaml()

    def spoil(checkpoint):
        for folder in (checkpoint, checkpoint.parents[1]):
            (folder / "config.yaml").write_text(settings)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "error", "complaint"),
    [
        (
            lambda checkpoint: write_json(checkpoint / LAYOUT, {"zero_stage": 2, "compute_dtype": "bfloat16"}),
            CheckpointError,
            "cannot read .*step-00000007: .*No such file or directory",
        ),
        (
            configured(TIED, strategy="moe"),
            CheckpointError,
            "cannot read layers.0.feed_forward.router.weight from",
        ),
        (
            configured(TIED, strategy="lora"),
            CheckpointError,
            "cannot read layers.0.attention.wq.lora_A.weight from",
        ),
        (
            lambda checkpoint: (checkpoint / INDEX).write_bytes(b"\0" * (checkpoint / INDEX).stat().st_size),
            CheckpointError,
            "step-00000007/index.jsonl is no index of a checkpoint",
        ),
        (
            configured(UNTIED),
            CheckpointError,
            "cannot read output.weight from",
        ),
    ],
)
def test_a_checkpoint_that_is_not_a_full_model_is_refused_and_leaves_nothing(
    folders, tmp_path, spoil, error, complaint
):
    run = run_with(tmp_path, folders[TIED.model]["checkpoint"])
    spoil(run.checkpoints / "step-00000007")
    relist(run.checkpoints / "step-00000007")
    with pytest.raises(error, match=complaint) as refused:
        export_run(run, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def relist(checkpoint):
    """Make the checkpoint's manifest anew."""
    write_manifest(checkpoint, {})


def test_a_weight_that_fp16_cannot_hold_is_refused(tmp_path):
    run, engine = new_run(tmp_path / "run", TIED), native_engine(ALONE, TIED.spec)
    with torch.no_grad():
        engine.model.norm.weight[3] = 1e5
    save_run(run, engine, TIED, 1)
    with pytest.raises(WeightsError, match=r"model.norm.weight has values above 65504.*use --dtype bf16"):
        export_run(run, tmp_path / "out", dtype="fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.root
def test_a_full_disk_is_one_line_and_leaves_nothing(run, disk_of):
    small = disk_of("64k")
    with pytest.raises(CheckpointError, match=r"cannot write .*: No space left on device; nothing is left there$"):
        export_run(run, small / "out")
    assert list(small.iterdir()) == []


UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from llama_core.config.run import RunConfig
from llama_core.models.llama import Llama
from llama_core.training.stored_weights import Pretrained, write_hugging_face

def limit(more):
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + more if more else resource.RLIM_INFINITY, resource.RLIM_INFINITY))

folder, more = Path(sys.argv[1]), int(sys.argv[2])
spec = RunConfig.load(folder / "config.yaml").spec
limit(more)
write_hugging_face(folder / "checkpoint", spec, folder / "out", dtype="fp32", shard_bytes=20_000_000)
(folder / "mean").mkdir()
checkpoints = [folder / "checkpoint"] * 2
limit(more + more // 3)
write_hugging_face(checkpoints[0], spec, folder / "mean", dtype="fp32", others=checkpoints[1:], shard_bytes=20_000_000)
limit(0)
model = Llama(spec)
limit(more)
Pretrained(spec, folder / "out").fill(model)
"""


@pytest.mark.nightly
def test_import_and_export_hold_only_a_few_weights_in_memory(tmp_path):
    """The system limits the process to private memory for three of the 58 matrices, and for four where it averages."""
    sizes = {"hidden_size": 640, "num_layers": 8, "num_heads": 10, "num_kv_heads": 10, "head_dim": 64}
    config = RunConfig.from_mapping(
        {"model": "llama3_8b", "architecture": sizes | {"ffn_size": 640, "vocab_size": 640}}
    )
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    model = build_llama(config.spec, device="cpu", seed=0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    (tmp_path / "out").mkdir()
    limit = 3 * model.tok_embeddings.weight.nbytes
    assert sum(parameter.nbytes for parameter in model.parameters()) > 19 * limit
    command = [sys.executable, "-c", UNDER_A_LIMIT, tmp_path, str(limit)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed matrices leave no gaps
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for folder in ("out", "mean"):
        assert differing(filled(config.spec, tmp_path / folder), model) == []


def with_deepspeed(sources, spec):
    logging.disable(logging.WARNING)
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        plan = ParallelPlan(dp_shard=2, zero_stage=3, zero_backend="deepspeed", num_microbatches=2)
        model = DeepSpeedModel(
            spec,
            plan,
            device=torch.device("cpu"),
            compute_dtype=torch.float32,
            build_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        )
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for kind, source in sources.items():
            model.set_weights(Pretrained(spec, source).fill)
            found[kind] = {
                name: safe_get_full_fp32_param(parameter).clone().numpy()
                for name, parameter in model.model.named_parameters()
            }
        return found


@pytest.mark.nightly
def test_deepspeed_starts_with_the_same_weights(folders):
    sources = folders[TIED.model]
    for found in run_ranks(2, with_deepspeed, sources, TIED.spec):
        for kind, source in sources.items():
            expected = dict(filled(TIED.spec, source).named_parameters())
            assert found[kind].keys() == expected.keys()
            for name, weight in found[kind].items():
                assert torch.equal(torch.from_numpy(weight), expected[name]), (kind, name)


def train_with_deepspeed(run, config, stage):
    """Train two steps with DeepSpeed, save, and return the trained weights, which are fp32."""
    logging.disable(logging.WARNING)
    plan = ParallelPlan(dp_shard=2, zero_stage=stage, zero_backend="deepspeed", num_microbatches=2)
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        engine = build_engine(config, plan, torch.device("cpu"))
        engine.initialize_weights(config.training.seed)
        train(engine, 2, plan)
        save_run(run, engine, config, 2)
        from deepspeed.utils import safe_get_full_fp32_param

        trained = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
        return {name: safe_get_full_fp32_param(parameter).clone().numpy() for name, parameter in trained.items()}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "precision", "strategy"), [(1, "fp32", "standard"), (2, "bf16", "lora"), (3, "bf16", "standard")]
)
def test_one_process_reads_and_exports_a_checkpoint_of_two_deepspeed_ranks(tmp_path, stage, precision, strategy):
    lora = {"lora": {"target_modules": ["q_proj", "embed_tokens"]}} if strategy == "lora" else {}
    training = {"precision": precision, "seed": 3}
    config = RunConfig.from_mapping(UNTIED.model_dump() | {"strategy": strategy, "training": training} | lora)
    run = new_run(tmp_path / "run", config)
    weights, _ = run_ranks(2, train_with_deepspeed, run, config, stage)
    for source in (run.checkpoints / "step-00000002", export_run(run, tmp_path / "out")):
        if strategy == "lora" and source.name == "out":
            break  # its base is random and in no file
        read = dict(filled(config.spec, source).named_parameters())
        for name, weight in weights.items():
            assert torch.equal(read[name], torch.from_numpy(weight)), name
    assert weights.keys() == (set(config.spec.adapter_shapes) or set(config.spec.parameter_shapes))
