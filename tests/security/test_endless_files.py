"""Pipes, devices and files of absurd size or contents in what somebody hands over: each ends in one line, at once."""

import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_run import ATTEMPT, FAILED, write_run
from tiers import nightly

from llama_core.errors import WeightsError
from llama_core.hugging_face.weight_files import read_header
from llama_core.records.checkpoints import STATE, write_manifest
from llama_core.records.files import write_json
from training_infra import cli

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
CONFIG = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e4, **SIZES, **HEADS}


def put(kind, path):
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # as /dev/zero
        case "sparse":
            with path.open("wb") as file:
                file.truncate(1 << 42)


KINDS = ["pipe", nightly("sparse"), pytest.param("device", marks=[pytest.mark.root, pytest.mark.nightly])]
RECORDS = [
    *("config.yaml", "plan.json", "job.json", "outcome.json", "estimate.json", "data.json", "heartbeat.json"),
    *("metrics/_tail.jsonl", "metrics/part-00000.parquet", "logs/activities.jsonl", "logs/attempt.json"),
    *("logs/preflight.jsonl", "logs/stragglers.jsonl"),
    *("checkpoints/step-00000020/state.json", "checkpoints/step-00000020/manifest.json", "trace/rank-00000.json"),
]


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_of_a_run_makes_a_command_hang(tmp_path, kind):
    for number, name in enumerate(RECORDS):
        run = write_run(tmp_path / str(number))
        (run.path / name).parent.mkdir(exist_ok=True)
        write_json(run.checkpoints / "step-00000020" / STATE, {"step": 20})
        put(kind, run.path / name)
        assert {cli.main([command, str(run.path)]) for command in ("doctor", "logs", "report")} <= {0, 1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_no_log_of_a_run_makes_a_command_hang(tmp_path, kind):
    run = write_run(tmp_path / "run")
    put(kind, run.logs / "rank-00000.log")
    assert cli.main(["report", str(run.path)]) == 0
    assert cli.main(["logs", str(run.path)]) == (0 if kind == "sparse" else 2)  # its last lines are shown


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
def test_no_file_of_weights_makes_a_command_hang(tmp_path, capsys, kind, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if name != "model.safetensors.index.json":  # which is read only without the file of all weights
        (tmp_path / "model.safetensors").write_bytes(b"")
    put(kind, tmp_path / name)
    flags = ["--device", "cpu", "--init-from", str(tmp_path), "--steps", "1"]
    tokenizer = ["--data", "no.jsonl", "--set", f"data.tokenizer={tmp_path}"]
    assert cli.main(["train", *flags, *tokenizer]) == cli.main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_no_configuration_makes_a_command_hang(tmp_path, capsys, kind):
    file = tmp_path / "run.yaml"
    put(kind, file)
    assert cli.main(["train", "--config", str(file)]) == cli.main(["sweep", "--config", str(file)]) == 2
    assert capsys.readouterr().err.count(f"{str(file)!r}: ") == 2


def test_a_header_that_claims_gigabytes_is_not_read(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as sparse:
        sparse.write((3 << 30).to_bytes(8, "little"))
        sparse.truncate(4 << 30)
    tracemalloc.start()
    with pytest.raises(WeightsError, match="a header of 3,221,225,472 bytes, more than the 100,000,000 of the format"):
        read_header(file)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, nightly(signal.SIGINT)])
def test_a_signal_ends_the_check_of_a_checkpoint_of_petabytes(tmp_path, number):
    run = write_run(tmp_path / "run")
    checkpoint = run.checkpoints / "step-00000020"
    put("sparse", checkpoint / "__0_0.distcp")
    write_json(checkpoint / STATE, {"step": 20})
    files = {name: {"num_bytes": (checkpoint / name).stat().st_size, "crc32": "00000000"} for name in ("__0_0.distcp",)}
    write_json(checkpoint / "manifest.json", {"files": files})
    command = [sys.executable, "-m", "training_infra.cli", "doctor", str(run.path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as doctor:
        while not reads(doctor, "distcp"):
            assert doctor.poll() is None
        doctor.send_signal(number)
        told = doctor.communicate()[1]
    assert told == "interrupted\n"


def reads(process, word):
    """Return whether a process has a file open with ``word`` in its name."""
    with suppress(FileNotFoundError):  # it is closed meanwhile
        return any(word in str(one.readlink()) for one in Path(f"/proc/{process.pid}/fd").iterdir())
    return False


@pytest.mark.parametrize(
    ("attempts", "problem"),
    [
        ([{}], r"attempts\.0\.job_id: field required"),
        ([ATTEMPT | {"first_step": "<b>"}], r"attempts\.0\.first_step: input should be a valid integer"),
        ([ATTEMPT | {"status": {}}], r"attempts\.0\.status: input should be a valid string"),
    ],
)
def test_an_attempt_that_is_malformed_is_one_line_of_every_command(tmp_path, capsys, attempts, problem):
    run = write_run(tmp_path / "run", outcome=replace(FAILED, attempts=tuple(attempts)))
    assert cli.main(["doctor", str(run.path)]) == 1
    assert re.search(problem, capsys.readouterr().out)
    assert cli.main(["report", str(run.path)]) == 0


@pytest.mark.parametrize("value", ["x", [6.9], {}])
def test_a_counter_of_a_checkpoint_that_is_no_number_is_one_line(tmp_path, capsys, value):
    run = write_run(tmp_path / "run")
    checkpoint = run.checkpoints / "step-00000020"
    write_json(checkpoint / STATE, {"step": 20, "loss": value})
    write_manifest(checkpoint, {})
    assert cli.main(["doctor", str(run.path)]) == 1
    assert "state.json is damaged (loss: input should be a valid number" in capsys.readouterr().out
