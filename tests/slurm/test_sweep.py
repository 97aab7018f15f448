"""Sweeps as job arrays; the elements of the first test are real runs of a tiny model, the others fake workers."""

import sys
from collections import Counter

import cluster
import pytest
from launch_harness import FAKE_WORKER
from waiting import eventually

from llama_core.errors import StoppedError
from llama_core.records.files import read_json
from llama_core.sweep import steps as sweeps
from llama_core.sweep.directory import is_timed, read_record, unfinished
from llama_core.sweep.grid import SweepConfig
from training_reports.sweep import write_report

MODEL = {
    "hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 64, "head_dim": 16,
    "vocab_size": 512,
}  # fmt: skip
PARALLEL = 2
"""Elements that run at once: as many as this machine has cores."""


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """Prepare a sweep of tiny runs of one rank, and cancel its remaining jobs after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prepared = []

    def make(grid):
        slurm = {"cpus_per_rank": 1, "memory_gb_per_node": 2, "time_limit_min": 5, "max_parallel_jobs": PARALLEL}
        base = {
            "architecture": MODEL,
            "training": {"batch_size": 4, "steps": 1},
            "launch": {"launcher": "slurm", "device": "cpu", "slurm": slurm},
            "benchmark": {"warmup_steps": 1, "steps": 2},
            "tracking": {"tensorboard": False},
        }
        config = SweepConfig.from_mapping({"name": "tiny", "base": base, "grid": grid})
        prepared.append(sweeps.prepare(config, tmp_path / f"sweep-{len(prepared)}"))
        return prepared[-1]

    yield make
    for sweep in prepared:
        for run in unfinished(sweep):
            if run.job.exists():
                cluster.cancel(read_json(run.job)["job_id"])


def submit(sweep, behaviour):
    """Submit a sweep of fake workers."""
    return sweeps.submit(sweep, worker=(sys.executable, str(FAKE_WORKER), behaviour))


def arrays(jobs):
    """Return how many elements each job array has."""
    return Counter(job.record.job_id.partition("_")[0] for job in jobs)


def at_work(jobs):
    """Return how many of the jobs' fake workers have taken a step."""
    return sum(job.run.heartbeat.exists() for job in jobs)


def test_eight_queued_elements_of_one_array_all_appear_in_one_report(prepare, capsys):
    sweep = prepare({"parallel.microbatch_size": [1, 2], "training.seq_len": [2, 4, 6, 8]})
    jobs = sweeps.submit(sweep)
    assert list(arrays(jobs).values()) == [8]
    sweeps.follow(sweep, jobs)
    names = read_record(sweep).names.shown
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("element")]
    assert sorted(line.removeprefix("element").split(":")[0].strip() for line in lines) == sorted(names.values())
    assert all(is_timed(sweep.run(folder)) for folder in names)
    page = write_report(sweep).read_text()
    assert "8 of 8 timed" in page
    assert all(name in page for name in names.values())
    assert sweeps.submit(sweep) == []


def test_elements_with_other_slurm_requests_form_other_arrays(prepare):
    sweep = prepare({"launch.slurm.time_limit_min": [4, 5], "parallel.microbatch_size": [1, 2]})
    assert sorted(arrays(submit(sweep, "finish")).values()) == [2, 2]


def test_a_second_process_finds_the_running_jobs_and_submits_nothing(prepare):
    sweep = prepare({"parallel.microbatch_size": [1, 2, 4]})
    first = submit(sweep, "serve")
    eventually(lambda: at_work(first))
    again = submit(sweep, "serve")
    assert [job.record for job in again] == [job.record for job in first]
    assert set(cluster.states()) >= {job.record.job_id for job in first}


def test_cancelling_a_sweep_ends_its_running_and_its_queued_elements(prepare):
    sweep = prepare({"parallel.microbatch_size": [1, 2, 4], "training.seq_len": [8]})
    jobs = submit(sweep, "serve")
    eventually(lambda: at_work(jobs) == PARALLEL)
    assert sweeps.cancel(sweep) == 3
    assert not {job.record.job_id for job in jobs} & set(cluster.states())
    stopped_in_order = [job.run.name for job in jobs if (job.run.path / "received.json").exists()]
    assert len(stopped_in_order) == PARALLEL
    with pytest.raises(StoppedError, match="--resume"):
        sweeps.follow(sweep, sweeps.attach(sweep))


@pytest.mark.nightly
def test_cancelling_one_element_in_slurm_leaves_the_others_alone(prepare):
    sweep = prepare({"parallel.microbatch_size": [1, 2]})
    first, second = submit(sweep, "serve")
    eventually(lambda: at_work([first, second]) == 2)
    cluster.cancel(first.record.job_id)
    assert first.wait().status == "cancelled"
    assert second.is_running()
