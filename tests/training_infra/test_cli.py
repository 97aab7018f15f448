"""The command line as a user sees it: output and exit codes, and real processes where signals and pipes reach them."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial, reduce
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from waiting import eventually

from llama_core.chain.prepare import prepare_run
from llama_core.config.models import model_names
from llama_core.config.run import RunConfig, config_keys
from llama_core.config.strict_yaml import parse_yaml
from llama_core.launch.outcome import read_outcome
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json
from llama_core.records.metrics import read_metrics
from llama_core.runs.diagnosis import diagnose
from llama_core.training.rates import learning_rate
from training_infra import cli
from training_infra.commands.configuration import requested_config
from training_infra.flags import FLAGS

FEW_PARAMETERS = [
    f"--set=architecture.{size}"
    for size in ("hidden_size=64", "num_layers=2", "ffn_size=128", "head_dim=16", "vocab_size=512")
]
SMALL = [*FEW_PARAMETERS, "--device=cpu", "--seq-len=32", "--batch-size=2", "--set=training.eval_sequences=2"]


class Ended(NamedTuple):
    """What a command leaves in the terminal."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    """Run the command line in an empty directory on the CPU, with its own token cache: in this process, to be quick."""

    def run(*arguments):
        capsys.readouterr()
        on_termination = signal.getsignal(signal.SIGTERM)
        try:
            code = cli.main(arguments)
        except SystemExit as ended:
            code = ended.code
        finally:
            signal.signal(signal.SIGTERM, on_termination)
        return Ended(code, *capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run.path = tmp_path
    return run


def command(*arguments):
    return [sys.executable, "-m", "training_infra.cli", *arguments]


def process(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False)


def only_run(path):
    (run,) = (path / "runs").iterdir()
    return RunDirectory(run)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run of two steps, ``mine``, and the record that its command printed."""
    folder = tmp_path_factory.mktemp("finished")
    told = subprocess.run(
        command("train", *SMALL, "--steps=2", "--run-dir=mine", "--json"),
        cwd=folder,
        env=os.environ | {"XDG_CACHE_HOME": str(folder.parent / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return folder, json.loads(told.stdout)


@pytest.fixture
def mine(shell, finished):
    """A finished run of two steps in the current directory."""
    shutil.copytree(finished[0] / "mine", "mine")
    return RunDirectory(shell.path / "mine")


of_finished = pytest.mark.xdist_group("finished run")
"""A test of the finished run, which the process of all such tests trains once."""


def wait_for_a_step(path):
    eventually(lambda: list(path.glob("runs/*/heartbeat.json")))


COMMANDS = (
    *("models", "estimate-memory", "dry-run", "validate-environment", "calibrate", "tokenize"),
    *("train", "benchmark", "profile", "sweep", "decay"),
    *("logs", "watch", "cancel", "doctor", "report", "compare", "evaluate", "generate", "export-hf"),
)
OF_RUNS = ("estimate-memory", "dry-run", "validate-environment", "tokenize", "train", "benchmark")
"""Commands that take the flags of a run."""


@pytest.fixture
def told(capsys, monkeypatch):
    """Return what a command that ends while its arguments are read prints: a help text, or the line of an error."""

    def tell(*arguments):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        return "".join(capsys.readouterr())

    monkeypatch.setenv("COLUMNS", "100")
    return tell


def test_help_names_every_command(told):
    assert re.findall(r"^  ([a-z][a-z-]+)  ", told("--help"), re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_is_a_screen_of_examples_and_the_arguments_of_most_users(told, command):
    page = told(command, "--help")
    assert len(page.splitlines()) <= 60
    assert f"\nexamples:\n  training-infra {command}" in page


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_a_command_are_understood(told, command):
    _, _, examples = told(command, "--help").partition("\nexamples:\n")
    lines = examples.partition("\n\n")[0].splitlines()
    asked = {line: cli.make_parser().parse_args(shlex.split(line)[1:]) for line in lines}
    assert {options.command.name for options in asked.values()} == {command}
    assert all(requested_config(options) for line, options in asked.items() if command in OF_RUNS and "~" not in line)


def test_the_example_of_every_flag_is_a_valid_value():
    for flag in FLAGS:
        strategy = ["--strategy=lora"] if flag.key.startswith("lora.") else []
        others = ["--launcher=slurm", "--nodes=1", "--gpus=8", "--batch-size=32", *strategy]
        given = [flag.name] if flag.constant is not None else []
        given += [f"{flag.name}={flag.example}"] if flag.example and not flag.example.startswith("~") else []
        for one in given:
            assert requested_config(cli.make_parser().parse_args(["train", *others, one]))


AWKWARD = (
    "2024",
    "null",
    "true",
    "no",
    "off",
    "1e3",
    "0x10",
    "010",
    "~x",
    "float16",
    "a#b",
    "[x]",
    "{x}",
    "a: b",
    "*a",
)
AWKWARD += ("&a", "@a", "%a", "!a", "|", ">", "?", "'a", '"a', " a", "a ", "a\nb", "a=b", "2026-01-31", "<<")


@pytest.mark.parametrize("text", AWKWARD)
def test_the_value_of_a_flag_whose_key_is_text_is_that_text(text):
    flags = {"--data": "source", "--validation-data": "validation", "--tokenizer": "tokenizer"}
    config = requested_config(
        cli.make_parser().parse_args(["train", f"--init-from={text}", *(f"{flag}={text}" for flag in flags)])
    )
    assert {getattr(config.data, key) for key in flags.values()} == {config.training.init_from} == {text}
    assert RunConfig.from_mapping(parse_yaml(config.to_yaml(), "recorded")) == config


def test_the_value_of_a_flag_whose_key_is_a_number_or_a_choice_has_that_type():
    given = ["--steps=010", "--learning-rate=1e-4", "--zero-stage=3", "--checkpoint-every=auto", "--wandb=off"]
    config = requested_config(cli.make_parser().parse_args(["train", *given, "--time=1:30", "--launcher=slurm"]))
    training = config.training
    assert (training.steps, training.learning_rate, training.checkpoint_every) == (10, 1e-4, "auto")
    assert (config.parallel.zero_stage, config.tracking.wandb, config.launch.slurm.time_limit_min) == (3, "off", 2)


@pytest.mark.parametrize("command", OF_RUNS)
def test_the_short_help_names_every_flag_and_all_of_the_help_has_every_key(told, command):
    short, everything = told(command, "--help"), told(command, "--help-all")
    without = "--no-benchmark" if command == "benchmark" else ""
    for flag in FLAGS:
        for name in (flag.name, *(flag.also if flag.is_common else ())):
            assert (f" {name}" in short) == (name != without)
        assert (f"  {flag.name}" in everything) == (flag.name != without)
    for key in config_keys():
        assert f"[{key}]" in " ".join(everything.split()) or f"--set {key}=" in everything


def test_help_on_a_group_or_on_a_part_of_a_name_has_only_that(told):
    assert "--tensor-parallel 2 " in told("train", "--help", "parallel")
    assert "--data" not in told("train", "--help", "parallel")
    page = told("train", "--help", "microbatch")
    assert re.findall(r"^  (--.*?)  ", page, re.MULTILINE) == ["--microbatch-size 2", "--microbatches 8"]
    assert "8 microbatches have 1 sequence each" in " ".join(page.split())
    assert "none, selective, full, or adaptive" in " ".join(told("train", "--help", "recompute").split())
    assert told("train", "--help", "foo") == (
        "error: no flag or key is called 'foo'; groups: model, data, training, parallel, launch, tracking, evaluation, "
        "notify\n"
    )


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--learning-rate", "1e-4"], "training.learning_rate", 1e-4),
        (["--lr", "1e-4"], "training.learning_rate", 1e-4),
        (["--weight-decay", "0.05"], "training.weight_decay", 0.05),
        (["--strategy", "lora", "--lora-alpha", "64"], "lora.lora_alpha", 64),
        (["--launcher", "slurm", "--partition", "gpu"], "launch.slurm.partition", "gpu"),
        (["--launcher", "slurm", "--account", "llm"], "launch.slurm.account", "llm"),
        (["--launcher", "slurm", "--time", "1:30:00"], "launch.slurm.time_limit_min", 90),
        (["--no-benchmark"], "benchmark.steps", 0),
        (["--activation-checkpointing"], "parallel.recompute", "full"),
        (["--activation-checkpointing", "selective"], "parallel.recompute", "selective"),
        (["--gradient-compression", "powersgd"], "parallel.gradient_compression", "powersgd"),
        (["--gpu-type", "A100-SXM4-80GB"], "launch.gpu_type", "a100"),
    ],
)
def test_a_flag_sets_its_key(arguments, key, value):
    options = cli.make_parser().parse_args(["train", *arguments])
    assert reduce(getattr, key.split("."), requested_config(options)) == value


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("--wd", "--weight-decay"),
        ("--gradient_accumulation_steps", "--microbatches"),
        ("--learning_rate", "--learning-rate"),
        ("--beta2", "--set training.beta2=..."),
    ],
)
def test_a_flag_of_other_software_is_answered_with_ours(told, argument, meant):
    said = f"error: unrecognized arguments: {argument} 3; did you mean {meant!r}?\n"
    assert told("train", argument, "3") == said


