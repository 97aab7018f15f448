import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "launch"))  # for the fake worker and its harness

import cluster
from launch_harness import FAKE_WORKER, Job

from llama_core.config.run import RunConfig
from llama_core.launch.jobs import slurm, submission
from llama_core.records.directory import RunDirectory

POLL_SECONDS = 0.5
"""Between two questions to this cluster's controller, which has no other users."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marker
def pytest_collection_modifyitems(items):
    """Leave all of these tests to one process, as they mostly wait, and others to those that keep the cores busy."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("launcher"))


@pytest.fixture(scope="session", autouse=True)
def a_cluster():
    """A running cluster; if there was none, it is brought up for the tests and taken down after them."""
    missing = cluster.why_not_here()
    if missing and "CI" not in os.environ:
        pytest.skip(missing)
    with cluster.brought_up():
        yield


@pytest.fixture(scope="module", autouse=True)
def _frequent_questions():
    with pytest.MonkeyPatch.context() as patch:
        often = replace(slurm.LAUNCHER.tasks, poll_seconds=POLL_SECONDS)
        patch.setattr(slurm, "LAUNCHER", replace(slurm.LAUNCHER, tasks=often))
        patch.setattr(slurm, "FIRST_POLL_SECONDS", POLL_SECONDS)
        patch.setattr(slurm, "SLOWEST_POLL_SECONDS", POLL_SECONDS)
        patch.setattr(slurm.SlurmJobHandle, "poll_seconds", POLL_SECONDS)
        yield


@pytest.fixture(autouse=True)
def _turn(a_cluster, request):
    """Run a test that requests ``alone`` when no other test process uses the cluster."""
    with cluster.to_itself(wanted="alone" in request.fixturenames):
        yield


@pytest.fixture
def alone():
    """Requested by a test that takes something from the whole cluster, such as its controller."""


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


@pytest.fixture
def submit(run):
    """Submit a job of fake workers to Slurm, on its own nodes, and cancel it at the end of the test.

    Takes settings of ``launch.slurm``.
    """
    handles = []

    def start(behaviour, *, run=run, nodes=2, ranks_per_node=2, device="cpu", **slurm):
        modest = {"cpus_per_rank": 1, "memory_gb_per_node": 2, "time_limit_min": 5, "options": {"exclusive": True}}
        launch = {"launcher": "slurm", "device": device, "nodes": nodes, "slurm": modest | slurm}
        num_ranks = nodes * ranks_per_node
        config = RunConfig.from_mapping({"launch": launch, "parallel": {"gpus": num_ranks}})
        worker = (sys.executable, str(FAKE_WORKER), behaviour)
        handles.append(submission.submit(run, config, num_ranks, worker=worker))
        return Job(handles[-1], num_ranks)

    yield start
    for handle in handles:
        handle.cancel(grace_seconds=0)
