import socket
import sys

import pytest
from launch_harness import FAKE_WORKER, Job

from llama_core.config.run import LaunchConfig, RunConfig
from llama_core.launch.jobs import submission
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.job import JobRecord


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


@pytest.fixture(params=[name for name in submission.LAUNCHERS if LaunchConfig(launcher=name).is_here])
def config(request):
    """A configuration with each launcher whose ranks run on this machine."""
    return RunConfig.from_mapping({"launch": {"device": "cpu", "launcher": request.param}})


@pytest.fixture
def submit(run, config):
    """Submit a job of fake workers, and kill it at the end of the test."""
    handles = []

    def start(behaviour, *, num_ranks=1, only=None):
        worker = (sys.executable, str(FAKE_WORKER), behaviour)
        handles.append(submission.submit(run, config, num_ranks, only, worker=worker))
        return Job(handles[-1], num_ranks)

    yield start
    for handle in handles:
        handle.cancel(grace_seconds=0)


@pytest.fixture
def job(run):
    """A recorded job, submitted a thousand seconds after the epoch."""
    record = JobRecord("local", "4242", socket.gethostname(), "1970-01-01T00:16:40.000000+00:00")
    write_json(run.job, record)
    return record
