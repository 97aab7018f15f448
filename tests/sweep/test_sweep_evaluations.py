"""Sweeps ranked by scores: the score is checked at once, and the last checkpoint's is there before the ranking."""

import pytest
import yaml
from harness_folders import TASKS, make_tasks
from step_record import training_summary

from llama_core.chain import steps
from llama_core.errors import ConfigError, StoppedError
from llama_core.records.checkpoints import checkpoint_name
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluation_jobs import write_ending
from llama_core.records.evaluations import Score, write_scores
from llama_core.records.files import read_json, write_json
from llama_core.records.job import Outcome
from llama_core.sweep import evaluations
from llama_core.sweep import steps as sweeps
from llama_core.sweep.directory import unfinished
from llama_core.sweep.evaluations import unevaluated
from llama_core.sweep.grid import SweepConfig
from llama_core.sweep.lock import unlock
from training_infra import cli

TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 128, "vocab_size": 512}
CHOICE = TASKS["toy_choice"]
LINE = '{"text": "one two three four five six seven eight nine ten"}\n'


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


def mapping(objective, evaluation, *, launcher="slurm"):
    return {
        "name": "tiny",
        "objective": objective,
        "base": {
            "architecture": TINY,
            "training": {"seq_len": 16, "batch_size": 4, "steps": 2},
            "launch": {"device": "cpu", "launcher": launcher},
            "evaluation": evaluation,
        },
        "grid": {"training.learning_rate": [1e-4, 1e-3, 1e-2]},
    }


def prepare(objective, evaluation):
    return sweeps.prepare(SweepConfig.from_mapping(mapping(objective, evaluation)))


@pytest.fixture
def sweep(tmp_path):
    """A sweep over three learning rates, ranked by the loss on data, whose elements have trained on Slurm."""
    (tmp_path / "law.jsonl").write_text(LINE)
    sweep = prepare("evaluation/law/loss", {"data": {"law": str(tmp_path / "law.jsonl")}, "sequences": 8})
    for run in list(unfinished(sweep)):
        write_json(run.outcome, Outcome("finished", "it did", 2, "", "2026-11-21T10:00:00+00:00"))
        write_json(run.training, training_summary(tokens=128))
        checkpoint = run.checkpoints / checkpoint_name(2)
        checkpoint.mkdir(parents=True)
        write_json(checkpoint / "state.json", {"step": 2, "tokens": 128})
        write_json(checkpoint / "manifest.json", {"step": 2})
    return sweep


class Played:
    """Evaluations that end when they start: with these losses, or with a reason in place of one, by element."""

    device = "cpu"

    def __init__(self, run, losses):
        self._run = run
        self._losses = losses

    def start(self, command, step):
        loss = self._losses[self._run.name]
        if loss is KeyboardInterrupt:
            raise KeyboardInterrupt
        checkpoint = self._run.checkpoints / checkpoint_name(step)
        failed = isinstance(loss, str)
        if not failed:
            score = Score(step, 128, "law", "loss", loss, 0.01, False, 8, "", "8 sequences", "2026-11-21T10:00:00")
            write_scores(self._run, [score])
        write_ending(self._run, checkpoint, loss if failed else "")
        return "1"

    def is_running(self, job_id):
        return False

    def stop(self):
        pass


def play(monkeypatch, *losses):
    names = ("learning_rate=0.0001", "learning_rate=0.001", "learning_rate=0.01")
    by_name = dict(zip(names, losses, strict=True))
    monkeypatch.setattr(steps, "evaluations_of", lambda run, config, *, while_training: Played(run, by_name))
    monkeypatch.setattr(evaluations, "LOOK_SECONDS", 0.0)


def test_the_last_checkpoints_are_evaluated_before_the_elements_are_ranked(sweep, monkeypatch, capsys):
    play(monkeypatch, 2.5, 2.25, "the disk is full")
    assert len(list(unevaluated(sweep))) == 3
    capsys.readouterr()
    sweeps.follow(sweep, [])
    assert capsys.readouterr().out.splitlines() == [
        "evaluate  learning rate 0.0001: step 2: law (8 sequences)  loss 2.5000 ± 0.0200",
        "evaluate  learning rate 0.001: step 2: law (8 sequences)  loss 2.2500 ± 0.0200",
        "evaluate  learning rate 0.01: step 2: not evaluated: the disk is full",
        "best      learning rate 0.001: law/loss 2.2500, 0.2500 ± 0.0283 ahead of the next (learning rate 0.0001); "
        "3 elements trained, 1 of them not evaluated",
    ]
    assert not list(unevaluated(sweep))


