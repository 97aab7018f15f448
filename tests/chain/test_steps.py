import json
import math
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from llama_core.chain import announcements, prepare, steps
from llama_core.chain.batch import batch_line
from llama_core.chain.chain import run_chain
from llama_core.chain.environment import validate_environment
from llama_core.chain.planned import plan_run
from llama_core.chain.prepare import prepare_run
from llama_core.chain.preview import preview
from llama_core.config.recorded import OR_CHANGE_ON_RESUME, refuse_edited
from llama_core.config.run import RunConfig
from llama_core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EnvironmentMismatchError,
    PlanError,
    RunDirectoryError,
    StoppedError,
    TrainingFailedError,
    WeightsError,
)
from llama_core.launch.jobs.local import LocalJobHandle
from llama_core.launch.outcome import read_outcome
from llama_core.launch.rank.checks import check_settings
from llama_core.machine.validate import EnvironmentReport
from llama_core.records.checkpoints import STATE, checkpoint_name, write_manifest
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json, write_json
from llama_core.records.job import JobRecord, Outcome
from llama_core.records.settings_changes import SettingsChange, first_values, newest_values, read_settings_changes
from llama_core.runs import continuing as runs
from llama_core.runs.console import say
from llama_core.runs.continuing import is_finished
from llama_core.runs.loading import load_config, load_plan
from llama_core.units import GIB, format_count
from training_infra import cli
from training_infra.local import local_steps


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))


def config(**training):
    return RunConfig.from_mapping({"training": {"seq_len": 32} | training, "launch": {"device": "cpu"}})


def finish(run, status="finished"):
    write_json(run.outcome, Outcome(status, "it did", 10, "", "2026-01-01T00:00:00+00:00"))
    write_json(run.training, {"steps": 10})


def test_a_plan_says_that_no_fused_kernel_computes_attention(monkeypatch):
    told = []
    monkeypatch.setattr(announcements, "say", lambda step, text: told.append(text))
    for cap in (0.0, 5.0):
        told.clear()
        asked = {"architecture": {"attention_soft_cap": cap}, "launch": {"device": "cpu"}}
        announcements.say_plan(prepare_run(RunConfig.from_mapping(asked)))
        assert any("it holds all scores and is slow" in text for text in told) == (cap > 0)


def test_a_run_is_named_by_model_date_and_fingerprint():
    run = prepare_run(config())
    model, date, fingerprint = run.name.rsplit("-", 2)
    assert (model, len(date)) == ("tiny_llama3_50m", 8)
    assert fingerprint == RunConfig.load(run.config).fingerprint()[:4]


@pytest.mark.parametrize(("seed", "reason"), [(0, "already holds this run"), (7, "holds a run of another config")])
def test_a_run_that_another_process_starts_in_the_same_directory_meanwhile_is_left_alone(monkeypatch, seed, reason):
    """Here while the data are read."""

    def be_overtaken(wanted, **settings):
        monkeypatch.setattr(prepare, "_check_data", check)
        written.append(prepare_run(config(seed=seed), Path("run")).config.read_bytes())
        return check(wanted, **settings)

    check, written = prepare._check_data, []
    monkeypatch.setattr(prepare, "_check_data", be_overtaken)
    with pytest.raises(RunDirectoryError, match=reason):
        prepare_run(config(), Path("run"))
    assert Path("run/config.yaml").read_bytes() == written[0]


def test_a_run_that_goes_on_with_longer_sequences_gets_another_plan():
    Path("texts.jsonl").write_text(json.dumps({"text": "a text of some words " * 50}) + "\n")
    mixture = config(steps=9, batch_size=8).with_overrides("data.sources.texts={path: texts.jsonl, weight: 1}")
    run = prepare_run(mixture, Path("run"))
    assert load_plan(run).batch_size == 8
    longer = mixture.with_overrides("data.stages=[{from_tokens: 256, seq_len: 64}]")
    with pytest.raises(RunDirectoryError, match="--allow-data-change"):
        prepare_run(longer, run.path, resume=True)
    prepare_run(longer, run.path, resume=True, allow_data_change=True)
    assert load_plan(run).batch_size == 4
    assert (load_config(run).training.batch_size, load_config(run).training.seq_len) == (8, 32)


def test_a_mixture_changed_by_hand_is_refused_with_the_flag_that_allows_it():
    Path("texts.jsonl").write_text(json.dumps({"text": "a text of some words " * 50}) + "\n")
    mixture = config(steps=9).with_overrides("data.sources.texts={path: texts.jsonl, weight: 1}")
    run = prepare_run(mixture, Path("run"))
    other = load_config(run).with_overrides("data.sources.texts.weight=2")
    with pytest.raises(RunDirectoryError, match=r"data\.sources\.texts\.weight is 1\.0 there.*--allow-data-change"):
        refuse_edited(run, other, load_config(run))
    refuse_edited(run, other, load_config(run), may_change_data=True)


