"""Sinks for the record of every step: Parquet, a heartbeat file, trackers, and a line of text."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib import import_module
from typing import Protocol, Self

from llama_core.config.run import RunConfig
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.measurements import NAMED_LOSS, StepRecord
from llama_core.records.metrics import append_metrics, write_metrics_part
from llama_core.records.settings_changes import first_values, read_settings_changes
from llama_core.redaction import redacted_values
from llama_core.trackers.guarded import GuardedTracker
from llama_core.trackers.traits import TrackedRun
from llama_core.units import format_bytes

logger = logging.getLogger(__name__)


class MetricsSink(Protocol):
    """A destination for the record of every step."""

    def write(self, record: StepRecord) -> None:
        """Take one step's record."""

    def flush(self) -> None:
        """Make sure that everything taken so far survives the process."""

    def close(self) -> None:
        """Flush, and release what is held open."""


class ParquetSink:
    """Adds records to the run's metrics at once, and puts every ``part_size`` of them into a new Parquet part."""

    def __init__(self, run: RunDirectory, part_size: int = 100) -> None:
        self.run = run
        self.part_size = part_size
        self._records: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        """Append the record; write a part once there are ``part_size``."""
        append_metrics(self.run, record)
        self._records.append(record)
        if len(self._records) >= self.part_size:
            self.flush()

    def flush(self) -> None:
        """Write the records since the last part as a part."""
        if self._records:
            write_metrics_part(self.run, self._records)
            self._records = []

    close = flush


class HeartbeatSink:
    """Keeps the newest record in one small file, for processes that watch the run."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run

    def write(self, record: StepRecord) -> None:
        """Replace the file."""
        write_json(self.run.heartbeat, record, durable=False)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        """Do nothing: no file stays open."""


class TrackersSink:
    """Hands the scalars of every record to trackers, which do not end the run if they fail."""

    def __init__(self, trackers: Sequence[GuardedTracker]) -> None:
        self.trackers = trackers

    def write(self, record: StepRecord) -> None:
        """Hand on the record's scalars."""
        values = _scalars(record)
        for tracker in self.trackers:
            tracker.write(record.step, values, record.time)

    def flush(self) -> None:
        """Flush every tracker."""
        for tracker in self.trackers:
            tracker.flush()

    def close(self) -> None:
        """Close every tracker."""
        for tracker in self.trackers:
            tracker.close()


def tracked_run(run: RunDirectory, config: RunConfig, *, resumed_at: int = 0, part: str = "") -> TrackedRun:
    """Return what trackers are told about a run, or about a part of it; see ``TrackedRun``."""
    return TrackedRun(
        run,
        configuration=redacted_values(config.model_dump(mode="json")),
        fingerprint=lambda: _as_begun(run, config).fingerprint(),
        group=run.sweep or run.name,
        resumed_at=resumed_at,
        part=part,
    )


def _as_begun(run: RunDirectory, config: RunConfig) -> RunConfig:
    """Return the settings that a run began with, whatever it has changed since when it was resumed."""
    first = first_values(read_settings_changes(run))
    # not validated: it is only named, and old values may not go with what has changed besides
    training = {key.removeprefix("training."): value for key, value in first.items()}
    return config.model_copy(update={"training": config.training.model_copy(update=training)})


def _warn(warning: str) -> None:
    logger.warning("%s; the run goes on, and its own metrics are whole", warning)


class MetricsSinks:
    """All sinks of a run behind one interface."""

    def __init__(self, *sinks: MetricsSink) -> None:
        self.sinks = sinks

    @classmethod
    def open(cls, run: RunDirectory, config: RunConfig, *, resumed_at: int) -> Self:
        """Open the sinks that ``config.tracking`` asks for; ``resumed_at`` is the last step already recorded.

        Raises:
            EnvironmentMismatchError: if a tracker's package is missing, or it refuses what it finds on this machine.
        """
        tracked = tracked_run(run, config, resumed_at=resumed_at)
        asked = config.tracking.asked_trackers()
        trackers = [GuardedTracker(one, tracked, "gets no more steps", _warn) for one in asked]
        return cls(ParquetSink(run), HeartbeatSink(run), TrackersSink(trackers))

    def write(self, record: StepRecord) -> None:
        """Hand the record to every sink."""
        for sink in self.sinks:
            sink.write(record)

    def flush(self) -> None:
        """Flush every sink."""
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        """Close every sink, even if one of them raises."""
        with ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close)


def import_what_records_need(config: RunConfig) -> None:
    """Import what the first records of a run would import, before its model is built.

    Otherwise their modules' objects, some 14 MiB, would be measured as memory that training takes.
    """
    import pyarrow.parquet

    pyarrow.Table.from_pylist([{"step": 1}])  # makes pyarrow look for pandas
    for asked in config.tracking.asked_trackers():
        for name in asked.kind.imports:
            with suppress(ImportError):  # opening the tracker says so
                import_module(name)


def print_record(record: StepRecord) -> None:
    """Print the record as one line of the rank's log."""
    with suppress(OSError):  # a full disk ends a run where it loses something; the metrics have all of this
        print(format_record(record), flush=True)  # noqa: T201


def format_record(record: StepRecord) -> str:
    """Return the record as one line of text; its memory is without what was alive before the model was built."""
    alive = record.memory_allocated_bytes - record.memory_baseline_bytes
    parts = [
        f"step {record.step}/{record.total_steps}",
        f"loss {record.loss:.4f}",
        f"grad norm {record.grad_norm:.3f}",
        f"lr {record.learning_rate:.2e}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        f"memory {format_bytes(alive)} (peak {format_bytes(record.memory_added_bytes)})",
    ]
    if record.shown:
        parts.insert(2, record.shown)
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    if record.held_out:
        parts.append(record.held_out)
    if record.skipped:
        parts.append("SKIPPED: not finite")
    if record.spike:
        parts.append("SPIKE")
    return "  ".join(parts)


def _scalars(record: StepRecord) -> dict[str, float]:
    ignored = {"step", "total_steps", "time", "eval_losses", "measured", "shown", "eval_shown"}
    ignored |= {"memory_baseline_bytes", "expert_shares"}
    values = {name: value for name, value in asdict(record).items() if name not in ignored}
    named = {f"{NAMED_LOSS}{name}": loss for name, loss in record.eval_losses.items()}
    all_values = {**values, **record.measured, **named}
    return {name: float(value) for name, value in all_values.items() if value is not None}
