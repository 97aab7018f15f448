import re
import sys
from pathlib import Path

import pandas as pd
import pytest
from step_record import record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.evaluation.score_trackers import show_scores
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import Score
from llama_core.records.files import now, read_json, write_json
from llama_core.records.measurements import StepRecord
from llama_core.records.metrics import drop_metrics_after, newest_evaluation, read_metrics, set_aside
from llama_core.training.metrics import HeartbeatSink, MetricsSinks, ParquetSink, format_record


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def config(**tracking):
    return RunConfig.from_mapping({"tracking": tracking})


def write(run, steps, *, resumed_at=0, named=(), **tracking):
    sinks = MetricsSinks.open(run, config(**tracking), resumed_at=resumed_at)
    for step in steps:
        sinks.write(record(step, eval_losses={name: step + number for number, name in enumerate(named)}))
    sinks.close()


def events(run, tag="loss"):
    accumulator = EventAccumulator(str(run.logs / "tensorboard"))
    accumulator.Reload()
    return {event.step: event.value for event in accumulator.Scalars(tag)}


def test_parquet_parts_are_written_as_they_fill_and_at_the_end(run):
    sink = ParquetSink(run, part_size=3)
    for step in range(1, 6):
        sink.write(record(step))
    assert read_metrics(run).num_rows == 5, "whatever happens to the process now"
    assert len(list(run.metrics.glob("part-*"))) == 1
    sink.close()
    assert read_metrics(run).column("step").to_pylist() == [1, 2, 3, 4, 5]


def test_the_call_of_pandas_in_the_docs_reads_the_parts_of_a_run_that_trains(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "runs" / "mine")
    run.create()
    sinks = MetricsSinks(ParquetSink(run, part_size=2), HeartbeatSink(run))
    for step in range(1, 6):
        sinks.write(record(step))
    (run.metrics / "part-00000.parquet").write_bytes(b"damaged")
    read_metrics(run, sets_aside=True)
    assert run.metrics_tail.exists()
    assert set_aside(run)
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    (call,) = re.findall(r"pandas: `(.+?)`", page)
    monkeypatch.chdir(tmp_path)
    assert list(eval(call, {"read_parquet": pd.read_parquet}).step) == [3, 4]


