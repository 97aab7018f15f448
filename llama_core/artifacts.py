"""The run-directory contract: which file holds what, and how it is written so that a reader never sees half of it."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from llama_core.errors import RunDirectoryError
from llama_core.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1

OutcomeStatus = Literal[
    "finished",
    "oom",
    "non-finite",
    "preempted",
    "timeout",
    "node-failure",
    "hang",
    "cancelled",
    "crashed",
    "bad-config",
]


@dataclass(frozen=True)
class RunDirectory:
    """The paths inside one run's directory. Every step of the chain is handed this and nothing else."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name, which is its directory's."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved ``RunConfig`` as YAML."""
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        """The ``ParallelPlan``."""
        return self.path / "plan.json"

    @property
    def choice(self) -> Path:
        """Why the plan is as it is, and what else was considered; not there for a plan that follows from rules."""
        return self.path / "choice.json"

    @property
    def environment(self) -> Path:
        """What ``validate_environment`` found."""
        return self.path / "environment.json"

    @property
    def estimate(self) -> Path:
        """Bytes per category by arithmetic."""
        return self.path / "estimate.json"

    @property
    def dry_run(self) -> Path:
        """Bytes per category and FLOPs counted on fake tensors."""
        return self.path / "dry_run.json"

    @property
    def job(self) -> Path:
        """The ``JobRecord`` of the job now or last at work; written before anyone waits for it."""
        return self.path / "job.json"

    @property
    def flow_run(self) -> Path:
        """The Prefect flow runs that have followed the run, the newest last."""
        return self.path / "flow_run.json"

    @property
    def training(self) -> Path:
        """What training reached: held-out loss, tokens, the corpus' entropies."""
        return self.path / "training.json"

    @property
    def benchmark(self) -> Path:
        """Timed steps: median and spread."""
        return self.path / "benchmark.json"

    @property
    def outcome(self) -> Path:
        """The ``Outcome``: why the job ended."""
        return self.path / "outcome.json"

    @property
    def metrics(self) -> Path:
        """Folder of Parquet parts of ``StepRecord``."""
        return self.path / "metrics"

    @property
    def progress(self) -> Path:
        """The newest ``StepRecord``, rewritten every step: a heartbeat for those who watch."""
        return self.path / "metrics" / "latest.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of ``step-00000100`` directories and the ``latest`` pointer."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of each rank's output."""
        return self.path / "logs"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    def create(self) -> None:
        """Make the directory.

        Raises:
            RunDirectoryError: if it cannot be made or written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self.metrics.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write run directory {str(self.path)!r}: {error.strerror or error}; choose another --run-dir"
            ) from None


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as it goes to every metrics sink."""

    step: int
    """Optimizer step, from 1."""
    total_steps: int
    """The run's last step."""
    loss: float
    """Mean cross-entropy of the step's target tokens, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    """Learning rate of the step."""
    tokens: int
    """Tokens trained on since the run began, this step included."""
    tokens_per_second: float
    """Tokens of this step over ``step_seconds``, all devices together."""
    step_seconds: float
    """Wall time of the whole step."""
    data_seconds: float
    """Part of the step spent waiting for data."""
    forward_backward_seconds: float
    """Part of the step spent in forward and backward passes, and clipping the gradient."""
    optimizer_seconds: float
    """Part of the step spent updating the weights."""
    mfu: float | None
    """Model FLOP/s over the devices' peak, attention counted in full; None where the peak is unknown."""
    memory_allocated_bytes: int
    """Memory held now: the CUDA allocator's, or the process's resident set on the CPU."""
    memory_peak_bytes: int
    """Most memory held since this attempt's training began, in the same measure."""
    loss_scale: float
    """Factor the loss was scaled by; 1 except in fp16."""
    skipped: bool
    """Whether the update was left out because the loss or the gradient was not finite."""
    eval_loss: float | None
    """Mean cross-entropy on held-out tokens after this step, in nats; None where none was measured."""
    time: float
    """Seconds since the epoch at the end of the step."""


@dataclass(frozen=True)
class TrainingSummary:
    """What training reached."""

    steps: int
    tokens: int
    train_loss: float
    """Mean cross-entropy of the last step's target tokens, in nats."""
    eval_loss: float | None
    """Mean cross-entropy on the held-out tokens after the last step, in nats."""
    eval_tokens: int
    unigram_entropy: float | None
    """Entropy of the corpus' tokens taken one by one, in nats; only for the byte tokenizer."""
    bigram_entropy: float | None
    """Entropy of a token of the corpus given the one before, in nats; only for the byte tokenizer."""
    memory_baseline_bytes: int
    """Memory held before the model was built, in the measure of ``StepRecord.memory_peak_bytes``."""
    memory_peak_bytes: int
    """Most memory held while training."""
    seconds: float
    """Wall time of the training loop of this attempt."""

    def summary(self) -> str:
        """Return what was reached in one line."""
        parts = [f"{self.steps} steps, {format_count(self.tokens)} tokens in {format_duration(self.seconds)}"]
        if self.eval_loss is not None:
            baselines = [
                f"{name} {entropy:.3f}"
                for name, entropy in (("byte-unigram", self.unigram_entropy), ("byte-bigram", self.bigram_entropy))
                if entropy is not None
            ]
            parts.append(
                f"held-out loss {self.eval_loss:.3f} nats/token" + (f" ({', '.join(baselines)})" if baselines else "")
            )
        grown, bare = self.memory_peak_bytes - self.memory_baseline_bytes, self.memory_baseline_bytes
        parts.append(f"peak {format_bytes(grown)} above the {format_bytes(bare)} of the bare process")
        return "; ".join(parts)


