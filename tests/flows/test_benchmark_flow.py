"""The flow of a sweep on a Prefect server that lives as long as the flow run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from waiting import eventually

from llama_core.chain import steps
from llama_core.launch.jobs import submission
from llama_core.launch.outcome import read_outcome
from llama_core.records.files import read_json, write_json
from llama_core.sweep import steps as sweeps
from llama_core.sweep.directory import SweepDirectory, is_timed
from llama_core.sweep.grid import SweepConfig
from tasks.sweep import cancel_sweep

pytestmark = [pytest.mark.wide, pytest.mark.xdist_group("benchmark flow")]

ROOT = Path(__file__).parents[2]
FAKE_WORKER = (sys.executable, str(ROOT / "tests" / "launch" / "fake_worker.py"), "serve")
NAMES = ["microbatch_size=1", "microbatch_size=2"]
PROGRAM = """
import json
from pathlib import Path
from flows.benchmark import benchmark
from llama_core.sweep.grid import SweepConfig

config = SweepConfig.from_mapping({
    "name": "tiny",
    "base": {
        "architecture": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 64,
                         "head_dim": 16, "vocab_size": 512},
        "training": {"seq_len": 16, "batch_size": 4, "steps": 1},
        "launch": {"device": "cpu"},
        "benchmark": {"warmup_steps": 1, "steps": 2},
        "tracking": {"tensorboard": False},
    },
    "grid": {"parallel.microbatch_size": [1, 2, 3]},
})
report = benchmark(config)
print(json.dumps({"report": str(report.resolve())}))
"""
AGAIN = """
from dataclasses import replace
from pathlib import Path
from flows.benchmark import benchmark
from llama_core.errors import RegressionError
from llama_core.sweep.directory import SweepDirectory, read_record
from llama_core.sweep.history import read_history, write_part
from llama_core.sweep.judgement import Judgement

(sweep,) = map(SweepDirectory, Path("sweeps").glob("tiny-*"))
folder = Path(Judgement.read(sweep.history).folder)
for night, result in enumerate(6 * read_history(folder)):
    faster = tuple((1000 + night) * rate for rate in result.tokens_per_second)
    ended_at = f"2026-01-{night + 1:02d}T02:00:00+00:00"
    write_part(folder / f"part-{night}.parquet", [replace(result, ended_at=ended_at, tokens_per_second=faster)])
try:
    benchmark(read_record(sweep).sweep_config, sweep_dir=sweep.path, resume=True, fail_on_regression=True)
except RegressionError as error:
    print(error)
"""


def run_flow(home, program):
    """Run a program with its own Prefect server, and return its last line."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "DO_NOT_TRACK": "1",
        "XDG_CACHE_HOME": str(home / "cache"),
    }
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=home, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The directory of a sweep that the flow has run, in its own folder."""
    home = tmp_path_factory.mktemp("prefect")
    return SweepDirectory(Path(json.loads(run_flow(home, PROGRAM))["report"]).parent)


def test_the_flow_times_every_element_and_leaves_one_report(sweep):
    assert sweep.path.parent.name == "sweeps"
    assert [is_timed(sweep.run(name)) for name in NAMES] == [True, True]
    assert "2 of 2 timed" in sweep.report.read_text()


def test_the_sweep_knows_its_flow_run_so_that_a_retry_finds_it(sweep):
    assert len(read_json(sweep.path / "flow_run.json")["flow_runs"]) == 1


@pytest.mark.nightly
def test_a_flow_run_whose_elements_got_slower_fails_with_their_names(sweep):
    told = run_flow(sweep.path.parents[1], AGAIN)
    assert told.startswith("slower than before: microbatch size 1 is 99.9% below")
    assert "In short" in sweep.report.read_text()


@pytest.fixture
def at_work(tmp_path, monkeypatch):
    """A sweep with one element running on this machine, the flow run that follows it, and the element's job."""
    monkeypatch.chdir(tmp_path)
    base = {"training": {"seq_len": 16, "batch_size": 1}, "launch": {"device": "cpu"}}
    config = SweepConfig.from_mapping({"name": "tiny", "base": base, "grid": {"parallel.microbatch_size": [1]}})
    sweep, flow_run = sweeps.prepare(config), FlowRun(flow_id=uuid4())
    write_json(sweep.path / "flow_run.json", {"flow_runs": [str(flow_run.id)]})
    run = sweep.run("microbatch_size=1")
    job = submission.submit(run, steps.load_config(run), 1, "benchmark", worker=FAKE_WORKER)
    eventually(run.heartbeat.exists)
    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield sweep, flow_run, job
    job.cancel(grace_seconds=0)


def test_cancelling_the_flow_run_cancels_the_jobs_and_leaves_a_report(at_work):
    sweep, flow_run, job = at_work
    cancel_sweep(None, flow_run, None)
    assert read_outcome(job.run).status == "cancelled"
    assert "0 of 1 timed" in sweep.report.read_text()


def test_a_sweep_followed_by_another_flow_run_keeps_running(at_work):
    sweep, flow_run, job = at_work
    write_json(sweep.path / "flow_run.json", {"flow_runs": [str(flow_run.id), str(uuid4())]})
    cancel_sweep(None, flow_run, None)
    assert job.is_running()


def test_the_parameters_of_the_flow_make_a_form():
    program = "import json; from flows.benchmark import benchmark; print(json.dumps(benchmark.parameters.model_dump()))"
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for text in ("Values to try for keys", "Combinations to leave out", "the newest unfinished one of this name"):
        assert text in told