def test_the_written_configuration_is_resolved_and_can_be_read_back():
    run = prepare_run(RunConfig())
    written = RunConfig.load(run.config)
    assert written.launch.device in {"cpu", "cuda"}
    assert written.training.precision in {"bf16", "fp32"}
    assert load_plan(run).world_size == 1


def test_repeating_a_request_makes_another_run():
    names = [prepare_run(config()).name for _ in range(3)]
    assert names == [names[0], f"{names[0]}-2", f"{names[0]}-3"]


def test_resume_takes_the_newest_unfinished_run_of_the_configuration():
    first, second = prepare_run(config()), prepare_run(config())
    prepare_run(config(seed=1))
    assert prepare_run(config(), resume=True) == second
    finish(second)
    assert prepare_run(config(), resume=True) == second, "its report is still to be written"
    second.report.touch()
    assert prepare_run(config(), resume=True) == first
    finish(first)
    first.report.touch()
    assert prepare_run(config(), resume=True).name.endswith("-3")


def end_after(run, step):
    save_checkpoint(run, step)
    finish(run)
    run.report.touch()


def test_resume_with_more_steps_takes_the_newest_run_that_took_fewer(capsys, monkeypatch):
    shorter, short, other = (prepare_run(config(**asked)) for asked in ({"steps": 2}, {"steps": 3}, {"seed": 1}))
    for step, run in ((2, shorter), (3, short), (4, other)):
        end_after(run, step)
    capsys.readouterr()
    assert prepare_run(config(steps=5), resume=True) == short
    monkeypatch.setattr(runs, "attach", lambda run: "its job")
    assert prepare_run(config(steps=5), resume=True) == short, "now an unfinished run of five steps, and running"
    assert capsys.readouterr().out == ""


def test_a_run_that_resume_starts_anew_says_why(capsys):
    def said(**asked):
        capsys.readouterr()
        run = prepare_run(config(**asked), resume=True)
        (line,) = capsys.readouterr().out.splitlines()
        return run, line

    run, none = said(steps=3)
    assert none == "note      nothing to resume: runs holds no run of tiny_llama3_50m"
    end_after(run, 3)
    again, same = said(steps=3)
    assert same == f"note      nothing to resume: {run.path} has already taken 3 steps; ask for more to extend it"
    end_after(again, 3)
    third, seed = said(steps=3, seed=1)
    assert seed == f"note      nothing to resume: {again.path} differs: training.seed is 0 there, 1 here"
    end_after(third, 3)
    _, rate = said(steps=3, seed=1, learning_rate=1e-4)
    assert rate == (
        f"note      nothing to resume: {third.path} differs: training.learning_rate is 0.0003 there, 0.0001 here; to "
        f"go on with it so, add --run-dir {third.path}"
    )


def test_a_slurm_job_on_the_cpu_has_the_memory_it_requests():
    asked = {"launcher": "slurm", "device": "cpu", "nodes": 2, "slurm": {"memory_gb_per_node": 6}}
    four_ranks = RunConfig.from_mapping({"launch": asked, "parallel": {"gpus": 4}})
    assert plan_run(four_ranks).estimate.usable_bytes == 3 * GIB


def test_a_job_with_nodes_of_its_own_is_said_to_ask_for_all_of_their_memory():
    slurm = {"launcher": "slurm", "device": "cpu"}

    def asked(**settings):
        launch = slurm | {"slurm": settings}
        return announcements.asked_memory(prepare_run(config().with_overrides(f"launch={launch}")))

    assert "--mem=0" in asked(options={"exclusive": True})
    assert not asked(options={"exclusive": True}, memory_gb_per_node=8)


def test_resume_may_change_the_checkpoint_interval_but_not_what_is_trained(tmp_path):
    run = prepare_run(config(), tmp_path / "run")
    prepare_run(config(checkpoint_every=7), run.path, resume=True)
    assert RunConfig.load(run.config).training.checkpoint_every == 7
    with pytest.raises(RunDirectoryError) as caught:
        prepare_run(config(seed=1, learning_rate=1e-5), run.path, resume=True)
    assert str(caught.value) == (
        f"{run.path} holds a run of another configuration (training.seed is 0 there, 1 here); training.seed cannot "
        "change on resume, as docs/runs.md says; choose another --run-dir"
    )
    with pytest.raises(RunDirectoryError) as caught:
        prepare_run(config(learning_rate=1e-5), run.path)
    assert str(caught.value) == (
        f"{run.path} holds a run of another configuration (training.learning_rate is 0.0003 there, 1e-05 here); "
        "choose another --run-dir, or add --resume to go on with it, which records the change"
    )


OTHERS = {
    "learning_rate": 1e-5,
    "lr_schedule": "constant",
    "min_lr_ratio": 0.5,
    "warmup_steps": 1,
    "weight_decay": 0.0,
    "beta2": 0.9,
    "max_grad_norm": 0.5,
}


