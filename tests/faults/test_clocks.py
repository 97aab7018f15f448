"""A clock jumps by an hour."""

import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from disks import while_stopped
from faulty_run import STEPS, Fault, FaultyRun, where

from llama_core.launch.jobs import submission
from llama_core.records.goodput import read_goodput

JUMPING_WORKER = Path(__file__).with_name("jumping_worker.py")
JUMPS = {"forward": 3600.0, "back": -3600.0}


@pytest.fixture
def run(tmp_path, texts, token_cache):
    """A run that is ready to start."""
    return FaultyRun(tmp_path, texts, token_cache=token_cache)


def cells(phase):
    return [
        pytest.param(seconds, marks=pytest.mark.fault(f"an hour {way}", phase=phase), id=way)
        for way, seconds in JUMPS.items()
    ]


def is_accounted_for(run):
    """Fail unless every step is there once, in order, and every second of the run has its part, none of them less
    than nothing."""
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    goodput = read_goodput(run.run)
    assert min(seconds for parts in goodput.attempts for seconds in parts.values()) >= 0
    assert 0 <= goodput.share <= 1


@pytest.fixture
def with_jump(monkeypatch):
    """Train a run of which the clock of one rank jumps."""

    def train(run, rank, seconds, end=0):
        with monkeypatch.context() as patch:
            worker = (sys.executable, str(JUMPING_WORKER), str(rank), str(seconds), str(end))
            patch.setattr(submission, "submit", partial(submission.submit, worker=worker))
            return run.train()

    return train


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seconds", cells("of one rank"))
def test_a_rank_whose_clock_is_set_trains_on(seconds, rank, run, with_jump, undisturbed, promise):
    outcome = with_jump(run, rank, seconds)
    assert outcome.status == "finished"
    (attempt,) = outcome.attempts
    assert (attempt["first_step"], attempt["last_step"]) == (1, STEPS)
    is_accounted_for(run)
    run.resume()
    run.equals(undisturbed)
    promise("finished; equal")


@pytest.mark.parametrize("seconds", cells("of a rank that is then killed"))
def test_a_run_that_is_killed_after_its_clock_was_set_goes_on(seconds, run, with_jump, undisturbed, promise):
    outcome = with_jump(run, 0, seconds, end=6)
    assert outcome.status == "crashed"
    assert "rank 0 was killed by signal 9" in outcome.reason
    diagnosis = run.resume()
    assert diagnosis.state == "failed"
    is_accounted_for(run)
    run.equals(undisturbed)
    promise(f"crashed, names the rank; {where(diagnosis)}; equal")


@pytest.mark.parametrize("seconds", cells("of the waiting process"))
def test_who_waits_for_a_run_is_not_misled_by_its_own_clock(seconds, run, undisturbed, monkeypatch, promise):
    read, steps, lines = time.time, [], []

    def wait(handle):
        def follow(record):
            steps.append(record.step)
            if record.step == 2:
                monkeypatch.setattr(time, "time", lambda: read() + seconds)
                let_go_on = while_stopped(run, partial(time.sleep, 1.0))
                threading.Thread(target=let_go_on, args=(handle,)).start()

        handle.wait(follow, on_waiting=lines.append)

    outcome = run.train(Fault("forward", {"signal": "SIGSTOP"}), wait)
    assert outcome.status == "finished"
    assert (steps[-1], lines) == (STEPS, [])
    run.equals(undisturbed)
    promise("finished; no false line; equal")
