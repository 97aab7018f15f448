"""The project's public description: every block of ``public_api.md`` works, or a list here says why not.

Python runs in page order in one namespace, statement by statement. Commands run one by one, in a directory that holds
a user's own ``tasks.py``, ``reports.py`` and ``flows.py``. There is no GPU: a block that needs one is refused in one
line. ``pytest -v -rA`` lists every block with its verdict.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from described import blocks, write_somebodys_files

from training_infra import cli
from training_infra.commands.configuration import requested_config

SCRIPT = Path(__file__).with_name("somebodys_script.py")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
OURS = "python -m training_infra.cli "

NO_CUDA = "gpus={}: this machine has no CUDA device"


def absent(gpus):
    return f'num_gpus={gpus}: this machine has no CUDA device; add device="cpu"'


ABSENT = {
    "Python API": {"orchestrator.launch_training(train_dataloader, val_dataloader)": absent(8)},
    "Quick Start / Python API": {"orchestrator.launch_training(train_dataloader, val_dataloader)": absent(8)},
    "LLaMA 3 Quick Examples / LLaMA 3 8B Training": {
        "orchestrator.launch_training(train_dataloader, val_dataloader)": absent(4),
    },
    "LLaMA 3 Quick Examples / LLaMA 3 70B with LoRA Fine-tuning": {
        "orchestrator.launch_training(finetune_dataloader)": absent(8),
    },
    "LLaMA 3 Quick Examples / LLaMA 3 405B Mega Model Training": {
        "orchestrator.launch_training(massive_dataloader)": absent(64),
    },
    "LLaMA 3 Quick Examples / Custom Configuration": {
        "orchestrator.launch_training(train_dataloader, val_dataloader)": absent(8),
    },
    "LLaMA 3 Quick Examples / Manual Trainer Creation": {"trainer.fit()": absent(2)},
}
"""Statements that this machine is too small for, with the start of the one line that refuses them."""

TOO_SMALL = "refused: this machine has not the devices"
REFUSED = {
    "train --model llama3_8b --gpus 4 --data path/to/training_data.jsonl --strategy standard": NO_CUDA.format(4),
    "train --model llama3_8b --gpus 4 --data path/to/data.jsonl --batch-size 8": NO_CUDA.format(4),
    "train --model llama3_8b --gpus 4 --data full_dataset.jsonl --epochs 3": NO_CUDA.format(4),
    "train --model llama3_8b --gpus 4": NO_CUDA.format(4),
    "train --model llama3_70b_instruct --strategy lora --gpus 8 --lora-rank 64": NO_CUDA.format(8),
    "train --model llama3_70b_instruct --strategy lora --gpus 8 --lora-rank 64 --data path/to/instruct_data.jsonl": (
        NO_CUDA.format(8)
    ),
    "train --model llama3_405b --gpus 64 --strategy standard --zero-stage 3": NO_CUDA.format(64),
    "train --model llama3_405b --gpus 64 --nodes 8 --zero-stage 3 --activation-checkpointing --gradient-compression": (
        "launch.nodes=8: the local launcher uses only this machine; use --launcher slurm"
    ),
}
"""Commands that this machine is too small for, with the start of the one line that refuses them."""

SHORT = ["--seq-len=64"]
REHEARSED = ["--dry-run", *SHORT]
QUICK = ("training.eval_sequences=2", "benchmark.warmup_steps=0", "benchmark.steps=1")
A_STEP = ["--steps=1", "--seq-len=2", *(f"--set={key}" for key in QUICK)]
SHORTENED = {
    "train --model tiny_llama3_50m --gpus 1 --data sample_data.jsonl --epochs 1 --dry-run": SHORT,
    "train --model tiny_llama3_50m --dry-run": SHORT,
    "train --model tiny_llama3_50m --gpus 1 --data path/to/test_data.jsonl --batch-size 64 --epochs 1": A_STEP,
    "train --model tiny_llama3_150m --gpus 1 --data path/to/small_dataset.jsonl --batch-size 32": REHEARSED,
    "train --model tiny_llama3_150m --gpus 1 --data path/to/dev_data.jsonl --batch-size 32": REHEARSED,
    "train --model tiny_llama3_150m --gpus 1 --data dev_data.jsonl --epochs 2": REHEARSED,
    "train --model tiny_llama3_150m --epochs 1": REHEARSED,
}
"""Commands that would take a CPU long: one trains for a step, the others are rehearsed, all on short sequences."""

NOT_OURS = {
    "pip": "installs packages: what it names is looked up in pyproject.toml",
    "git": "fetches the repository: this checkout is one",
    "cd": "enters the repository",
    "pre-commit": "writes into the checkout's .git: its configuration is looked for",
}
"""Installation programs that are not run, and what is checked instead."""


@pytest.fixture
def place(tmp_path):
    """A user's directory."""
    write_somebodys_files(tmp_path)
    return tmp_path