@pytest.mark.parametrize("key", OTHERS)
def test_resume_may_change_how_the_optimizer_steps_and_records_it(trained, key):
    usual = getattr(load_config(trained).training, key)
    change = SettingsChange(10, {f"training.{key}": usual}, {f"training.{key}": OTHERS[key]})
    prepare_run(config(steps=10, **{key: OTHERS[key]}), trained.path, resume=True)
    assert read_settings_changes(trained) == (change,)
    # no checkpoint has been saved with it yet: the ranks accept it, and a second resume keeps it
    check_settings(trained, load_config(trained))
    prepare_run(load_config(trained), trained.path, resume=True)
    assert read_settings_changes(trained) == (change,)
    save_checkpoint(trained, 20)
    prepare_run(config(steps=30, **{key: usual}), trained.path, resume=True)
    back = SettingsChange(20, change.after, change.before)
    assert read_settings_changes(trained) == (change, back)
    assert first_values((change, back)) == newest_values((change, back)) == change.before


def test_a_change_that_is_taken_back_before_a_step_is_not_recorded(trained):
    prepare_run(config(steps=10, learning_rate=1e-5), trained.path, resume=True)
    prepare_run(config(steps=10), trained.path, resume=True)
    assert read_settings_changes(trained) == ()


def test_a_setting_that_is_edited_after_a_recorded_change_is_refused(trained):
    prepare_run(config(steps=10, learning_rate=1e-5), trained.path, resume=True)
    edit(trained, "learning_rate: 1.0e-05", "learning_rate: 0.001")
    for refused in (
        lambda: prepare_run(load_config(trained), trained.path, resume=True),
        lambda: check_settings(trained, load_config(trained)),
    ):
        with pytest.raises(RunDirectoryError, match="has changed since"):
            refused()


def test_the_settings_of_a_running_job_do_not_change(trained, monkeypatch):
    monkeypatch.setattr(runs, "attach", lambda run: "a job")
    with pytest.raises(RunDirectoryError, match=r"its job is running; .*, to change training\.learning_rate$"):
        prepare_run(config(steps=10, learning_rate=1e-5), trained.path, resume=True)


@pytest.fixture
def trained(tmp_path):
    """A finished run with a checkpoint."""
    run = prepare_run(config(steps=10), tmp_path / "run")
    save_checkpoint(run, 10)
    finish(run)
    return run


def edit(run, old, new):
    text = run.config.read_text()
    assert old in text
    run.config.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("learning_rate: 0.0003", "learning_rate: 0.001", "training.learning_rate is 0.0003 there, 0.001 here"),
        ("hidden_size: null", "hidden_size: 256", "architecture.hidden_size is unset there, 256 here"),
        ("ffn_size: null", "ffn_size: 256", "architecture.ffn_size is unset there, 256 here"),
        ("steps: 10\n  epochs: 1.0", "steps: null\n  epochs: 2.0", "training.epochs is 1.0 there, 2.0 here"),
    ],
)
def test_settings_that_were_edited_since_the_checkpoint_are_refused_and_the_outcome_stays(trained, old, new, said):
    edit(trained, old, new)
    outcome = trained.outcome.read_bytes()
    with pytest.raises(RunDirectoryError) as refused:
        prepare_run(load_config(trained), trained.path, resume=True)
    copy = trained.checkpoints / "step-00000010" / "config.yaml"
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"{trained.config} has changed since {trained.path} was trained (")
    assert str(refused.value).endswith(
        f"); get the run's settings back with: cp {copy} {trained.config}, or choose another --run-dir to train with "
        "other settings" + (OR_CHANGE_ON_RESUME if "learning_rate" in old else "")
    )
    assert trained.outcome.read_bytes() == outcome
    shutil.copyfile(copy, trained.config)
    assert prepare_run(load_config(trained), trained.path, resume=True) == trained


