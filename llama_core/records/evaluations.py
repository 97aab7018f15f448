"""What the checkpoints of a run have scored, in Parquet.

A file for each task and checkpoint: evaluations that run at the same time, on several nodes, need no lock.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path

from llama_core.records.directory import RunDirectory
from llama_core.records.files import DAMAGE, atomic_write, checked_record, damaged, read_file, table_of, unreadable
from llama_core.records.held_out import TOLD_APART

SCORE = "evaluation/"
"""What the name of a score's curve begins with, and of a sweep's objective: ``evaluation/TASK/METRIC``."""
LOSS = "loss"
"""The metric of data."""


@dataclass(frozen=True)
class Score:
    """One metric of one task, or the loss on one set of data, of one checkpoint."""

    step: int
    """The checkpoint's."""
    tokens: int
    """Tokens that it was trained on."""
    task: str
    """The name of the task or of the data."""
    metric: str
    """As the harness calls it, such as ``acc`` or ``exact_match,strict-match``; ``loss`` for data."""
    value: float
    standard_error: float | None
    """None if the metric has none."""
    higher_is_better: bool
    examples: int
    """Documents of the task, or sequences of the data, that the value is over."""
    version: str
    """The task's own; empty for data."""
    settings: str
    """How the task was asked otherwise than by default, such as ``5-shot, first 100, chat``; else empty."""
    time: str
    """When it ended, as ISO 8601."""

    @property
    def spread(self) -> float | None:
        """How far chance alone moves the value, either way."""
        return None if self.standard_error is None else TOLD_APART * self.standard_error

    @property
    def tag(self) -> str:
        """The name of its curve, such as ``evaluation/arc_easy/acc``."""
        return f"{SCORE}{self.task}/{self.metric}"

    def __str__(self) -> str:
        """Return the score and how far chance moves it, in one line."""
        asked = f" ({self.settings})" if self.settings else ""
        spread = "" if self.spread is None else f" ± {self.spread:.4f}"
        return f"step {self.step:,}: {self.task}{asked}  {self.metric} {self.value:.4f}{spread}"


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task of lm-evaluation-harness, or of a group of tasks."""

    task: str
    metric: str
    """As in ``Score``."""
    value: float
    standard_error: float | None
    higher_is_better: bool
    examples: int
    version: str
    num_fewshot: int
    """Solved examples before each question."""

    def of_checkpoint(self, step: int, tokens: int, *, settings: str, time: str) -> Score:
        """Return the score as that of a run's checkpoint; see ``Score`` for the arguments."""
        known = asdict(self)
        del known["num_fewshot"]
        return Score(step=step, tokens=tokens, settings=settings, time=time, **known)


def write_scores(run: RunDirectory, scores: Sequence[Score]) -> Path:
    """Keep the scores of one task and checkpoint, in place of earlier ones asked in the same way; return their file.

    Args:
        run: the run.
        scores: at least one; all of one step, task and settings.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    (key,) = {(score.step, score.task, score.settings) for score in scores}
    path = run.evaluations / f"step-{key[0]:08d}-{sha256(repr(key[1:]).encode()).hexdigest()[:12]}.parquet"
    types = {int: pa.int64(), float: pa.float64(), float | None: pa.float64(), bool: pa.bool_(), str: pa.string()}
    schema = pa.schema([(field.name, types[field.type]) for field in fields(Score)])  # type: ignore[index]
    with atomic_write(path) as temporary:
        pq.write_table(pa.Table.from_pylist([asdict(score) for score in scores], schema), temporary)
    return path


def read_scores(run: RunDirectory) -> list[Score]:
    """Return what the run's checkpoints have scored, by task, settings, metric and step; empty if none was evaluated.

    Raises:
        RunDirectoryError: naming a file that is damaged.
    """
    scores = [score for path in sorted(run.evaluations.glob("step-*.parquet")) for score in _read(path, run)]
    return sorted(scores, key=lambda score: (score.task, score.settings, score.metric, score.step))


def _read(path: Path, run: RunDirectory) -> list[Score]:
    import pyarrow as pa

    try:
        content = read_file(path, run.path)
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        rows = table_of(content).to_pylist()
    except (OSError, pa.ArrowException, *DAMAGE) as error:
        raise damaged(path, error) from None
    return checked_record(rows, list[Score], path)