def test_models_lists_every_variant_with_its_parameters(shell):
    assert list(json.loads(shell("models", "--json").stdout)) == model_names()
    table = shell("models").stdout
    assert "405,853,388,800" in table
    assert " 202,048  10,485,760 " in table  # the longest context of all stands apart from the column before


def test_a_memory_estimate_is_a_table_by_category_without_torch():
    program = (
        "import sys; from training_infra.cli import main\n"
        "code = main(['estimate-memory', '--model', 'llama3_8b', '--gpus', '8'])\n"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    for category in ("weights", "gradients", "moments", "activations", "loss", "communication", "temporaries", "total"):
        assert re.search(rf"^{category} +[\d.]+ \w+", told, re.MULTILINE)
    assert re.search(r"^moments .* 7\.48 GiB$", told, re.MULTILINE)  # 8 bytes x 8.03e9 parameters / 8 ranks


def test_an_estimate_of_a_pipeline_has_a_row_for_each_rank(shell):
    flags = ("--gpus=64", "--tensor-parallel=8", "--pipeline-parallel=8", "--gpu-type=h200", "--schedule=1f1b")
    ended = shell("estimate-memory", "--model=llama3_405b", *flags, "--activation-checkpointing", "--zero-stage=3")
    rows = ended.stdout[ended.stdout.index("pipeline rank") :].splitlines()[1:9]
    assert [row.split()[:2] for row in rows][::7] == [["0", "0-14"], ["7", "111-125"]]
    assert sum("most" in row for row in rows) == sum("least" in row for row in rows) == 1
    assert "the effective stage is 0" in ended.stdout


def test_an_estimate_that_does_not_fit_says_so_and_what_to_do(shell):
    ended = shell("estimate-memory", "--model", "llama2_13b", "--gpus", "2", "--gpu-type", "h100")
    assert ended.returncode == 3
    assert "16 bytes x 13.02e9 parameters / 2 = 104.1 GB per device before activations" in ended.stdout
    assert "these would fit: parallel.gpus=4; launch.gpu_type=h200" in ended.stdout


def test_an_estimate_gives_the_reasons_for_the_plan(shell):
    ended = shell("estimate-memory", "--model", "llama3_8b", "--gpus", "4")
    assert ended.returncode == 0
    assert "  recompute selective on " in ended.stdout
    assert "  cp 2: fewer than 8192 tokens per rank (sequence length 8192)" in ended.stdout


@pytest.mark.parametrize(
    ("asked", "nodes", "batch"),
    [
        (["--gpus=48"], "launch.nodes=6 (8 x H200 141 GB on each)", "batch of 48 sequences (the default)"),
        (["--gpus=20", "--batch-size=40"], "launch.nodes=4 (5 x H200 141 GB on each)", "batch of 40 sequences\n"),
    ],
)
def test_an_estimate_says_which_nodes_and_batch_it_is_for(capsys, asked, nodes, batch):
    assert cli.main(["estimate-memory", "--model=llama3_8b", "--gpu-type=h200", *asked]) == 0
    told = capsys.readouterr().out
    assert f"default: {nodes}\n" in told
    assert batch in told
    in_node = nodes.partition("(")[2].split()[0]
    assert f"for {in_node} ranks on a node" in told


def test_an_estimate_tells_days_and_price_of_tokens(capsys):
    asked = ["estimate-memory", "--model=llama3_70b", "--strategy=lora", "--gpus=8", "--gpu-type=a100", "--json"]
    assert cli.main([*asked, "--tokens=2B", "--price=1.8"]) == 0
    told = json.loads(capsys.readouterr().out)
    cost = told["cost"]
    assert cost["seconds"] == pytest.approx(2e9 / told["step"]["tokens_per_second"])
    assert cost["dollars"] == pytest.approx(1.8 * cost["gpu_hours"]) == pytest.approx(1.8 * 8 * cost["seconds"] / 3600)


def test_the_price_of_a_run_counts_its_spare_nodes(capsys):
    asked = ["estimate-memory", "--model=llama3_8b", "--gpus=16", "--nodes=2", "--gpu-type=h100", "--launcher=slurm"]
    cli.main([*asked, "--tokens=2B", "--json"])
    without = json.loads(capsys.readouterr().out)["cost"]
    cli.main([*asked, "--tokens=2B", "--json", "--spare-nodes=1"])
    with_spare = json.loads(capsys.readouterr().out)["cost"]
    assert with_spare["seconds"] == without["seconds"]
    assert with_spare["dollars"] == pytest.approx(1.5 * without["dollars"])
    cli.main([*asked, "--tokens=2B", "--spare-nodes=1"])
    assert " GPU hours with those of 8 spare GPUs, " in capsys.readouterr().out


def test_the_length_of_a_run_comes_from_its_steps_or_else_from_its_data(capsys, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "0123456789"}\n' * 5000)
    for flags, tokens in ((["--steps=10"], 10 * 8 * 2048), ([f"--data={tmp_path}", "--epochs=2"], 2 * 5000 * 12)):
        assert cli.main(["estimate-memory", "--model=tiny_llama3_50m", "--json", *flags]) == 0
        assert json.loads(capsys.readouterr().out)["cost"]["tokens"] == pytest.approx(tokens, rel=0.01)


def test_a_dry_run_can_target_an_absent_gpu_and_tells_the_price(shell):
    asked = ("--seq-len=32", "--batch-size=2", "--set=parallel.compile=false", "--tokens=1B", "--gpu-type=h200")
    told = shell("dry-run", *FEW_PARAMETERS, *asked).stdout
    assert "fits the 130.32 GiB of H200 141 GB" in told
    assert re.search(
        r"^cost: 1.00B tokens \(as asked for\) take .* at \$2.50 per GPU hour \[--price\]$", told, re.MULTILINE
    )


def test_tokens_that_are_no_number_are_refused(shell):
    ended = shell("estimate-memory", "--tokens=15X")
    assert (ended.returncode, ended.stderr) == (
        2,
        "error: argument --tokens: '15X' is not a number above 0, such as 15T, 200B or 1e9\n",
    )


def test_the_script_of_a_slurm_job_is_printed_without_slurm_and_nothing_is_written(shell):
    asked = ["--model=llama3_8b", "--gpus=16", "--nodes=2", "--set=launch.slurm.partition=gpu"]
    ended = shell("train", *asked, "--print-sbatch")
    assert ended.returncode == 0
    assert ended.stdout.startswith("#!/bin/bash")
    assert {
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --partition=gpu",
        "#SBATCH --requeue",
    } <= set(ended.stdout.splitlines())
    assert "--kill-on-bad-exit=1" in ended.stdout.splitlines()[-1]
    assert not (shell.path / "runs").exists()


def test_a_model_that_does_not_fit_is_not_trained_and_nothing_is_written(shell):
    ended = shell("train", "--model", "llama3_70b", "--device", "cpu")
    assert ended.returncode == 3
    assert ended.stderr.startswith("error: weights, gradients and moments alone take 1128.9")
    assert list(shell.path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["train", "--model", "lama3_8b"],
            ["error: unknown model 'lama3_8b'; did you mean 'llama3_8b' or 'llama3_1_8b'?"],
        ),
        (
            ["train", "--set", "training.batchsize=3"],
            ["error: unknown key 'training.batchsize'; did you mean 'training.batch_size'?"],
        ),
        (
            ["train", "--batch-size", "eight", "--seq-len", "4096"],
            [
                "error: training.batch_size='eight': input should be a valid integer",
                "error: training.seq_len=4096 is above the context of tiny_llama3_50m; use at most 2048",
            ],
        ),
        (
            ["train", "--batchsize", "3"],
            ["error: unrecognized arguments: --batchsize 3; did you mean '--batch-size' or '--microbatch-size'?"],
        ),
        (["trian"], ["error: trian is no command; did you mean 'train'?"]),
        (["comprae", "a", "b"], ["error: comprae is no command; did you mean 'compare'?"]),
        (["validate"], ["error: validate is no command; did you mean 'validate-environment'?"]),
        (["serve"], ["error: serve is no command; see training-infra --help"]),
        (["evaluate", "x", "--device", "cuad"], ["error: argument --device: invalid choice: 'cuad' (choose from "]),
        (["dpo"], ["error: dpo is no command; `training-infra train --objective dpo"]),
        (["train", "--best"], ["error: unrecognized arguments: --best; --step best of generate and export-hf takes"]),
        (
            ["generate", "runs/x", "--prompt", "a", "--best"],
            ["error: unrecognized arguments: --best; --step best of generate and export-hf takes"],
        ),
        (["train", "--optimizer", "lion"], ["error: training.optimizer='lion': choose one of adamw, muon"]),
        (["train", "--data", "no.jsonl", "--device", "cpu"], ["error: data source 'no.jsonl' does not exist"]),
        (
            ["train", "--gpus", "3", "--tensor-parallel", "3", "--device", "cpu"],
            ["error: parallel.tp=3 does not divide the 2 key/value heads of tiny_llama3_50m; use one of 1, 2"],
        ),
        (["train", "--gpus", "4"], ["error: gpus=4: this machine has no CUDA device; add --device cpu"]),
        (
            ["train", "--partition", "gpu"],
            ["error: --partition is for Slurm jobs, and this run stays on this machine; add --launcher slurm"],
        ),
        (
            ["train", "--data", "no.jsonl", "nowhere", "--device", "cpu"],
            ["error: data source 'no.jsonl' does not exist"],
        ),
        (["train", "--data", "sample", "--data", "a"], ["error: data.source=['sample', 'a']: 'sample' cannot be"]),
        (
            ["train", "--strategy", "dpo"],
            ["error: strategy='dpo': a strategy says which weights are trained (standard, lora, moe, hybrid); "],
        ),
        (["train", "--data", ""], ["error: --data has no value; write one, or leave the flag out for the default"]),
        (
            ["train", "--data", "a", ""],
            ["error: --data has no value; write one, or leave the flag out for the default"],
        ),
        (["train", "--config", "no.yaml"], ["error: cannot read configuration 'no.yaml'"]),
        (
            ["train", "--strategy", "moe", "--set", "moe.num_experts=1"],
            ["error: experts_per_token=2 is not between 1 and num_experts=1"],
        ),
        (["train", "--resume", "--run-dir", "nowhere"], ["error: nowhere holds no run to continue (no config.yaml)"]),
        (["train", "--allow-data-change"], ["error: --allow-data-change is for a run on a mixture (data.sources)"]),
        (["--debugg", "models"], ["error: unrecognized arguments: --debugg; did you mean '--debug'?"]),
        (["train", "--set", "training=5"], ["error: training=5: this is a section of keys, not a value"]),
        (
            ["train", "--set", "architecture.vocab_size=100", "--device", "cpu"],
            ["error: tokenizer 'bytes' has 258 tokens, more than the model's vocabulary of 100; choose a model"],
        ),
        (["report", "nowhere"], ["error: nowhere holds no run"]),
        (["train", "--init-from", "nowhere", "--device", "cpu"], ["error: training.init_from="]),
        (["dry-run", "--init-from", "nowhere"], ["error: training.init_from="]),
        (["export-hf", "nowhere", "--out", "there"], ["error: nowhere holds no run"]),
        (
            ["export-hf", "there", "--out", "o", "--step", "bst"],
            ["error: argument --step: 'bst' is neither a step nor"],
        ),
        (["decay", "nowhere", "--steps", "5", "--out", "there"], ["error: nowhere holds no run"]),
        (
            ["generate", "nowhere", "--prompt", "a", "--max-new-tokens", "1.5"],
            ["error: argument --max-new-tokens: '1.5' is not a whole number, such as 4096, 128k or 1e6"],
        ),
        (
            ["export-hf", "nowhere"],
            ["error: nowhere to write to; name a folder with --out, a repository with --push, or both"],
        ),
    ],
    ids=lambda value: " ".join(value) if value[0][:5] != "error" else "",
)
def test_a_wrong_request_is_one_line_per_problem_exits_2_and_writes_nothing(shell, arguments, lines):
    ended = shell(*arguments)
    assert ended.returncode == 2
    told = ended.stderr.splitlines()
    assert len(told) == len(lines)
    for line, beginning in zip(told, lines, strict=True):
        assert line.startswith(beginning)
    assert list(shell.path.iterdir()) == []