def test_edited_settings_do_not_make_another_request_the_same_run(trained, monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    run = RunDirectory(trained.path.rename(tmp_path / "runs" / "tiny_llama3_50m-1"))
    edit(run, "learning_rate: 0.0003", "learning_rate: 0.001")
    assert runs.existing_run(plan_run(config(steps=10)).config, None, resume=True) == run
    other = plan_run(config(steps=10, learning_rate=0.001)).config
    assert runs.existing_run(other, None, resume=True) is None
    assert "training.learning_rate is 0.0003 there, 0.001 here" in runs.why_none_goes_on(other)


def test_flags_that_repeat_what_was_trained_bring_edited_settings_back(trained):
    text = trained.config.read_text()
    edit(trained, "learning_rate: 0.0003", "learning_rate: 0.001")
    prepare_run(config(steps=10), trained.path, resume=True)
    assert trained.config.read_text() == text


def test_more_steps_may_be_written_into_the_settings_but_no_fewer_than_were_taken(trained):
    edit(trained, "  steps: 10", "  steps: 20")
    prepare_run(load_config(trained), trained.path, resume=True)
    assert not is_finished(trained)
    edit(trained, "  steps: 20", "  steps: 5")
    with pytest.raises(RunDirectoryError, match=r"training.steps=5: .* has already taken 10 steps; ask for more"):
        prepare_run(load_config(trained), trained.path, resume=True)


def test_settings_that_were_edited_before_the_first_checkpoint_are_taken(tmp_path):
    run = prepare_run(config(), tmp_path / "run")
    edit(run, "learning_rate: 0.0003", "learning_rate: 0.001")
    prepare_run(load_config(run), run.path, resume=True)
    assert load_config(run).training.learning_rate == 0.001


def test_ranks_refuse_settings_that_were_edited_since_the_job_was_submitted(trained):
    check_settings(trained, load_config(trained))
    edit(trained, "learning_rate: 0.0003", "learning_rate: 0.001")
    with pytest.raises(RunDirectoryError, match=r"training.learning_rate is 0.0003 there, 0.001 here"):
        check_settings(trained, load_config(trained))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("[1]", "is not a mapping of keys to values"),
        ("modle: x", "unknown key 'modle'; did you mean 'model'?"),
        ("training: {learning_rate: fast}", "training.learning_rate='fast': input should be a valid number"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_damaged_configuration_of_a_run_names_the_file_and_the_way_back(trained, content, said):
    trained.config.write_text(content)
    copy = trained.checkpoints / "step-00000010" / "config.yaml"
    with pytest.raises(ConfigError) as refused:
        load_config(trained)
    (line,) = refused.value.problems
    assert str(trained.config) in line and said in line
    assert "write a key" not in line
    assert line.endswith(f"; get the run's settings back with: cp {copy} {trained.config}")


def test_an_emptied_configuration_ends_a_resume_in_one_line_with_the_way_back(trained, capsys):
    trained.config.write_text("")
    outcome = trained.outcome.read_bytes()
    assert cli.main(["train", "--resume", "--run-dir", str(trained.path)]) == 2
    copy = trained.checkpoints / "step-00000010" / "config.yaml"
    assert capsys.readouterr().err == (
        f"error: {trained.config} is empty; get the run's settings back with: cp {copy} {trained.config}\n"
    )
    assert trained.outcome.read_bytes() == outcome


def test_a_damaged_copy_of_the_settings_is_no_way_back(trained):
    save_checkpoint(trained, 20)
    write_json(trained.checkpoints / "step-00000020" / STATE, {"step": 20})
    write_manifest(trained.checkpoints / "step-00000020", {})
    copy = trained.checkpoints / "step-00000020" / "config.yaml"
    copy.write_text(copy.read_text().replace("seed: 0", "seed: 1"))
    prepare_run(load_config(trained), trained.path, resume=True)
    trained.config.write_text("")
    with pytest.raises(ConfigError, match=r"cp .*/step-00000010/config.yaml"):
        load_config(trained)


@pytest.fixture
def request_with_a_folder(tmp_path):
    """A request to train a two-layer model in a folder, given by its relative path."""
    folder = tmp_path / "My-Llama"
    folder.mkdir()
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2} | sizes))
    return RunConfig.from_mapping(
        {"model": "./My-Llama", "training": {"seq_len": 32}, "launch": {"device": "cpu"}, "data": {"source": "sample"}}
    )


def test_a_run_is_named_after_its_model_folder_and_resumes_without_it(request_with_a_folder, tmp_path):
    run = prepare_run(request_with_a_folder)
    assert run.name.startswith("My-Llama-")
    assert prepare_run(request_with_a_folder, resume=True) == run
    (tmp_path / "My-Llama").rename(tmp_path / "elsewhere")
    recorded = load_config(run)
    assert (recorded.model, recorded.spec) == (str(tmp_path / "My-Llama"), request_with_a_folder.spec)
    assert prepare_run(recorded, run.path, resume=True) == run


def test_a_run_does_not_resume_with_a_changed_model_folder(request_with_a_folder, tmp_path):
    run = prepare_run(request_with_a_folder, tmp_path / "run")
    file = tmp_path / "My-Llama" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    assert load_config(run).spec.num_layers == 2
    changed = request_with_a_folder.with_overrides()
    with pytest.raises(RunDirectoryError, match=r"\(architecture.num_layers is 2 there, 3 here\)"):
        prepare_run(changed, run.path, resume=True)


def test_a_resumed_run_keeps_its_plan():
    """Other microbatches would round the sums differently."""
    run = prepare_run(config())
    plan = read_json(run.plan) | {"microbatch_size": 2, "num_microbatches": 4}
    write_json(run.plan, plan)
    prepare_run(config(), run.path, resume=True)
    assert read_json(run.plan) == plan


def save_checkpoint(run, step):
    """Write the files of a checkpoint that are read before a job starts."""
    checkpoint = run.checkpoints / checkpoint_name(step)
    checkpoint.mkdir(parents=True)
    shutil.copyfile(run.config, checkpoint / run.config.name)
    write_json(checkpoint / STATE, {"step": step})
    write_manifest(checkpoint, {})


