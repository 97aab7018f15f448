"""Fine-tuning as a user does it, from a Hugging Face folder to exports that PEFT and transformers load."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM
from waiting import eventually

from llama_core.config.run import RunConfig
from llama_core.models.llama import Llama, with_adapters
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json
from llama_core.records.metrics import read_metrics
from llama_core.training.stored_weights import Pretrained

pytestmark = [pytest.mark.wide, pytest.mark.xdist_group("finetuning")]

STEPS = 12
TRAIN = [
    "--strategy=lora",
    "--lora-rank=4",
    "--set=lora.target_modules=all-linear",
    "--set=lora.lora_dropout=0.1",
    "--lr=1e-2",
    "--data=chats.jsonl",
    "--gpus=2",
    "--tensor-parallel=2",
    "--device=cpu",
    "--mixed-precision=fp32",
    "--seq-len=256",
    "--batch-size=4",
    f"--steps={STEPS}",
    "--set=training.checkpoint_every=2",
    "--set=data.validation_fraction=0.1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a small random model and conversations."""
    path = tmp_path_factory.mktemp("finetuning")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(path / "base")
    with (path / "chats.jsonl").open("w") as file:
        for number in range(48):
            asked = {"role": "user", "content": f"{number} + 1?"}
            file.write(json.dumps({"messages": [asked, {"role": "assistant", "content": str(number + 1)}]}) + "\n")
    return path


def write_pairs(path):
    """Write 24 pairs, each of which prefers the sum."""
    with path.open("w") as file:
        for number in range(24):
            pair = {"prompt": f"{number} + 1?", "chosen": str(number + 1), "rejected": "Hard to say."}
            file.write(json.dumps(pair) + "\n")


def command(*arguments):
    return [sys.executable, "-m", "training_infra.cli", *arguments]


def shell(folder, *arguments):
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command(*arguments), cwd=folder, env=environment, capture_output=True, text=True, check=False)


def kill_a_rank(run):
    """Kill one worker of a run with -9, once there is a checkpoint to resume from."""
    eventually((run / "checkpoints" / "step-00000004" / "state.json").exists)
    for process in psutil.process_iter():
        try:
            if {"llama_core.launch.rank.worker", str(run)} <= set(process.cmdline()):
                process.send_signal(signal.SIGKILL)
                return
        except psutil.Error:
            continue
    raise AssertionError("no worker is left")


@pytest.fixture(scope="module")
def tuned(folder):
    """A killed and resumed run of tp 2, with its output before the kill and after the resume."""
    first = subprocess.Popen(
        command("train", "--init-from=base", *TRAIN, "--run-dir=tuned"),
        cwd=folder,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    kill_a_rank(folder / "tuned")
    said, _ = first.communicate()
    assert first.returncode not in (0, None), said
    resumed = shell(folder, "train", "--resume", "--run-dir=tuned")
    assert resumed.returncode == 0, resumed.stderr
    return RunDirectory(folder / "tuned"), said, resumed.stdout


def test_a_run_prints_its_initial_weights_and_fine_tuning_defaults(tuned, folder):
    _, said, _ = tuned
    assert f"weights   of {folder / 'base'}\n" in said
    assert "default   training.weight_decay=0 (fine-tuning)\n" in said
    assert "; 48 conversations (" in said


def test_a_killed_and_resumed_run_trains_every_step_once_and_learns(tuned):
    run, _, _ = tuned
    steps = read_metrics(run).column("step").to_pylist()
    losses = read_metrics(run).column("loss").to_pylist()
    assert steps == list(range(1, STEPS + 1))
    assert losses[-1] < 0.9 * losses[0]


def test_exports_compute_the_trained_logits_in_peft_and_transformers(tuned, folder):
    run, _, _ = tuned
    for flags in (["--out=adapters"], ["--out=merged", "--merged"]):
        done = shell(folder, "export-hf", "tuned", *flags)
        assert done.returncode == 0, done.stderr
    spec = RunConfig.load(run.config).spec
    model = with_adapters(Llama(spec))
    Pretrained(spec, run.checkpoints / f"step-{STEPS:08d}").fill(model)
    tokens = torch.randint(0, spec.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    base = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    merged = LlamaForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        untuned = base(tokens).logits
        ours = model.eval()(tokens)
        for theirs in (PeftModel.from_pretrained(base, folder / "adapters").eval(), merged):
            torch.testing.assert_close(ours, theirs(tokens).logits, rtol=0, atol=1e-4)
    assert (ours - untuned).abs().max() > 0.01


def test_the_commands_from_a_base_to_a_tuned_model_do_what_the_page_says(folder):
    page = Path(__file__).parents[2] / "docs" / "finetuning.md"
    (block,) = re.findall(r"## From a base to a tuned model\n.*?```bash\n(.*?)```", page.read_text(), re.DOTALL)
    sizes = ["--steps=4", "--seq-len=128", "--batch-size=4", "--device=cpu", "--set=training.checkpoint_every=2"]
    write_pairs(folder / "pairs.jsonl")
    shutil.copy(folder / "chats.jsonl", folder / "held-out-chats.jsonl")
    said = []
    for line in block.strip().splitlines():
        words = shlex.split(line.replace("~/Llama-3.2-1B", "base").replace("~/", ""))[1:]
        more = {"train": sizes, "evaluate": ["--device=cpu"], "generate": ["--max-new-tokens=4"]}.get(words[0], [])
        done = shell(folder, *words, *more)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    _, preferences, losses, _, _ = said
    assert "24 pairs" in preferences
    assert ", whose adapters are trained on (strategy=lora)\n" in preferences
    assert [line.split("  ")[:2] for line in losses.splitlines()] == [["step 2", "chats"], ["step 4", "chats"]]
    steps = read_metrics(RunDirectory(folder / "runs" / "dpo"))
    assert steps.column("loss")[0].as_py() == pytest.approx(math.log(2), abs=1e-3), "of equal rewards"
    LlamaForCausalLM.from_pretrained(folder / "my-llama")


@pytest.mark.nightly
def test_adapters_save_the_estimated_memory(folder):
    measured, estimated = {}, {}
    for strategy in ("standard", "lora"):
        sizes = ["--seq-len=64", "--batch-size=2", "--steps=2", "--set=training.eval_sequences=1", "--no-benchmark"]
        flags = [f"--strategy={strategy}", "--device=cpu", "--mixed-precision=fp32", *sizes, f"--run-dir={strategy}"]
        done = shell(folder, "train", "--model=tiny_llama3_50m", *flags)
        assert done.returncode == 0, done.stderr
        run = RunDirectory(folder / strategy)
        in_steps = max(read_metrics(run)["memory_peak_bytes"].to_pylist())  # without the copy of the last checkpoint
        measured[strategy] = in_steps - read_json(run.path / "training.json")["memory_baseline_bytes"]
        estimated[strategy] = read_json(folder / strategy / "estimate.json")["peak_bytes"]
    saved, expected = (peaks["standard"] - peaks["lora"] for peaks in (measured, estimated))
    assert saved == pytest.approx(expected, rel=0.05)
    assert measured["lora"] < 0.5 * measured["standard"]


@pytest.mark.nightly
def test_the_rehearsal_of_70b_adapters_matches_the_estimate(folder):
    flags = ["--strategy=lora", "--lora-rank=64", "--gpus=8", "--set=architecture.num_layers=8", "--dry-run", "--json"]
    done = shell(folder, "train", "--model=llama3_70b_instruct", *flags)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["estimate"]["peak_bytes"] == pytest.approx(shown["dry_run"]["peak_bytes"], rel=0.03)
    assert any("base weights are random" in note for note in shown["notes"])
