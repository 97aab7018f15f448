"""The GPU measurement, run on a CPU: every stage, a stage that fails, and the tables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_stages

pytestmark = pytest.mark.xdist_group("gpu")

ROOT = Path(__file__).parents[2]
NOT_ON_A_CPU = ("documents", "causal, cuDNN", "kernel", "3B step, fp8")
"""What a CPU does not have; their rows hold an error."""


def test_the_driver_names_every_stage():
    assert list(gpu.STAGES) == [stage.__name__ for stage in gpu_stages.STAGES]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert (out / "gpu.md").read_text() in run.stdout
    return {result["stage"]: result for result in json.loads((out / "gpu.json").read_text())}


@pytest.mark.wide
@pytest.mark.parametrize("stage", gpu.STAGES)
def test_every_stage_measures_all_it_can_on_a_cpu(results, stage):
    result = results[stage]
    failed = {row.get("what", row.get("kernel", "")) for row in result["rows"] if "error" in row}
    unexpected = {name for name in failed if not name.startswith(NOT_ON_A_CPU)}
    assert (result["ended"], bool(result["rows"])) == ("done", True)
    assert stage == "peer" or not unexpected


@pytest.mark.wide
def test_every_kernel_on_a_cpu_is_close_to_fp64(results):
    rows = [row for row in results["parity"]["rows"] if "error" not in row]
    assert {row["what"] for row in rows} == {"mask", "causal", "ring of 4", "ring of 4, documents", "loss"}
    limits = {"bfloat16": 0.02, "float16": 0.003, "float32": 1e-5}
    for row in rows:
        distances = [value for name, value in row.items() if name not in {"what", "dtype"}]
        assert max(distances) < limits[row["dtype"]], row


@pytest.mark.wide
def test_a_step_makes_a_graph_if_and_only_if_it_is_compiled(results):
    rows = results["training"]["rows"]
    assert {(row["model"], row["compiled"], row["attention"], row["recompute"]) for row in rows} == {
        (model, compiled, "mask", recompute)
        for model in ("1B", "3B")
        for compiled in (False, True)
        for recompute in ("none", "selective")
    }
    assert all(row["graphs"] == row["compiled"] for row in rows)


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT)}


def test_a_stage_that_fails_or_hangs_costs_only_itself(tmp_path, monkeypatch):
    failed = gpu.run_stage("machine", "no such device", tmp_path, 60, environment())
    assert failed["ended"].startswith("failed: ")
    assert failed["rows"] == []
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0)
    assert gpu.run_stage("machine", "cpu", tmp_path, 0.5, environment())["ended"] == "stopped after 0.5 s"
    assert gpu.run_stage("machine", "cpu", tmp_path, -1, environment())["ended"] == "not begun: no time is left"


def test_rows_with_other_columns_start_a_new_table():
    rows = [{"what": "a|b", "ms": 1.23456}, {"what": "c", "ms": 1000.0}, {"what": "d", "error": "no\nkernel"}]
    results = [{"stage": "machine", "ended": "stopped after 3 s", "seconds": 3.2, "rows": rows}]
    assert gpu.as_markdown(results).splitlines() == [
        "### machine (3 s): stopped after 3 s",
        "",
        "| what | ms |",
        "| --- | --- |",
        "| a/b | 1.235 |",
        "| c | 1000 |",
        "",
        "| what | error |",
        "| --- | --- |",
        "| d | no kernel |",
        "",
    ]
