"""Sinks for the record of every step: Parquet, a heartbeat file, TensorBoard, Weights & Biases, and a line of text."""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.imports import how_to_install
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.measurements import NAMED_LOSS, StepRecord
from llama_core.records.metrics import append_metrics, write_metrics_part
from llama_core.records.owners import who_else_may_write
from llama_core.records.settings_changes import first_values, read_settings_changes
from llama_core.training.events import EventFile
from llama_core.units import format_bytes

if TYPE_CHECKING:
    import wandb

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


class TensorBoardSink:
    """Writes the scalars of every record as one TensorBoard event, until one cannot be written.

    Then the run goes on without them, since its own metrics hold the same scalars.
    """

    def __init__(self, run: RunDirectory, resumed_at: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._file: EventFile | None = None
        # Whatever an earlier attempt recorded from this step on is hidden, so that each step shows once.
        start = SessionLog(status=SessionLog.START)
        with self._until_it_fails():
            self._file = EventFile(run.tensorboard)
            self._file.write(Event(wall_time=time.time(), step=resumed_at + 1, session_log=start))

    def write(self, record: StepRecord) -> None:
        """Add the record's scalars; a TensorBoard that is open shows them at once."""
        with self._until_it_fails():
            if self._file is not None:
                self._file.write_scalars(record.step, _scalars(record), record.time)

    def flush(self) -> None:
        """Do nothing: every event is flushed as it is written."""

    def close(self) -> None:
        """Close the event file."""
        with self._until_it_fails():
            if self._file is not None:
                self._file.close()

    @contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._file is not None:
                with suppress(OSError):  # what the file still buffers does not fit either
                    self._file.close()
            self._file = None
            logger.warning("TensorBoard gets no more events: %s; the run goes on, and its own metrics are whole", error)


class WandbSink:
    """Logs to Weights & Biases; a resumed run continues under the same id."""

    def __init__(self, run: RunDirectory, config: RunConfig) -> None:
        self._run = open_wandb(run, config)

    def write(self, record: StepRecord) -> None:
        """Log the record's scalars."""
        self._run.log(_scalars(record), step=record.step)

    def flush(self) -> None:
        """Do nothing: W&B writes from its own process."""

    def close(self) -> None:
        """End the W&B run."""
        self._run.finish()


def open_wandb(run: RunDirectory, config: RunConfig, part: str = "") -> "wandb.Run":
    """Return the run of Weights & Biases in which the metrics of a run are, or a part that other processes log.

    Args:
        run: the run.
        config: its configuration.
        part: the name of the part, which is a run of its own there, in one group with the other; empty for the steps.

    Raises:
        EnvironmentMismatchError: if the package is missing.
    """
    try:
        import wandb
    except ImportError:
        raise EnvironmentMismatchError(
            f"tracking.wandb={config.tracking.wandb} needs the wandb package; {how_to_install('wandb')}, "
            "or set tracking.wandb=off"
        ) from None
    _refuse_settings_of_others(run)
    name = f"{run.name}-{part}" if part else run.name
    return wandb.init(
        project=config.tracking.wandb_project,
        name=name,
        group=run.name,
        id=re.sub(r"[/\\#?%:]", "-", f"{name}-{_as_begun(run, config).fingerprint()}"),  # W&B refuses these characters
        resume="allow",
        mode="online" if config.tracking.wandb == "online" else "offline",
        dir=run.logs,
        config=config.model_dump(),
        settings=wandb.Settings(console="off", silent=True),
    )


def _refuse_settings_of_others(run: RunDirectory) -> None:
    """Refuse settings that wandb would take from the current folder, or from the run: they say where the key is sent.

    Raises:
        EnvironmentMismatchError: naming the file.
    """
    for folder in (".wandb", "wandb"):
        file = Path(folder, "settings").absolute()
        if file.exists() and (others := who_else_may_write(file) or who_else_may_write(file.parent)):
            raise EnvironmentMismatchError(
                f"{file} {others}, and wandb would send your key where it says; start the run in another folder"
            )
        of_run = run.logs / folder / "settings"
        if of_run.exists():  # nobody has made it on purpose
            raise EnvironmentMismatchError(f"wandb would send your key where {of_run} says; read it, and remove it")


def _as_begun(run: RunDirectory, config: RunConfig) -> RunConfig:
    """Return the settings that a run began with, whatever it has changed since when it was resumed."""
    first = first_values(read_settings_changes(run))
    # not validated: it is only named, and old values may not go with what has changed besides
    training = {key.removeprefix("training."): value for key, value in first.items()}
    return config.model_copy(update={"training": config.training.model_copy(update=training)})


class MetricsSinks:
    """All sinks of a run behind one interface."""

    def __init__(self, *sinks: MetricsSink) -> None:
        self.sinks = sinks

    @classmethod
    def open(cls, run: RunDirectory, config: RunConfig, *, resumed_at: int) -> Self:
        """Open the sinks that ``config.tracking`` asks for; ``resumed_at`` is the last step already recorded.

        Raises:
            EnvironmentMismatchError: if a sink's package is missing.
        """
        sinks: list[MetricsSink] = [ParquetSink(run), HeartbeatSink(run)]
        if config.tracking.tensorboard:
            sinks.append(TensorBoardSink(run, resumed_at))
        if config.tracking.wandb != "off":
            sinks.append(WandbSink(run, config))
        return cls(*sinks)

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


def print_record(record: StepRecord) -> None:
    """Print the record as one line of the rank's log."""
    with suppress(OSError):  # a full disk ends a run where it loses something; the metrics have all of this
        print(format_record(record), flush=True)  # noqa: T201


def format_record(record: StepRecord) -> str:
    """Return the record as one line of text."""
    parts = [
        f"step {record.step}/{record.total_steps}",
        f"loss {record.loss:.4f}",
        f"grad norm {record.grad_norm:.3f}",
        f"lr {record.learning_rate:.2e}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        f"memory {format_bytes(record.memory_allocated_bytes)} (peak {format_bytes(record.memory_peak_bytes)})",
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
    values = {name: value for name, value in asdict(record).items() if name not in ignored}
    named = {f"{NAMED_LOSS}{name}": loss for name, loss in record.eval_losses.items()}
    all_values = {**values, **record.measured, **named}
    return {name: float(value) for name, value in all_values.items() if value is not None}
