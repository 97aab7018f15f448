"""A branch off the stable phase of a run, without the processes of a job."""

import re
import shutil

import pytest
import torch
from safetensors.torch import save_file
from test_trainer import Counting, assert_equal, batch, losses, trainer, weights
from tiers import nightly

from llama_core.config.run import RunConfig
from llama_core.config.settings import UNNAMED
from llama_core.data.statistics import refuse_other_digest
from llama_core.errors import DataError, TrainingInfraError, WeightsError
from llama_core.hugging_face.bases import BaseRecord, base_digest, refuse_other_base
from llama_core.hugging_face.pretrained import Origin
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import checkpoint_name, find_problem, list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.settings_changes import SettingsChange, read_settings_changes, record_settings_change
from llama_core.runs.decay import branch_off
from llama_core.training.trainer import Trainer

STABLE = {"lr_schedule": "wsd", "warmup_steps": 2, "checkpoint_every": 1, "keep_checkpoints": 20}


@pytest.fixture(scope="module")
def stable(tmp_path_factory):
    """A run that is stable after step 2 and decays after step 9 of 12."""
    run = RunDirectory(tmp_path_factory.mktemp("stable") / "run")
    run.create()
    trainer(run, steps=12, decay_fraction=0.25, **STABLE).fit()
    return run


def resumed(branch):
    settings = RunConfig.load(branch.config)
    plan = ParallelPlan(microbatch_size=settings.batch_size)
    validation = {UNNAMED: lambda: [batch(99)]}
    steps = settings.training.steps
    return Trainer(branch, settings, plan, batches=Counting(), validation=validation, total_steps=steps)


@pytest.mark.parametrize("at", [2, nightly(9)])
def test_a_branch_is_the_run_that_would_have_decayed_there_bit_for_bit(stable, tmp_path, at):
    decay = 3
    whole = RunDirectory(tmp_path / "whole")
    whole.create()
    expected = trainer(whole, steps=at + decay, decay_fraction=decay / (at + decay), **STABLE)
    expected.fit()
    branch = branch_off(stable, tmp_path / "branch", num_steps=decay, step=at)
    assert [path.name for path in list_checkpoints(branch)] == [checkpoint_name(at)]
    assert find_problem(branch.checkpoints / checkpoint_name(at)) == ""
    decayed = resumed(branch)
    decayed.fit()
    assert losses(branch) == losses(whole)
    assert_equal(weights(decayed), weights(expected))
    assert_equal(decayed.engine.optimizer.state_dict()["state"], expected.engine.optimizer.state_dict()["state"])


def test_a_branch_off_a_run_without_patience_left_takes_all_its_steps(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    settings = STABLE | {"eval_every": 1, "patience": 1, "learning_rate": 1e-30, "steps": 9}
    assert trainer(run, validation=lambda: [batch(99)], **settings).fit().ended_early
    assert resumed(branch_off(run, tmp_path / "branch", num_steps=4)).fit().steps == 6


def test_a_branch_has_the_settings_of_its_checkpoint_whatever_its_run_has_changed_since(stable, tmp_path):
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(stable.path, run.path)
    usual = RunConfig.load(run.config)
    changes = [
        SettingsChange(3, {"training.weight_decay": 0.3}, {"training.weight_decay": usual.training.weight_decay}),
        SettingsChange(8, {"training.learning_rate": usual.training.learning_rate}, {"training.learning_rate": 1e-9}),
    ]
    for change in changes:
        record_settings_change(run, change)
    run.config.write_text(usual.with_overrides("training.learning_rate=1e-9").to_yaml())
    branch = branch_off(run, tmp_path / "branch", num_steps=3, step=6)
    assert RunConfig.load(branch.config).training.learning_rate == usual.training.learning_rate
    assert read_settings_changes(branch) == tuple(changes[:1])


def test_a_branch_refuses_another_base_tokenizer_or_template_as_its_run_does(stable, tmp_path):
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(stable.path, run.path)
    base = tmp_path / "base"
    base.mkdir()
    save_file({"a": torch.zeros(9)}, base / "model.safetensors")
    write_json(run.base, BaseRecord(str(base), base_digest(base)))
    write_json(run.data, {"tokenizer_digest": "0", "template_digest": "0"})
    branch = branch_off(run, tmp_path / "branch", num_steps=1, step=5)
    refuse_other_base(branch, Origin(base))
    save_file({"a": torch.ones(9)}, base / "model.safetensors")
    with pytest.raises(WeightsError, match=f"holds other weights than those over which {branch.path} has trained"):
        refuse_other_base(branch, Origin(base))
    for what in ("tokenizer", "template"):
        with pytest.raises(DataError, match=f"{what} 'mine' is not the one that {branch.path} has trained with"):
            refuse_other_digest(branch, what, "mine", "1")


def test_the_run_that_is_branched_off_stays_as_it_is(stable, tmp_path):
    before = {path: path.read_bytes() for path in stable.path.rglob("*") if path.is_file()}
    branch = branch_off(stable, tmp_path / "branch", num_steps=1, step=5)
    resumed(branch).fit()
    assert {path: path.read_bytes() for path in stable.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"num_steps": 3}, r"step 12 of .* is in the decay, with a learning rate of 3.00e-05 instead of 3.00e-04; "),
        ({"num_steps": 3, "step": 1}, r"step 1 of .* is in the warm-up, with a learning rate of 1.50e-04 instead"),
        ({"num_steps": 3, "step": 13}, r"has no checkpoint of step 13; there are 1, 2, 3"),
        ({"num_steps": 0, "step": 5}, r"steps=0: a decay takes at least 1$"),
    ],
)
def test_what_cannot_decay_is_one_line_and_leaves_nothing(stable, tmp_path, choice, problem):
    with pytest.raises(TrainingInfraError, match=problem):
        branch_off(stable, tmp_path / "branch", **choice)
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_without_a_stable_phase_is_refused(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    trainer(run, steps=2).fit()
    with pytest.raises(TrainingInfraError, match=r"^training.lr_schedule=cosine of .* has no stable phase"):
        branch_off(run, tmp_path / "branch", num_steps=1)


def test_a_folder_that_holds_anything_is_refused(stable, tmp_path):
    (tmp_path / "branch").mkdir()
    (tmp_path / "branch" / "thesis.tex").write_text("")
    with pytest.raises(TrainingInfraError, match=re.escape(f"{tmp_path / 'branch'} exists and is not an empty folder")):
        branch_off(stable, tmp_path / "branch", num_steps=1, step=5)


def test_the_decay_of_a_branch_is_as_long_as_asked_for(stable, tmp_path):
    for num_steps in (1, 7, 1000):
        branch = branch_off(stable, tmp_path / str(num_steps), num_steps=num_steps, step=5)
        training = RunConfig.load(branch.config).training
        assert training.steps == 5 + num_steps
        assert round(training.steps * training.decay_fraction) == num_steps
