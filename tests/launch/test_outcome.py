import os
import shutil
import signal
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from launch_harness import step_record

from llama_core.launch.attempts import (
    JOB_ID_VARIABLE,
    LOG_HEADER,
    Attempt,
    RankExit,
    attempt_path,
    exit_path,
    flight_recorder,
    log_path,
    request_cancellation,
)
from llama_core.launch.outcome import conclude, read_outcome, record_outcome
from llama_core.launch.rank import requeue, slurm
from llama_core.launch.scheduler import JobStatus
from llama_core.launch.verdict import LOST_PEERS_EXIT
from llama_core.records.files import read_json, write_json
from llama_core.records.job import JobRecord
from llama_core.records.metrics import write_metrics_part

TRACEBACK = "Traceback (most recent call last):\n  File \"x.py\", line 1, in <module>\nKeyError: 'tokens'\n"


def leave(run, *, rank=0, exit_code=None, by=None, log="", **facts):
    """Write the exit record and the log of a rank that has ended; the log also holds an earlier attempt."""
    defaults = {"oom_killed": False, "stopped": False, "num_ranks": 1, "ended_at": 2000.0}
    job = JobRecord(**read_json(run.job))
    write_json(exit_path(run, job, 0, rank), RankExit(rank, exit_code, by, **defaults | facts))
    log_path(run, rank).write_text(f"{LOG_HEADER}1 ===\nCUDA out of memory\n{LOG_HEADER}4242 ===\n{log}")