def test_a_run_records_the_checkpoint_it_starts_from(tmp_path):
    other = prepare_run(config(), tmp_path / "other")
    save_checkpoint(other, 3)
    run = prepare_run(config(init_from="other"), tmp_path / "run")
    save_checkpoint(other, 4)
    assert load_config(run).training.init_from == str(other.checkpoints / "step-00000003")


def test_a_run_starts_from_the_checkpoint_before_a_damaged_one_with_a_line(tmp_path, capsys):
    other = prepare_run(config(), tmp_path / "other")
    for step in (3, 4):
        save_checkpoint(other, step)
        write_json(other.checkpoints / checkpoint_name(step) / STATE, {"step": step})
        write_manifest(other.checkpoints / checkpoint_name(step), {})
    settings = other.checkpoints / checkpoint_name(4) / "config.yaml"
    settings.write_text(settings.read_text().replace("seed: 0", "seed: 1"))
    capsys.readouterr()
    run = prepare_run(config(init_from="other"), tmp_path / "run")
    assert load_config(run).training.init_from == str(other.checkpoints / "step-00000003")
    damage = r"config.yaml has the checksum \w+, but \w+ was written"
    line = rf"warning +checkpoint step-00000004 is damaged \({damage}\); trying the one before\n"
    assert re.search(line, capsys.readouterr().out)


def test_a_rotary_embedding_that_the_weights_were_not_made_for_is_a_warning(tmp_path):
    save_checkpoint(prepare_run(config(), tmp_path / "other"), 3)
    asked = config(init_from="other").with_overrides("architecture.rope_theta=1000000")
    (warning,) = [line for line in validate_environment(asked).warnings if "rope_theta" in line]
    assert warning.startswith("architecture.rope_theta is 1e+06, but ")
    assert warning.endswith(" was made for 500000; ignore this if it is intended")


def test_a_run_needs_its_initial_weights_until_it_has_saved(tmp_path):
    other = prepare_run(config(), tmp_path / "other")
    save_checkpoint(other, 3)
    run = prepare_run(config(init_from="other"), tmp_path / "run")
    shutil.rmtree(other.path)
    with pytest.raises(WeightsError, match="does not exist"):
        prepare_run(load_config(run), run.path, resume=True)
    assert "does not exist" in validate_environment(load_config(run), run.path).errors[0]
    save_checkpoint(run, 1)
    prepare_run(load_config(run), run.path, resume=True)
    assert validate_environment(load_config(run), run.path).errors == ()


def test_adapters_always_need_their_base_weights(tmp_path):
    other = prepare_run(config(), tmp_path / "other")
    save_checkpoint(other, 3)
    run = prepare_run(config(init_from="other").with_overrides("strategy=lora"), tmp_path / "run")
    save_checkpoint(run, 1)
    prepare_run(load_config(run), run.path, resume=True)
    shutil.rmtree(other.path)
    with pytest.raises(WeightsError, match="does not exist"):
        prepare_run(load_config(run), run.path, resume=True)