def test_each_difference_of_a_folder_from_llama_is_one_line_and_exits_2(shell):
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    unlike = {"model_type": "llama", "attention_bias": True, "hidden_act": "gelu"}
    (shell.path / "config.json").write_text(json.dumps(sizes | unlike))
    ended = shell("estimate-memory", "--model", f"{shell.path}/")
    told = [line.removeprefix(f"error: {shell.path}/config.json: ") for line in ended.stderr.splitlines()]
    assert ended.returncode == 2
    assert sorted(line.partition(":")[0] for line in told) == [
        "attention_bias=true",
        'hidden_act="gelu"',
        "num_hidden_layers is missing",
    ]


def test_the_process_of_a_wrong_request_exits_with_its_code_and_with_debug_shows_the_traceback():
    ended = process("train", "--model", "lama3_8b")
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
    assert "Traceback" in process("train", "--model", "lama3_8b", "--debug").stderr


def test_a_suffix_of_a_count_is_explained_where_it_is_used(shell):
    ended = shell("estimate-memory", "--model", "tiny_llama3_50m", "--seq-len", "1k", "--set", "training.steps=3Ki")
    assert ended.returncode == 0, ended.stderr
    assert "sequence length 1000," in ended.stdout
    assert ended.stderr.splitlines() == [
        "note: training.seq_len=1k is 1,000; k is 1,000 and Ki is 1,024",
        "note: training.steps=3Ki is 3,072; k is 1,000 and Ki is 1,024",
    ]


