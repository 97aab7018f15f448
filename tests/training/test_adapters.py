"""Adapters in and out: PEFT computes the same with our exports, and training starts from adapters that PEFT wrote."""

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from parity import draw_adapters, native_engine
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from same_logits import TOKENS, assert_same_logits, logits
from test_stored_weights import (
    ALONE,
    PLANS,
    UNTIED,
    differing,
    filled,
    lively,
    logits_of_transformers,
    new_run,
    relist,
    save_folder,
    save_run,
    train,
    whole,
)
from transformers import LlamaForCausalLM

from llama_core.config.model_weights import hugging_face_name
from llama_core.config.run import RunConfig
from llama_core.errors import WeightsError
from llama_core.hugging_face.pretrained import check_pretrained
from llama_core.runs.export import export_run
from llama_core.training.stored_weights import Pretrained

pytestmark = pytest.mark.xdist_group("adapters")

TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
LORA = {"lora_rank": 4, "lora_alpha": 6.0, "target_modules": TARGETS}
BEGUN_UNDER = ("tp2 zero3 dp2, with adapters", "tp2 pp2")


def adapted(base=None, **training):
    """The configuration of a run that trains adapters over the weights in a folder, or over random ones."""
    init_from = {} if base is None else {"init_from": str(base)}
    return RunConfig.from_mapping(
        UNTIED.model_dump() | {"strategy": "lora", "lora": LORA, "training": training | init_from}
    )


SPEC = adapted().spec


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The model that adapters are trained over, in fp32."""
    return save_folder(tmp_path_factory.mktemp("base") / "folder", lively(UNTIED.spec))


@pytest.fixture(scope="module")
def written_by_peft(base):
    """A folder that PEFT saved, and the logits of its model."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
        logits = model.eval()(TOKENS).logits
    folder = base.with_name("peft")
    model.save_pretrained(folder)
    return folder, logits


@torch.no_grad()
def draw_small_adapters(model):
    """Give every B values that change the logits by several units without amplifying rounding errors."""
    draw_adapters(model)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B.weight"):
            parameter.mul_(0.1)


@pytest.fixture(scope="module")
def four_ranks(base, written_by_peft, tmp_path_factory):
    """A run with adapters trained under tp 2 x dp 2, and the wrong initial weights on each of four ranks."""
    run = new_run(tmp_path_factory.mktemp("trained") / "run", adapted(base))
    return run, run_ranks(4, on_a_rank, base, written_by_peft[0], run)


def on_a_rank(base, written_by_peft, run):
    logging.disable(logging.WARNING)  # torch warns about gathering a sharded tensor for the comparison
    config = adapted(base)
    plan, _ = PLANS["tp2 zero1 dp2"]
    engine = native_engine(plan, SPEC)
    engine.set_weights(Pretrained(SPEC, base).fill)
    draw_small_adapters(engine.model)
    train(engine, 2, plan)
    save_run(run, engine, config, 2)
    dist.barrier()
    checkpoint = run.checkpoints / "step-00000002"
    wrong = {"saved": differing(engine.model, filled(SPEC, checkpoint))}
    for name in BEGUN_UNDER:
        for source in (written_by_peft, checkpoint):
            begun = native_engine(PLANS[name][0], SPEC, seed=3)
            begun.set_weights(Pretrained(SPEC, source).fill)
            wrong[f"{source.name} under {name}"] = differing(begun.model, filled(SPEC, source))
    return wrong


def test_every_rank_starts_with_the_adapters_and_base_of_one_process_bit_for_bit(four_ranks):
    _, found = four_ranks
    for rank, wrong in enumerate(found):
        assert len(wrong) == 1 + 2 * len(BEGUN_UNDER)
        assert not any(wrong.values()), f"rank {rank}: {wrong}"


def test_a_peft_folder_loads_bit_for_bit_and_computes_the_same_logits(base, written_by_peft):
    folder, theirs = written_by_peft
    assert check_pretrained(SPEC, folder) == []
    model = filled(SPEC, folder)
    stored = {name: weight for file in base.glob("*.safetensors") for name, weight in load_file(file).items()}
    adapters = load_file(folder / "adapter_model.safetensors")
    for name, parameter in model.named_parameters():
        path, is_adapter, part = name.partition(".lora_")
        matrix = hugging_face_name(path + ".weight" * bool(is_adapter)).removesuffix(".weight")
        if path == "tok_embeddings":
            part = f"embedding_{part.removesuffix('.weight')}"
        weight = adapters.pop(f"base_model.model.{matrix}.lora_{part}") if is_adapter else stored[f"{matrix}.weight"]
        assert torch.equal(parameter, weight), name
    # PEFT also saves the tables that have adapters
    assert sorted(adapters) == [
        "base_model.model.lm_head.base_layer.weight",
        "base_model.model.model.embed_tokens.base_layer.weight",
    ]
    assert_same_logits(logits(model), theirs)