def test_the_directory_of_a_run_is_reused_only_to_resume_it(tmp_path):
    prepare_run(config(), tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="already holds this run; add --resume to continue it"):
        prepare_run(config(), tmp_path / "run")


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("")
    with pytest.raises(RunDirectoryError, match="holds files that are not a run"):
        prepare_run(config(), tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("mapping", "error", "message"),
    [
        ({"data": {"source": "no.jsonl"}}, DataError, "'no.jsonl' does not exist"),
        ({"data": {"validation": "no.jsonl"}}, DataError, "'no.jsonl' does not exist"),
        ({"training": {"init_from": "nowhere"}, "launch": {"device": "cpu"}}, WeightsError, "does not exist; name a"),
        ({"parallel": {"gpus": 3, "tp": 3}, "launch": {"device": "cpu"}}, PlanError, "tp=3 does not divide the"),
        ({"parallel": {"gpus": 4}}, EnvironmentMismatchError, "gpus=4: this machine has"),
    ],
)
def test_a_request_that_cannot_be_met_writes_nothing(tmp_path, mapping, error, message):
    with pytest.raises(error, match=message):
        prepare_run(RunConfig.from_mapping(mapping), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


BIG = {"model": "llama3_70b", "launch": {"device": "cpu"}, "training": {"seq_len": 32, "batch_size": 1}}


def test_a_run_estimated_not_to_fit_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(PlanError, match=r"take 1128.9 GB per device, .*\(estimated\); or run it anyway with --force"):
        prepare_run(RunConfig.from_mapping(BIG))
    assert list(tmp_path.iterdir()) == []


def test_force_overrides_the_estimate_and_is_recorded():
    forced = RunConfig.from_mapping(BIG, ["launch.force=true"])
    run = prepare_run(forced)
    assert load_config(run).launch.force
    assert not steps.read_estimate(run).fits


def test_a_run_rehearsed_not_to_fit_is_refused_and_frees_its_directory(tmp_path):
    run = prepare_run(config(batch_size=1), tmp_path / "run")
    usable = 100 * 2**20
    write_json(run.estimate, read_json(run.estimate) | {"usable_bytes": usable})
    with pytest.raises(PlanError, match=r"this machine's memory.*\(rehearsed\)"):
        steps.rehearse(run)
    assert read_json(run.dry_run)["peak_bytes"] > usable
    assert prepare_run(config(batch_size=2), run.path) == run


@pytest.mark.root
def test_a_directory_without_write_permission_is_one_line(tmp_path):
    """Runs as an unprivileged user, since root may write anywhere."""
    (tmp_path / "theirs").mkdir(mode=0o755)
    program = (
        "import sys; from pathlib import Path\n"
        "from llama_core.chain.prepare import prepare_run; from llama_core.config.run import RunConfig\n"
        "config = RunConfig.from_mapping({'launch': {'device': 'cpu'}, 'data': {'source': 'dataloader'}})\n"
        "prepare_run(config, Path(sys.argv[2]))  # imports what the user may not be able to read\n"
        "import os; os.setgid(65534); os.setuid(65534)\n"
        "try: prepare_run(config, Path(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "theirs" / "run"), str(tmp_path / "ours")]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert told.startswith("RunDirectoryError cannot write run directory")
    assert "Permission denied; choose another --run-dir" in told


def test_a_run_that_cannot_start_here_records_the_reason_and_leaves_its_directory_to_the_next(tmp_path, monkeypatch):
    wanted = config().with_overrides("launch.launcher=slurm")
    run = prepare_run(wanted, tmp_path / "run")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentMismatchError, match="no sbatch"):
        steps.validate(run)
    outcome = read_outcome(run)
    assert (outcome.status, outcome.step) == ("bad-config", 0)
    assert "this machine has no sbatch" in outcome.reason
    assert prepare_run(config(), tmp_path / "run") == run


def test_a_step_on_a_directory_without_a_run_says_so(tmp_path):
    with pytest.raises(RunDirectoryError, match="holds no run"):
        steps.validate(RunDirectory(tmp_path))


def test_every_warning_about_the_machine_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(say, "console", Console(soft_wrap=True))
    announcements.say_environment(
        EnvironmentReport((), ("the disk is full", "the clock is late"), {"python": "Python 3"}, {})
    )
    assert capsys.readouterr().out.splitlines() == [
        "validate  Python 3; 2 warnings",
        "warning   the disk is full",
        "warning   the clock is late",
    ]


def test_a_runs_estimate_follows_its_plan():
    run = prepare_run(config())
    whole = steps.read_estimate(run)
    assert json.loads(json.dumps(whole.as_dict())) == read_json(run.estimate)
    write_json(run.plan, read_json(run.plan) | {"microbatch_size": 1, "num_microbatches": 8})
    prepare_run(config(), run.path, resume=True)
    half = steps.read_estimate(run)
    assert half.profile.phases["forward"]["activations"] < whole.profile.phases["forward"]["activations"]


def test_a_finished_run_is_not_started_again():
    run = prepare_run(config())
    finish(run)
    assert steps.submit(run) is None
    assert steps.wait(run, None).status == "finished"


def test_a_finished_run_that_has_lost_its_last_checkpoint_goes_on_from_the_one_before():
    run = prepare_run(config(steps=10))
    for step in (5, 10):
        save_checkpoint(run, step)
    finish(run)
    assert is_finished(prepare_run(config(steps=10), run.path, resume=True))
    shutil.rmtree(run.checkpoints / checkpoint_name(10))
    assert not is_finished(prepare_run(config(steps=10), run.path, resume=True))
    assert announcements.describe(run)[0] == f"{run.path}: continues after step 5"


def test_a_run_says_where_it_goes_on(tmp_path):
    run = prepare_run(config(), tmp_path / "run")
    write_json(run.job, JobRecord("local", "999999999", socket.gethostname(), "2026-01-01T00:00:00+00:00"))
    assert announcements.describe(run)[0] == f"{run.path}: starts over, since there is no checkpoint yet"
    save_checkpoint(run, 7)
    assert announcements.describe(run)[0] == f"{run.path}: continues after step 7"


def checkpoints_of(run, *steps):
    """Write checkpoints with checksums, and return the file of weights in each."""
    write_json(run.job, JobRecord("local", "999999999", socket.gethostname(), "2026-01-01T00:00:00+00:00"))
    written = []
    for step in steps:
        save_checkpoint(run, step)
        written.append(run.checkpoints / checkpoint_name(step) / "__0_0.distcp")
        written[-1].write_bytes(b"weights")
        write_json(written[-1].with_name(STATE), {"step": step})
        write_manifest(written[-1].parent, {})
    return written


DAMAGES = {
    "another byte": lambda file: file.write_bytes(b"weighty"),
    "a byte less": lambda file: file.write_bytes(b"weight"),
    "gone": lambda file: file.unlink(),
    "no counters": lambda file: file.with_name(STATE).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_run_goes_on_after_its_newest_intact_checkpoint_and_says_so(tmp_path, capsys, damage):
    run = prepare_run(config(), tmp_path / "run")
    *_, newest = checkpoints_of(run, 3, 7, 11)
    damage(newest)
    capsys.readouterr()
    assert announcements.describe(run)[0] == f"{run.path}: continues after step 7"
    assert re.fullmatch(r"warning +checkpoint step-00000011 is damaged \(.*\); .*\n", capsys.readouterr().out)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_with_the_way_to_start_over(tmp_path):
    run = prepare_run(config(), tmp_path / "run")
    for file in checkpoints_of(run, 3, 7):
        DAMAGES["another byte"](file)
    with pytest.raises(CheckpointError, match=r"none of the 2 .* or move them away to start over, and .*--resume$"):
        announcements.describe(run)


def test_a_checkpoint_that_only_the_ranks_will_read_is_not_said_to_be_intact(tmp_path):
    run = prepare_run(config(), tmp_path / "run")
    (file,) = checkpoints_of(run, 3)
    run.config.write_text(load_config(run).with_overrides("launch.launcher=slurm").to_yaml())
    file.write_bytes(b"weighty")
    where_it_goes_on = f"{run.path}: continues after step 3, if the ranks find that checkpoint intact"
    assert announcements.describe(run)[0] == where_it_goes_on


def test_a_run_that_only_timed_steps_is_not_finished():
    run = prepare_run(config())
    finish(run)
    run.training.unlink()
    assert not is_finished(run)
    assert prepare_run(config(), resume=True) == run


def test_the_records_of_a_run_are_json():
    run = prepare_run(config())
    assert set(json.loads(json.dumps(steps.records(run)))) == {"run_dir", "plan", "data", "estimate"}


CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def chats(path, *conversations, **data):
    lines = (json.dumps({"messages": messages}) for messages in conversations)
    (path / "chats.jsonl").write_text("\n".join(lines))
    return {"data": {"source": "chats.jsonl", **data}, "launch": {"device": "cpu"}, "training": {"seq_len": 256}}


@pytest.mark.parametrize("launcher", ["local", "slurm"])
@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        (CHAT[:1], r"no document to train on: .*1 no assistant turn\); the first: .*chats\.jsonl:1: "),
        ("hello", r"chats\.jsonl:1: 'messages' is a string"),
        ([{"role": "bot", "content": "hello"}], r"chats\.jsonl:1: message 1 has the unknown role 'bot'"),
        ([*CHAT, CHAT[1]], r"chats\.jsonl:1: chat template .* refuses it: after an optional system prompt, user and"),
    ],
)
def test_unusable_conversations_write_nothing(tmp_path, launcher, conversation, message):
    mapping = chats(tmp_path, conversation, chat_template="llama2")
    mapping["launch"]["launcher"] = launcher
    with pytest.raises(DataError, match=message):
        prepare_run(RunConfig.from_mapping(mapping), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


def test_the_data_is_described_before_anything_runs(tmp_path):
    run = prepare_run(RunConfig.from_mapping(chats(tmp_path, CHAT, [*CHAT, *CHAT])))
    with say.console.capture() as told:
        announcements.say_data(run)
    data, note = " ".join(told.get().split()).split(" note ")
    numbers = read_json(run.data)
    assert data == (
        "data 1 documents to train on, 1 held out; 2 conversations (1 multi-turn, 0 with a system prompt, "
        f"3 assistant turns), template: Llama 3's format; loss on {numbers['num_targets']} of "
        f"{numbers['num_tokens']} tokens"
    )
    assert note.startswith("tokenizer 'bytes' reads <|begin_of_text|>")


def test_the_model_is_told_with_its_size_and_tokenizer_and_the_batch_with_its_steps(tmp_path):
    run = prepare_run(RunConfig.from_mapping(chats(tmp_path, CHAT, [*CHAT, *CHAT])))
    with say.console.capture() as told:
        announcements.say_model(run)
        announcements.say_batch(run)
    model, batch = told.get().splitlines()
    config = load_config(run)
    size = format_count(sum(math.prod(shape) for shape in config.spec.parameter_shapes.values()))
    assert model == f"model     {config.model}: {size} parameters; tokenizer: bytes"
    assert batch == f"batch     {batch_line(config, read_json(run.data))}"
    run.config.write_text(config.with_overrides("data.source=dataloader").to_yaml())
    run.data.unlink()
    with say.console.capture() as told:
        announcements.say_model(run)
        announcements.say_batch(run)
    model, batch = told.get().splitlines()
    assert model == f"model     {config.model}: {size} parameters", "its batches are tokens already"
    assert batch == f"batch     {batch_line(config, {})}"


def test_data_tokenised_in_the_job_is_described_by_its_first_records(tmp_path):
    mapping = chats(tmp_path, CHAT)
    run = prepare_run(RunConfig.from_mapping(mapping | {"launch": {"device": "cpu", "launcher": "slurm"}}))
    write_json(run.environment, {"facts": {"data": "the first records"}})
    with say.console.capture() as told:
        announcements.say_data(run)
    assert told.get().split() == ["data", "the", "first", "records"]


def test_a_chat_template_is_found_from_any_directory(tmp_path):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}")
    run = prepare_run(RunConfig.from_mapping(chats(tmp_path, CHAT, chat_template="mine.jinja")))
    assert load_config(run).data.chat_template == str(tmp_path / "mine.jinja")
    run = prepare_run(RunConfig.from_mapping(chats(tmp_path, CHAT, chat_template="llama2")))
    assert load_config(run).data.chat_template == "llama2"