def test_the_package_is_the_command_and_takes_no_module_of_the_current_folder(tmp_path):
    (tmp_path / "yaml.py").write_text("raise SystemExit('of the folder')\n")
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-m", "training_infra", "trian"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (2, "error: trian is no command; did you mean 'train'?\n")


def test_train_runs_the_whole_chain_with_a_line_for_each_step(shell):
    ended = shell("train", *SMALL, "--steps", "6")
    assert ended.returncode == 0, ended.stderr
    names = [line.split()[0] for line in ended.stdout.splitlines()]
    names = [name for name in names if name != "note"]  # the machine may be shared
    expected = "run model validate data batch plan estimate dry-run submit train benchmark step goodput metrics report"
    assert " ".join(dict.fromkeys(names)) == expected
    run = only_run(shell.path)
    *_, metrics, report = ended.stdout.splitlines()
    assert report.split()[1] == f"runs/{run.name}/report.html"
    assert metrics == f"metrics   tensorboard --logdir runs/{run.name}/logs/tensorboard"
    assert "held-out loss" in ended.stdout
    assert read_metrics(run).num_rows == 6
    assert run.report.stat().st_size > 100_000
    found = diagnose(run)
    assert (found.state, found.is_healthy, found.command) == ("finished", True, ""), found
    assert [(one.step, one.compared, one.problem) for one in found.checkpoints] == [(6, "checksums", "")]


