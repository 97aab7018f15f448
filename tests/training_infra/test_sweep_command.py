"""``training-infra sweep`` on this machine: real runs of a tiny model, one after the other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from llama_core.chain import steps
from llama_core.records.files import read_json
from llama_core.sweep.directory import SweepDirectory, is_timed
from llama_core.sweep.history import read_history, write_part
from llama_core.sweep.judgement import Judgement
from training_infra.cli import main

pytestmark = pytest.mark.xdist_group("sweep")

SWEEP = {
    "name": "tiny",
    "base": {
        "architecture": {
            "hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 64, "head_dim": 16,
            "vocab_size": 512,
        },
        "training": {"seq_len": 16, "batch_size": 4, "steps": 2},
        "launch": {"device": "cpu"},
        "benchmark": {"warmup_steps": 1, "steps": 3},
        "tracking": {"tensorboard": False},
    },
    "grid": {"parallel.microbatch_size": [1, 2, 3]},
}  # fmt: skip
NAMES = ["microbatch_size=1", "microbatch_size=2"]
"""Of their folders."""
SHOWN = ["microbatch size 1", "microbatch size 2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    return folder


@pytest.fixture(scope="module")
def interrupted(place):
    """A sweep that was interrupted when its second element was about to start, and the job of its first."""
    begin = steps.submit

    def submit(run, only):
        if run.name == NAMES[1]:
            raise KeyboardInterrupt
        return begin(run, only)

    sweep = SweepDirectory(place / "sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "submit", submit)
        assert main(["sweep", "--config", str(place / "sweep.yaml"), "--sweep-dir", str(sweep.path)]) == 130
    return sweep, read_json(sweep.run(NAMES[0]).job)


@pytest.fixture(scope="module")
def finished(interrupted):
    """The same sweep, resumed and run to its end."""
    sweep, _ = interrupted
    assert main(["sweep", "--sweep-dir", str(sweep.path), "--resume", "--json"]) == 0
    return sweep


def resume(sweep, capsys):
    assert main(["sweep", "--sweep-dir", str(sweep.path), "--resume", "--json"]) == 0
    return {element["name"]: element for element in json.loads(capsys.readouterr().out)["elements"]}


@pytest.mark.wide
def test_every_possible_element_is_timed_and_the_impossible_one_skipped(finished, capsys):
    elements = resume(finished, capsys)
    assert {name: elements[name]["outcome"]["status"] for name in NAMES} == dict.fromkeys(NAMES, "finished")
    assert all(len(elements[name]["benchmark"]["step_seconds"]) == 3 for name in NAMES)
    assert "not a multiple of 3" in elements["microbatch_size=3"]["skipped"]


@pytest.mark.wide
def test_all_elements_appear_in_one_report(finished):
    page = finished.report.read_text()
    assert "2 of 2 timed" in page
    assert all(page.count(name) >= 3 for name in SHOWN)
    plans = page.split("<h2>Every element", 1)[1]
    assert "1 rank, 4 x 1 sequences per step and rank" in plans
    assert "1 rank, 2 x 2 sequences per step and rank" in plans
    assert "microbatch size 3" in page


@pytest.mark.wide
def test_nothing_was_trained(finished):
    assert not any(finished.run(name).training.exists() for name in NAMES)


@pytest.mark.wide
def test_a_finished_sweep_runs_nothing_again(finished, capsys):
    before = {name: read_json(finished.run(name).job) for name in NAMES}
    resume(finished, capsys)
    assert {name: read_json(finished.run(name).job) for name in NAMES} == before


@pytest.mark.wide
def test_an_interrupted_sweep_runs_only_its_unfinished_elements_when_it_is_resumed(interrupted, finished):
    _, job_of_the_first = interrupted
    assert read_json(finished.run(NAMES[0]).job) == job_of_the_first
    assert [is_timed(finished.run(name)) for name in NAMES] == [True, True]


def keep_faster_results(sweep, factor, number):
    """Add earlier results to the history of a sweep that were faster by a factor, and vary by some percent."""
    own = Judgement.read(sweep.history)
    for night in range(number):
        faster = [
            replace(
                one,
                ended_at=f"2026-01-{1 + night:02d}T02:00:00+00:00",
                tokens_per_second=tuple(factor * (1 + night % 3 / 100) * one.median_rate for _ in range(3)),
                versions=one.versions | {"torch": "2.0"},
            )
            for one in read_history(Path(own.folder))
            if one.source == sweep.name and one.ended_at > "2026-02"
        ]
        write_part(Path(own.folder) / f"part-{factor}-{night}.parquet", faster)


@pytest.mark.wide
def test_results_are_kept_and_a_sweep_that_got_slower_fails_only_if_asked_to(finished, capsys):
    first = Judgement.read(finished.history)
    assert [one.element for one in first.elements] == NAMES
    assert (finished.path.parent / "history" / first.part).exists()
    keep_faster_results(finished, 1000, 6)
    resume(finished, capsys)
    assert main(["sweep", "--sweep-dir", str(finished.path), "--resume", "--fail-on-regression"]) == 4
    told = capsys.readouterr()
    assert f"history   {SHOWN[0]}: slower: 99.9% below" in told.out
    (line,) = told.err.splitlines()
    assert all(name in line for name in SHOWN)
    assert "torch 2.0 ->" in line
    assert "What changed since last time" in finished.report.read_text()
    assert len(read_history(finished.path.parent / "history")) == 2 * 7  # the sweep itself once


LOSS = SWEEP | {
    "base": SWEEP["base"] | {"training": {"seq_len": 16, "batch_size": 4, "steps": 6, "eval_sequences": 4}},
    "grid": {"training.learning_rate": [1e-5, 1e-2]},
}


def test_a_grid_of_learning_rates_is_refused_before_anything_is_written(place, capsys):
    (place / "loss.yaml").write_text(yaml.safe_dump(LOSS))
    assert main(["sweep", "--config", str(place / "loss.yaml"), "--sweep-dir", str(place / "loss")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "training.learning_rate cannot change the throughput" in line
    assert "--objective loss" in line
    assert not (place / "loss").exists()


@pytest.mark.nightly
def test_a_sweep_over_the_learning_rate_trains_and_ranks_the_held_out_losses(place, capsys):
    (place / "loss.yaml").write_text(yaml.safe_dump(LOSS))
    command = ["sweep", "--config", str(place / "loss.yaml"), "--sweep-dir", str(place / "loss"), "--objective", "loss"]
    assert main([*command, "--json"]) == 0
    slow, fast = json.loads(capsys.readouterr().out)["elements"]
    assert fast["training"]["eval_loss"] < slow["training"]["eval_loss"]
    assert "benchmark" not in fast
    page = SweepDirectory(place / "loss").report.read_text()
    table = page.split("lowest held-out loss first", 1)[1]
    assert table.index("learning rate 0.01") < table.index("learning rate 1e-5")


@pytest.mark.parametrize("arguments", [[], ["--resume"], ["--sweep-dir", "sweep"]])
def test_without_a_configuration_it_asks_for_one(arguments, capsys):
    assert main(["sweep", *arguments]) == 2
    assert "no sweep given; add --config FILE" in capsys.readouterr().err


def test_a_sweep_is_predicted_without_hardware(tmp_path, capsys):
    sweep = {
        "name": "eight",
        "base": {"model": "llama3_8b", "parallel": {"gpus": 8, "pp": 1}},
        "grid": {"parallel.tp": [1, 3, 8], "parallel.zero_stage": [0, 3]},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    asked = ["sweep", "--config", str(tmp_path / "sweep.yaml"), "--sweep-dir", str(tmp_path / "there"), "--predict"]
    assert main([*asked, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    statuses = {name: row["status"] for name, row in rows.items()}
    assert statuses["tp=1,zero_stage=0"] == "does-not-fit"
    assert statuses["tp=3,zero_stage=3"] == "impossible"
    assert statuses["tp=8,zero_stage=3"] == "finished"
    rates = {name: row["tokens_per_second"] for name, row in rows.items()}
    assert rates["tp=1,zero_stage=3"] > rates["tp=8,zero_stage=3"]
    whole_hours = 1e9 / rates["tp=8,zero_stage=3"] / 3600
    assert rows["tp=8,zero_stage=3"]["dollars_per_billion_tokens"] == pytest.approx(8 * 2.5 * whole_hours)
    assert main(asked) == 0
    assert " more than the next (tp " in capsys.readouterr().out.split("\nbest      tp 1, zero stage 3: ")[1]
    page = (tmp_path / "there" / "predicted.html").read_text()
    assert all(row["plan"] in page for row in rows.values())
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["predicted.html"]