def test_an_interrupted_sweep_goes_on_with_the_evaluations_that_are_left(sweep, monkeypatch, capsys):
    play(monkeypatch, 2.5, KeyboardInterrupt, 2.75)
    with pytest.raises(
        StoppedError, match=r"last checkpoints of 2 of 3 elements not evaluated; continue with: .*resume"
    ):
        sweeps.follow(sweep, [])
    unlock(sweep)
    play(monkeypatch, KeyboardInterrupt, 2.25, 2.75)  # the first one is not evaluated again
    again = sweeps.prepare(SweepConfig.from_mapping(read_json(sweep.record)["config"]), resume=True)
    assert again == sweep
    sweeps.follow(again, [])
    assert "best      learning rate 0.001: law/loss 2.2500, 0.2500" in capsys.readouterr().out


def test_an_element_whose_evaluation_cannot_start_costs_only_its_rank(sweep, monkeypatch, capsys):
    play(monkeypatch, 2.5, 2.25, 2.75)
    refused = Played.start

    def start(self, command, step):
        if self._run.name == "learning_rate=0.001":
            raise ConfigError("Slurm refuses it")
        return refused(self, command, step)

    monkeypatch.setattr(Played, "start", start)
    capsys.readouterr()
    sweeps.follow(sweep, [])
    told = capsys.readouterr().out
    assert "evaluate  learning rate 0.001: not evaluated: Slurm refuses it\n" in told
    assert "best      learning rate 0.0001: law/loss 2.5000" in told


GROUP = {"group": "both", "task": ["mine", "other"], "aggregate_metric_list": [{"metric": "acc"}]}
LESS = [{"metric": "acc", "aggregation": "mean", "higher_is_better": False}]


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (
            "evaluation/mine/f1",
            "objective=evaluation/mine/f1: choose one of evaluation/mine/acc, evaluation/mine/acc_norm, "
            "evaluation/mine/brier_score",
        ),
        ("evaluation/mina/acc", "evaluation.tasks of the base gives scores of mine, other, both; did you mean"),
        ("evaluation/both/acc", "the tasks of both disagree whether a higher acc is better; rank by one of its tasks"),
    ],
)
def test_a_score_that_no_task_gives_is_refused_before_anything_is_written(objective, message, tmp_path):
    folder = make_tasks(tmp_path / "tasks", {"mine": CHOICE, "other": CHOICE | {"metric_list": LESS}})
    (folder / "group.yaml").write_text(yaml.safe_dump(GROUP))
    with pytest.raises(ConfigError) as refused:
        prepare(objective, {"tasks": ["both"], "include_path": str(folder)})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "sweeps").exists()


@pytest.mark.parametrize("objective", ["evaluation/mine/acc", "evaluation/both/acc", "evaluation/written/chrf"])
def test_a_score_of_a_task_or_a_group_ranks_the_elements(objective, tmp_path):
    folder = make_tasks(tmp_path / "tasks", {"mine": CHOICE, "other": CHOICE, "written": TASKS["toy_generation"]})
    (folder / "group.yaml").write_text(yaml.safe_dump(GROUP))
    sweep = prepare(objective, {"tasks": ["both", "written"], "include_path": str(folder)})
    assert len(list(unfinished(sweep))) == 3


@pytest.mark.wide
def test_a_sweep_trains_evaluates_and_ranks_by_a_score(tmp_path, capsys):
    folder = make_tasks(tmp_path / "tasks", {"mine": CHOICE}, num_documents=4)
    asked = mapping("evaluation/mine/acc", {"tasks": ["mine"], "include_path": str(folder)}, launcher="local")
    asked["grid"] = {"training.learning_rate": [1e-4, 1e-2]}
    asked["base"]["training"]["checkpoint_every"] = 0
    asked["base"]["architecture"] |= {"max_context": 256}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(asked))
    assert cli.main(["sweep", "--config", "sweep.yaml", "--sweep-dir", "sweep"]) == 0
    told = capsys.readouterr().out
    for rate in ("0.0001", "0.01"):
        assert f"evaluate  learning rate {rate}: step 2: mine  acc 0." in told
    assert ": mine/acc 0." in next(line for line in told.splitlines() if line.startswith("best "))
    assert "Every element, best mine/acc first" in (tmp_path / "sweep" / "report.html").read_text()
    run = RunDirectory(tmp_path / "sweep" / "runs" / "learning_rate=0.01")
    assert {score["metric"] for score in steps.records(run)["evaluations"]} == {"acc", "acc_norm", "brier_score"}
