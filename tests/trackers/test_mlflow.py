"""A run in MLflow, by its own client: on a folder, and on servers that are away."""

import socket
from pathlib import Path

import pytest
import yaml
from step_record import record

from llama_core.chain.environment import validate_environment
from llama_core.chain.report import say_report
from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.evaluation.score_trackers import show_scores
from llama_core.launch.outcome import record_outcome
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import Score
from llama_core.records.files import now, read_json, write_json
from llama_core.records.metrics import read_metrics
from llama_core.trackers import background
from llama_core.trackers.mlflow import MLFLOW, MlflowSettings
from llama_core.trackers.mlflow_record import record_path
from llama_core.training.metrics import MetricsSinks

EXPERIMENT = "test"
COMMIT = "0123456789abcdef"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder that MLflow writes to."""
    folder = tmp_path / "mlruns"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{folder}")
    monkeypatch.setenv(
        "MLFLOW_ALLOW_FILE_STORE", "true"
    )  # which MLflow recommends no more; a server needs its own packages
    return folder


@pytest.fixture
def run(tmp_path):
    return made(tmp_path / "runs" / "mine")


def made(path, **sections):
    directory = RunDirectory(path)
    directory.create()
    directory.config.write_text(config(**sections).to_yaml())
    write_json(directory.plan, {"tp": 2})
    write_json(directory.estimate, {"total": 123})
    write_json(directory.environment, {"facts": {"commit": COMMIT, "torch": "torch 2.13.0"}})
    return directory


def config(**sections):
    tracking = {"tensorboard": False, "trackers": {"mlflow": {"experiment": EXPERIMENT}}}
    return RunConfig.from_mapping({"tracking": tracking, "launch": {"device": "cpu"}} | sections)


def train(run, steps, total=100, **sections):
    sinks = MetricsSinks.open(run, config(**sections), resumed_at=min(steps) - 1)
    for step in steps:
        sinks.write(record(step, total_steps=total, time=1000.0 + step))
    sinks.close()


def in_mlflow(run):
    from mlflow import MlflowClient

    client = MlflowClient()
    run_id = read_json(record_path(run))["run_id"]
    return client, client.get_run(run_id), run_id


def losses(run, name="loss"):
    client, _, run_id = in_mlflow(run)
    return {(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)}


def test_a_run_has_its_steps_settings_records_and_commit(store, run):
    train(run, range(1, 6), total=5)
    client, there, run_id = in_mlflow(run)
    assert losses(run) == {(step, 1.0) for step in range(1, 6)}
    assert there.info.run_name == "mine"
    assert client.get_experiment(there.info.experiment_id).name == EXPERIMENT
    params = there.data.params
    assert params["training.seed"] == str(config().training.seed)
    assert (params["plan.tp"], params["estimate.total"]) == ("2", "123")
    assert there.data.tags["mlflow.source.git.commit"] == COMMIT
    assert there.data.tags["environment.torch"] == "torch 2.13.0"
    assert there.info.status == "FINISHED"
    files = {file.path for file in client.list_artifacts(run_id)}
    assert files == {"config.yaml", "plan.json", "estimate.json", "environment.json"}
    kept = Path(client.download_artifacts(run_id, "config.yaml")).read_text()
    assert yaml.safe_load(kept) == yaml.safe_load(run.config.read_text())


def test_a_resumed_run_goes_on_in_the_same_run(store, run):
    train(run, [1, 2])
    _, before, first = in_mlflow(run)
    assert before.info.status == "KILLED", "it has not taken its last step"
    more = {"training": {"steps": 7}}
    train(run, [3, 4], total=4, **more)
    client, there, again = in_mlflow(run)
    assert again == first
    assert {step for step, _ in losses(run)} == {1, 2, 3, 4}
    assert there.info.status == "FINISHED"
    assert len(client.search_runs([there.info.experiment_id])) == 1


def test_a_run_that_was_deleted_there_gets_a_new_one(store, run):
    train(run, [1])
    client, _, first = in_mlflow(run)
    client.delete_run(first)
    train(run, [2])
    assert in_mlflow(run)[2] != first
    assert {step for step, _ in losses(run)} == {2}


def test_scores_of_checkpoints_are_in_the_run_which_goes_on(store, run):
    sinks = MetricsSinks.open(run, config(), resumed_at=0)
    sinks.write(record(1))
    score = Score(
        step=1, tokens=640, task="gsm8k", metric="exact_match,strict-match", value=0.5, time=now(),
        standard_error=None, higher_is_better=True, examples=9, version="", settings="",
    )  # fmt: skip
    show_scores(run, config(), [score], pytest.fail)
    _, there, _ = in_mlflow(run)
    assert there.info.status == "RUNNING"
    assert losses(run, "evaluation/gsm8k/exact_match_strict-match") == {(1, 0.5)}
    sinks.close()


@pytest.mark.parametrize(("status", "there"), [("finished", "FINISHED"), ("cancelled", "KILLED"), ("oom", "FAILED")])
def test_the_report_is_kept_with_the_run_that_then_ends_as_its_outcome_says(store, run, status, there, capsys):
    train(run, [1, 2], total=2)
    record_outcome(run, status, reason="so it was", next_action="")
    run.report.write_text("<html>the report</html>")
    say_report(run, run.report)
    client, at_mlflow, run_id = in_mlflow(run)
    assert "report.html" in {file.path for file in client.list_artifacts(run_id)}
    assert at_mlflow.info.status == there
    assert "warning" not in capsys.readouterr().out


def test_runs_of_a_sweep_are_a_group(store, tmp_path):
    write_json(tmp_path / "sweep" / "sweep.json", {})
    element = made(tmp_path / "sweep" / "runs" / "lr=1")
    alone = made(tmp_path / "other" / "runs" / "mine")
    train(element, [1])
    train(alone, [1])
    assert in_mlflow(element)[1].data.tags["group"] == "sweep"
    assert in_mlflow(alone)[1].data.tags["group"] == "mine"


def test_nothing_that_is_kept_holds_a_secret(store, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "a-secret-0123456789")
    run = made(tmp_path / "runs" / "mine", data={"text_field": "a-secret-0123456789"})
    train(run, [1], data={"text_field": "a-secret-0123456789"})
    kept = [path.read_bytes() for path in store.rglob("*") if path.is_file()]
    assert any(b"text_field" in content for content in kept)
    assert not any(b"a-secret" in content for content in kept)


def test_a_server_that_is_away_costs_a_warning_and_no_step(run, monkeypatch, caplog):
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.5)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # without listening, so that connections are refused
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://someone:s3cret-word@127.0.0.1:{unused.getsockname()[1]}")
        train(run, [1, 2, 3])
    assert read_metrics(run).num_rows == 3
    away, lost = [line for line in caplog.messages if line.startswith("MLflow")]
    assert away.startswith("MLflow does not answer; its values wait until it does: ")
    assert lost.startswith("MLflow gets no more steps: TimeoutError: it took no values for 0.5 s at the end")
    assert "lacks the values of steps 1 to 3" in lost


def test_a_server_that_refuses_the_run_costs_one_warning(run, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    train(run, [1])
    (refused,) = [line for line in caplog.messages if line.startswith("MLflow")]
    assert "gets no more steps: MlflowException: The filesystem tracking backend" in refused
    assert read_metrics(run).num_rows == 1


def test_a_run_without_the_address_of_a_server_is_refused(run, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    problem = (
        "tracking.trackers.mlflow needs the address of a server; export MLFLOW_TRACKING_URI=https://..., "
        "or do without it"
    )
    assert problem in validate_environment(config()).errors
    with pytest.raises(EnvironmentMismatchError) as refused:
        MetricsSinks.open(run, config(), resumed_at=0)
    assert str(refused.value) == problem


def test_where_to_look_names_the_run_and_no_password(run, monkeypatch):
    assert MLFLOW.where(run, MlflowSettings()) == ""
    write_json(record_path(run), {"run_id": "abc", "experiment_id": "7"})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://someone:word@mlflow.example/team/")
    assert MLFLOW.where(run, MlflowSettings()) == "https://mlflow.example/team/#/experiments/7/runs/abc"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:/shared/ml runs")
    assert MLFLOW.where(run, None) == "mlflow ui --backend-store-uri 'file:/shared/ml runs', run abc"
