"""Scores on tasks: of every checkpoint asked for, recorded in the run, and one line for what cannot be evaluated."""

import errno
import json
import sys
from importlib.util import find_spec

import pytest
from harness_folders import TASKS, make_folder, make_tasks
from huggingface_hub.errors import OfflineModeIsEnabled
from saved_runs import SMALL, make_lively, save_run

import training_infra
from llama_core.chain.prepare import prepare_run
from llama_core.config.overrides import Override
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, RunDirectoryError
from llama_core.evaluation import evaluator
from llama_core.evaluation import ranks as evaluation_ranks
from llama_core.evaluation import tasks as chain_tasks
from llama_core.records.checkpoints import checkpoint_name
from llama_core.records.evaluation_jobs import read_ending
from llama_core.records.evaluations import read_scores
from llama_core.runs.loading import load_config
from training_infra import cli

CHOICE = TASKS["toy_choice"]
SIZES = {"architecture": SMALL["architecture"] | {"max_context": 256}}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tasks(tmp_path_factory.mktemp("tasks"), num_documents=4)


@pytest.fixture
def run(tmp_path):
    """A run of bytes with checkpoints of steps 1 and 2."""
    return save_run(tmp_path / "run", SIZES, lambda engine, step: make_lively(engine.model, step), steps=(1, 2))


def evaluate(source, *arguments):
    return cli.main(["evaluate", str(source), "--device", "cpu", *map(str, arguments)])


def test_every_checkpoint_is_scored_and_the_scores_are_recorded(run, folder, capsys):
    asked = ("--tasks", *TASKS, "--include-path", folder, "--step", "all", "--limit", 3)
    assert evaluate(run.path, *asked) == 0
    told = capsys.readouterr()
    lines = [line.split() for line in told.out.splitlines()]
    recorded = read_scores(run)
    assert {(int(step), task, metric) for _, step, task, metric, *_ in lines} == {
        (score.step, score.task, score.metric) for score in recorded
    }
    assert len(recorded) == len(lines) == 2 * (3 + 3 + 2)
    assert {score.settings for score in recorded} == {"first 3"}
    assert {score.examples for score in recorded} == {3}
    assert "%" not in told.err
    assert told.err.count("\n") == 2, "a line for each checkpoint"
    (steps_1, steps_2) = ([score.value for score in recorded if score.step == step] for step in (1, 2))
    assert steps_1 != steps_2

    found = training_infra.evaluate(
        run.path, tasks=["toy_rolling"], include_path=folder, steps=2, limit=3, device="cpu"
    )
    same = {score.metric: score.value for score in recorded if (score.step, score.task) == (2, "toy_rolling")}
    assert {one["metric"]: one["value"] for one in found} == same
    assert len(read_scores(run)) == len(recorded), "the same question replaces the score"


def test_a_folder_is_scored_as_json_and_nothing_is_recorded(folder, tmp_path, capsys):
    source = make_folder(tmp_path / "model")
    capsys.readouterr()
    assert evaluate(source, "--tasks", "toy_choice", "--include-path", folder, "--num-fewshot", 2, "--json") == 0
    (accuracy, *_) = json.loads(capsys.readouterr().out)["scores"]
    assert (accuracy["metric"], accuracy["examples"], accuracy["num_fewshot"], accuracy["step"]) == ("acc", 4, 2, None)
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_run_is_evaluated_on_the_tasks_of_its_configuration(run, folder):
    asked = {"tasks": ["toy_choice"], "include_path": str(folder), "limit": 2, "num_fewshot": 1}
    run.config.write_text(load_config(run).with_overrides(Override("evaluation", asked)).to_yaml())
    assert evaluator.main([str(run.path), "--step", "2", "--device", "cpu"]) == 0
    scores = read_scores(run)
    assert {score.task for score in scores} == {"toy_choice"}
    assert {(score.step, score.settings, score.examples) for score in scores} == {(2, "1-shot, first 2", 2)}
    assert read_ending(run, run.checkpoints / checkpoint_name(2)).problem == ""