def test_a_preview_has_the_notes_on_the_data():
    few = ("hidden_size=64", "num_layers=2", "num_heads=4", "num_kv_heads=2", "head_dim=16", "ffn_size=128")
    overrides = ["model=llama3_8b_instruct", *(f"architecture.{size}" for size in few), "architecture.vocab_size=512"]
    previewed = preview(RunConfig.from_mapping(config(seq_len=32).model_dump(), overrides), here=True)
    assert any(note.endswith("every token counts in the loss") for note in previewed.notes)


def test_a_run_finds_its_data_from_any_directory(tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{"some words " * 300}{n}"}}\n' for n in range(9)))
    asked = RunConfig.from_mapping({"data": {"source": "texts.jsonl"}, "launch": {"device": "cpu"}})
    run = prepare_run(asked)
    assert RunConfig.load(run.config).data.source == str(tmp_path / "texts.jsonl")
    assert prepare_run(asked, resume=True) == run


def interrupt(run):
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["validate", "rehearse", "submit"])
@pytest.mark.parametrize("seed", [0, 7])
def test_after_an_interrupt_before_the_job_its_directory_takes_the_same_command_or_another(tmp_path, step, seed):
    chain = replace(local_steps(config(), tmp_path / "run", resume=False), **{step: interrupt})
    with pytest.raises(StoppedError, match="the same command starts it"):
        run_chain(chain)
    assert load_config(prepare_run(config(seed=seed), tmp_path / "run")).training.seed == seed


