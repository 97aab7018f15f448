"""The flow on a real Prefect server, and the deployments as Prefect reads them."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from prefect.exceptions import ParameterTypeError
from waiting import eventually

from flows.train import train
from llama_core.launch.outcome import read_outcome
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_metrics
from llama_core.runs.stopping import cancel, stopped

pytestmark = pytest.mark.xdist_group("flow")

ROOT = Path(__file__).parents[2]
TASKS = {
    "prepare-run",
    "validate-environment",
    "estimate-memory",
    "dry-run",
    "submit",
    "train",
    "evaluate",
    "benchmark",
    "report",
}
ARTIFACTS = {"plan", "environment", "memory-estimate", "dry-run", "run", "outcome", "benchmark", "report"}


@pytest.fixture(scope="module")
def prefect(tmp_path_factory):
    """Run a program with its own Prefect home, on a server that lives as long as the program."""
    home = tmp_path_factory.mktemp("prefect")
    for name in ("tasks", "flows", "reports", "training", "config"):  # a user's own modules, with common names
        (home / f"{name}.py").write_text("raise ImportError('somebody has a module of this name')")
    environment = os.environ | {
        "PREFECT_HOME": str(home),
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "DO_NOT_TRACK": "1",
        "XDG_CACHE_HOME": str(home / "cache"),
    }

    def run(*command, cwd=ROOT):
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)

    run.home, run.environment = home, environment
    return run


CONFIG = """
architecture: {hidden_size: 64, num_layers: 2, ffn_size: 128, head_dim: 16, vocab_size: 512}
training: {seq_len: 32, batch_size: 2, steps: 6, eval_sequences: 2}
launch: {device: cpu}
"""


@pytest.fixture(scope="module")
def flow_run(prefect):
    (prefect.home / "run.yaml").write_text(CONFIG)
    command = ("train", "--flow", "--config", str(prefect.home / "run.yaml"), "--run-dir", str(prefect.home / "run"))
    ended = prefect(sys.executable, "-m", "training_infra.cli", *command, cwd=prefect.home)
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.mark.wide
def test_the_flow_leaves_a_finished_run_and_its_report(prefect, flow_run):
    run = RunDirectory(prefect.home / "run")
    assert read_outcome(run).status == "finished"
    assert read_metrics(run).num_rows == 6
    assert run.report.exists()


@pytest.mark.wide
def test_the_terminal_shows_a_line_for_each_step_and_nothing_from_prefect(flow_run):
    assert steps_said(flow_run) == [
        "run",
        "model",
        "validate",
        "data",
        "batch",
        "plan",
        "estimate",
        "dry-run",
        "submit",
        "train",
        "benchmark",
        "step",
        "goodput",
        "metrics",
        "report",
    ]
    assert flow_run.stderr == ""


FACADE = """
import sys
from pathlib import Path
from llama_core.config.run import RunConfig
from training_infra import LlamaTrainingOrchestrator