def test_peft_computes_the_same_with_adapters_trained_under_tp2_dp2(four_ranks, base, tmp_path):
    run, _ = four_ranks
    told = []
    out = export_run(run, tmp_path / "out", tell=told.append)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert told[1:3] == [f"adapters over {base}", "wrote adapter_model.safetensors"]
    assert told[3].endswith("is that folder; for others, write the repository of the base")
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(model).logits
    with warnings.catch_warnings(action="error", category=UserWarning):  # such as a missing key
        theirs = logits(PeftModel.from_pretrained(model, out).eval()).logits
    assert (theirs - before).abs().max() > 1
    assert_same_logits(logits(filled(SPEC, run.checkpoints / "step-00000002")), theirs)


def test_exported_adapters_load_again_bit_for_bit(four_ranks, tmp_path):
    run, _ = four_ranks
    expected = filled(SPEC, run.checkpoints / "step-00000002")
    assert differing(filled(SPEC, export_run(run, tmp_path / "out")), expected) == []


def test_rslora_scales_as_peft_does_in_and_out(base, tmp_path):
    config = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
    theirs = logits(model).logits
    model.save_pretrained(tmp_path / "peft")
    started = RunConfig.from_mapping({"strategy": "lora", "training": {"init_from": str(tmp_path / "peft")}})
    assert (started.lora.rslora, started.lora.scale) == (True, 3.0)
    assert_same_logits(logits(filled(started.spec, tmp_path / "peft")), theirs)
    run = new_run(tmp_path / "run", started)
    engine = native_engine(ALONE, started.spec)
    engine.set_weights(Pretrained(started.spec, tmp_path / "peft").fill)
    save_run(run, engine, started, 1)
    out = export_run(run, tmp_path / "out")
    assert json.loads((out / "adapter_config.json").read_text())["use_rslora"] is True
    base_model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert_same_logits(logits(PeftModel.from_pretrained(base_model, out).eval()).logits, theirs)


@pytest.mark.parametrize(("alpha", "written"), [(None, 8), (6.0, 6), (2.5, 2.5)])
def test_the_exported_alpha_is_a_number(tmp_path, alpha, written):
    config = RunConfig.from_mapping(UNTIED.model_dump() | {"strategy": "lora", "lora": LORA | {"lora_alpha": alpha}})
    run = new_run(tmp_path / "run", config)
    save_run(run, native_engine(ALONE, config.spec), config, 1)
    text = (export_run(run, tmp_path / "out") / "adapter_config.json").read_text()
    assert f'"lora_alpha": {written},' in text
    described = json.loads(text)
    assert (described["r"], described["lora_alpha"]) == (4, written)
    assert described["target_modules"] == LORA["target_modules"]


def trained_over(kind, base, tmp_path):
    """A run that has trained adapters, and its model."""
    if kind == "checkpoint":
        full = new_run(tmp_path / "full", UNTIED)
        engine = native_engine(ALONE, UNTIED.spec)
        engine.set_weights(Pretrained(UNTIED.spec, base).fill)
        save_run(full, engine, UNTIED, 1)
        config = adapted(full.checkpoints / "step-00000001")
    else:
        config = adapted(seed=7) if kind == "drawn" else adapted(base)
    run, engine = new_run(tmp_path / "run", config), native_engine(ALONE, SPEC, seed=7)
    if config.training.init_from is not None:
        engine.set_weights(Pretrained(SPEC, Path(config.training.init_from)).fill)
    draw_small_adapters(engine.model)
    train(engine, 1)
    save_run(run, engine, config, 1)
    return run, engine.model


@pytest.mark.parametrize("kind", ["folder", "checkpoint", "drawn"])
def test_merged_weights_compute_the_runs_logits(base, tmp_path, kind):
    run, model = trained_over(kind, base, tmp_path)
    assert differing(filled(SPEC, run.checkpoints / "step-00000001"), model) == []
    out = export_run(run, tmp_path / "out", merged=True)
    torch.testing.assert_close(logits(model), logits_of_transformers(out, TOKENS), rtol=0, atol=1e-4)
    assert differing(filled(UNTIED.spec, out), model.__class__(UNTIED.spec)) != []
    rounded = load_file(export_run(run, tmp_path / "bf16", merged=True, dtype="bf16") / "model.safetensors")
    for name, weight in load_file(out / "model.safetensors").items():
        assert torch.equal(rounded[name], weight.bfloat16()), name


