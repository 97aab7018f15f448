"""A command that is typed in a folder of somebody else runs no module that lies there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_core.launch.jobs.handle import PLANNER, WORKER
from training_infra import cli

TRAPS = (
    *("yaml", "pydantic", "psutil", "submitit", "torch", "numpy", "pandas", "pyarrow", "prefect", "uvicorn", "httpx"),
    *("json", "argparse", "socket", "selectors", "multiprocessing", "dataclasses", "llama_core", "training_reports"),
)
FAKE_WORKER = Path(__file__).parents[1] / "launch" / "fake_worker.py"
SUBMIT = """
import sys
from pathlib import Path
del sys.path[0]  # of this test, and not of what it starts
from llama_core.config.run import RunConfig
from llama_core.launch.jobs.submission import submit
from llama_core.records.directory import RunDirectory

run = RunDirectory(Path("run"))
run.create()
config = RunConfig.from_mapping({"launch": {"device": "cpu"}})
outcome = submit(run, config, 1, worker=(sys.executable, sys.argv[1], "finish")).wait()
print(outcome.status)
"""
TWIN = """
import sys
del sys.path[0]
from llama_core.rehearsal.rank_processes import run_ranks
from torch.distributed import get_rank
print(run_ranks(2, get_rank, timeout_s=300))
"""
SMALL = """
architecture: {hidden_size: 64, num_layers: 2, ffn_size: 128, head_dim: 16, vocab_size: 512}
training: {seq_len: 32, batch_size: 2, steps: 2, eval_sequences: 2}
launch: {device: cpu}
"""


@pytest.fixture
def run(tmp_path):
    """Run Python in a folder full of traps; return what it prints, and check that none was stepped on."""
    for name in TRAPS:
        trap = f"import os; os.close(os.open({str(tmp_path / f'ran-{name}')!r}, os.O_CREAT)); raise ImportError('trap')"
        (tmp_path / f"{name}.py").write_text(trap)
    environment = os.environ | {"PREFECT_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def start(*arguments):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert [path.name for path in tmp_path.glob("ran-*")] == [], done.stderr
        assert done.returncode == 0, done.stderr
        return done.stdout

    start.folder = tmp_path
    return start


def test_the_command_line_as_a_module_takes_none(run):
    assert "llama3_8b" in json.loads(run("-m", "training_infra.cli", "models", "--json"))


@pytest.mark.wide
def test_no_process_of_a_job_on_this_machine_takes_one(run):
    assert run("-c", SUBMIT, str(FAKE_WORKER)) == "finished\n"


def test_no_rank_and_no_planner_takes_one():
    assert {command[1] for command in (WORKER, PLANNER)} == {"-P"}


@pytest.mark.root
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env", "PREFECT_LOGGING_SETTINGS_PATH=logging.yml"),
        ("prefect.toml", '[api]\nurl = "http://127.0.0.1:1/api"'),
        ("pyproject.toml", '[tool.prefect.api]\nurl = "http://127.0.0.1:1/api"'),
    ],
)
def test_prefect_takes_no_settings_of_somebody_else(tmp_path, monkeypatch, capsys, name, text):
    """They can name a server that commands the flow, and even Python functions to call."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    os.chown(tmp_path / name, 65534, -1)
    assert cli.main(["train", "--flow", "--device", "cpu"]) == 2
    assert f"{tmp_path / name} belongs to nobody, and Prefect would take its settings" in capsys.readouterr().err


@pytest.mark.nightly
def test_no_rank_of_a_twin_takes_one(run):
    assert run("-c", TWIN) == "[0, 1]\n"


@pytest.mark.nightly
@pytest.mark.parametrize("flow", [(), ("--flow",)], ids=["chain", "flow"])
def test_no_process_of_a_whole_run_takes_one(run, flow):
    (run.folder / "run.yaml").write_text(SMALL)
    run("-m", "training_infra.cli", "train", *flow, "--config", "run.yaml", "--run-dir", "run")
    assert json.loads((run.folder / "run" / "outcome.json").read_text())["status"] == "finished"
