"""Checkpoints are evaluated beside a run: each once, again if that was killed, and never in the ranks' way."""

import errno
import sys

import pytest
from waiting import eventually

from llama_core.chain.prepare import check_evaluation, prepare_run
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, DoesNotFitError
from llama_core.evaluation.evaluator import Evaluator
from llama_core.evaluation.jobs import OnThisMachine
from llama_core.records.checkpoints import checkpoint_name
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluation_jobs import write_ending
from llama_core.records.files import write_json

DATA = {"law": "law.jsonl"}


class Played:
    """Evaluations that the test plays: it says which run, and how many may at once."""

    device = "cpu"

    def __init__(self, most=9):
        self.most = most
        self.started = []
        self.running = set()

    def start(self, command, step):
        if len(self.running) >= self.most:
            return None
        self.started.append(step)
        self.running.add(str(len(self.started)))
        return str(len(self.started))

    def is_running(self, job_id):
        return job_id in self.running

    def stop(self):
        self.running.clear()


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def save(run, *steps):
    for step in steps:
        path = run.checkpoints / checkpoint_name(step)
        path.mkdir(parents=True)
        write_json(path / "state.json", {"step": step, "tokens": 100 * step}, durable=False)
        write_json(path / "manifest.json", {"step": step}, durable=False)


def evaluator_of(run, evaluations, **settings):
    told = []
    config = RunConfig.from_mapping({"evaluation": {"data": DATA} | settings})
    return Evaluator(run, config, evaluations, told.append), told


def end(run, step, problem=""):
    write_ending(run, run.checkpoints / checkpoint_name(step), problem)


def test_each_checkpoint_is_evaluated_once_in_order(run):
    played = Played(most=1)
    evaluator, told = evaluator_of(run, played)
    assert not evaluator.look()
    save(run, 1, 2)
    for _ in range(3):
        assert evaluator.look()
    assert played.started == [1]
    end(run, 1)
    played.running.clear()
    evaluator.look()
    end(run, 2, "the disk is full")
    played.running.clear()
    assert not evaluator.look()
    assert played.started == [1, 2]
    assert told == ["step 2: not evaluated: the disk is full"]


def test_one_that_was_killed_is_started_again_and_given_up_after_some_attempts(run):
    played = Played()
    evaluator, told = evaluator_of(run, played, max_attempts=3)
    save(run, 5)
    for _ in range(3):
        assert evaluator.look()
        played.running.clear()
    evaluator.look()
    assert not evaluator.look()
    assert played.started == [5, 5, 5]
    assert told[:2] == [f"step 5: its evaluation was killed or crashed; attempt {number} of 3" for number in (2, 3)]
    assert told[2].startswith("step 5: not evaluated: all 3 evaluations were killed or crashed; see")


def test_what_cannot_be_recorded_is_told_once_and_nobody_waits_for_it(run, monkeypatch):
    played = Played()
    save(run, 5)
    evaluator, told = evaluator_of(run, played)

    def fill(path, record):
        raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))

    monkeypatch.setattr("llama_core.records.evaluation_jobs.write_json", fill)
    played.start = lambda command, step: "1"
    while evaluator.look(has_trained=True):
        pass
    (line,) = told
    assert line.startswith(
        f"step 5: not evaluated: cannot write {run.evaluations}/jobs/step-00000005.json: the disk of"
    )


def test_who_comes_next_follows_what_runs_and_repeats_what_was_ended_for_it(run):
    played = Played()
    save(run, 1)
    first, _ = evaluator_of(run, played)
    first.look()
    second, told = evaluator_of(run, played)
    second.look()
    assert played.started == [1]
    second.stop()
    third, _ = evaluator_of(run, played, max_attempts=1)
    assert third.look()
    assert played.started == [1, 1]
    assert not told


def test_the_last_checkpoint_is_evaluated_though_it_is_no_milestone(run):
    played = Played()
    save(run, 1, 3, 4)
    evaluator, _ = evaluator_of(run, played, every_tokens=300)
    evaluator.look()
    assert played.started == [3]
    evaluator.look(has_trained=True)
    assert played.started == [3, 4]


def test_no_more_wait_than_may_stay_on_disk(run):
    played = Played()
    save(run, 1, 2, 3)
    evaluator, _ = evaluator_of(run, played, keep_waiting=2)
    evaluator.look()
    assert played.started == [1, 2]


def test_data_that_cannot_be_evaluated_on_is_refused_before_the_run_begins(tmp_path):
    config = RunConfig.from_mapping({"launch": {"device": "cpu"}, "evaluation": {"data": {"gone": "gone.jsonl"}}})
    with pytest.raises(ConfigError, match=r"evaluation\.data\.gone: .*gone\.jsonl"):
        prepare_run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


LARGE = {"model": "llama3_70b", "launch": {"launcher": "slurm", "device": "cuda", "gpu_type": "h100"}}


def test_a_run_that_would_fail_in_every_evaluation_is_refused_with_what_to_set():
    asked = {"data": DATA, "dtype": "bf16", "tp": 1, "pp": 1}
    with pytest.raises(DoesNotFitError, match=r"^evaluation\.tp=1: .*; set evaluation\.tp=2, or"):
        check_evaluation(RunConfig.from_mapping(LARGE | {"evaluation": asked}))


def test_the_number_of_gpus_that_is_chosen_is_told(tmp_path, capsys):
    (tmp_path / "law.jsonl").write_text('{"text": "the law"}')
    asked = {"data": {"law": str(tmp_path / "law.jsonl")}, "dtype": "bf16"}
    check_evaluation(RunConfig.from_mapping(LARGE | {"data": {"tokenizer": "bytes"}, "evaluation": asked}))
    assert "evaluation.tp=2: fewer GPUs do not hold llama3_70b in bf16" in capsys.readouterr().out


def test_processes_run_one_at_a_time_and_end_when_told(run):
    here = OnThisMachine(run, "cpu")
    command = (sys.executable, "-c", "import time; print('evaluating', flush=True); time.sleep(600)")
    first = here.start(command, 1)
    assert here.start(command, 2) is None
    assert here.is_running(first)
    here.stop()
    assert not here.is_running(first)
    second = here.start((sys.executable, "-c", "print('again')"), 2)
    eventually(lambda: not here.is_running(second))
    assert (run.logs / "evaluations.log").read_text().endswith("=== evaluation of step 2 ===\nagain\n")
