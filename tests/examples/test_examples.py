"""The example scripts, run on the smallest model as a user would run them, each from its own directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--model", "tiny_llama3_50m"]
QUICKLY = ["--device", "cpu", "--steps", "1", "--seq-len", "16"]
TWO_RANKS = ["--gpus", "2", *QUICKLY]
RUNS = {
    "train_llama_7b.py": [*TINY, "--gpus", "1", "--batch-size", "2", *QUICKLY],
    "finetune_with_lora.py": [*TINY, "--batch-size", "2", *QUICKLY],
    "multi_node_training.py": [*TINY, "--launcher", "local", "--nodes", "1", "--tensor-parallel", "2", *TWO_RANKS],
    "custom_data_loading.py": [*TINY, "--batch-size", "2", *TWO_RANKS],
    "train_with_moe.py": [*TINY, "--experts", "2", "--layers", "1", "--batch-size", "2", *TWO_RANKS],
}


def run(script, arguments, place):
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