def test_an_evaluation_whose_scores_cannot_be_written_has_not_ended(run, folder, monkeypatch, capsys):
    asked = {"tasks": ["toy_choice"], "include_path": str(folder), "limit": 1}
    run.config.write_text(load_config(run).with_overrides(Override("evaluation", asked)).to_yaml())
    checkpoint = run.checkpoints / checkpoint_name(2)

    def fill(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    for place in ("llama_core.evaluation.recording.write_scores", "llama_core.records.evaluation_jobs.write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(place, fill)
            assert evaluator.main([str(run.path), "--step", "2", "--device", "cpu"]) == RunDirectoryError.exit_code
        assert f"the disk of {run.path}" in capsys.readouterr().out
        assert read_ending(run, checkpoint) is None, "it is started again"
    assert evaluator.main([str(run.path), "--step", "2", "--device", "cpu"]) == 0
    assert read_ending(run, checkpoint).problem == ""
    assert read_scores(run)


@pytest.mark.wide
def test_a_task_that_is_unknown_is_refused_before_the_run_begins(folder, tmp_path):
    asked = {"tasks": ["toy_choise"], "include_path": str(folder)}
    config = RunConfig.from_mapping({"launch": {"device": "cpu"}, "evaluation": asked})
    with pytest.raises(ConfigError, match="there is no task 'toy_choise'; did you mean 'toy_choice'"):
        prepare_run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_losses_of_checkpoints_are_recorded_too(run, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": "to be " * 9}) for _ in range(40)))
    data = ("--data", f"mine={tmp_path / 'texts.jsonl'}", "--seq-len", 32)
    assert evaluate(run.path, *data, "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["evaluations"]
    (score,) = read_scores(run)
    assert (score.task, score.metric, score.step, score.value) == ("mine", "loss", 2, told["loss"])
    assert (score.settings, score.higher_is_better) == ("32 tokens a sequence", False)


@pytest.mark.parametrize(("in_the_way", "code"), [("file", 1), ("link", 1), ("owner", 0)])
def test_a_run_that_cannot_be_written_to_costs_only_the_record(
    run, folder, capsys, tmp_path, monkeypatch, in_the_way, code
):
    (tmp_path / "elsewhere").mkdir()
    make = {
        "file": lambda: run.evaluations.write_text(""),
        "link": lambda: run.evaluations.symlink_to(tmp_path / "elsewhere"),
        "owner": lambda: monkeypatch.setattr("llama_core.evaluation.recording.other_owner", lambda _: "somebody"),
    }
    make[in_the_way]()
    assert evaluate(run.path, "--tasks", "toy_choice", "--include-path", folder, "--limit", 1) == code
    told = capsys.readouterr()
    assert "acc" in told.out
    assert "the scores of step 2 are not recorded" in told.err
    assert not list((tmp_path / "elsewhere").iterdir())


def test_chat_is_asked_in_the_template_of_the_run(tmp_path, folder, capsys):
    template = tmp_path / "template"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}#{% endfor %}{{ 'a:' if add_generation_prompt }}"
    )
    settings = SIZES | {"data": {"chat_template": str(template)}}
    run = save_run(tmp_path / "run", settings, lambda engine, step: make_lively(engine.model, step))
    asked = ("--tasks", "toy_choice", "--include-path", folder)
    for more in ((), ("--chat",), ("--chat", "--system", "be brief")):
        assert evaluate(run.path, *asked, *more) == 0
    scores = [score for score in read_scores(run) if score.metric == "brier_score"]
    assert [score.settings for score in scores] == ["", "chat", "chat, system 'be brief'"]
    assert len({score.value for score in scores}) == 3
    template.write_text("{{ raise_exception('no system') if messages[0].role == 'system' }}{{ messages[0].content }}")
    capsys.readouterr()
    assert evaluate(run.path, *asked, "--chat", "--system", "be brief") == 2
    assert "refuses the system prompt: no system;" in capsys.readouterr().err


def test_texts_longer_than_the_context_are_told(tmp_path, folder, capsys):
    run = save_run(tmp_path / "run", {}, lambda engine, step: make_lively(engine.model, step))
    assert evaluate(run.path, "--tasks", "toy_choice", "--include-path", folder, "--limit", 2) == 0
    told = "toy_choice: 5 texts lost their beginnings, because they are longer than the model's context of 64 tokens"
    assert told in capsys.readouterr().err


@pytest.mark.wide
def test_several_processes_give_the_scores_of_one(run, folder, capsys):
    asked = ("--tasks", "toy_choice", "toy_generation", "--include-path", folder, "--limit", 3, "--step", "all")
    assert evaluate(run.path, *asked) == 0
    expected = capsys.readouterr().out
    assert evaluate(run.path, *asked, "--gpus", 2, "--pipeline-parallel", 2) == 0
    told = capsys.readouterr()
    assert told.out == expected
    assert "in fp32 on 2 cpu processes (pp=2)" in told.err


@pytest.mark.nightly
def test_an_error_of_several_processes_is_that_of_one(run, tmp_path, capsys):
    tasks = make_tasks(tmp_path / "tasks", {"mine": CHOICE | {"doc_to_image": "image"}})
    assert evaluate(run.path, "--tasks", "mine", "--include-path", tasks, "--gpus", 2) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == "error: task 'mine' has images or sound, which the model cannot read; choose another"


@pytest.mark.nightly
def test_a_process_that_ends_is_named(run, folder, monkeypatch, capsys):
    program = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('out of luck'); time.sleep(60)"
    monkeypatch.setattr(evaluation_ranks, "_COMMAND", (sys.executable, "-c", program))
    assert evaluate(run.path, "--tasks", "toy_choice", "--include-path", folder, "--gpus", 2) == 1
    assert "rank 1 of the evaluation ended with exit code 1: out of luck" in capsys.readouterr().err


HIDDEN = "{{ ''.__class__.__mro__ }}"
REFUSED = {
    "limit": ({}, ["--tasks", "toy_choice", "--limit", 0], "limit=0: ask at least 1 question"),
    "negative": ({}, ["--tasks", "toy_choice", "--num-fewshot", -1], "num_fewshot=-1: give a number"),
    "system": ({}, ["--tasks", "toy_choice", "--system", "x"], "system has no effect without chat"),
    "chat": ({}, ["--tasks", "toy_choice", "--chat"], "has no chat template"),
    "both": ({}, ["--tasks", "toy_choice", "--data", "x"], "--tasks and --data exclude each other"),
    "neither": ({}, ["--limit", 3], "--limit has no effect without --tasks"),
    "devices": ({}, ["--tasks", "toy_choice", "--gpus", 3, "--tensor-parallel", 2], "does not divide num_gpus=3"),
    "heads": (
        {},
        ["--tasks", "toy_choice", "--gpus", 3, "--tensor-parallel", 3],
        "tp=3 does not divide the 2 key/value heads",
    ),
    "none": (
        {},
        ["--tasks", "toy_choice", "--gpus", 0],
        "num_gpus=0, tensor_parallel=1, pipeline_parallel=1, num_nodes=1: use at least 1 of each",
    ),
    "images": ({"doc_to_image": "image"}, [], "task 'mine' has images or sound"),
    "program": (
        {"metric_list": [{"metric": "someone/metric", "aggregation": "mean", "higher_is_better": True}]},
        [],
        "mine.yaml: metric: someone/metric may execute code",
    ),
    "no file": ({"dataset_kwargs": {"data_files": {"test": "gone.jsonl"}}}, [], "task 'mine' cannot be loaded: "),
    "template": ({"doc_to_text": HIDDEN}, [], "task 'mine' cannot be loaded: a template of it: access to attribute"),
    "column": (
        {"doc_to_text": "{{ nothing }}"},
        [],
        "task 'mine' cannot be loaded: a template of it: 'nothing' is undefined",
    ),
    "too many": ({}, ["--num-fewshot", 50], "task 'mine' does not work: "),
    "code": ({"unsafe_code": True}, [], "mine.yaml: unsafe_code may execute code"),
}


@pytest.mark.parametrize(("changes", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_evaluated_is_one_line(run, tmp_path, capsys, changes, arguments, message):
    tasks = TASKS | {"mine": CHOICE | changes}
    where = ("--include-path", make_tasks(tmp_path / "tasks", tasks))
    named = () if "--tasks" in arguments or "has no effect without --tasks" in message else ("--tasks", "mine")
    where = where if named or "--tasks" in arguments else ()
    assert evaluate(run.path, *named, *where, *arguments) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.splitlines()[-1].startswith("error")
    assert not told.out
    assert not read_scores(run)


UNREADABLE = {
    "cut off": ('{"question": "a", "choices": ["b"', "because of ArrowInvalid: JSON parse error: "),
    "no record": ("", "StopIteration: raised at line "),
    "other columns": ('{"question": 7}\n', "because of CastError: "),
    "no JSON": ("question,choices\n", "because of ArrowInvalid: JSON parse error: Invalid value"),
}


@pytest.mark.parametrize(("content", "cause"), UNREADABLE.values(), ids=UNREADABLE)
def test_the_data_that_a_task_cannot_read_are_named_with_the_cause(run, tmp_path, capsys, content, cause):
    tasks = make_tasks(tmp_path / "tasks", {"mine": CHOICE | {"training_split": "train"}})
    file = tasks / "test.jsonl"
    file.write_text(content)
    assert evaluate(run.path, "--tasks", "mine", "--include-path", tasks) == 2
    told = capsys.readouterr().err
    assert cause in told
    assert str(file) in told
    assert told.count("\n") == 1


def test_code_is_executed_if_it_is_allowed(run, tmp_path):
    tasks = make_tasks(tmp_path / "tasks", {"mine": CHOICE})
    (tasks / "functions.py").write_text("def text(doc):\n    return 'asked by code'\n")
    file = tasks / "mine.yaml"
    file.write_text(file.read_text().replace("doc_to_text:", "doc_to_text: !function functions.text\ndescription:"))
    asked = ("--tasks", "mine", "--include-path", tasks)
    assert evaluate(run.path, *asked) == 2
    assert evaluate(run.path, *asked, "--allow-task-code") == 0


def test_data_that_needs_the_hub_is_named_while_offline(run, tmp_path, capsys, monkeypatch):
    def offline(*_, **__):
        raise OfflineModeIsEnabled("Cannot reach https://huggingface.co: offline mode is enabled.\nSee the manual.")

    monkeypatch.setattr("datasets.load_dataset", offline)
    tasks = make_tasks(tmp_path / "tasks", {"mine": CHOICE})
    assert evaluate(run.path, "--tasks", "mine", "--include-path", tasks) == 2
    told = capsys.readouterr().err
    assert "the data of task 'mine' cannot be had from the Hub: OfflineModeIsEnabled: Cannot reach" in told
    assert told.count("\n") == 1


def test_a_missing_harness_is_named_with_the_extra(run, capsys, monkeypatch):
    monkeypatch.setattr(chain_tasks, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name))
    assert evaluate(run.path, "--tasks", "toy_choice") == 2
    assert "pip install 'llama-training-infra[eval]'" in capsys.readouterr().err


def test_a_tokenizer_that_does_not_fit_is_refused(run, folder, tmp_path, capsys):
    tokenizer = make_folder(tmp_path / "model") / "tokenizer.json"
    assert evaluate(run.path, "--tasks", "toy_choice", "--include-path", folder, "--tokenizer", tokenizer) == 2
    assert "tokens, more than the model's vocabulary of 320" in capsys.readouterr().err
