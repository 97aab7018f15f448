import json
import os
import re
import shutil
import socket
import subprocess
import time
from dataclasses import replace

import psutil
import pytest
from step_record import record

from llama_core.config.run import RunConfig
from llama_core.launch.attempts import Attempt, attempt_path
from llama_core.launch.outcome import read_outcome, record_outcome
from llama_core.launch.rank.requeue import begin_attempt
from llama_core.launch.rank.slurm import SlurmSurroundings
from llama_core.launch.verdict import read_log
from llama_core.records.checkpoints import STATE, checkpoint_name, write_manifest
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluation_jobs import write_ending
from llama_core.records.evaluations import Score, write_scores
from llama_core.records.files import now, timestamp, write_json
from llama_core.records.job import JobRecord, Outcome
from llama_core.records.metrics import read_metrics, write_metrics_part
from llama_core.records.preflight import NamedRank, PreflightRecord, append_preflight
from llama_core.records.references import writing_reference
from llama_core.records.rollbacks import Rollback, Suspect, write_rollbacks
from llama_core.runs.continuing import has_lost_its_end
from llama_core.runs.diagnosis import diagnose
from training_infra import cli

ATTEMPT = {
    "job_id": "7", "submitted_at": "2026-11-01T00:00:00.000000+00:00", "restart": 0, "status": "crashed",
    "reason": "rank 0 was killed", "requeued": False, "excluded": [], "first_step": 1, "last_step": 6,
    "started_at": None, "ended_at": "2026-11-01T01:00:00+00:00",
}  # fmt: skip

