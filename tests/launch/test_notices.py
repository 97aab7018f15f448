"""What someone who waits for a job hears of it: in the queue, before the first step, and when it is interrupted."""

import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from launch_harness import FAKE_WORKER, step_record
from waiting import eventually

from llama_core.launch.jobs import notices, slurm
from llama_core.launch.jobs.slurm import SlurmJobHandle
from llama_core.launch.jobs.submission import attach
from llama_core.launch.outcome import read_outcome
from llama_core.launch.scheduler import JobStatus
from llama_core.launch.slurm import job_status
from llama_core.records.activity import record_activity
from llama_core.records.files import timestamp, write_json
from llama_core.records.job import JobRecord


class EnoughError(Exception):
    pass


@pytest.fixture
def lines():
    """Collect lines, and stop waiting after the second."""

    class Lines(list):
        def __call__(self, line):
            self.append(line)
            if len(self) == 2:
                raise EnoughError

    return Lines()


@pytest.mark.wide
def test_a_job_without_a_first_step_says_again_and_again_where_its_first_rank_is(submit, monkeypatch, lines):
    monkeypatch.setattr(notices, "FIRST_NOTICE_SECONDS", 1.0)
    job = submit("hang")
    job.worker()
    record_activity(job.handle.run, "building the model")
    with pytest.raises(EnoughError):
        job.handle.wait(on_waiting=lines, expected=lambda: "expected: 4.0 s")
    for line in lines:
        assert line.startswith("no step yet after ")
        assert ": rank 0 has been building the model for " in line
        assert line.endswith("; expected: 4.0 s")


def told(run, *, newest=None, waits_for="", seconds=200.0):
    return notices.StallNotices(run, time.time() - seconds, lambda: "").line(newest, waits_for)


def test_silence_is_broken_after_three_minutes_and_ever_less_often(run):
    assert told(run, seconds=170) is None
    one = notices.StallNotices(run, time.time() - 200, lambda: "")
    assert "starting Python and torch for 3 min 20 s" in one.line(None, "")
    assert one.line(None, "") is None


def test_nobody_is_silent_because_a_clock_was_set(run, monkeypatch):
    """Neither the clock of who waits, nor that of the first rank."""
    follower, read = notices.StallNotices(run, time.time(), lambda: ""), time.time
    assert follower.line(None, "") is None
    monkeypatch.setattr(time, "time", lambda: read() + 3600)
    assert follower.line(None, "") is None
    assert follower.line(step_record(1, at=read() - 3600), "") is None


def test_after_a_step_only_a_silence_of_several_steps_is_worth_a_line(run):
    slow = replace(step_record(2, at=time.time() - 200), step_seconds=90.0)
    assert told(run, newest=slow) is None
    quick = replace(slow, step_seconds=2.0)
    line = "no step since step 2, which took 2.0 s: rank 0 has been "
    assert told(run, newest=quick) == f"{line}in step 3 for 3 min 20 s"
    record_activity(run, "evaluating")
    assert told(run, newest=quick) == f"{line}evaluating for 0.0 s"


@pytest.fixture
def slurm_lines(run, monkeypatch):
    """Return what a Slurm job tells, its steps included, for the statuses that Slurm reports one after the other."""
    monkeypatch.setattr(slurm, "FIRST_POLL_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "SLOWEST_POLL_SECONDS", 0.0)
    monkeypatch.setattr(SlurmJobHandle, "poll_seconds", 0.0)

    def lines(statuses):
        record = JobRecord("slurm", "17", "here", timestamp(), name="train")
        write_json(run.job, record)
        answers = iter(statuses)
        heard = []
        handle = SlurmJobHandle(run, record, lambda job_id, name: next(answers))
        handle.wait(on_waiting=heard.append, on_progress=lambda step: heard.append(f"step {step.step}"))
        return heard

    return lines


def test_a_job_that_slurm_has_not_considered_does_not_wait_for_none(slurm_lines, pending):
    statuses = [pending(reason) for reason in ("None", "Priority")]
    assert slurm_lines([*statuses, JobStatus("RUNNING"), JobStatus("CANCELLED")])[:3] == [
        "for Slurm to consider the job",
        "for Priority",
        "Slurm has started the job",
    ]


def test_a_controller_that_is_away_for_long_is_told_once_and_changes_nothing_else(slurm_lines):
    running, away = JobStatus("RUNNING"), [None] * 5
    heard = slurm_lines([JobStatus("PENDING", "Priority"), *away, running, *away, running, JobStatus("CANCELLED")])
    gone, back = (
        "for Slurm's controller, which does not answer; a job that runs goes on without it",
        "Slurm's controller answers again",
    )
    assert heard == ["for Priority", gone, back, "Slurm has started the job", gone, back]


def test_a_step_tells_that_its_job_has_started_before_slurm_does(run, slurm_lines):
    queued = JobStatus("PENDING", "Priority")

    def statuses():
        yield queued
        write_json(run.heartbeat, step_record(1))  # between two answers
        yield queued
        yield JobStatus("RUNNING")
        yield JobStatus("CANCELLED")

    assert slurm_lines(statuses()) == ["for Priority", "Slurm has started the job", "step 1"]


@pytest.fixture
def pending(tmp_path, monkeypatch):
    """Return the status that ``scontrol`` prints for a pending job with a reason."""
    program = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def status(reason):
        program.write_text(f"#!/bin/sh\necho JobId=17 JobName=train JobState=PENDING Reason={reason}\n")
        program.chmod(0o755)
        return job_status("17", "train")

    return status


FOLLOW = """
import signal, sys
from pathlib import Path
from llama_core.chain.steps import follow
from llama_core.runs.stopping import stopping_on_interrupt
from llama_core.errors import StoppedError
from llama_core.launch.jobs.submission import submit
from llama_core.runs.loading import load_config
from llama_core.records.directory import RunDirectory

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background processes with it ignored
run = RunDirectory(Path(sys.argv[1]))
try:
    with stopping_on_interrupt(run):
        submit(run, load_config(run), 1, worker=(sys.executable, sys.argv[2], "hang"))
        follow(run)
except StoppedError as error:
    print(error)
"""


@pytest.mark.wide
def test_a_first_interrupt_says_what_it_waits_for_and_a_second_stops_at_once(request, run, config):
    run.config.write_text(config.to_yaml())
    process = subprocess.Popen(
        [sys.executable, "-c", FOLLOW, str(run.path), str(FAKE_WORKER)], stdout=subprocess.PIPE, text=True
    )
    request.addfinalizer(lambda: (job := attach(run)) and job.cancel(grace_seconds=0))
    request.addfinalizer(process.kill)
    eventually((run.path / "worker-0.json").exists)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == (
        "stopping  waiting for the end of a step and a checkpoint, at most 300 s; Ctrl-C again stops at once: "
        "then --resume starts over, since there is no checkpoint yet\n"
    )
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert output.endswith(
        "stopping  at once\nstopped before the first step, with no checkpoint yet; start over with: "
        f"training-infra train --run-dir {run.path} --resume\n"
    )
    assert read_outcome(run).status == "cancelled"
