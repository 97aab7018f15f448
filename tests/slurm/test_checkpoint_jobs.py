"""Checkpoints are evaluated in Slurm jobs of their own while a run trains, which does not notice."""

import json

import cluster
import pytest
from test_attempts import history
from waiting import eventually

from llama_core.chain import steps
from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.evaluation.held_out import evaluate
from llama_core.evaluation.questions import Devices
from llama_core.records.checkpoints import checkpoint_name, checkpoint_step, list_checkpoints
from llama_core.records.evaluation_jobs import read_attempt
from llama_core.records.evaluations import read_scores
from llama_core.runs.loading import load_config

STEPS = 800


@pytest.fixture
def train(tmp_path):
    """Submit a run of one rank, and cancel it at the end."""
    law = tmp_path / "law.jsonl"
    law.write_text("\n".join(json.dumps({"text": f"{number}: the court held the law. " * 5}) for number in range(50)))
    handles = []

    def start(name, **evaluation):
        config = RunConfig.from_mapping(
            {
                "architecture": {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 512},
                "training": {"batch_size": 8, "seq_len": 64, "steps": STEPS, "precision": "fp32"}
                | {"checkpoint_every": 200, "keep_checkpoints": 1},
                "data": {"cache_dir": str(tmp_path / "cache")},
                "launch": {"launcher": "slurm", "device": "cpu"}
                | {"slurm": {"cpus_per_rank": 1, "memory_gb_per_node": 3, "time_limit_min": 10}},
                "tracking": {"tensorboard": False},
                "benchmark": {"steps": 0},
                "evaluation": {"data": {"law": str(law)}, "time_limit_min": 5} | evaluation if evaluation else {},
            }
        )
        run = prepare_run(config, tmp_path / name)
        handles.append(steps.submit(run))
        return handles[-1]

    yield start
    for handle in handles:
        handle.cancel(grace_seconds=0)


def has_begun(run, attempt):
    """Return whether a process of an evaluation has written something."""
    return any(log.stat().st_size for log in run.evaluations.rglob(f"{attempt.job_id}_0_log.out"))


def test_every_checkpoint_is_evaluated_though_one_evaluation_is_killed(train):
    alone = train("alone")
    assert alone.wait().status == "finished"
    handle = train("evaluated", pp=2, nodes=2)
    run = handle.run
    first = run.checkpoints / checkpoint_name(200)
    attempt = eventually(lambda: first.exists() and read_attempt(run, first))
    eventually(lambda: has_begun(run, attempt))  # else Slurm suspends the job, but no process of it
    cluster.suspend(attempt.job_id)  # so that it ends neither before nor after a moment that a machine's speed decides
    eventually(lambda: checkpoint_step(list_checkpoints(run)[-1]) >= 600)
    assert first in list_checkpoints(run)  # it waits
    cluster.cancel(attempt.job_id)
    assert handle.wait().status == "finished"
    scores = steps.evaluate(run)
    assert [(score.step, score.task) for score in scores] == [(step, "law") for step in (200, 400, 600, 800)]
    assert [score.tokens for score in scores] == [step * 8 * 64 for step in (200, 400, 600, 800)]
    assert scores == read_scores(run)
    # the checkpoint is gone if its second evaluation ended before training did
    assert json.loads((run.evaluations / "jobs" / f"{first.name}.json").read_text())["attempt"] == 2
    logs = [log.read_text() for log in run.evaluations.rglob("*_log.out")]
    assert sum("on 2 cpu processes (pp=2)" in log for log in logs) >= len(scores)
    asked = load_config(run).evaluation
    (of_one,) = evaluate(run.path, asked.data, steps=STEPS, num_sequences=asked.sequences, devices=Devices("cpu"))
    assert scores[-1].value == pytest.approx(of_one.rows.mean, rel=1e-6)
    assert history(run) == history(alone.run)