def run(place, command):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(place / "cache")}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


def ends_of_python(place):
    """Return how every statement of the Python blocks ended, by block and first line; None if it worked."""
    shutil.copy(SCRIPT, place)
    (place / "blocks.json").write_text(json.dumps([block.text for block in blocks("python")]))
    ended = run(place, [sys.executable, SCRIPT.name, "blocks.json", "ends.json"])
    assert ended.returncode == 0, ended.stderr
    told = json.loads((place / "ends.json").read_text())
    return {
        block.name: {line: end and f"{end['type']}: {end['text']}" for line, end in lines}
        for block, lines in zip(blocks("python"), told, strict=True)
    }


def verdict(end, absent):
    """Return how a statement or command is judged, given how it ended and how that is listed."""
    if absent is None:
        return end or "runs"
    if end is None:
        return "has started to work: no exemption is needed"
    return TOO_SMALL if re.match(rf"\w+Error: {re.escape(absent)}[^\n]*$", end) else end


def listed(absent):
    return TOO_SMALL if absent else "runs"


@pytest.mark.wide
def test_every_python_statement_of_the_page_works_or_is_listed(place):
    found, expected = {}, {}
    for name, lines in ends_of_python(place).items():
        for line, end in lines.items():
            absent = ABSENT.get(name, {}).get(line)
            found[name, line] = verdict(end, absent)
            expected[name, line] = listed(absent)
            print(f"{name} | {line} | {found[name, line]}")
    assert found == expected
    assert {(name, line) for name in ABSENT for line in ABSENT[name]} <= found.keys()


COMMANDS = {
    command.removeprefix(OURS).replace("/path/to/", "path/to/"): block.name
    for block in reversed(blocks("bash"))
    for command in block.commands
    if command.startswith(OURS)
}


@pytest.mark.wide
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_works_or_is_listed(place, command):
    arguments = [*shlex.split(command), *SHORTENED.get(command, [])]
    ended = run(place, [sys.executable, "-m", "training_infra.cli", *arguments])
    end = None if ended.returncode == 0 else f"CommandError: {ended.stderr.removeprefix('error: ').rstrip()}"
    absent = REFUSED.get(command)
    print(f"{COMMANDS[command]} | {command} | {verdict(end, absent)}")
    assert verdict(end, absent) == listed(absent), ended.stdout
    assert ended.returncode in {0, 2, 3}


def test_every_listed_command_is_on_the_page():
    assert {*REFUSED, *SHORTENED} <= COMMANDS.keys()


FLAGS = [command for block in blocks("bash") for command in block.commands if command.startswith("--")]


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_of_the_page_is_a_flag_of_train(flag):
    options = cli.make_parser().parse_args(["train", "--gpus=4", *shlex.split(flag)])
    requested_config(options)


def others():
    return [
        shlex.split(command)
        for block in blocks("bash")
        for command in block.commands
        if not command.startswith((OURS, "--"))
    ]


def test_the_other_commands_of_the_page_are_installation_programs():
    assert {words[0] for words in others()} == set(NOT_OURS)
    assert (PROJECT.parent / ".pre-commit-config.yaml").exists()


def test_the_page_installs_the_projects_own_requirements_and_extras():
    project = tomllib.loads(PROJECT.read_text())["project"]
    named = {word for words in others() if words[0] == "pip" for word in words[2:]}
    extras = {extra for word in named for extra in re.findall(r"\w+", word.partition("[")[2])}
    needs = " ".join([*project["dependencies"], *project["optional-dependencies"]["hf"]])
    assert all(re.search(rf"\b{name}>=", needs) for word in named for name in re.findall(r"^(\w+)>=", word))
    assert extras
    assert extras <= set(project["optional-dependencies"])


def modules_of_the_tree():
    """Return the modules that the page's project tree shows."""
    (tree,) = (block.text for block in blocks("") if block.name == "Project Structure")
    package, modules = "training_infra", []
    for line in tree.splitlines()[1:]:
        depth, name = re.fullmatch(r"([| ]*)[|`]-- (\S+).*", line).groups()
        if name.endswith("/"):
            package = f"training_infra.{name[:-1]}"
            modules.append(package)
        elif name != "__init__.py":
            modules.append(f"{package if depth else 'training_infra'}.{name.removesuffix('.py')}")
    return modules


@pytest.mark.parametrize("module", modules_of_the_tree())
def test_every_module_of_the_pages_tree_can_be_imported(module):
    import_module(module)
