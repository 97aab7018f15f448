"""``make serve`` as people use it: runs from another terminal, killed, cancelled and refused runs, and shutdown."""

import json
from datetime import UTC, datetime

import httpx
import pytest
from serving import ROOT, SECRET, Serving, slowed, until

from flows.automations import LOST_FLOW_RUNS
from llama_core.launch.jobs import submission
from llama_core.launch.outcome import read_outcome

pytestmark = [pytest.mark.wide, pytest.mark.xdist_group("serve")]

TINY = {
    "architecture": {"hidden_size": 64, "num_layers": 2, "ffn_size": 128, "head_dim": 16, "vocab_size": 512},
    "training": {"seq_len": 32, "batch_size": 2, "steps": 6, "eval_sequences": 2},
    "launch": {"device": "cpu"},
}

QUICKLY_LOST_SECONDS = 10
"""The shortest time without a heartbeat that Prefect's server can be asked to wait for."""


def endless(seed):
    """Return the configuration of a run that ends only when told to."""
    return TINY | {"training": TINY["training"] | {"steps": 1_000_000, "seed": seed}}


LINES = {"run", "model", "validate", "data", "batch", "plan", "estimate", "dry-run", "submit", "train", "benchmark"}
LINES |= {"step", "goodput", "metrics", "report"}


def stop_of(run, flow_run):
    """Return the line of a run whose flow run has been cancelled."""
    step = read_outcome(run).step
    return f"stopped after step {step}, with a checkpoint of it; continue with: prefect flow-run retry {flow_run}"


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    started = Serving(tmp_path_factory.mktemp("serving"))
    yield started
    started.stop()
    for left in started.processes():
        left.kill()