def test_a_detached_run_goes_on_without_its_command_and_is_followed_later(shell):
    started = shell("train", *SMALL, "--steps", "4", "--detach", "--run-dir", "run")
    assert started.returncode == 0, started.stderr
    submitted, following = started.stdout.splitlines()[-2:]
    assert submitted.startswith("submit    process ")
    assert "training-infra cancel run stops it" in submitted
    assert "train     " not in started.stdout
    command = following.removeprefix("next      training-infra ").partition("#")[0].split()
    ended = shell(*command)
    assert ended.returncode == 0, ended.stderr
    assert read_metrics(RunDirectory(shell.path / "run")).num_rows == 4
    assert (shell.path / "run" / "report.html").exists()
    again = shell(*command, "--detach")
    assert "submit    nothing: the run is finished" in again.stdout


def test_a_report_says_that_its_run_is_at_work(shell):
    started = shell("train", *SMALL, "--steps", "100000", "--detach", "--run-dir", "run")
    assert started.returncode == 0, started.stderr
    try:
        assert shell("report", "run").returncode == 0
        assert '<span class="status idle">running, ' in (shell.path / "run" / "report.html").read_text()
    finally:
        stopped = shell("cancel", "run")
    assert stopped.returncode == 0, stopped.stderr
    assert shell("report", "run").returncode == 0
    assert '<span class="status warn">cancelled' in (shell.path / "run" / "report.html").read_text()


def test_a_flow_is_not_detached_from_its_job(shell):
    refused = shell("train", *SMALL, "--flow", "--detach")
    assert (refused.returncode, refused.stderr) == (2, "error: --detach: a flow follows its job; drop --flow\n")


@pytest.mark.wide
def test_a_run_of_some_minutes_chooses_its_steps_and_ends_with_what_it_has_learnt(shell):
    given = ("training.minutes=0.01", "training.warmup_steps=4", "tracking.prompts=[import , def]")
    ended = shell("train", *SMALL, *(f"--set={one}" for one in given))
    assert ended.returncode == 0, ended.stderr
    run = only_run(shell.path)
    chosen = read_json(run.length)["num_steps"]
    assert chosen >= 4
    assert f"length    {chosen:,} steps fit into 0.6 s (training.minutes): a step takes " in ended.stdout
    rates = read_metrics(run).column("learning_rate").to_pylist()
    settings = RunConfig.load(run.config).training
    assert rates == [learning_rate(step, settings, chosen) for step in range(1, chosen + 1)]
    assert read_metrics(run).column("eval_loss").null_count == chosen - 1  # only after the last step
    page = run.report.read_text()
    texts = [sample["text"] for sample in read_json(run.samples)["samples"]]
    assert len(texts) == 2
    assert "What it has learnt" in page
    assert "<strong>import</strong>" in page
    assert f"next      training-infra train --resume --run-dir runs/{run.name} --steps {2 * chosen} " in ended.stdout
    assert f"Predicted before the run, {read_json(run.expected)['told_by']}: " in page
    again = shell("train", "--resume", f"--run-dir=runs/{run.name}")
    assert f"runs/{run.name}: already finished" in again.stdout


@pytest.mark.wide
@of_finished
def test_train_json_prints_one_record_of_everything(finished):
    _, record = finished
    assert record["outcome"]["status"] == "finished"
    assert record["training"]["steps"] == 2
    steps = ("plan", "data", "environment", "estimate", "dry_run", "training", "benchmark", "outcome")
    assert set(record) == {"run_dir", "expected", "goodput", *steps}
    assert sum(record["goodput"]["parts"].values()) == pytest.approx(record["goodput"]["seconds"])


