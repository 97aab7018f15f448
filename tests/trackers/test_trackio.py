"""A run in Trackio, in a folder. Each test has a process of its own, since Trackio reads where it is when imported."""

import json
import os
import subprocess
import sys

import pytest

from llama_core.chain.environment import validate_environment
from llama_core.config.run import RunConfig
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.trackers.trackio import TRACKIO, TrackioSettings

RUN = """
import json, sys
from pathlib import Path
from step_record import record
from llama_core.chain.report import say_report
from llama_core.config.run import RunConfig
from llama_core.evaluation.score_trackers import show_scores
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import Score
from llama_core.records.files import now, write_json
from llama_core.training.metrics import MetricsSinks

folder = Path(sys.argv[1])
config = RunConfig.from_mapping({
    "tracking": {"tensorboard": False, "trackers": {"trackio": {"project": "ours"}}},
    "launch": {"device": "cpu"},
    "data": {"text_field": "a-secret-0123456789"},
})
write_json(folder / "sweep" / "sweep.json", {})
run = RunDirectory(folder / "sweep" / "runs" / "mine")
run.create()
run.config.write_text(config.to_yaml())
write_json(run.plan, {"tp": 2})
write_json(run.environment, {"facts": {"commit": "0123456789abcdef"}})
for steps in ((1, 2, 3), (4, 5)):
    sinks = MetricsSinks.open(run, config, resumed_at=steps[0] - 1)
    for step in steps:
        write_json(run.heartbeat, record(step))
        sinks.write(record(step, loss=10.0 - step))
    sinks.close()
score = Score(step=3, tokens=640, task="arc", metric="acc", value=0.5, time=now(), standard_error=None,
              higher_is_better=True, examples=9, version="", settings="")
show_scores(run, config, [score], lambda line: sys.exit(line))
run.report.write_text("<html>the report</html>")
say_report(run, run.report)

from trackio.sqlite_storage import SQLiteStorage

logs = {name: SQLiteStorage.get_logs("ours", name) for name in ("mine", "mine-evaluations")}
told = {"logs": logs, "runs": SQLiteStorage.get_runs("ours"), "config": SQLiteStorage.get_run_config("ours", "mine")}
print("TOLD" + json.dumps(told, default=str))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trackio")


@pytest.fixture(scope="module")
def told(folder):
    """What Trackio has of a run that was resumed, evaluated and reported on."""
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    env = {**os.environ, "TRACKIO_DIR": str(folder / "store"), "MY_API_KEY": "a-secret-0123456789"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "does not get" not in done.stdout
    return json.loads(done.stdout.rpartition("TOLD")[2])


def test_a_resumed_run_goes_on_in_one_run(told):
    assert [(log["step"], log["loss"]) for log in told["logs"]["mine"]] == [(step, 10 - step) for step in range(1, 6)]
    assert sorted(told["runs"]) == ["mine", "mine-evaluations"]


def test_scores_are_a_run_of_their_own(told):
    assert [(log["step"], log["evaluation/arc/acc"]) for log in told["logs"]["mine-evaluations"]] == [(3, 0.5)]


def test_a_run_has_its_settings_plan_and_commit_and_its_sweep_as_a_group(told):
    config = told["config"]
    assert config["tracking"]["trackers"] == {"trackio": {"project": "ours"}}
    assert config["plan"] == {"tp": 2}
    assert config["environment"]["commit"] == "0123456789abcdef"
    assert config["_Group"] == "sweep"


def test_the_report_is_kept_and_no_secret(told, folder):
    kept = [path.read_bytes() for path in (folder / "store").rglob("*") if path.is_file()]
    assert any(b"<html>the report</html>" in content for content in kept)
    assert any(b"text_field" in content for content in kept)
    assert not any(b"a-secret" in content for content in kept)


def test_where_to_look_holds_no_token(tmp_path, monkeypatch):
    for name in TRACKIO.variables:
        monkeypatch.delenv(name, raising=False)
    run = RunDirectory(tmp_path / "mine")
    run.create()
    settings = TrackioSettings(project="ours")
    assert TRACKIO.where(run, settings) == ""
    write_json(run.tracker("trackio") / "run.json", {"run_id": "1"})
    assert TRACKIO.where(run, settings) == "trackio show --project ours"
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://trackio.example/?write_token=a-secret")
    assert TRACKIO.where(run, settings) == "https://trackio.example/, project ours"


def test_a_server_without_a_token_is_refused(monkeypatch):
    config = RunConfig.from_mapping({"tracking": {"trackers": {"trackio": {}}}})
    problem = (
        "tracking.trackers.trackio: the server of TRACKIO_SERVER_URL needs a token; export TRACKIO_WRITE_TOKEN=..., "
        "or do without it"
    )
    for name in TRACKIO.variables:
        monkeypatch.delenv(name, raising=False)
    assert problem not in validate_environment(config).errors
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://trackio.example")
    assert problem in validate_environment(config).errors
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "a-secret-0123456789")
    assert problem not in validate_environment(config).errors
