"""A node that is slow before the first step is left out, and the run goes on without it."""

import os

import pytest

from llama_core.chain import steps
from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.records.preflight import read_preflights

SLOW_RANK = """
import os, time
if os.environ.get("RANK") == "1":
    seconds = time.perf_counter
    time.perf_counter = lambda: 6 * seconds()
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
                "preflight": "exclude",
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
    handle = steps.submit(prepare_run(config, tmp_path / "run"))
    yield handle
    handle.cancel(grace_seconds=0)


def test_a_job_starts_again_once_without_a_node_that_is_slow(train):
    outcome = train.wait()
    assert (outcome.status, outcome.step) == ("finished", 3), outcome
    assert [(attempt["status"], attempt["requeued"]) for attempt in outcome.attempts] == [
        ("node-failure", True),
        ("finished", False),
    ]
    first, second = read_preflights(train.run)
    slow = first.ranks[1].host
    assert first.excluded == (slow,)
    assert slow in outcome.attempts[0]["reason"]
    assert {"node1", slow}.isdisjoint(one.host for one in second.ranks)
    assert [named.rank for named in second.named] == [1]
    assert (second.excluded, second.kept) == ((), "it has started again for this before")