def test_a_run_from_another_terminal_finishes_and_writes_down_no_secret(serving):
    (worker,) = serving.processes("worker")
    assert worker.environ()["WANDB_API_KEY"] == SECRET
    flow_run = serving.deploy("train/tiny_llama3_50m", f"config={json.dumps(TINY)}")
    assert serving.end(flow_run) == "Completed"
    run = serving.followed(flow_run)
    assert run.report.exists()
    assert serving.owner.get(f"/flow_runs/{flow_run}").json()["name"] == run.name
    said = {line.split()[0] for line in serving.log(flow_run, last="report")}
    assert said - {"note"} == LINES  # the machine may have been shared
    written = [path for folder in (serving.home, run.path) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    password = serving.auth_string.encode()
    assert [path for path in written if password in path.read_bytes()] == []
    assert (serving.checkout / "prefect.toml").stat().st_mode & 0o077 == 0


def test_every_deployment_is_made(serving):
    made = {one["name"] for one in serving.owner.post("/deployments/filter", json={}).json()}
    assert made >= {path.stem for path in (ROOT / "configs").glob("*ll*.yaml")}


def test_a_flow_run_can_be_cancelled_without_a_worker(serving):
    flow_run = serving.run(endless(seed=1))
    run = slowed(serving.followed(flow_run))
    serving.kill("worker")
    assert serving.prefect("flow-run", "cancel", flow_run).returncode == 0
    assert serving.end(flow_run) == "Cancelled"
    assert read_outcome(run).status == "cancelled"
    assert serving.state(flow_run)["message"] == stop_of(run, flow_run)


def test_a_job_cancelled_outside_shows_as_cancelled_and_cancelling_the_next_flow_run_ends_its_job(serving):
    first = serving.run(endless(seed=2))
    run = slowed(serving.followed(first))
    submission.attach(run).cancel()
    assert serving.end(first) == "Cancelled"
    assert read_outcome(run).reason in serving.state(first)["message"]
    assert run.report.exists()
    second = serving.run(endless(seed=2), resume=True)
    assert serving.followed(second) == run
    assert serving.prefect("flow-run", "cancel", second).returncode == 0
    assert serving.end(second) == "Cancelled"
    assert submission.attach(run) is None
    lines = serving.log(second, last="stopped")
    assert lines[-1] == stop_of(run, second)
    (page,) = serving.pages(second)
    assert page.startswith(f"cancelled: step {read_outcome(run).step}/1000000  loss ")
    assert not [line for line in lines if "crash" in line.lower() or "Finished in state" in line]
    assert [attempt["status"] for attempt in read_outcome(run).attempts] == ["cancelled", "cancelled"]


def test_somebody_without_the_password_gets_no_shell(serving, tmp_path):
    """Every user of the machine reaches the port, and a flow run can bring its own command."""
    with httpx.Client(base_url=serving.url) as stranger:
        named = {"deployments": {"name": {"any_": ["tiny_llama3_50m"]}}}
        found = stranger.post("/deployments/filter", json=named)
        command = {"job_variables": {"command": f"touch {tmp_path / 'shell'}"}}
        for deployment in found.json() if found.is_success else []:
            assert stranger.post(f"/deployments/{deployment['id']}/create_flow_run", json=command).is_success
            until((tmp_path / "shell").exists)
    assert (found.status_code, (tmp_path / "shell").exists()) == (401, False)


@pytest.mark.parametrize(
    ("parameter", "problem"),
    [
        ('config={"training": {"batchsize": 1}}', "'batchsize' was unexpected"),
        ('config={"model": 3}', "3 is not of type 'string'"),
        ("confg={}", "not found on the deployment: 'confg'"),
    ],
)
def test_a_wrong_parameter_is_refused_before_anything_is_scheduled(serving, parameter, problem):
    told = serving.prefect("deployment", "run", "train/tiny_llama3_50m", "-p", parameter)
    assert told.returncode == 1
    assert problem in told.stdout + told.stderr
    assert "UUID" not in told.stdout


def test_the_nightly_sweep_is_planned_for_two_oclock(serving):
    """By the server's scheduler, which needs up to a minute after its start."""
    nightly, runs = {"deployments": {"name": {"any_": ["tiny_llama3_50m_throughput"]}}}, []
    until(lambda: runs.extend(serving.owner.post("/flow_runs/filter", json=nightly).json()) or runs)
    assert {run["state"]["type"] for run in runs} == {"SCHEDULED"}
    assert {run["expected_start_time"][11:16] for run in runs} == {"02:00"}


def test_a_heartbeat_after_the_end_leaves_a_flow_run_as_it_ended(serving):
    """One that arrives late makes the automation wait for another one, which never comes."""
    started = datetime.now(UTC)
    quick = LOST_FLOW_RUNS.model_dump(mode="json") | {"name": "lost after seconds"}
    quick["trigger"] |= {"within": QUICKLY_LOST_SECONDS}
    made = serving.owner.post("/automations/", json=quick)
    assert made.is_success, made.text
    ended, lost = (serving.flow_run(state) for state in ("COMPLETED", "RUNNING"))
    for flow_run in (ended, lost):
        serving.beat(flow_run)
    assert serving.end(lost) == "Crashed"  # by the automation: both heartbeats have reached it
    acted = {"event": {"prefix": ["prefect.automation.action."]}, "occurred": {"since": started.isoformat()}}
    until(lambda: len(serving.owner.post("/events/filter", json={"filter": acted}).json()["events"]) >= 4)
    assert serving.state(ended)["name"] == "Completed"


def test_an_interrupt_stops_everything_and_leaves_a_resumable_run(serving):
    """The last test here, since it stops the server that the others use."""
    run = serving.followed(serving.run(endless(seed=3)))
    serving.stop()
    assert serving.process.returncode == 0
    printed = serving.log_file.read_text().splitlines()
    assert {line.split()[0] for line in printed} == {"password", "serve", "next", "stopping"}
    assert serving.processes() == []
    assert not (serving.checkout / "prefect.toml").exists()
    assert read_outcome(run).status == "cancelled"
    assert run.checkpoints.exists()