def queue_again(run, job, max_excluded=0):
    """Queue a job again near its time limit, as its first rank does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: name)
        patch.setattr(slurm, "job_status", lambda *job: JobStatus("RUNNING"))
        patch.setattr(slurm, "requeue", lambda job_id: job_id == job.job_id)
        in_slurm = replace(job, launcher="slurm")
        around = slurm.SlurmSurroundings()
        return requeue.start_again(
            run, in_slurm, 0, announced=True, max_attempts=3, max_excluded=max_excluded, surroundings=around
        )


@pytest.fixture
def under_the_job(job, monkeypatch):
    monkeypatch.setenv(JOB_ID_VARIABLE, job.job_id)
    return job


def test_the_workers_own_outcome_stands(run, under_the_job):
    recorded = record_outcome(run, "non-finite", reason="loss is NaN at step 7", next_action="lower the rate", step=7)
    leave(run, exit_code=1, log=TRACEBACK)
    assert conclude(run, under_the_job) == recorded


def test_an_outcome_of_an_earlier_job_says_nothing_about_this_one(run, job):
    record_outcome(run, "finished", reason="10 steps", next_action="")
    leave(run, exit_code=1, log=TRACEBACK)
    assert conclude(run, job).status == "crashed"


@pytest.mark.parametrize(
    ("ended", "status", "reason"),
    [
        ({"exit_code": 1, "log": TRACEBACK}, "crashed", "rank 0 ended with exit code 1: KeyError: 'tokens'"),
        ({"exit_code": 3}, "crashed", "rank 0 ended with exit code 3"),
        ({"exit_code": 0}, "crashed", "every rank exited with code 0 but none recorded an outcome"),
        ({"exit_code": 2, "log": "unknown key"}, "bad-config", "rank 0 refused the request: unknown key"),
        ({"by": signal.SIGKILL}, "crashed", "rank 0 was killed by signal 9 (possibly out of memory)"),
        ({"by": signal.SIGKILL, "oom_killed": True}, "oom", "the kernel ran out of memory and killed rank 0"),
        ({"by": signal.SIGABRT}, "crashed", "rank 0 was killed by signal 6 (SIGABRT)"),
        (
            {"by": signal.SIGBUS},
            "crashed",
            "rank 0 was killed by signal 7 (SIGBUS): a file that it had mapped, such as the token cache, was cut short "
            "or can no longer be read, or shared memory is full",
        ),
        ({"by": signal.SIGTERM}, "cancelled", "rank 0 was stopped by SIGTERM before it could save"),
        ({"by": signal.SIGUSR2}, "preempted", "rank 0 was told by SIGUSR2 that its time was up, and could not save"),
        (
            {"exit_code": 1, "log": f"{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n"},
            "oom",
            "rank 0 ran out of memory: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB",
        ),
        (
            {"exit_code": 1, "log": "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"},
            "oom",
            "rank 0 ran out of memory: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes",
        ),
        (
            {"exit_code": 1, "log": "Traceback (most recent call last):\n  import torch\nKeyboardInterrupt\n"},
            "cancelled",
            "rank 0 was interrupted",
        ),
    ],
)
def test_the_reason_is_worked_out_from_exit_code_signal_and_log(run, job, ended, status, reason):
    leave(run, **ended)
    outcome = conclude(run, job)
    assert (outcome.status, outcome.reason) == (status, reason)
    assert outcome.next_action


FAILURES = {case["name"]: case for case in yaml.safe_load(Path(__file__).with_name("cuda_failures.yaml").read_text())}


def how(ended):
    return {"exit_code": ended} if isinstance(ended, int) else {"by": signal.Signals[ended]}


@pytest.mark.parametrize("case", FAILURES.values(), ids=FAILURES)
def test_a_failure_of_a_device_or_of_nccl_is_told_from_its_words(run, job, case):
    leave(run, rank=0, by=signal.SIGKILL, num_ranks=2, ended_at=2005.0, stopped=True)
    leave(run, rank=1, num_ranks=2, host="node7", log=case["log"], **how(case["ended"]))
    outcome = conclude(run, job)
    assert (outcome.status, outcome.reason) == (case["status"], case["reason"])
    assert outcome.next_action
    assert outcome.next_action.startswith(case.get("next_action", ""))


def test_the_next_command_after_a_broken_device_leaves_its_node_out(run, job):
    write_json(run.job, replace(job, launcher="slurm"))
    leave(run, exit_code=1, host="node7", log=FAILURES["an uncorrectable ECC error"]["log"])
    action = conclude(run, replace(job, launcher="slurm")).next_action
    assert action == "continue on other nodes: --resume --set launch.slurm.options.exclude=node7"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_that_slurm_kills_after_the_others_gave_up_was_silent(run, job, number):
    log = FAILURES["NCCL's watchdog"]["log"]
    leave(run, rank=0, by=signal.SIGABRT, num_ranks=3, log=log, ended_at=2000.0)
    leave(run, rank=1, by=number, num_ranks=3, ended_at=2001.0)
    leave(run, rank=2, by=signal.SIGABRT, num_ranks=3, log=log, ended_at=2000.5)
    outcome = conclude(run, job)
    assert (outcome.status, outcome.reason) == (
        "hang",
        "rank 0 timed out waiting for the other ranks (silent ranks: 1)",
    )


def test_ranks_that_all_wait_for_each_other_have_lost_their_network(run, job):
    log = "ERROR lost the other ranks: Timed out waiting"
    for rank in range(2):
        leave(run, rank=rank, exit_code=LOST_PEERS_EXIT, num_ranks=2, log=log, ended_at=2000.0 + rank)
    assert conclude(run, job).reason == (
        "rank 0 timed out waiting for the other ranks (silent ranks: none; the network between them failed, or each "
        "waited for another)"
    )


def test_a_rank_that_was_killed_long_before_the_others_gave_up_is_blamed(run, job):
    leave(run, rank=0, by=signal.SIGABRT, num_ranks=2, log=FAILURES["NCCL's watchdog"]["log"], ended_at=2000.0)
    leave(run, rank=1, by=signal.SIGKILL, num_ranks=2, ended_at=1400.0)
    assert conclude(run, job).reason.startswith("rank 1 was killed by signal 9")


def test_a_hang_names_the_flight_recorders_files(run, job):
    folder = flight_recorder(run)
    folder.mkdir()
    (folder / "rank-1").touch()
    leave(run, rank=1, by=signal.SIGABRT, num_ranks=2, log=FAILURES["NCCL's watchdog"]["log"])
    assert conclude(run, job).next_action.startswith(f"torchfrtrace {folder} shows")


def test_the_rank_that_failed_first_is_blamed(run, job):
    leave(run, rank=0, exit_code=1, log="connection reset by peer", num_ranks=2, ended_at=2001.0)
    leave(run, rank=1, exit_code=1, log=TRACEBACK, num_ranks=2, ended_at=2000.0)
    assert conclude(run, job).reason == "rank 1 ended with exit code 1: KeyError: 'tokens'"


def test_a_rank_that_was_stopped_for_another_is_not_blamed(run, job):
    leave(run, rank=0, by=signal.SIGKILL, stopped=True, num_ranks=2)
    assert conclude(run, job).reason.startswith("rank 1 vanished")


def test_a_job_without_any_exit_record_has_vanished(run, job):
    assert conclude(run, job).reason.startswith("rank 0 vanished without an exit code")


def test_a_job_that_could_not_start_quotes_the_submission_log(run, job):
    folder = run.logs / "submitit" / "submission-00000"
    folder.mkdir(parents=True)
    job = replace(job, folder=str(folder))
    (folder / "4242_0_log.out").write_text(f"{TRACEBACK}ModuleNotFoundError: No module named 'llama_core'\n")
    assert conclude(run, job).reason == "rank 0 did not start: ModuleNotFoundError: No module named 'llama_core'"


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("TIMEOUT", "timeout"),
        ("PREEMPTED", "preempted"),
        ("NODE_FAIL", "node-failure"),
        ("OUT_OF_MEMORY", "oom"),
        ("CANCELLED", "cancelled"),
        ("FAILED", "crashed"),
    ],
)
def test_slurms_final_state_decides_the_status(run, job, state, status):
    leave(run, by=signal.SIGKILL)
    assert conclude(run, job, slurm.VERDICT_OF_STATE.get(state)).status == status


def test_slurms_state_overrides_the_workers_outcome(run, under_the_job):
    record_outcome(run, "cancelled", reason="stopped by a signal", next_action="resume", step=7)
    outcome = conclude(run, under_the_job, slurm.VERDICT_OF_STATE["PREEMPTED"])
    assert (outcome.status, outcome.step, len(outcome.attempts)) == ("preempted", 7, 1)


def test_a_job_asked_to_stop_is_cancelled_however_it_ended(run, job):
    request_cancellation(run, job)
    leave(run, by=signal.SIGKILL)
    assert conclude(run, job).status == "cancelled"


def test_each_attempt_keeps_its_job_its_status_and_its_steps(run, job):
    write_metrics_part(run, [step_record(step, at=500.0 + step) for step in (1, 2)])
    write_json(run.heartbeat, step_record(5, at=2000.0))
    record_outcome(run, "crashed", reason="by hand", next_action="try again")
    leave(run, exit_code=1)
    attempts = conclude(run, job).attempts
    assert [(attempt["job_id"], attempt["status"]) for attempt in attempts] == [(None, "crashed"), ("4242", "crashed")]
    assert (attempts[1]["first_step"], attempts[1]["last_step"]) == (3, 5)


def test_the_steps_of_an_attempt_are_its_own_whatever_its_clock_did(run, job):
    """Here it is behind that of the submitter, and set back after the second step."""
    write_json(attempt_path(run), Attempt(job.job_id, job.submitted_at, 0, "", "1970-01-01T00:15:00+00:00"))
    write_metrics_part(run, [step_record(step, at=at) for step, at in enumerate((901, 902, 3, 4), start=1)])
    write_json(run.heartbeat, step_record(4, at=4))
    (attempt,) = conclude(run, job).attempts
    assert (attempt["first_step"], attempt["last_step"]) == (1, 4)


@pytest.mark.parametrize("record", [conclude, queue_again])
def test_an_outcome_is_recorded_and_a_job_restarts_beside_damaged_metrics(run, job, record, caplog):
    for step in (1, 2, 3):
        write_metrics_part(run, [step_record(step, at=2000.0 + step)])
    write_json(run.heartbeat, step_record(3, at=2003.0))
    write_json(attempt_path(run), Attempt(job.job_id, job.submitted_at, 0, "", job.submitted_at))
    leave(run, exit_code=1)
    (run.metrics / "part-00000.parquet").write_bytes(b"damaged")
    assert record(run, job)
    (attempt,) = read_outcome(run).attempts
    assert (attempt["first_step"], attempt["last_step"]) == (1, 3)
    assert "part-00000.parquet is damaged" in caplog.text


def test_an_attempt_says_when_it_was_submitted_started_and_ended(run, job):
    started = "2026-11-21T10:00:00+00:00"
    write_json(attempt_path(run), Attempt(job.job_id, job.submitted_at, 0, "", started))
    (attempt,) = conclude(run, job).attempts
    assert (attempt["submitted_at"], attempt["started_at"]) == (job.submitted_at, started)
    assert datetime.fromisoformat(attempt["ended_at"])


def test_an_attempt_without_steps_has_no_first_or_last_step(run, job):
    write_json(run.heartbeat, step_record(5, at=900.0))
    outcome = conclude(run, job)
    assert (outcome.step, outcome.attempts[0]["first_step"], outcome.attempts[0]["last_step"]) == (5, None, None)


def test_concluding_an_earlier_job_keeps_the_later_outcome(run, job):
    conclude(run, job)
    later = conclude(run, replace(job, job_id="4343"))
    assert conclude(run, job) == later


def test_the_same_job_is_one_attempt_however_often_it_is_recorded(run, under_the_job):
    for _ in range(2):
        outcome = record_outcome(run, "finished", reason="3 steps", next_action="")
    assert len(outcome.attempts) == 1


def test_a_worker_started_by_hand_does_not_rewrite_the_last_jobs_attempt(run, under_the_job, monkeypatch):
    record_outcome(run, "crashed", reason="of old", next_action="resume")
    monkeypatch.delenv(JOB_ID_VARIABLE)
    assert JOB_ID_VARIABLE not in os.environ
    record_outcome(run, "finished", reason="3 steps", next_action="")
    assert [attempt["status"] for attempt in read_json(run.outcome)["attempts"]] == ["crashed", "finished"]