def test_an_average_of_adapters_is_that_of_their_factors_merged_or_not(base, tmp_path):
    run, model = trained_over("folder", base, tmp_path)
    engine = native_engine(ALONE, SPEC, seed=7)
    engine.set_weights(lambda fresh: fresh.load_state_dict(model.state_dict()))
    train(engine, 1)
    config = RunConfig.load(run.config)
    save_run(run, engine, config, 2)
    first, second = (filled(SPEC, run.checkpoints / f"step-0000000{step}") for step in (1, 2))
    mean = filled(SPEC, run.checkpoints / "step-00000001")
    with torch.no_grad():
        for name, parameter in mean.named_parameters():
            parameter.copy_((first.get_parameter(name) + second.get_parameter(name)) / 2)
    assert differing(first, second)
    assert differing(filled(SPEC, export_run(run, tmp_path / "out", average="1,2")), mean) == []
    merged = export_run(run, tmp_path / "merged", average="last:2", merged=True)
    torch.testing.assert_close(logits(mean), logits_of_transformers(merged, TOKENS), rtol=0, atol=1e-4)


def test_each_adapted_matrix_is_merged_with_its_adapter_and_no_other_weight_changes(base, tmp_path):
    run, model = trained_over("folder", base, tmp_path)
    merged = filled(UNTIED.spec, export_run(run, tmp_path / "out", merged=True))
    for name, weight in merged.named_parameters():
        expected = whole(model.get_parameter(name))
        part = model.get_submodule(name.rpartition(".")[0])
        if hasattr(part, "lora_A"):
            added = 6 / 4 * part.lora_B.weight @ part.lora_A.weight
            expected = expected + (added.T if name == "tok_embeddings.weight" else added)
            torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(weight, expected), name


def test_adapters_trained_from_others_have_the_same_base(written_by_peft, base, tmp_path):
    folder, _ = written_by_peft
    config = adapted(folder)
    run, engine = new_run(tmp_path / "run", config), native_engine(ALONE, SPEC)
    engine.set_weights(Pretrained(SPEC, folder).fill)
    train(engine, 1)
    save_run(run, engine, config, 1)
    out = export_run(run, tmp_path / "out")
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert differing(filled(SPEC, out), engine.model) == []


MERGE_UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
from llama_core.config.run import RunConfig
from llama_core.training.stored_weights import write_hugging_face

checkpoint, more = Path(sys.argv[1]), int(sys.argv[2])
spec = RunConfig.load(checkpoint / "config.yaml").spec
lines = Path("/proc/self/status").read_text().splitlines()
held = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (held + more, resource.RLIM_INFINITY))
write_hugging_face(checkpoint, spec, Path(sys.argv[3]), dtype="bf16")
"""


@pytest.mark.nightly
def test_merging_holds_only_a_few_weights_in_memory(tmp_path):
    """The system limits the process to private memory for six of the 58 matrices; it needs two."""
    sizes = {"hidden_size": 640, "num_layers": 8, "num_heads": 10, "num_kv_heads": 10, "head_dim": 64}
    model = {"model": "llama3_8b", "architecture": sizes | {"ffn_size": 640, "vocab_size": 640}}
    full = lively(RunConfig.from_mapping(model).spec)
    training = {"init_from": str(save_folder(tmp_path / "base", full))}
    config = RunConfig.from_mapping(model | {"strategy": "lora", "training": training})
    run = new_run(tmp_path / "run", config)
    save_run(run, native_engine(ALONE, config.spec), config, 1)
    (tmp_path / "out").mkdir()
    limit = str(6 * full.tok_embeddings.weight.nbytes)
    command = [sys.executable, "-c", MERGE_UNDER_A_LIMIT, run.checkpoints / "step-00000001", limit, tmp_path / "out"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # the stacks of others would count
    done = subprocess.run(command, env=one_thread, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rounded = full.bfloat16().float()  # untrained adapters add nothing
    assert differing(filled(full.spec, tmp_path / "out"), rounded) == []


def test_a_full_model_has_nothing_to_merge(tmp_path):
    run = new_run(tmp_path / "run", UNTIED)
    save_run(run, native_engine(ALONE, UNTIED.spec), UNTIED, 1)
    with pytest.raises(WeightsError, match=r"holds a full model .* and no adapters to merge; drop --merged$"):
        export_run(run, tmp_path / "out", merged=True)


def test_a_missing_base_is_refused_only_where_it_is_needed(base, tmp_path):
    run, _ = trained_over("folder", base, tmp_path)
    checkpoint = run.checkpoints / "step-00000001"
    for file in (run.config, checkpoint / "config.yaml"):
        file.write_text(adapted(tmp_path / "gone").to_yaml())
    relist(checkpoint)
    for needs_it in (
        lambda: export_run(run, tmp_path / "out", merged=True),
        lambda: check_pretrained(SPEC, checkpoint),
    ):
        with pytest.raises(WeightsError, match=r"the base of the adapters in .*gone' does not exist; name a folder"):
            needs_it()
    assert (export_run(run, tmp_path / "out") / "adapter_model.safetensors").exists()
