"""Batch sizes compared: this machine measures the runs it can, predicts the rest, and every failure is a result."""

import json

import pytest

from llama_core.machine.detect import detect_machine
from training_infra.benchmarking import PerformanceBenchmark
from training_infra.cli import main

TINY = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 64, "head_dim": 16}
QUICKLY = {"seq_len": 16, "steps": 2, "device": "cpu", "tensorboard": False, "precision": "fp32"}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def tiny(batch_sizes, **settings):
    sizes = TINY | {"vocab_size": 512}
    return PerformanceBenchmark("tiny_llama3_50m", batch_sizes=batch_sizes, **sizes | QUICKLY | settings)


def test_a_run_without_its_devices_here_is_predicted(tmp_path):
    rows = PerformanceBenchmark("llama2_7b", num_gpus=4, batch_sizes=(4, 8)).run_comprehensive_benchmark()
    assert [row["settings"] for row in rows] == [{"training.batch_size": 4}, {"training.batch_size": 8}]
    assert {row["how"] for row in rows} == {"predicted"}
    assert all(
        row["tokens_per_second"] * row["step_seconds"] / 4096 == pytest.approx(size)
        for row, size in zip(rows, (4, 8), strict=True)
    )
    assert not (tmp_path / "sweeps").exists()


def test_a_run_that_does_not_fit_is_a_result_with_the_arithmetic():
    (row,) = PerformanceBenchmark("llama3_70b", num_gpus=2, batch_sizes=[2]).run_comprehensive_benchmark()
    assert (row["how"], row["status"], row["tokens_per_second"]) == ("predicted", "does-not-fit", None)
    assert "gradients and moments take 16 bytes x 70.55e9 parameters / 2" in row["reason"]


@pytest.mark.wide
def test_possible_runs_are_measured_and_impossible_ones_reported(capsys):
    benchmark = tiny([4, 3], microbatch_size=2)
    rows = benchmark.run_comprehensive_benchmark()
    assert [(row["how"], row["status"]) for row in rows] == [("measured", "finished"), ("predicted", "impossible")]
    assert "training.batch_size=3 is not a multiple of 2" in rows[1]["reason"]
    assert rows[0]["tokens_per_second"] > 0
    capsys.readouterr()
    benchmark.print_summary()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["4", "measured"], ["3", "predicted"]]


@pytest.mark.wide
def test_running_out_of_memory_is_a_result():
    """The embedding is larger than the machine's memory, and ``force`` lets it through the gate."""
    rows = detect_machine().memory_bytes // (4 * 1024)
    settings = TINY | QUICKLY | {"hidden_size": 1024, "vocab_size": rows + rows // 10, "force": True}
    (row,) = PerformanceBenchmark("tiny_llama3_50m", batch_sizes=[1], **settings).run_comprehensive_benchmark()
    assert (row["how"], row["status"]) == ("measured", "oom")
    assert "allocate" in row["reason"]


def test_the_command_saves_the_results_it_prints(tmp_path, capsys):
    command = ["benchmark", "--model", "llama2_7b", "--gpus", "4", "--batch-sizes", "1", "2"]
    assert main([*command, "--save-results", str(tmp_path / "out" / "results.json")]) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (record["model"], record["gpus"], len(record["rows"])) == ("llama2_7b", 4, 2)
    for row in record["rows"]:
        assert f"{row['tokens_per_second']:,.0f}" in printed
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == record["rows"]