@dataclass(frozen=True)
class BenchmarkRecord:
    """Timed optimizer steps, after warm-up steps that are not counted."""

    device: str
    """The device as its maker calls it."""
    warmup_steps: int
    step_seconds: tuple[float, ...]
    """Wall time of each timed step."""
    median_seconds: float
    spread_seconds: float
    """Interquartile range of ``step_seconds``."""
    tokens_per_step: int
    tokens_per_second: float
    """Tokens of a step over the median, all devices together."""
    mfu: float | None
    memory_peak_bytes: int
    """Most memory held during the timed steps, in the measure of ``StepRecord.memory_peak_bytes``."""

    def summary(self) -> str:
        """Return the speed in one line."""
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        return (
            f"{self.tokens_per_second:,.0f} tokens/s{mfu}: median step {self.median_seconds:.3f} s, "
            f"quartiles {self.spread_seconds:.3f} s apart, {len(self.step_seconds)} steps on {self.device}"
        )


@dataclass(frozen=True)
class JobRecord:
    """The job at work on a run: enough to find it again."""

    launcher: str
    job_id: str
    """Slurm's job id, or the process id of the local controller."""
    host: str
    """Where it was submitted from."""
    submitted_at: str
    name: str = ""
    """Its name in Slurm's queue."""
    cluster: str = ""
    """The name of the Slurm cluster; empty on this machine."""
    grace_seconds: float = 120.0
    """Time the job gets to finish its step and save a checkpoint before it is killed."""
    folder: str = ""
    """Where submitit keeps what the job starts from, and what it prints before its ranks begin."""


@dataclass(frozen=True)
class Outcome:
    """Why a job ended."""

    status: OutcomeStatus
    reason: str
    """One sentence: what happened, with the values that show it."""
    step: int
    """Last completed optimizer step."""
    next_action: str
    """What to try next; empty when the run finished."""
    ended_at: str
    attempts: tuple[Mapping[str, Any], ...] = ()
    """Every attempt at this run, oldest first: job id, how often Slurm had started the job before, status, reason,
    first and last step, and whether the job was queued again."""


def now() -> str:
    """Return the current time in UTC as ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path that takes the place of ``path`` when the block ends without an error.

    Args:
        path: the file to make or replace.
        durable: see that the bytes are on disk first, so that a power cut leaves the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, record: object, *, durable: bool = True) -> None:
    """Write a mapping or dataclass as JSON with its ``schema_version``, whole or not at all; see ``atomic_write``."""
    payload = asdict(record) if is_dataclass(record) and not isinstance(record, type) else record
    if not isinstance(payload, Mapping):
        raise TypeError(f"a record is a mapping or a dataclass, not {type(record).__name__}")
    with atomic_write(path, durable=durable) as temporary:
        temporary.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **payload}, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the record in ``path`` without its ``schema_version``.

    Raises:
        RunDirectoryError: if the file is missing, damaged, or of another schema version.
    """
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunDirectoryError(f"{path} does not exist; run the step that writes it first") from None
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"cannot read {path}: {error}") from None
    if not isinstance(record, dict) or record.pop("schema_version", None) != SCHEMA_VERSION:
        raise RunDirectoryError(f"{path} was written by another version of this software; start a new run")
    return record


def write_metrics_part(run: RunDirectory, records: Sequence[StepRecord]) -> Path:
    """Write ``records`` as the next Parquet part of the run's metrics and return its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 1 + max((int(path.stem.removeprefix("part-")) for path in _parts(run)), default=-1)
    table = pa.Table.from_pylist([asdict(record) for record in records], schema=_metrics_schema())
    path = run.metrics / f"part-{number:05d}.parquet"
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary)
    return path


def read_metrics(run: RunDirectory) -> "pa.Table":
    """Return the run's ``StepRecord`` rows in order of step; an empty table if there are none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [pq.read_table(path, schema=_metrics_schema()) for path in _parts(run)]
    return pa.concat_tables([_metrics_schema().empty_table(), *tables]).sort_by("step")


def drop_metrics_after(run: RunDirectory, step: int) -> None:
    """Forget the records of steps above ``step``, which a run resumed there will take again."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    if run.progress.exists() and read_json(run.progress)["step"] > step:
        run.progress.unlink()
    for path in _parts(run):
        table = pq.read_table(path, schema=_metrics_schema())
        kept = table.filter(pc.field("step") <= step)
        if kept.num_rows == 0:
            path.unlink()
        elif kept.num_rows < table.num_rows:
            with atomic_write(path) as temporary:
                pq.write_table(kept, temporary)


def _parts(run: RunDirectory) -> list[Path]:
    return sorted(run.metrics.glob("part-*.parquet"))


def _metrics_schema() -> "pa.Schema":
    import pyarrow as pa

    types = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), float | None: pa.float64()}
    return pa.schema([(field.name, types[field.type]) for field in fields(StepRecord)])  # type: ignore[index]
