"""The everyday setup: deployments on a Prefect server, jobs in a Slurm queue."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import cluster
import pytest
import yaml
from waiting import eventually

from llama_core.launch.outcome import read_outcome
from llama_core.records.files import read_json
from llama_core.records.job import JobRecord

sys.path.append(str(Path(__file__).parents[1] / "flows"))

from serving import SECRET, Serving, slowed, workers

SMALL = {"hidden_size": 64, "num_layers": 2, "ffn_size": 128, "head_dim": 16, "vocab_size": 512}
SLURM = {"cpus_per_rank": 1, "memory_gb_per_node": 3, "time_limit_min": 10, "options": {"exclusive": True}}


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    started = Serving(tmp_path_factory.mktemp("serving"), PREFECT_LOGGING_LEVEL="INFO")  # the worker reports crashes
    yield started
    started.stop()
    for left in started.processes():
        left.kill()
    for path in started.checkout.glob("runs/*/job.json"):
        cluster.cancel(JobRecord(**read_json(path)).job_id)


@pytest.fixture(autouse=True)
def log(serving):
    """Show the last output of ``make serve`` beside a failure."""
    yield
    sys.stdout.write(serving.log_file.read_text()[-8000:])


def request(seed, steps):
    """Return a configuration of two nodes with a rank each; each test has its own ``seed``."""
    return {
        "architecture": SMALL,
        "training": {"seq_len": 32, "batch_size": 4, "steps": steps, "seed": seed, "eval_sequences": 2},
        "parallel": {"gpus": 2},
        "launch": {"launcher": "slurm", "device": "cpu", "nodes": 2, "slurm": SLURM},
    }


def job_of(run):
    return JobRecord(**read_json(run.job))


def deployed_config(serving, name):
    """Return the configuration of a deployment in ``prefect.yaml``."""
    deployments = yaml.safe_load((serving.checkout / "prefect.yaml").read_text())["deployments"]
    (config,) = (one["parameters"]["config"] for one in deployments if one["name"] == name)
    return config


def test_the_deployment_of_the_smoke_test_trains_on_two_nodes_and_its_report_arrives(serving):
    """With a smaller model, which saves minutes."""
    config = deployed_config(serving, "tiny_llama3_50m_slurm")
    del config["model"]
    flow_run = serving.deploy("train/tiny_llama3_50m_slurm", f"config={json.dumps(config | {'architecture': SMALL})}")
    run = serving.submitted(flow_run)
    assert serving.end(flow_run) == "Completed"
    assert read_outcome(run).status == "finished"
    hosts = [rank["host"] for rank in read_json(run.environment)["ranks"]]
    assert len(hosts) == 4
    assert len(set(hosts)) == 2
    assert run.report.exists()
    assert [path for path in run.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []


def test_a_job_survives_kills_of_prefect_and_is_never_submitted_twice(serving):
    flow_run = serving.run(request(seed=1, steps=100))
    run = serving.followed(flow_run)
    job = job_of(run)
    with suspended(run):
        serving.kill("prefect.engine")
        assert serving.end(flow_run) == "Crashed"
        eventually(
            lambda: "flow_runs.worker - Check whether" in serving.log_file.read_text()
        )  # it reports a crash twice
        assert serving.prefect("flow-run", "retry", flow_run).returncode == 0
        assert serving.followed(flow_run, times=2) == run
        serving.kill("worker")
        serving.kill(str(serving.checkout / "flows" / "listen.py"))
    assert serving.end(flow_run) == "Completed"
    assert job_of(run) == job
    assert [attempt["status"] for attempt in read_outcome(run).attempts] == ["finished"]
    assert run.report.exists()


@contextmanager
def suspended(run):
    """Stop a run's ranks for a while, so that it does not end meanwhile."""
    ranks = workers(run)
    for rank in ranks:
        rank.suspend()
    yield
    for rank in ranks:
        rank.resume()


@pytest.mark.nightly
def test_cancelling_a_flow_run_removes_its_job_from_the_queue(serving):
    flow_run = serving.run(request(seed=2, steps=1_000_000))
    run = slowed(serving.followed(flow_run))
    job_id = job_of(run).job_id
    assert serving.prefect("flow-run", "cancel", flow_run).returncode == 0
    assert serving.end(flow_run) == "Cancelled"
    eventually(lambda: job_id not in cluster.states())
    assert read_outcome(run).status == "cancelled"


@pytest.mark.nightly
def test_a_job_cancelled_in_slurm_shows_as_cancelled(serving):
    flow_run = serving.run(request(seed=3, steps=1_000_000))
    run = slowed(serving.followed(flow_run))
    cluster.cancel(job_of(run).job_id)
    assert serving.end(flow_run) == "Cancelled"
    assert run.report.exists()


def test_405b_on_h200_is_submitted_as_planned_and_cancelled_through_prefect(serving):
    with cluster.held_node():  # or it would start 64 ranks here
        # Rehearse one rank of one microbatch: the full plan would take many minutes here.
        config = deployed_config(serving, "llama3_405b")
        config["parallel"]["pp"] = 1
        config["training"]["batch_size"] = 16
        config["launch"]["force"] = True  # this disk has no room for a checkpoint
        flow_run = serving.deploy("train/llama3_405b", f"config={json.dumps(config)}")
        run = serving.submitted(flow_run)
        assert run.estimate.exists()
        assert run.dry_run.exists()
        fields = cluster.job_fields(job_of(run).job_id)
        assert fields["JobState"] == "PENDING"
        assert fields["NumNodes"].split("-")[0] == "8"
        assert fields["TresPerNode"] == "gres:gpu:8"
        assert serving.prefect("flow-run", "cancel", flow_run).returncode == 0
        assert serving.end(flow_run) == "Cancelled"
        eventually(lambda: job_of(run).job_id not in cluster.states())


def test_405b_on_h100_stops_at_the_gate_with_the_arithmetic(serving):
    config = {"model": "llama3_405b", "training": {"batch_size": 64}, "parallel": {"gpus": 64}}
    launch = {"launcher": "slurm", "device": "cuda", "gpu_type": "h100", "nodes": 8}
    flow_run = serving.run(config | {"launch": launch})
    assert serving.end(flow_run) == "Failed"
    assert "16 bytes x 405.85e9 parameters / 64 = 101.5 GB per device" in serving.state(flow_run)["message"]
    assert cluster.jobs_named("llama3_405b") == []
