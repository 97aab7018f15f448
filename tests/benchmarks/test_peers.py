"""The comparison with other frameworks: its figures, and a tiny run beside transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import theirs

ROOT = Path(__file__).parents[2]
CASE = peers.Case("tiny_llama3_50m", "fp32", 1, 16, "as it comes", "transformers")


def steps(*seconds, loss=11.0, peak=100):
    return [{"seconds": s, "cpu_seconds": 2 * s, "loss": loss, "faults": 7, "peak_bytes": peak} for s in seconds]


def test_warm_up_counts_for_the_loss_and_not_for_the_times():
    row = {"warmup": 1, "ours": steps(9.0, 1.0, 2.0, 4.0), "theirs": steps(1.0, 3.0, 6.0, 12.0, peak=400)}
    figures = peers.figures(CASE, row, peak=1e12)
    assert figures["times_faster"] == figures["times_less_cpu"] == [3.0, 3.0, 3.0]
    assert (figures["memory_share"], figures["counts"]) == (0.25, True)
    assert figures["ours_in_short"]["gflops"] == pytest.approx(3 * figures["theirs_in_short"]["gflops"])
    row["theirs"][0]["loss"] += 2e-4
    assert not peers.figures(CASE, row, peak=1e12)["counts"]


def test_every_peer_of_a_case_has_its_loop():
    assert {case.peer for case in peers.all_cases()} == set(theirs.PEERS)


def test_patterns_that_select_nothing_are_refused(tmp_path, capsys):
    assert peers.main(["--out", str(tmp_path), "--only", "llama9*"]) == 2
    said = capsys.readouterr().err
    assert said == f"error: --only llama9* selects no case; a case is like {peers.all_cases()[0].name}\n"


@pytest.mark.nightly
def test_transformers_trains_with_the_same_losses_and_a_peer_without_an_environment_is_left_out(tmp_path):
    names = ("fp32/*/as it comes/transformers", "bf16/*/as it comes/peft", "fp32/*/tuned/litgpt")
    options = ["--seq-len", "16", "--warmup", "1", "--steps", "2", "--environments", str(tmp_path / "none")]
    command = [sys.executable, "-m", "benchmarks.peers", "--out", str(tmp_path), *options, "--only"]
    selected = [f"tiny_llama3_50m/{name}" for name in names]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([*command, *selected], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = {row["peer"]: row for row in json.loads((tmp_path / "peers.json").read_text())["rows"]}
    assert rows["transformers"]["counts"], rows["transformers"]
    assert rows["peft"]["counts"], rows["peft"]
    assert "make it with benchmarks/peers/setup.sh" in rows["litgpt"]["left_out"]
    assert (tmp_path / "peers.md").read_text() in run.stdout
