"""A node that is slow is left out, and the run goes on without it."""

import os
from pathlib import Path

import cluster
import pytest
from waiting import eventually

from llama_core.chain import steps
from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.launch.attempts import current_attempt
from llama_core.launch.outcome import read_outcome
from llama_core.records.preflight import read_preflights
from llama_core.records.stragglers import read_stragglers

SLOW_RANK = """
import os, time
if os.environ.get("RANK") == "1":
    seconds, own_seconds = time.perf_counter, time.thread_time
    time.perf_counter = lambda: 6 * seconds()
    time.thread_time = lambda: 6 * own_seconds()
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Submit a run whose second rank takes six times as long for all that it times, wherever it is."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_RANK)
    paths = [str(tmp_path / "slow"), *filter(None, [os.getenv("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    config = RunConfig.from_mapping(
        {
            "architecture": {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 512},
            "training": {"batch_size": 8, "seq_len": 64, "steps": 3, "precision": "fp32"},
            "parallel": {"gpus": 2},
            "data": {"cache_dir": str(tmp_path / "cache")},
            "launch": {
                "launcher": "slurm",
                "device": "cpu",
                "nodes": 2,
                "slurm": {
                    "cpus_per_rank": 1,
                    "memory_gb_per_node": 3,
                    "time_limit_min": 10,
                    "options": {"exclusive": True, "exclude": "node1"},
                },
            },
            "tracking": {"tensorboard": False},
            "benchmark": {"steps": 0},
        }
    )
    handles = []

    def start(*overrides):
        handles.append(steps.submit(prepare_run(config.with_overrides(*overrides), tmp_path / "run")))
        return handles[-1]

    yield start
    for handle in handles:
        handle.cancel(grace_seconds=0)


def test_a_job_starts_again_once_without_a_node_that_is_slow(train):
    job = train("launch.preflight=exclude")
    outcome = job.wait()
    assert (outcome.status, outcome.step) == ("finished", 3), outcome
    assert [(attempt["status"], attempt["requeued"]) for attempt in outcome.attempts] == [
        ("node-failure", True),
        ("finished", False),
    ]
    first, second = read_preflights(job.run)
    slow = first.ranks[1].host
    assert first.excluded == (slow,)
    assert slow in outcome.attempts[0]["reason"]
    assert {"node1", slow}.isdisjoint(one.host for one in second.ranks)
    assert [named.rank for named in second.named] == [1]
    assert (second.excluded, second.kept) == ((), "it has started again for this before")


def test_a_job_with_a_spare_gives_a_slow_node_back_and_goes_on_without_the_queue(train):
    job = train("launch.preflight=exclude", "launch.spare_nodes=1")
    outcome = job.wait()
    assert (outcome.status, outcome.step) == ("finished", 3), outcome
    slow = read_preflights(job.run)[0].ranks[1].host
    first, _ = outcome.attempts
    assert (first["status"], first["requeued"], first["excluded"]) == ("node-failure", True, [slow])
    fields = cluster.job_fields(job.record.job_id)
    assert (fields["Restarts"], slow in cluster.hosts(fields["NodeList"])) == ("0", False)
    assert list(Path.cwd().glob("slurm_job_*_resize.*")) == []


def test_a_job_at_its_time_limit_leaves_out_the_node_that_fell_behind_while_it_trained(train):
    job = train("launch.preflight=off", "launch.stragglers=exclude", "training.steps=1000000")
    eventually(lambda: read_stragglers(job.run))
    slow = read_stragglers(job.run)[0]
    nodes = cluster.hosts(cluster.job_fields(job.record.job_id)["NodeList"])
    assert (slow.rank, slow.host) == (1, nodes[1])
    cluster.send_signal(job.record.job_id, "USR2")
    eventually(lambda: job.run.outcome.exists() and current_attempt(job.run, job.record).restart == 1)
    (attempt,) = read_outcome(job.run).attempts
    assert (attempt["status"], attempt["requeued"], attempt["excluded"]) == ("timeout", True, [slow.host])
    fields = cluster.job_fields(job.record.job_id)
    assert slow.host in cluster.hosts(fields["ExcNodeList"])
    assert slow.host not in cluster.hosts(fields["NodeList"])
