"""A tracker that is a file and a line: its settings, what is checked, and what it gets of a run and its evaluations."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Event

import pytest
from one_batch import ROWS, SEQ_LEN, OneBatch
from toy_tracker import TOY, ToySettings

from llama_core.chain import announcements
from llama_core.chain.environment import validate_environment
from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, EnvironmentMismatchError, RunDirectoryError
from llama_core.evaluation.score_trackers import show_scores
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import Score
from llama_core.records.file_owners import refuse_links
from llama_core.records.files import now
from llama_core.records.metrics import read_metrics
from llama_core.redaction import redacted
from llama_core.trackers import guarded
from llama_core.trackers.guarded import keep_file
from llama_core.trackers.registry import TRACKERS, folders_with_links
from llama_core.training.metrics import MetricsSinks, tracked_run
from llama_core.training.trainer import Trainer


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(TRACKERS, "toy", TOY)
    return TOY


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


@pytest.fixture
def score():
    common = {"standard_error": None, "higher_is_better": True, "examples": 9, "version": "", "settings": ""}
    return Score(step=20, tokens=640, task="arc", metric="acc", value=0.5, time=now(), **common)


def config(toy, **sections):
    return RunConfig.from_mapping(sections | {"tracking": {"tensorboard": False, "trackers": {"toy": toy}}})


def lines(run, part="steps"):
    return [json.loads(line) for line in (run.tracker("toy") / f"{part}.jsonl").read_text().splitlines()]


def test_its_settings_are_of_the_type_that_its_row_names():
    settings = config({"project": "mine", "fails_at": 3}).tracking.trackers["toy"]
    assert settings == ToySettings(project="mine", fails_at=3)


def test_a_run_records_its_settings_and_has_them_again(tmp_path):
    one = config({"project": "mine", "fails_at": 3})
    (tmp_path / "config.yaml").write_text(one.to_yaml())
    assert RunConfig.load(tmp_path / "config.yaml") == one
    assert RunConfig.from_mapping(one.given()) == one
    assert RunConfig.model_validate_json(one.model_dump_json()) == one


def test_it_is_turned_on_by_one_setting_and_off_by_null():
    one = RunConfig.from_mapping({}, ["tracking.trackers.toy.project=mine"])
    assert [asked.kind.name for asked in one.tracking.asked_trackers()] == ["tensorboard", "toy"]
    other = one.with_overrides("tracking.trackers.toy=null")
    assert [asked.kind.name for asked in other.tracking.asked_trackers()] == ["tensorboard"]
    assert one.fingerprint() == other.fingerprint()


@pytest.mark.parametrize(
    ("trackers", "problem"),
    [
        ({"toy": {"project": 3}}, "tracking.trackers.toy.project=3: input should be text; put it in quotes"),
        ({"toy": {"project": "a", "x": 1}}, "unknown key 'tracking.trackers.toy.x'"),
        ({"toy": {}}, "tracking.trackers.toy.project={}: field required"),
        ({"toy": True}, "tracking.trackers.toy=True: this is a section of keys, not a value"),
        ({"toys": {}}, "tracking.trackers.toys={}: choose one of mlflow, trackio, toy; did you mean 'toy'?"),
        ({"wandb": {"mode": "online"}}, "tracking.trackers.wandb={'mode': 'online'}: use tracking.wandb"),
        (["toy"], "tracking.trackers=['toy']: input should be a valid dictionary"),
    ],
)
def test_a_wrong_setting_is_named_by_its_whole_key(trackers, problem):
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_mapping({"tracking": {"trackers": trackers}})
    assert refused.value.problems == (problem,)


def test_the_page_of_all_keys_has_its_settings(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    page = "\n".join(import_module("generated")._configuration())
    assert page.endswith(
        "## `tracking.trackers.toy`\n\n"
        "| key | value | default | meaning |\n|---|---|---|---|\n"
        "| `project` | text |  | The project that gets the values. |\n"
        "| `fails_at` | integer or null |  | The step at which its service goes away. |\n"
    )


def test_what_it_lacks_is_an_error_before_any_job(monkeypatch):
    assert validate_environment(config({"project": "mine"})).errors == ()
    (error,) = validate_environment(config({"project": "closed"})).errors
    assert error == "tracking.trackers.toy.project=closed takes no more runs; choose another one"
    monkeypatch.setitem(TRACKERS, "toy", replace(TOY, package="toy-client"))
    (error,) = validate_environment(config({"project": "mine"})).errors
    assert error == "tracking.trackers.toy needs toy-client, which is not installed; pip install 'toy-client'"


def test_validation_names_the_variables_that_it_reads_and_no_value(monkeypatch):
    monkeypatch.setenv("TOY_TOKEN", "a-secret-0123456789")
    facts = validate_environment(config({"project": "mine"})).facts
    assert facts["Toy"] == "TOY_TOKEN of the environment"
    assert "a-secret" not in str(facts)


@pytest.mark.parametrize("name", {name for kind in TRACKERS.values() for name in kind.variables if "KEY" in name})
def test_no_key_of_a_tracker_is_shown(monkeypatch, name):
    monkeypatch.setenv(name, "a-secret-0123456789")
    assert redacted("the server says a-secret-0123456789") == "the server says ***"


def train(run, steps, **toy):
    one = config(
        {"project": "mine"} | toy,
        launch={"device": "cpu"},
        architecture={"hidden_size": 32, "num_layers": 1, "head_dim": 8, "ffn_size": 64, "vocab_size": 128},
        training={"seq_len": SEQ_LEN, "batch_size": ROWS, "precision": "fp32", "steps": 6, "checkpoint_every": 2},
    )
    plan = ParallelPlan()
    Trainer(run, one, plan, batches=OneBatch(plan), validation={}, total_steps=steps).fit()


def test_it_gets_every_step_and_is_flushed_with_each_checkpoint_and_closed(run):
    train(run, 4)
    begun, *rest = lines(run)
    losses = read_metrics(run).column("loss").to_pylist()
    of_steps = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    assert begun == {"opened": "mine", "run": begun["run"], "resumed_at": 0}
    assert [line for line in rest if "step" in line] == of_steps
    assert rest.count({"flushed": True}) == 2
    assert rest.index({"flushed": True}) == 2
    assert rest[-1] == {"closed": True}


def test_it_fails_in_the_middle_and_has_the_steps_of_the_resumed_run(run, caplog):
    train(run, 4, fails_at=3)
    assert read_metrics(run).column("step").to_pylist() == [1, 2, 3, 4]
    assert [message for message in caplog.messages if "Toy" in message] == [
        "Toy gets no more steps: ConnectionError: the service is away; the run goes on, and its own metrics are whole"
    ]
    assert lines(run)[-1] == {"closed": True}
    train(run, 6)
    begun, again = [line for line in lines(run) if "opened" in line]
    assert again == begun | {"resumed_at": 4}
    assert [line["step"] for line in lines(run) if "step" in line] == [1, 2, 5, 6]


def test_it_gets_the_scores_of_checkpoints_as_a_part_of_their_own(run, score):
    show_scores(run, config({"project": "mine"}), [score], print)
    begun, scored, closed = lines(run, "evaluations")
    assert begun["opened"] == "mine"
    assert scored == {"step": 20, "tokens": 640, "scores": {"evaluation/arc/acc": 0.5}}
    assert closed == {"closed": True}


def test_what_a_user_has_to_change_refuses_the_run_but_no_evaluation(run, score, monkeypatch):
    def refuse(run, settings):
        raise EnvironmentMismatchError("somebody else may write the settings")

    monkeypatch.setitem(TRACKERS, "toy", replace(TOY, open=refuse))
    with pytest.raises(EnvironmentMismatchError, match="somebody else may write"):
        MetricsSinks.open(run, config({"project": "mine"}), resumed_at=0)
    told = []
    show_scores(run, config({"project": "mine"}), [score], told.append)
    assert told == ["somebody else may write the settings"]


def test_a_run_ends_with_where_to_look(tmp_path, capsys):
    one = config({"project": "mine"}, launch={"device": "cpu"}, data={"source": "dataloader"})
    run = RunDirectory(prepare_run(one, tmp_path / "run").path)
    capsys.readouterr()
    announcements.say_metrics(run)
    assert capsys.readouterr().out == ""
    run.tracker("toy").mkdir()
    announcements.say_metrics(run)
    assert capsys.readouterr().out == f"metrics   cat {run.path}/logs/toy/steps.jsonl\n"


def kept_by(run, keep):
    """Return the warnings of a tracker that keeps the report as a function says."""
    one = config({"project": "mine"})
    (asked,) = one.tracking.asked_trackers()
    told = []
    keep_file(asked._replace(kind=replace(TOY, keep=keep)), tracked_run(run, one), run.report, told.append)
    return told


def test_a_tracker_may_keep_the_report_and_prints_nothing(run, capsys):
    got = []
    assert kept_by(run, lambda tracked, settings, file: got.append((file, print("uploading")))) == []
    assert got == [(run.report, None)]
    assert capsys.readouterr().out == ""


def test_a_tracker_that_fails_to_keep_the_report_or_does_not_answer_costs_a_warning(run, monkeypatch):
    def fail(*_):
        raise ConnectionError("no network")

    assert kept_by(run, fail) == ["Toy does not get report.html: ConnectionError: no network"]
    monkeypatch.setattr(guarded, "KEEP_SECONDS", 0.05)
    may_end = Event()
    told = kept_by(run, lambda *_: may_end.wait(60))
    may_end.set()
    assert told == ["Toy does not get report.html: it did not answer within 0.05 s"]


def test_only_a_tracker_that_says_so_may_leave_links(run, monkeypatch):
    run.tracker("toy").mkdir()
    (run.tracker("toy") / "latest").symlink_to("steps.jsonl")
    with pytest.raises(RunDirectoryError, match="logs/toy/latest is a link"):
        refuse_links(run, folders_with_links())
    monkeypatch.setitem(TRACKERS, "toy", replace(TOY, makes_links=True))
    refuse_links(run, folders_with_links())