TRAINED = {
    "steps": 6, "tokens": 3072, "train_loss": 4.4, "eval_loss": None, "eval_tokens": 0, "unigram_entropy": None,
    "bigram_entropy": None, "memory_baseline_bytes": 1, "memory_peak_bytes": 2, "seconds": 6.0,
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A run that has crashed after step 6, with checkpoints of steps 2 and 4."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.config.write_text(RunConfig.from_mapping({"launch": {"device": "cpu"}}).to_yaml())
    write_metrics_part(run, [step_record(step) for step in range(1, 7)])
    for step in (2, 4):
        save(run, step)
    end(run, "crashed")
    return run


def step_record(step, **changes):
    return record(step, loss=5 - 0.1 * step, **changes)


def save(run, step, **changes):
    path = run.checkpoints / checkpoint_name(step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"weights" * step)
    one = step_record(step)
    write_json(path / STATE, {"step": step, "loss": one.loss, "tokens": one.tokens} | changes)
    write_manifest(path, {})


def end(run, status, next_action="start it again with --resume"):
    attempt = ATTEMPT | {"status": status}
    write_json(run.outcome, Outcome(status, "rank 0 was killed", 6, next_action, ATTEMPT["ended_at"], (attempt,)))


def flip(run, step):
    """Damage a checkpoint in a way that its size does not show."""
    file = run.checkpoints / checkpoint_name(step) / "__0_0.distcp"
    file.write_bytes(file.read_bytes().swapcase())


def has_job(run, **changes):
    """Record a job that is this process, submitted just now."""
    process = psutil.Process()
    own = JobRecord("local", str(process.pid), socket.gethostname(), timestamp(), folder=process.cmdline()[0])
    write_json(run.job, replace(own, **changes))


def beat(run, at, step=6):
    write_json(run.heartbeat, step_record(step, time=at))


def doctor(capsys, run, *flags):
    code = cli.main(["doctor", str(run.path), *flags])
    return code, capsys.readouterr().out


def texts(found, subject):
    return [fact.text for fact in found.facts if fact.subject == subject]


def problems(found):
    return [(fact.subject, fact.text) for fact in found.facts if fact.is_problem]


def test_a_crashed_run_is_told_in_a_line_for_each_fact(run, capsys):
    code, told = doctor(capsys, run)
    assert code == 1
    state, attempt, first, second, disk, metrics, following, verdict = told.splitlines()
    assert state == "! state       crashed after step 6, at 2026-11-01T01:00:00+00:00: rank 0 was killed"
    assert attempt == "  attempt 1   steps 1 to 6, crashed: rank 0 was killed"
    assert first.startswith("  checkpoint  step 2, ")
    assert second.startswith("  checkpoint  step 4, ")
    assert second.endswith(": every file has its checksum")
    assert "free; a checkpoint takes" in disk
    assert metrics == (
        "  metrics     steps 1 to 6, in agreement with the checkpoint of step 4; resuming repeats what follows step 4"
    )
    assert following == f"  next        training-infra train --run-dir {run.path} --resume"
    assert verdict == "1 problem, marked with !"


@pytest.mark.parametrize(("status", "state"), [("finished", "finished"), ("cancelled", "stopped")])
def test_a_run_that_ended_as_it_should_is_healthy(run, capsys, status, state):
    end(run, status)
    code, told = doctor(capsys, run, "--json")
    found = json.loads(told)
    assert (code, found["healthy"], found["state"]) == (0, True, state)
    assert (found["command"] == "") == (status == "finished")
    assert [one["step"] for one in found["checkpoints"]] == [2, 4]
    assert found["attempts"][0]["last_step"] == 6


def test_a_job_that_started_again_says_so_once(run, monkeypatch):
    job = JobRecord("slurm", "7", "", ATTEMPT["submitted_at"], folder="")
    attempt = Attempt("7", job.submitted_at, 0, "", ATTEMPT["submitted_at"])
    write_json(attempt_path(run), attempt)
    monkeypatch.setattr("llama_core.launch.rank.slurm.earlier_states", lambda job_id, name: [])
    monkeypatch.setattr("llama_core.launch.rank.requeue.SUPERSEDED_SECONDS", 0.0)
    run.outcome.unlink()
    begin_attempt(run, job, restart=1, nodes="", max_attempts=3, surroundings=SlurmSurroundings())
    (told,) = texts(diagnose(run), "attempt 1")
    assert told.endswith("preempted: Slurm stopped the job; its job started again")


def test_a_run_that_never_started_is_healthy(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.config.write_text(RunConfig().to_yaml())
    found = diagnose(run)
    assert (found.state, found.is_healthy) == ("new", True)
    assert found.command == f"training-infra train --run-dir {run.path} --resume"


def test_a_running_job_is_told_with_its_step_and_followed_by_its_logs(run):
    has_job(run)
    assert "its ranks have not said anything yet" in texts(diagnose(run), "state")[0]
    beat(run, time.time())
    found = diagnose(run)
    assert (found.state, found.is_healthy) == ("running", True)
    assert "; step 6 of 100, " in texts(found, "state")[0]
    assert found.command == f"training-infra logs {run.path} --follow"


def test_a_running_job_without_a_step_for_too_long_is_a_problem(run):
    config = RunConfig.from_mapping({"launch": {"device": "cpu", "hang_timeout_s": 1}})
    run.config.write_text(config.to_yaml())
    has_job(run, submitted_at="2026-11-01T00:00:00.000000+00:00")
    long_ago = time.time() - 3600
    beat(run, long_ago)
    os.utime(run.heartbeat, (long_ago, long_ago))
    ((subject, text),) = problems(diagnose(run))
    assert subject == "state"
    assert text.endswith("ago: longer than launch.hang_timeout_s=1")


def test_ranks_that_torchrun_started_are_told_by_their_steps(run):
    beat(run, time.time(), step=5)
    found = diagnose(run)
    assert (found.state, found.is_healthy) == ("running", True)


def test_the_last_step_of_a_dead_job_is_not_taken_for_a_running_one_by_a_clock_ahead_of_ours(run):
    beat(run, time.time() + 3600)
    assert diagnose(run).state == "failed"


def test_a_job_that_is_gone_without_a_word_has_failed_and_its_end_is_recorded(run):
    has_job(run, job_id=str(2**22 + 1))  # more than Linux gives out
    found = diagnose(run)
    assert found.state == "failed"
    assert read_outcome(run).status == "crashed"
    assert len(texts(found, "attempt 2")) == 1


def test_a_job_on_another_machine_is_unknown_and_no_command_is_given(run):
    has_job(run, host="elsewhere")
    found = diagnose(run)
    assert (found.state, found.command) == ("unknown", "")
    assert "was submitted on elsewhere" in problems(found)[0][1]


def test_a_rank_that_fell_behind_before_the_newest_attempt_is_told_of_and_is_no_problem(run):
    slow, fault = (NamedRank(1, "n1", "a device", (text,), slows_training=True) for text in ("slow", "faulty"))
    append_preflight(run, PreflightRecord(now(), 0.1, (), (slow,)))
    append_preflight(run, PreflightRecord(now(), 0.1, (), (fault,)))
    found = diagnose(run)
    assert texts(found, "preflight") == ["rank 1 on n1 (a device): faulty"]
    assert "preflight" not in {fact.subject for fact in found.facts if fact.is_problem}


def test_replicas_that_differed_are_told_of_and_are_no_problem(run):
    reason = "rank 1 on node7 (NVIDIA H200, cuda:1) differs from the other replicas in norm.weight"
    bad_data = Rollback(2, 3, "loss 9", {"position": 4}, 1.0)
    write_rollbacks(run, [bad_data, Rollback(4, 6, reason, None, 2.0, (Suspect(1, "node7", "NVIDIA H200, cuda:1"),))])
    found = diagnose(run)
    assert texts(found, "device") == [f"step 6: {reason}"]
    assert "device" not in {fact.subject for fact in found.facts if fact.is_problem}


def test_a_damaged_checkpoint_is_a_problem_only_found_by_reading(run):
    end(run, "cancelled")
    flip(run, 4)
    assert diagnose(run, read=False).is_healthy
    found = diagnose(run)
    ((subject, text),) = problems(found)
    assert subject == "checkpoint"
    assert "damaged: __0_0.distcp has the checksum" in text
    assert "in agreement with the checkpoint of step 2" in texts(found, "metrics")[0]


def test_the_checkpoint_with_the_lowest_held_out_loss_is_marked_as_the_best(run):
    for step, loss in ((7, 3.0), (8, 2.0), (9, 4.0)):
        save(run, step, eval_loss=loss)
    marked = [text for text in texts(diagnose(run, read=False), "checkpoint") if "the best" in text]
    assert len(marked) == 1
    assert marked[0].startswith("step 8, ")


def test_without_a_good_checkpoint_the_advice_is_to_restore_one(run):
    for path in run.checkpoints.iterdir():
        (path / "__0_0.distcp").unlink()
    found = diagnose(run)
    assert texts(found, "advice") == [
        "no checkpoint is good: restore one from a backup, or move them away to start over"
    ]
    assert found.command.startswith("training-infra train ")


def test_a_finished_run_whose_newest_checkpoint_is_damaged_is_told_how_to_get_it_back(run):
    end(run, "finished")
    write_json(run.training, TRAINED)
    save(run, 6)
    flip(run, 6)
    found = diagnose(run)
    (advice,) = texts(found, "advice")
    assert "the checkpoint of step 6 is damaged, and the newest sound one is of step 4, which generate" in advice
    assert found.command == f"training-infra train --run-dir {run.path} --resume"
    assert not has_lost_its_end(run), "nobody has read the checkpoint"
    (command,) = re.findall(r"mv \S+ \S+(?=, then$)", advice)
    subprocess.run(command, shell=True, check=True)
    assert has_lost_its_end(run)
    assert [one.step for one in diagnose(run).checkpoints] == [2, 4]


def test_a_finished_run_whose_last_checkpoint_is_good_has_nothing_left_to_do(run):
    end(run, "finished")
    write_json(run.training, TRAINED)
    save(run, 6)
    flip(run, 4)
    found = diagnose(run)
    assert (found.command, texts(found, "advice")) == ("", [])
    assert not has_lost_its_end(run)


def test_a_finished_run_without_a_good_checkpoint_is_told_to_restore_one(run):
    end(run, "finished")
    flip(run, 2)
    flip(run, 4)
    found = diagnose(run)
    assert (found.command, texts(found, "advice")) == ("", ["no checkpoint is good: restore one from a backup"])


def test_the_advice_of_the_outcome_comes_before_the_command(run):
    end(run, "oom", next_action="use a smaller parallel.microbatch_size")
    assert texts(diagnose(run), "advice") == ["use a smaller parallel.microbatch_size"]


def test_an_edited_configuration_is_told_before_the_resumption_that_it_would_fail(run):
    newest = run.checkpoints / checkpoint_name(4)
    shutil.copyfile(run.config, newest / run.config.name)
    write_manifest(newest, {})
    end(run, "cancelled")
    assert problems(diagnose(run)) == []
    run.config.write_text(RunConfig.from_mapping({"launch": {"device": "cpu"}, "training": {"seq_len": 64}}).to_yaml())
    (found,) = problems(diagnose(run))
    assert found[0] == "settings"
    assert f"{run.config} has changed since {run.path} was trained (training.seq_len is " in found[1]
    assert f"get the run's settings back with: cp {newest / run.config.name} {run.config}" in found[1]


@pytest.mark.parametrize(
    ("recorded", "saved", "problem"),
    [
        ([1, 2, 4, 5, 6], {}, "steps up to 6, but step 3 is missing; the newest good checkpoint is of step 4"),
        ([1, 2], {}, "steps up to 2, but step 3 is missing; the newest good checkpoint is of step 4"),
        ([1, 2, 3, 4], {"loss": 9.0}, "loss 4.6 at step 4, but the checkpoint of that step has 9.0"),
        ([1, 2, 3, 4], {"tokens": 1}, "tokens 2048 at step 4, but the checkpoint of that step has 1"),
    ],
)
def test_metrics_that_disagree_with_the_newest_checkpoint_are_a_problem(run, recorded, saved, problem):
    end(run, "cancelled")
    shutil.rmtree(run.metrics)
    run.create()
    write_metrics_part(run, [step_record(step) for step in recorded])
    shutil.rmtree(run.checkpoints)
    save(run, 4, **saved)
    assert problems(diagnose(run)) == [("metrics", problem)]


def test_metrics_that_cannot_be_read_are_a_problem(run):
    end(run, "cancelled")
    part = next(run.metrics.glob("part-*"))
    part.write_bytes(b"damaged")
    ((subject, text),) = problems(diagnose(run))
    assert (subject, text.startswith(f"{part} is damaged (")) == ("metrics", True)


@pytest.mark.parametrize(
    "name",
    [
        *("plan", "choice", "estimate", "environment", "dry_run", "data", "training", "benchmark", "hub", "samples"),
        *("rollbacks", "data_changes", "settings_changes", "reference", "length", "checkpoint_interval"),
        "base",
    ],
)
def test_a_record_that_cannot_be_read_is_a_problem_that_names_it(run, name):
    end(run, "cancelled")
    path = getattr(run, name)
    path.write_text("garbage")
    ((subject, told),) = problems(diagnose(run))
    assert (subject, told.startswith(f"{path} ")) == ("record", True)


def test_a_reference_whose_values_are_damaged_or_gone_is_a_problem(run):
    end(run, "cancelled")
    with writing_reference(run, weights="drawn", rows={"train/0": "a"}, shapes={"train/0": (3, 2)}) as append:
        append(b"log-probabilities")
    assert problems(diagnose(run)) == []
    run.reference_values.write_bytes(b"Log-probabilities")
    assert problems(diagnose(run)) == [("record", f"{run.reference_values} is damaged")]
    run.reference_values.unlink()
    assert problems(diagnose(run)) == [("record", f"cannot read {run.reference_values}: No such file or directory")]


def test_evaluations_without_scores_are_problems(run):
    end(run, "cancelled")
    write_ending(run, run.checkpoints / checkpoint_name(4), "the disk is full")
    write_ending(run, run.checkpoints / checkpoint_name(6))
    assert problems(diagnose(run)) == [
        ("evaluation", "step 4: not evaluated: the disk is full"),
        ("evaluation", f"step 6: its evaluation has ended, but its scores are in no file of {run.evaluations}"),
    ]
    score = Score(6, 100, "arc", "acc", 0.5, None, higher_is_better=True, examples=1, version="", settings="", time="")
    write_scores(run, [score])
    assert [text for _, text in problems(diagnose(run))] == ["step 4: not evaluated: the disk is full"]


def test_a_plan_without_its_keys_or_with_keys_that_exclude_each_other_is_a_problem(run):
    end(run, "cancelled")
    write_json(run.plan, {"tp": "many"})
    ((subject, told),) = problems(diagnose(run))
    assert (subject, told.startswith(f"{run.plan} is damaged (tp: ")) == ("record", True)
    write_json(run.plan, {"dp_shard": 2, "zero_stage": 0})
    ((subject, told),) = problems(diagnose(run))
    assert (subject, told.startswith(f"{run.plan} is damaged (dp_shard=2 shards nothing")) == ("record", True)


@pytest.mark.root
def test_a_disk_without_inodes_is_a_problem_however_much_room_it_has(run, disk_of):
    end(run, "cancelled")
    path = disk_of("64m,nr_inodes=100") / "run"
    shutil.copytree(run.path, path)
    ((subject, told),) = problems(diagnose(RunDirectory(path)))
    assert subject == "disk"
    assert re.search(r"MiB free, but only \d+ of 100 inodes", told), told


def test_advice_for_a_run_that_was_copied_names_its_own_log(run, tmp_path):
    record_outcome(run, "crashed", reason="rank 1 was killed by signal 11", next_action=read_log(1))
    shutil.copytree(run.path, tmp_path / "elsewhere")
    copy = RunDirectory(tmp_path / "elsewhere")
    for one in (run, copy):
        assert texts(diagnose(one), "advice") == [f"read {one.logs}/rank-00001.log, fix the cause, then --resume"]


def test_steps_of_metrics_that_were_set_aside_are_missing_and_the_file_is_named(run):
    end(run, "cancelled")
    part = next(run.metrics.glob("part-*"))
    part.write_bytes(b"damaged")
    read_metrics(run, sets_aside=True)
    ((subject, text),) = problems(diagnose(run))
    assert (subject, f"step 1 is missing (_{part.name}.damaged was damaged)" in text) == ("metrics", True)


def test_too_little_disk_for_a_checkpoint_is_a_problem(run, monkeypatch):
    end(run, "cancelled")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    ((subject, text),) = problems(diagnose(run))
    assert (subject, text.startswith("1 B free; a checkpoint takes ")) == ("disk", True)


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} holds no run (no config.yaml)\n"
