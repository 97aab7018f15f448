import socket
import sys
from contextlib import ExitStack, contextmanager

import pytest
from launch_harness import FAKE_WORKER, Job, ending_jobs

from llama_core.config.run import RunConfig
from llama_core.launch.jobs import submission
from llama_core.launchers.registry import LAUNCHERS
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.job import JobRecord


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


@pytest.fixture(scope="module", params=[launcher.name for launcher in LAUNCHERS.built_in() if launcher.is_here])
def config(request):
    """A configuration with each launcher whose ranks run on this machine."""
    return RunConfig.from_mapping({"launch": {"device": "cpu", "launcher": request.param}})


@pytest.fixture
def submit(run, config):
    """Submit a job of fake workers, and kill it at the end of the test."""
    with submitting(run, config) as start:
        yield start


@pytest.fixture(scope="module")
def submit_for_all(tmp_path_factory, config):
    """Submit a job of fake workers, in a new run if none is given, for tests of a module that only look at it."""
    with ExitStack() as jobs:

        def start(behaviour, *, run=None, **options):
            if run is None:
                run = RunDirectory(tmp_path_factory.mktemp("runs") / "run")
                run.create()
            return jobs.enter_context(submitting(run, config))(behaviour, **options)

        yield start


@pytest.fixture(scope="module")
def at_work(submit_for_all):
    """A running job, which no test may end."""
    job = submit_for_all("serve")
    job.worker()
    return job


@contextmanager
def submitting(run, config):
    """Yield a function that submits a job of fake workers; the jobs are killed at the end."""
    with ending_jobs() as handles:

        def start(behaviour, *, num_ranks=1, only=None):
            worker = (sys.executable, str(FAKE_WORKER), behaviour)
            handles.append(submission.submit(run, config, num_ranks, only, worker=worker))
            return Job(handles[-1], num_ranks)

        yield start


@pytest.fixture
def job(run):
    """A recorded job, submitted a thousand seconds after the epoch."""
    record = JobRecord("local", "4242", socket.gethostname(), "1970-01-01T00:16:40.000000+00:00")
    write_json(run.job, record)
    return record
