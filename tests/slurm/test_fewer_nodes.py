"""An elastic job of fake workers; one that trains and loses a node is in ``test_attempts.py``."""

import sys

import cluster
import pytest
from launch_harness import FAKE_WORKER, Job

from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.launch.jobs import submission
from llama_core.runs.loading import load_config

SMALL = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 512}


@pytest.fixture
def submit(tmp_path):
    """Submit an elastic job that only some nodes of the cluster may take, with a rank on each; cancel it at the end."""
    handles = []

    def start(behaviour, *, allowed, nodes, min_nodes):
        slurm = {"cpus_per_rank": 1, "memory_gb_per_node": 2, "time_limit_min": 5}
        slurm["options"] = {"exclusive": True, "exclude": cluster.all_but(*allowed)}
        launch = {"launcher": "slurm", "device": "cpu", "nodes": nodes, "min_nodes": min_nodes, "slurm": slurm}
        config = {
            "architecture": SMALL,
            "training": {"seq_len": 32, "batch_size": 8, "steps": 3},
            "parallel": {"gpus": nodes, "tp": 1, "pp": 1, "cp": 1},
            "launch": launch,
        }
        run = prepare_run(RunConfig.from_mapping(config), tmp_path / "run")
        cluster.wait_until_idle(*allowed)
        worker = (sys.executable, str(FAKE_WORKER), behaviour)
        handles.append(submission.submit(run, load_config(run), nodes, worker=worker))
        return Job(handles[-1], nodes)

    yield start
    for handle in handles:
        handle.cancel(grace_seconds=0)


def test_a_job_starts_on_the_most_of_its_nodes_that_its_batch_can_be_divided_by(submit):
    job = submit("finish", allowed=(4, 5, 6), nodes=4, min_nodes=2)
    assert job.handle.wait().status == "finished"
    environments = [job.worker(rank)["environment"] for rank in range(2)]
    assert [(env["SLURMD_NODENAME"], env["LOCAL_RANK"]) for env in environments] == [("node4", "0"), ("node5", "0")]
    assert {(env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) for env in environments} == {
        ("2", "1", "node4")
    }