@pytest.mark.nightly
def test_train_dry_run_prints_the_same_as_dry_run_and_leaves_nothing(shell):
    ended = shell("train", *SMALL, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    without_times = partial(re.sub, r"(?<=counted in ).*|(?<=\nexpect:   a step takes about ).*", "")
    assert without_times(ended.stdout) == without_times(shell("dry-run", *SMALL).stdout)
    assert re.search(r"^expect: +a step .*\nverdict: +peak .* fits", ended.stdout, re.MULTILINE)
    assert list(shell.path.iterdir()) == []


def test_the_long_names_of_dtypes_are_accepted(shell):
    ended = shell("estimate-memory", *SMALL, "--mixed-precision", "bfloat16")
    assert ended.returncode == 0, ended.stderr


def test_data_without_a_document_is_one_line_and_nothing_is_written(shell):
    (shell.path / "empty.jsonl").write_text("\n")
    ended = shell("train", *SMALL, "--data", "empty.jsonl")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert [path.name for path in shell.path.iterdir()] == ["empty.jsonl"]
    assert ended.stderr.startswith("error: no document to train on: unusable lines (1 empty)")
    assert "empty.jsonl:1" in ended.stderr


@pytest.mark.parametrize(
    ("flags", "source"),
    [
        (["--data", "wiki"], "wiki"),
        (["--data", "wiki", "co de", "2026"], ("wiki", "co de", "2026")),
        (["--data", "wiki", "--data", "code", "papers"], ("wiki", "code", "papers")),
        (["--data=wiki", "--steps", "3", "--data=co: de"], ("wiki", "co: de")),
        (["--data", "wiki", "caf\udce9"], ("wiki", "caf\udce9")),
        (["--data", "caf\udce9"], "caf\udce9"),
        (["--data", "*.jsonl"], "*.jsonl"),
        (
            ["--data", "[ab]/?.json", "**/#1: 'x', \"y\" \\z\t🦙\x7f.md"],
            ("[ab]/?.json", "**/#1: 'x', \"y\" \\z\t🦙\x7f.md"),
        ),
        (["--data", f"{'long words ' * 30}.txt"], f"{'long words ' * 30}.txt"),
    ],
)
def test_data_takes_several_paths_and_may_be_repeated(flags, source):
    options = cli.make_parser().parse_args(
        ["train", *flags, *(flag.replace("--data", "--validation-data") for flag in flags)]
    )
    data = requested_config(options).data
    assert (data.source, data.validation) == (source, source)


def test_a_dry_run_says_what_is_read_of_several_files_and_what_is_left_out(shell):
    (shell.path / "in").mkdir()
    chats = [{"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]}] * 9
    (shell.path / "in" / "chats.json").write_text(json.dumps(chats))
    (shell.path / "in" / "table.csv").write_text("a,b")
    (shell.path / "more.jsonl").write_text('{"text": "a text"}\n')
    ended = shell("train", *SMALL, "--data", "in", "m*.jsonl", "--dry-run")
    assert ended.returncode == 0, ended.stderr
    notes = [line for line in ended.stdout.splitlines() if line.startswith("note: in, m*.jsonl: ")]
    assert [note.removeprefix("note: in, m*.jsonl: ") for note in notes] == [
        "left out 1 file of an unknown kind (table.csv)",
        "recognised by their fields: 1 texts ('text'), 9 ShareGPT conversations ('conversations' with 'from' and "
        "'value'; where given, 'system' and 'tools')",
    ]


@pytest.fixture
def not_utf8(tmp_path):
    """A folder whose name is not UTF-8."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def on_files(tmp_path_factory):
    """A run on two files of a folder whose name is not UTF-8, one with unusable lines, and what it printed."""
    folder = tmp_path_factory.mktemp("files") / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    for name, more in (("wiki.jsonl", ["{", '{"txt": 1}']), ("code.jsonl", [])):
        lines = [json.dumps({"text": f"{name} {number} " * 20}) for number in range(60)]
        (folder / name).write_text("\n".join([*lines, *more]))
    run = RunDirectory(folder.parent / "run")
    data = ("--data", "wiki.jsonl", "--data", f"{folder}/co*.jsonl")
    told = subprocess.run(
        command("train", *SMALL, "--steps=2", *data, "--run-dir", str(run.path), "--set=benchmark.steps=0"),
        cwd=folder,
        env=os.environ | {"LC_ALL": "C", "XDG_CACHE_HOME": str(folder.parent / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        check=False,
    )
    ended = Ended(told.returncode, told.stdout.decode(errors="replace"), told.stderr.decode(errors="replace"))
    assert ended.returncode == 0, ended.stderr
    return run, ended


of_files = pytest.mark.xdist_group("run on files")


@pytest.mark.wide
@of_files
def test_data_in_a_folder_whose_name_is_not_utf8_are_trained_on_and_reported(on_files):
    run, _ = on_files
    assert "caf\\udce9/wiki.jsonl" in run.report.read_text()


@pytest.mark.wide
@of_files
def test_unusable_lines_are_reported_and_the_rest_is_trained_on(on_files):
    _, ended = on_files
    assert "unusable lines (1 invalid JSON, 1 missing field)" in ended.stderr
    assert "wiki.jsonl:61: invalid JSON" in ended.stderr


@pytest.mark.nightly
@of_files
def test_a_run_without_timed_steps_says_so(on_files):
    _, ended = on_files
    assert "benchmark skipped: benchmark.steps=0" in ended.stdout.splitlines()


@pytest.mark.wide
@of_files
def test_a_run_trains_on_several_paths_and_goes_on_from_anywhere(on_files, monkeypatch):
    run, _ = on_files
    record = read_json(run.data)
    assert record["num_documents"] + record["num_validation_documents"] == 120
    monkeypatch.chdir("/")
    again = process("train", "--resume", "--run-dir", str(run.path), "--steps", "3")
    assert again.returncode == 0, again.stderr


def test_a_run_directory_whose_name_is_not_utf8_is_refused_before_it_is_made(shell, not_utf8):
    ended = shell("train", *SMALL, "--steps", "2", "--run-dir", str(not_utf8 / "run"))
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: run directory '{shell.path}/caf\\udce9/run' has a name that is not UTF-8")
    assert not (not_utf8 / "run").exists()


@pytest.mark.wide
def test_conversations_are_trained_and_evaluated_on_assistant_text(shell):
    said = [f"that is {2 * number}" for number in range(12)]
    chats = [
        {"messages": [{"role": "user", "content": f"twice {n}?"}, {"role": "assistant", "content": text}]}
        for n, text in enumerate(said)
    ]
    held_out = chats[:3]
    for name, records in (("chats", chats), ("held-out", held_out)):
        (shell.path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    flags = (
        "--seq-len=256",
        "--set=training.eval_sequences=3",
        "--data=chats.jsonl",
        "--validation-data=held-out.jsonl",
    )
    ended = shell("train", *SMALL, "--steps=2", *flags, "--json")
    assert ended.returncode == 0, ended.stderr
    record = json.loads(ended.stdout)
    of_each = [len(f"{text}<|eot_id|>") for text in said]
    assert record["training"]["eval_tokens"] == sum(of_each[:3])
    assert record["data"]["num_targets"] == sum(of_each[3:])
    assert record["data"]["conversations"]["num_conversations"] == 15


@pytest.mark.wide
def test_a_run_interrupted_from_the_keyboard_stops_the_job_and_says_how_to_continue(shell):
    process = subprocess.Popen(
        command("train", *SMALL, "--steps", "100000"),
        cwd=shell.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_a_step(shell.path)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    run = only_run(shell.path)
    outcome = read_outcome(run)
    assert process.returncode == 130
    assert errors == (
        f"stopped after step {outcome.step}, with a checkpoint of it; continue with: "
        f"training-infra train --run-dir runs/{run.name} --resume\n"
    )
    assert (outcome.status, output.splitlines()[-1].split()[0]) == ("cancelled", "report")
    assert (run.checkpoints / f"step-{outcome.step:08d}").exists()


@pytest.mark.wide
@of_finished
def test_resuming_needs_only_the_directory(shell, mine):
    mine.outcome.unlink()
    ended = shell("train", "--resume", "--run-dir", "mine")
    assert ended.returncode == 0, ended.stderr
    assert read_json(mine.training)["steps"] == 2
    assert read_metrics(mine).num_rows == 2


@pytest.mark.nightly
@of_finished
def test_a_finished_run_goes_on_when_it_is_resumed_with_more_steps(shell, finished):
    name = "runs/tiny_llama3_50m-mine"
    shutil.copytree(finished[0] / "mine", name)
    extended = shell("train", *SMALL, "--resume", "--steps=4")
    assert extended.returncode == 0, extended.stderr
    lines = extended.stdout.splitlines()
    run = only_run(shell.path)
    assert lines[0] == f"run       {name}: continues after step 2"
    rates = read_metrics(run).column("learning_rate").to_pylist()
    assert lines[1] == (
        "note      4 steps instead of 2; learning rate on the cosine schedule of 4 steps: "
        f"{rates[1]:.2e} at step 2, {rates[2]:.2e} at step 3"
    )
    whole = RunConfig.load(run.config).training
    assert rates[2:] == [learning_rate(step, whole, 4) for step in (3, 4)]
    assert read_json(run.training)["steps"] == 4
    fewer = shell("train", "--resume", f"--run-dir={name}", "--steps=3")
    assert fewer.stderr == (
        f"error: training.steps=3: {name} has already taken 4 steps; ask for more, or choose another --run-dir\n"
    )


def test_output_of_a_rank_that_does_not_exist_is_one_line(shell):
    prepare_run(RunConfig.from_mapping({}, [flag.removeprefix("--set=") for flag in FEW_PARAMETERS]), Path("mine"))
    for wrong, told in (
        ("--rank=7", "--rank 7: mine has only rank 0"),
        ("--lines=-3", "--lines -3: give 0 or more"),
    ):
        ended = shell("logs", "mine", wrong)
        assert (ended.returncode, ended.stderr) == (2, f"error: {told}\n")


def test_a_benchmark_without_timed_steps_is_refused_and_writes_nothing(shell):
    ended = shell("benchmark", *SMALL, "--set=benchmark.steps=0")
    assert (ended.returncode, ended.stderr) == (2, "error: benchmark.steps=0 leaves nothing to time; give at least 1\n")
    assert list(shell.path.iterdir()) == []


@pytest.mark.wide
def test_a_run_killed_before_its_first_checkpoint_has_its_steps_in_the_report_and_starts_over(shell):
    process = subprocess.Popen(
        command("train", *SMALL, "--steps=100000", "--run-dir=mine"), cwd=shell.path, stdout=subprocess.PIPE
    )
    run = RunDirectory(shell.path / "mine")
    eventually(run.heartbeat.exists)
    psutil.Process(int(read_json(run.job)["job_id"])).kill()
    told, _ = process.communicate()
    assert process.returncode == 1, told
    assert "No metrics yet" not in run.report.read_text()
    again = shell("train", "--resume", "--run-dir=mine", "--steps=3")
    assert again.stdout.startswith("run       mine: starts over, since there is no checkpoint yet\n")
    assert read_metrics(run).column("step").to_pylist() == [1, 2, 3]


@pytest.mark.nightly
@of_finished
def test_a_report_can_be_written_again(shell, mine):
    mine.report.unlink()
    ended = shell("report", "mine")
    assert ended.stdout == "mine/report.html\n"
    assert mine.report.exists()


@pytest.mark.wide
@of_finished
def test_weights_are_exported_to_a_folder_and_loaded_again(shell, mine):
    exported = shell("export-hf", "mine", "--out", "hub")
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.splitlines() == [
        "export    mine/checkpoints/step-00000002 in fp32",
        "export    wrote model.safetensors",
        "export    hub",
    ]
    begun = shell("train", *SMALL, "--steps=1", "--run-dir=second", "--init-from=hub")
    assert begun.returncode == 0, begun.stderr
    second = RunDirectory(shell.path / "second")
    assert f"init_from: {shell.path / 'hub'}" in second.config.read_text()
    assert f"weights of {shell.path / 'hub'} read: " in shell("logs", "second", "--lines=99").stdout


@pytest.mark.wide
def test_adapters_are_exported_alone_or_merged_and_loaded_only_with_their_settings(shell):
    lora = ["--strategy=lora", "--lora-rank=4", "--steps=1"]
    assert shell("train", *SMALL, *lora, "--run-dir=first").returncode == 0
    checkpoint = "first/checkpoints/step-00000001"
    base = "tiny_llama3_50m as seed 0 draws it, which is in no file"
    for option, written in (
        (["--out=alone"], [f"adapters over {base}", "wrote adapter_model.safetensors", "alone"]),
        (["--out=whole", "--merged"], [f"adapters added to {base}", "wrote model.safetensors", "whole"]),
    ):
        exported = shell("export-hf", "first", *option)
        assert exported.returncode == 0, exported.stderr
        told = [line.removeprefix("export    ") for line in exported.stdout.splitlines()]
        assert (told[0], told[1:]) == (f"{checkpoint} in fp32", written)
    refused = shell("train", *SMALL, *lora, "--lora-rank=8", "--run-dir=second", "--init-from=first")
    assert refused.returncode == 2
    assert refused.stderr == (
        f"error: the adapters in {shell.path / checkpoint} have lora_rank=4 instead of 8, lora_alpha=8 instead of 16; "
        "set lora.lora_rank=4 lora.lora_alpha=8\n"
    )


@pytest.mark.wide
def test_benchmark_times_steps_without_training(shell):
    ended = shell("benchmark", *SMALL, "--json")
    record = json.loads(ended.stdout)
    assert len(record["step_seconds"]) == 5
    assert record["tokens_per_second"] == pytest.approx(64 / record["median_seconds"])


@pytest.mark.nightly
def test_a_dry_run_agrees_with_the_estimate(shell):
    told = json.loads(shell("dry-run", *SMALL, "--json").stdout)
    assert told["dry_run"]["peak_bytes"] == pytest.approx(told["estimate"]["peak_bytes"], rel=0.05)
    assert told["fits"]


def test_a_dry_run_under_deepspeed_is_the_estimate_alone_and_says_so(shell):
    told = shell("dry-run", "--gpus", "4", "--set", "parallel.zero_backend=deepspeed").stdout
    assert "dry run:" not in told
    assert re.search(r"^verdict: +peak .* fits the 73.51 GiB of H100", told, re.MULTILINE)
    assert told.splitlines()[-1] == "note: dry run skipped: DeepSpeed needs real ranks"


@pytest.mark.nightly
def test_a_dry_run_of_a_pipeline_shows_every_rank_a_verdict_and_parity(shell):
    flags = ("--gpus=4", "--tensor-parallel=2", "--pipeline-parallel=2", "--batch-size=4")
    told = shell("dry-run", *SMALL, *flags, "--parity").stdout
    rows = told[told.index("pipeline rank") :].splitlines()[1:3]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert re.search(r"^order: +[\d,]+ calls of 4 ranks match on \d+ communicators", told, re.MULTILINE)
    assert re.search(r"^parity: +agrees with one process over 3 steps of 4 ranks \(tp 2 x pp 2\)", told, re.MULTILINE)
    assert re.search(r"^verdict: +peak .* fits the .* of this machine's memory$", told, re.MULTILINE)


@pytest.mark.nightly
def test_a_terminated_command_stops_its_job(shell):
    process = subprocess.Popen(command("train", *SMALL, "--steps", "100000"), cwd=shell.path)
    wait_for_a_step(shell.path)
    process.terminate()
    assert process.wait() == 130
    assert read_outcome(only_run(shell.path)).status == "cancelled"


def test_validate_environment_lists_its_findings(shell):
    ended = shell("validate-environment")
    assert ended.returncode == 0, ended.stdout
    assert "environment ready for training" in ended.stdout
    assert "torch" in ended.stdout


def test_output_into_a_closed_pipe_is_no_error():
    ended = subprocess.run(
        f"{sys.executable} -m training_infra.cli estimate-memory | true",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == ""


@pytest.mark.parametrize(
    "arguments", ["models", "evaluate nowhere", "generate nowhere --prompt=x", "logs nowhere", "-h"]
)
def test_a_command_that_only_prints_fails_in_one_line_if_its_output_is_closed(arguments):
    command = f"exec {sys.executable} -m training_infra.cli {arguments} >&-"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "error: standard output is closed, and this only prints; redirect it to a file\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_other_commands_do_their_work_though_their_output_is_closed(tmp_path, closed):
    (tmp_path / "a.txt").write_text("some words " * 9)
    other = tmp_path / "cache"
    arguments = (
        f"tokenize --device=cpu --data={tmp_path / 'a.txt'} --set=data.cache_dir={other} --set=training.seq_len=8"
    )
    command = f"exec {sys.executable} -m training_infra.cli {arguments} --set=data.tokenizer=bytes {closed}"
    ended = subprocess.run(["sh", "-c", command], cwd=tmp_path, check=False)
    assert ended.returncode == 0
    assert list(other.iterdir())


@pytest.mark.nightly
@of_finished
def test_a_profile_says_where_the_time_of_a_run_like_another_goes(shell, mine):
    told = shell("profile", "mine", "--run-dir=profiled")
    assert told.returncode == 0, told.stderr
    trace = shell.path / "profiled" / "trace"
    assert sorted(path.name for path in trace.iterdir()) == ["rank-00000.json", "rank-00000.json.gz"]
    told_of_rank = [line.split(maxsplit=6) for line in told.stdout.splitlines() if line.startswith("profile   rank 0")]
    shares = {kind: float(share.rstrip("%")) for *_, share, kind in told_of_rank}
    assert {"matrix products", "optimizer", "head and loss"} <= shares.keys()
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)
    assert "Profile of the timed steps" in (shell.path / "profiled" / "report.html").read_text()
    assert RunConfig.load(mine.config).benchmark.profile is False


def test_a_machine_without_a_folder_for_temporary_files_is_one_line_that_names_those_tried(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    monkeypatch.setattr(
        "llama_core.planning.search.model_variants.list_variants", lambda gpu_type: tempfile.gettempdir()
    )
    assert cli.main(["models"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "missing") in line
    assert line.endswith("or set TMPDIR to a folder with room")
