"""Prefect's database goes away while a flow follows a job, and comes back."""

import os
import signal
import subprocess
import sys
import time

import pytest
from disks import is_stopped, pid_of
from faulty_run import INJECTION, Fault, FaultyRun
from postgresql import PostgreSQL
from waiting import eventually

from llama_core.launch.jobs.submission import attach
from llama_core.launch.places import submission_folders
from llama_core.records.files import read_json

pytestmark = pytest.mark.root

AWAY_SECONDS = 20


@pytest.fixture
def database(tmp_path):
    """Run a PostgreSQL server."""
    folder = tmp_path / "postgresql"
    folder.mkdir()
    server = PostgreSQL(folder)
    yield server
    server.kill()


@pytest.fixture
def run(tmp_path, texts, token_cache):
    """A run that is ready to start."""
    return FaultyRun(tmp_path, texts, token_cache=token_cache)


def followed(run, database, fault):
    """Start a flow, on its own server with this database, that trains the run; return its process."""
    run.attempts = 1
    others = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    prefect = {
        "PREFECT_HOME": str(run.folder / "home"),
        "PREFECT_API_DATABASE_CONNECTION_URL": database.url,
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "INJECTED_FAULT": fault.to_json(run.folder / "proof-1"),
        "PYTHONPATH": os.pathsep.join([str(INJECTION), *filter(None, [os.getenv("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "training_infra.cli", "train", "--flow", "--resume", f"--run-dir={run.run.path}"]
    with (run.folder / "flow.log").open("wb") as log:
        return subprocess.Popen(command, env=others | prefect, stdout=log, stderr=log)


def held(run, flow, number):
    """Wait until the fault has stopped rank 0 for the ``number``-th time, from 0; return its process id."""
    while (pid := pid_of(run, number)) is None or not is_stopped(pid):
        assert flow.poll() is None, (run.folder / "flow.log").read_text()
        time.sleep(0.05)
    return pid


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(phase, marks=pytest.mark.fault("away for 20 s", phase=phase))
        for phase in ("steps", "end of the job")
    ],
)
def test_a_flow_whose_database_goes_away_follows_its_job_to_the_end(phase, run, database, undisturbed, promise):
    flow = followed(run, database, Fault("forward", {"signal": "SIGSTOP"}, step=3, times=2))
    try:
        pid = held(run, flow, 0)
        database.kill()
        os.kill(pid, signal.SIGCONT)
        pid = held(run, flow, 1)  # a step later
        if phase == "end of the job":
            os.kill(pid, signal.SIGCONT)
            eventually(run.run.outcome.exists)
        time.sleep(AWAY_SECONDS)
        database.start()
        if phase == "steps":
            os.kill(pid, signal.SIGCONT)
        assert flow.wait() == 0, (run.folder / "flow.log").read_text()
    finally:
        if (job := attach(run.run)) is not None:
            job.cancel(grace_seconds=0)
        flow.terminate()
        flow.wait()
    assert read_json(run.run.outcome)["status"] == "finished"
    assert len(submission_folders(run.run.logs)) == 1
    assert database.ask("select state_name from flow_run") == "Completed\n"
    run.equals(undisturbed)
    promise("finished; one job; the flow run is Completed; equal")