one = LlamaTrainingOrchestrator("tiny_llama3_50m")
one.config = RunConfig.load(Path("run.yaml"))
one.launch_training(run_dir=sys.argv[1])
"""


@pytest.mark.wide
@pytest.mark.parametrize(
    "front",
    [("-m", "training_infra.cli", "train", "--config", "run.yaml", "--run-dir"), ("-c", FACADE)],
    ids=["command", "facade"],
)
def test_every_entry_point_prints_trains_and_records_the_same_as_the_flow(prefect, flow_run, front):
    other = prefect(sys.executable, *front, front[0].strip("-"), cwd=prefect.home)
    assert other.returncode == 0, other.stderr
    assert steps_said(other) == steps_said(flow_run)
    flow, run = RunDirectory(prefect.home / "run"), RunDirectory(prefect.home / front[0].strip("-"))
    assert kept(run) == kept(flow) - {flow.flow_run.name}
    assert losses(run) == losses(flow)


def steps_said(ended):
    """Return the names before the lines, without the note that the machine was shared while steps were timed."""
    names = dict.fromkeys(line.split()[0] for line in ended.stdout.splitlines())
    return [name for name in names if name != "note"]


def kept(run):
    folders = {path.name for path in run.path.iterdir()}
    return folders | {path.name for path in run.path.rglob("*") if path.suffix in {".json", ".parquet", ".yaml"}}


def losses(run):
    return read_metrics(run).column("loss").to_pylist()


@pytest.mark.wide
def test_prefect_has_recorded_every_task_and_artifact(prefect, flow_run):
    """Even on a server that ends with the run."""
    flows = records(prefect, "SELECT name, state_name, parameters FROM flow_run")
    tasks = records(prefect, "SELECT name, state_name FROM task_run")
    artifacts = records(prefect, "SELECT key FROM artifact")
    ((name, state, parameters),) = flows
    assert (name, state, json.loads(parameters)["config"]["training"]["steps"]) == ("run", "Completed", 6)
    assert {name.rsplit("-", 1)[0]: task_state for name, task_state in tasks} == dict.fromkeys(TASKS, "Completed")
    assert {key for (key,) in artifacts} == ARTIFACTS


@pytest.mark.wide
def test_the_log_of_the_flow_run_holds_the_lines_of_the_terminal_and_nothing_else(prefect, flow_run):
    logged = records(prefect, "SELECT message FROM log ORDER BY timestamp")
    assert [line for (line,) in logged] == flow_run.stdout.splitlines()


@pytest.mark.wide
def test_the_page_of_the_flow_run_begins_with_the_last_step_the_directory_and_the_report(prefect, flow_run):
    run = RunDirectory(prefect.home / "run")
    ((percent, description),) = records(prefect, "SELECT data, description FROM artifact WHERE task_run_id IS NULL")
    assert percent == 100
    assert description.startswith("finished: step 6/6  loss ")
    assert f"`{run.path}`" in description
    assert f"]({run.report.as_uri()})" in description


def records(prefect, query):
    with closing(sqlite3.connect(prefect.home / "prefect.db")) as database:
        return database.execute(query).fetchall()


@pytest.mark.nightly
def test_a_wrong_request_is_one_line_under_prefect_too(prefect):
    command = ("train", "--flow", "--device", "cpu", "--data", "no.jsonl", "--run-dir", "nowhere")
    ended = prefect(sys.executable, "-m", "training_infra.cli", *command, cwd=prefect.home)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: data source 'no.jsonl' does not exist")
    assert ended.stderr.count("\n") == 1
    assert not (prefect.home / "nowhere").exists()


@pytest.mark.wide
def test_an_interrupt_from_the_terminal_reaches_the_job_and_not_the_server(prefect):
    """Ctrl-C goes to every process of the terminal's foreground group."""
    command = [sys.executable, "-m", "training_infra.cli", "train", "--flow", "--run-dir", "interrupted"]
    command += ["--config", str(prefect.home / "run.yaml"), "--steps", "100000"]
    (prefect.home / "run.yaml").write_text(CONFIG)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=prefect.home, env=prefect.environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    run = RunDirectory(prefect.home / "interrupted")
    try:
        eventually(run.heartbeat.exists)
        os.killpg(process.pid, signal.SIGINT)
        said, errors = process.communicate()
        assert process.returncode == 130, said + errors
    finally:
        process.kill()
        cancel(run)
    assert errors == f"{stopped(run, read_outcome(run)).args[0]}\n".replace(str(run.path), "interrupted")
    assert run.report.exists()


def test_the_parameters_of_the_flow_make_a_form():
    form = json.dumps(train.parameters.model_dump())
    for text in ("sequences per optimizer step", "Peak learning rate", "continue the run in ``run_dir``"):
        assert text in form
    assert "Most questions of each task" in form


def test_a_deployment_run_is_given_its_evaluation_in_the_configuration_as_the_docs_say():
    (written,) = re.findall(r"-p config='(\{[^']*\"evaluation\"[^']*\})'", (ROOT / "docs" / "prefect.md").read_text())
    given = json.loads(written)
    (deployed,) = [
        one["parameters"]["config"]
        for one in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
        if one["name"] == "llama3_8b"
    ]
    assert given == deployed | {"evaluation": given["evaluation"]}
    config = train.validate_parameters({"config": given})["config"]
    assert (config.evaluation.tasks, config.evaluation.limit) == (("hellaswag", "arc_easy"), 500)
    assert config.evaluation.every_tokens == 10**10
    with pytest.raises(ParameterTypeError, match=r"config\.evaluation\.task: Extra inputs"):
        train.validate_parameters({"config": deployed | {"evaluation": {"task": ["hellaswag"]}}})
