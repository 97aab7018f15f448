"""A command that is typed in a folder of somebody else runs no module that lies there."""

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from urllib.request import urlopen

import pytest
from harness_folders import make_tasks

from flows.serve import PREFECT
from llama_core.imports import safe_python
from llama_core.launch.jobs.handle import EVALUATOR, PLANNER, WORKER
from llama_core.machine import detect
from training_infra import cli

TRAPS = (
    *("yaml", "pydantic", "psutil", "submitit", "torch", "numpy", "pandas", "pyarrow", "prefect", "uvicorn", "httpx"),
    *("json", "argparse", "socket", "selectors", "multiprocessing", "dataclasses", "llama_core", "training_reports"),
)
EVERY_TRAP = sorted({name for name in (*sys.stdlib_module_names, *packages_distributions()) if name.isidentifier()})
"""Every module that could be found in place of Python's, or of an installed package's. With ``-m`` and ``-c``, Python
itself imports some before any line of ours; a program such as ``training-infra`` is safe from the first line on."""
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
def run(tmp_path, request):
    """Run Python in a folder full of traps; return what it prints, and check that none was stepped on."""
    for name in getattr(request, "param", TRAPS):
        trap = f"import os; os.close(os.open({str(tmp_path / f'ran-{name}')!r}, os.O_CREAT)); raise ImportError('trap')"
        (tmp_path / f"{name}.py").write_text(trap)
    environment = os.environ | {"PREFECT_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def start(*arguments):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert [path.name for path in tmp_path.glob("ran-*")] == [], done.stderr
        assert done.returncode == 0, done.stderr
        return done.stdout

    def serve(*command):
        """Return the page that a command serves until it is interrupted; its line begins with the address."""
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as serving:
            try:
                with urlopen(serving.stdout.readline().split()[0]) as page:
                    return page.read().decode()
            finally:
                serving.send_signal(signal.SIGINT)
                serving.wait()
                assert [path.name for path in tmp_path.glob("ran-*")] == []

    start.folder = tmp_path
    start.serve = serve
    return start


def test_the_command_line_as_a_module_takes_none(run):
    assert "llama3_8b" in json.loads(run("-m", "training_infra.cli", "models", "--json"))


@pytest.mark.wide
def test_no_process_of_a_job_on_this_machine_takes_one(run):
    assert run("-c", SUBMIT, str(FAKE_WORKER)) == "finished\n"


def test_every_python_that_we_start_has_the_flag():
    """One function writes the command lines; the others look for a program beside Python, or come before any import."""
    root = Path(cli.__file__).parents[1]
    packages = ("llama_core", "training_infra", "flows", "tasks", "reports")
    files = [file for package in packages for file in (root / package).rglob("*.py")]
    naming = {str(file.relative_to(root)) for file in files if "sys.executable" in file.read_text()}
    assert naming == {
        *("llama_core/imports.py", "llama_core/launch/rank/start.py", "llama_core/machine/validate.py"),
        "flows/serve.py",
    }
    assert {command[1] for command in (WORKER, PLANNER, EVALUATOR, PREFECT, safe_python())} == {"-P"}


def test_torch_is_not_asked_for_devices_in_the_current_folder(tmp_path, monkeypatch):
    """Where nvidia-smi lists none, as for slices of devices and in some containers."""
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "version").write_text("Kernel Module  570.1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(detect, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(detect, "torch_has_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    detect._gpus_of_torch.cache_clear()
    assert detect.visible_gpus() == ()
    assert not (tmp_path / "ran").exists()


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
    (tmp_path / name).chmod(0o666)
    assert cli.main(["train", "--flow", "--device", "cpu"]) == 2
    told = f"{tmp_path / name} can be written by other users, and Prefect would take its settings"
    assert told in capsys.readouterr().err
    os.chown(tmp_path / name, 65534, -1)
    assert cli.main(["train", "--flow", "--device", "cpu"]) == 2
    assert f"{tmp_path / name} belongs to nobody, and Prefect would take its settings" in capsys.readouterr().err


@pytest.mark.nightly
def test_no_rank_of_a_parity_check_takes_one(run):
    assert run("-c", TWIN) == "[0, 1]\n"


@pytest.mark.nightly
@pytest.mark.parametrize("flow", [(), ("--flow",)], ids=["chain", "flow"])
def test_no_process_of_a_whole_run_takes_one(run, flow):
    (run.folder / "run.yaml").write_text(SMALL)
    run("-m", "training_infra.cli", "train", *flow, "--config", "run.yaml", "--run-dir", "run")
    assert json.loads((run.folder / "run" / "outcome.json").read_text())["status"] == "finished"


COMMANDS = (
    "models",
    "validate-environment --config run.yaml",
    "estimate-memory --config run.yaml",
    "dry-run --config run.yaml --parity",
    "calibrate --only sort --out profile.json",
    "tokenize --config texts.yaml --workers 2",
    "train --config texts.yaml --run-dir run",
    "train --config texts.yaml --run-dir run --resume --steps 4",
    "benchmark --config run.yaml --run-dir timed",
    "profile --config run.yaml --run-dir profiled",
    "sweep --config sweep.yaml --sweep-dir sweep",
    "decay run --step 2 --steps 1 --out branch",
    "logs run",
    "doctor run",
    "report run",
    "compare run branch --out page.html",
    "cancel run",
    "evaluate run --data mine=texts.jsonl --device cpu",
    "evaluate run --tasks toy_choice --include-path tasks --limit 2 --device cpu",
    "generate run --prompt a --max-new-tokens 2 --device cpu",
    "export-hf run --out exported",
)


@pytest.mark.wide
@pytest.mark.parametrize("run", [EVERY_TRAP], indirect=True, ids=["every module"])
def test_no_command_takes_one(run):
    folder = run.folder
    texts = [json.dumps({"text": f"{number} times to be or not to be, " * 9}) for number in range(60)]
    (folder / "texts.jsonl").write_text("\n".join(texts))
    (folder / "run.yaml").write_text(SMALL)
    (folder / "texts.yaml").write_text(
        f"{SMALL}data: {{source: texts.jsonl, tokenizer: bytes}}\n".replace("steps", "lr_schedule: constant, steps", 1)
    )
    (folder / "sweep.yaml").write_text("{name: mine, base: run.yaml, grid: {training.learning_rate: [1e-3]}}")
    make_tasks(folder / "tasks", num_documents=4)
    program = str(Path(sys.executable).with_name("training-infra"))
    for command in COMMANDS:
        run(program, *command.split())
    assert "<title>" in run.serve(program, "watch", "run", "--port", "0")
    named = {"watch", *(command.split()[0] for command in COMMANDS)}
    assert named == {command.name for commands in cli.COMMANDS.values() for command in commands}