def test_a_run_with_checkpoints_keeps_its_records_when_it_is_interrupted_before_its_job(tmp_path):
    run = prepare_run(config(), tmp_path / "run")
    checkpoints_of(run, 3)
    chain = replace(local_steps(config(), run.path, resume=True), rehearse=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_chain(chain)
    with pytest.raises(RunDirectoryError, match="add --resume to continue it"):
        prepare_run(config(), run.path)


def test_a_run_that_was_cancelled_before_its_first_step_may_be_started_again(tmp_path):
    run = prepare_run(config(), tmp_path / "run")
    finish(run, "cancelled")
    assert prepare_run(config(), run.path) == run
    save_checkpoint(run, 3)
    with pytest.raises(RunDirectoryError, match="add --resume to continue it"):
        prepare_run(config(), run.path)


def test_a_run_whose_job_is_running_says_how_to_follow_or_stop_it(tmp_path, monkeypatch):
    run = prepare_run(config(), tmp_path / "a run")
    record = JobRecord("local", "4711", socket.gethostname(), "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr(runs, "attach", lambda run: LocalJobHandle(run, record))
    with pytest.raises(RunDirectoryError) as refusal:
        prepare_run(config(), run.path)
    assert "its job is running (process 4711); follow it with: training-infra logs '" in str(refusal.value)
    assert "--resume" not in str(refusal.value)


def test_a_report_that_cannot_be_written_does_not_hide_why_the_run_failed(tmp_path):
    def refuse(run):
        raise RunDirectoryError("cannot write the report")

    def fail(run):
        raise TrainingFailedError("crashed after step 3")

    chain = replace(local_steps(config(steps=1), tmp_path / "run", resume=False), submit=fail, report=refuse)
    with pytest.raises(TrainingFailedError, match="crashed after step 3"), say.console.capture() as told:
        run_chain(chain)
    assert told.get().splitlines()[-1] == "report    cannot write the report"


def test_a_run_ends_with_the_commands_that_show_its_metrics_elsewhere(capsys):
    run = RunDirectory(prepare_run(config()).path)
    announcements.say_metrics(run)
    assert capsys.readouterr().out == ""
    for folder in (run.tracker("tensorboard"), run.tracker("wandb") / "offline-run-20261122_101112-x"):
        folder.mkdir(parents=True)
    announcements.say_metrics(run)
    assert capsys.readouterr().out == (
        f"metrics   tensorboard --logdir {run.path}/logs/tensorboard\n"
        f"metrics   wandb sync {run.path}/logs/wandb/offline-run-*\n"
    )
