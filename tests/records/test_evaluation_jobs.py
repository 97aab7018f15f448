"""Which checkpoints wait for their evaluation, and stay on disk for it."""

import shutil

import pytest

from llama_core.records.checkpoints import checkpoint_name, list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluation_jobs import (
    EvaluationAttempt,
    identity,
    read_attempt,
    read_ending,
    waiting_checkpoints,
    write_attempt,
    write_ending,
)
from llama_core.records.files import write_json
from llama_core.records.retention import Retention


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path)


def save(run, step, tokens=None, *, trained="once"):
    path = run.checkpoints / checkpoint_name(step)
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "state.json", {"step": step, "tokens": tokens or 100 * step}, durable=False)
    write_json(path / "manifest.json", {"trained": trained}, durable=False)
    return path


def waiting(run, every_tokens=0):
    return [int(path.name[-8:]) for path in waiting_checkpoints(list_checkpoints(run), every_tokens)]


def test_a_checkpoint_waits_until_its_evaluation_has_ended_with_scores_or_without(run):
    assert waiting(run) == []
    first, second, _ = (save(run, step) for step in (1, 2, 3))
    write_ending(run, first)
    write_ending(run, second, "no such file")
    assert waiting(run) == [3]
    assert [read_ending(run, path).problem for path in (first, second)] == ["", "no such file"]


def test_a_step_that_is_trained_again_is_evaluated_again(run):
    path = save(run, 1)
    write_attempt(run, EvaluationAttempt(1, 100, identity(path), 2, "7"))
    write_ending(run, path)
    save(run, 1, trained="twice")
    assert waiting(run) == [1]
    assert read_attempt(run, path) is None


@pytest.mark.parametrize("content", ["{", "{}", '{"step": 1, "tokens": "many", "checkpoint": "", "problem": ""}'])
def test_a_checkpoint_whose_ending_is_damaged_is_evaluated_again(run, content):
    path = save(run, 1)
    write_ending(run, path)
    (damaged,) = run.evaluations.rglob("*.ended.json")
    damaged.write_text(content)
    assert waiting(run) == [1]
    assert waiting(run, every_tokens=50) == [1]


def test_the_first_checkpoint_after_each_multiple_waits_also_when_those_before_are_gone(run):
    for step, tokens in enumerate((90, 130, 180, 210, 290, 450), start=1):
        save(run, step, tokens)
    assert waiting(run, 100) == [2, 4, 6]
    write_ending(run, run.checkpoints / checkpoint_name(2))
    assert waiting(run, 100) == [4, 6]
    shutil.rmtree(run.checkpoints / checkpoint_name(2))
    assert waiting(run, 100) == [4, 6]
    save(run, 2, 130, trained="twice")
    assert waiting(run, 100) == [2, 4, 6]


def test_the_oldest_that_wait_stay_on_disk_beside_the_newest(run):
    for step in range(1, 7):
        save(run, step)
    write_ending(run, run.checkpoints / checkpoint_name(1))
    kept = Retention(newest=1, waiting=2).kept(list_checkpoints(run))
    assert sorted(path.name for path in kept) == [checkpoint_name(step) for step in (2, 3, 6)]
    assert Retention(newest=1, waiting=2).most(0, 9) == 4