def test_metrics_are_columns_for_all_readers_and_null_where_a_step_has_none(run):
    first = [record(1, measured={"load": 1.5, "eval_kl": None}), record(2, measured={"load": 2.5, "eval_kl": 0.25})]
    other = [record(3, measured={"wait": 0.5}), record(4, measured={"wait": 0.75})]  # resumed with another part
    for records in (first, other):
        sink = ParquetSink(run, part_size=2)
        for one in records:
            sink.write(one)
    ParquetSink(run).write(record(5, measured={"load": 3.5}))  # in no part yet
    rows = read_metrics(run).select(["load", "eval_kl", "wait"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (1.5, None, None),
        (2.5, 0.25, None),
        (None, None, 0.5),
        (None, None, 0.75),
        (3.5, None, None),
    ]
    assert pd.read_parquet(run.metrics)["eval_kl"].notna().tolist() == [False, True, False, False]
    drop_metrics_after(run, 3)
    assert read_metrics(run).column("wait").to_pylist() == [None, None, 0.5]


def test_the_newest_evaluation_has_what_it_measured(run):
    sink = ParquetSink(run, part_size=1)
    evaluated = record(1, eval_loss=2.0, measured={"load": 1.5, "wait": None}, eval_shown="margin 0.5")
    sink.write(evaluated)
    sink.write(record(2, measured={"load": 2.5, "wait": 1.0}))
    assert newest_evaluation(run, after=0) == evaluated


def test_a_metric_may_not_have_the_name_of_a_field():
    with pytest.raises(ValueError, match="a metric cannot be called loss"):
        record(1, measured={"loss": 1.0})


def test_the_heartbeat_is_the_newest_record(run):
    write(run, range(1, 4))
    assert StepRecord(**read_json(run.heartbeat)) == record(3)


def test_a_resumed_run_shows_each_step_once_in_tensorboard(run):
    write(run, range(1, 8))
    write(run, range(5, 10), resumed_at=4)
    assert list(events(run)) == list(range(1, 10))


def test_each_named_held_out_loss_is_a_line_of_its_own_in_tensorboard(run):
    write(run, (10, 20), named=("code", "wiki"))
    assert events(run, "eval_loss/code") == {10: 10, 20: 20}
    assert events(run, "eval_loss/wiki") == {10: 11, 20: 21}


def test_each_named_held_out_loss_is_a_line_of_its_own_in_weights_and_biases(run, monkeypatch):
    lines = {}

    class Recorder:
        def log(self, values, step):
            lines[step] = {name: value for name, value in values.items() if name.startswith("eval_loss")}

        def finish(self):
            pass

    monkeypatch.setattr("wandb.init", lambda **_: Recorder())
    write(run, (10, 20), named=("code", "wiki"), wandb="offline", tensorboard=False)
    assert lines == {
        10: {"eval_loss/code": 10, "eval_loss/wiki": 11},
        20: {"eval_loss/code": 20, "eval_loss/wiki": 21},
    }


def test_weights_and_biases_gets_the_sweep_as_a_group_and_the_plan_beside_the_settings(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr("wandb.init", lambda **asked: given.update(asked))
    write_json(tmp_path / "sweep" / "sweep.json", {})
    element = RunDirectory(tmp_path / "sweep" / "runs" / "lr=1")
    element.create()
    write_json(element.plan, {"tp": 2})
    MetricsSinks.open(element, config(wandb="offline", tensorboard=False), resumed_at=0)
    assert given["group"] == "sweep"
    assert given["config"]["plan"] == {"tp": 2}
    assert given["config"]["tracking"]["wandb"] == "offline"


@pytest.fixture
def scores():
    common = {
        "standard_error": None,
        "higher_is_better": True,
        "examples": 9,
        "version": "",
        "settings": "",
        "time": now(),
    }
    return [
        Score(step=20, tokens=640, task="arc", metric=metric, value=0.5, **common) for metric in ("acc", "acc_norm")
    ]


def test_the_scores_of_a_checkpoint_are_lines_of_tensorboard_beside_those_of_the_steps(run, scores):
    write(run, (10, 20))
    show_scores(run, config(), scores, print)
    accumulator = EventAccumulator(str(run.tracker("tensorboard") / "evaluations")).Reload()
    assert set(accumulator.Tags()["scalars"]) == {"evaluation/arc/acc", "evaluation/arc/acc_norm"}
    assert [(event.step, event.value) for event in accumulator.Scalars("evaluation/arc/acc")] == [(20, 0.5)]
    assert list(events(run)) == [10, 20]


def test_the_scores_of_a_checkpoint_are_a_run_of_weights_and_biases_by_tokens(run, scores, monkeypatch):
    calls = []

    class Recorder:
        def __getattr__(self, name):
            return lambda *values, **named: calls.append((name, values, named))

    monkeypatch.setattr("wandb.init", lambda **given: calls.append(given["name"]) or Recorder())
    show_scores(run, config(wandb="offline", tensorboard=False), scores, print)
    logged = {"tokens": 640, "step": 20, "evaluation/arc/acc": 0.5, "evaluation/arc/acc_norm": 0.5}
    assert calls == [
        f"{run.name}-evaluations",
        ("define_metric", ("evaluation/*",), {"step_metric": "tokens"}),
        ("log", (logged,), {}),
        ("finish", (), {}),
    ]


def test_a_service_that_fails_costs_a_line(run, scores, monkeypatch):
    def refuse(**_):
        raise ConnectionError("no network")

    monkeypatch.setattr("wandb.init", refuse)
    told = []
    show_scores(run, config(wandb="online", tensorboard=False), scores, told.append)
    assert told == ["Weights & Biases does not get the scores of step 20: ConnectionError: no network"]


class _Away:
    """A run of Weights & Biases whose service is away from some call on."""

    def log(self, values, step):
        if step >= 3:
            raise ConnectionError("no network")

    def finish(self):
        raise ConnectionError("still no network")


@pytest.mark.parametrize("fails", ["at its beginning", "in the middle"])
def test_a_service_that_fails_costs_a_run_one_warning(run, monkeypatch, caplog, fails):
    def begin(**_):
        if fails == "at its beginning":
            raise ConnectionError("no network")
        return _Away()

    monkeypatch.setattr("wandb.init", begin)
    write(run, range(1, 6), wandb="online")
    assert read_metrics(run).num_rows == 5
    assert list(events(run)) == list(range(1, 6))
    assert caplog.messages == [
        "Weights & Biases gets no more steps: ConnectionError: no network; the run goes on, and its own metrics are "
        "whole"
    ]


def test_a_run_does_not_begin_without_the_package_of_a_tracker(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EnvironmentMismatchError, match=r"tracking.wandb=online needs the wandb package; pip install"):
        write(run, [1], wandb="online")


@pytest.mark.wide
def test_weights_and_biases_works_offline_without_an_account(run, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    write(run, range(1, 4), wandb="offline", tensorboard=False)
    (folder,) = (run.logs / "wandb").glob("offline-run-*")
    (log,) = Path(folder).glob("*.wandb")
    assert log.stat().st_size > 0


@pytest.mark.root
def test_a_full_disk_ends_tensorboard_and_not_the_run(run, disk_of, caplog):
    run.tracker("tensorboard").symlink_to(disk_of("16k"))
    write(run, range(1, 100))
    assert read_metrics(run).num_rows == 99
    (warning,) = [line for line in caplog.messages if "TensorBoard" in line]
    assert "No space left on device" in warning


def test_tensorboard_can_be_turned_off(run):
    write(run, [1], tensorboard=False)
    assert not (run.logs / "tensorboard").exists()


def test_the_log_shows_skipped_steps_and_evaluations():
    line = format_record(
        record(3, skipped=True, eval_loss=1.5, mfu=0.412, memory_allocated_bytes=2**30, memory_peak_bytes=2**31)
    )
    for text in ("step 3/100", "SKIPPED", "held-out loss 1.5000", "MFU 41.2%", "memory 1.00 GiB (peak 2.00 GiB)"):
        assert text in line
