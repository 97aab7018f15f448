from pathlib import Path

import pytest
from step_record import record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llama_core.config.run import RunConfig
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json
from llama_core.records.measurements import StepRecord
from llama_core.records.metrics import read_metrics
from llama_core.training.metrics import MetricsSinks, ParquetSink, format_record


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def write(run, steps, *, resumed_at=0, **tracking):
    sinks = MetricsSinks.open(run, RunConfig.from_mapping({"tracking": tracking}), resumed_at=resumed_at)
    for step in steps:
        sinks.write(record(step))
    sinks.close()


def events(run):
    accumulator = EventAccumulator(str(run.logs / "tensorboard"))
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars("loss")]


def test_parquet_parts_are_written_as_they_fill_and_at_the_end(run):
    sink = ParquetSink(run, part_size=3)
    for step in range(1, 6):
        sink.write(record(step))
    assert read_metrics(run).num_rows == 5, "whatever happens to the process now"
    assert len(list(run.metrics.glob("part-*"))) == 1
    sink.close()
    assert read_metrics(run).column("step").to_pylist() == [1, 2, 3, 4, 5]


def test_the_heartbeat_is_the_newest_record(run):
    write(run, range(1, 4))
    assert StepRecord(**read_json(run.heartbeat)) == record(3)


def test_a_resumed_run_shows_each_step_once_in_tensorboard(run):
    write(run, range(1, 8))
    write(run, range(5, 10), resumed_at=4)
    assert events(run) == list(range(1, 10))


def test_weights_and_biases_works_offline_without_an_account(run, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    write(run, range(1, 4), wandb="offline", tensorboard=False)
    (folder,) = (run.logs / "wandb").glob("offline-run-*")
    (log,) = Path(folder).glob("*.wandb")
    assert log.stat().st_size > 0


@pytest.mark.root
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_tensorboard_and_not_the_run(run, disk_of, caplog):
    run.tensorboard.symlink_to(disk_of("16k"))
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
