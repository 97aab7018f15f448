"""The example scripts, run on a very small model as a user would run them, each from its own directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--model", "small"]
QUICKLY = ["--device", "cpu", "--steps", "1", "--seq-len", "16"]
TWO_RANKS = ["--gpus", "2", *QUICKLY]
RUNS = {
    "train_llama_7b.py": [*SMALL, "--gpus", "1", "--batch-size", "2", *QUICKLY],
    "finetune_with_lora.py": [*SMALL, "--batch-size", "2", *QUICKLY],
    "multi_node_training.py": [*SMALL, "--launcher", "local", "--nodes", "1", "--tensor-parallel", "2", *TWO_RANKS],
    "custom_data_loading.py": [*SMALL, "--batch-size", "2", *TWO_RANKS],
    "train_with_moe.py": [*SMALL, "--experts", "2", "--layers", "1", "--batch-size", "2", *TWO_RANKS],
}


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
"""Of the Hugging Face folder ``small``, which names the model."""


def run(script, arguments, place):
    (place / "small").mkdir()
    (place / "small" / "config.json").write_text(json.dumps(CONFIG))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(place / "cache")}
    command = [sys.executable, EXAMPLES / script, *arguments]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", RUNS)
def test_an_example_trains(script, tmp_path):
    ended = run(script, RUNS[script], tmp_path)
    assert ended.returncode == 0, ended.stderr
    (trained,) = tmp_path.glob("runs/*/training.json")
    assert (trained.parent / "report.html").exists()


def test_every_example_is_run_and_short():
    scripts = {path.name: path for path in EXAMPLES.glob("*.py")}
    assert scripts.keys() == {*RUNS}
    assert all(len(path.read_text().splitlines()) < 80 for path in scripts.values())
