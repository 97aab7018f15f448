"""Which checkpoints of a run are evaluated while it trains: the attempts at each, and how the last one ended.

An attempt is recorded by whoever starts it, and its ending by the evaluation itself, in files of their own.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from llama_core.errors import RunDirectoryError
from llama_core.records.checkpoints import MANIFEST, checkpoint_name, checkpoint_step
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_file, read_typed, unwritable, write_json
from llama_core.records.progress import first_of_each, read_progress


@dataclass(frozen=True)
class EvaluationAttempt:
    """The newest attempt to evaluate a checkpoint."""

    step: int
    tokens: int
    """Tokens that the checkpoint was trained on."""
    checkpoint: str
    """``identity`` of the checkpoint: a run that has gone back trains to the same step once more."""
    attempt: int
    """Counted from 1."""
    job_id: str
    """The scheduler's; empty for a process of whoever has started it."""


@dataclass(frozen=True)
class EvaluationEnding:
    """How the evaluation of a checkpoint has ended for good."""

    step: int
    tokens: int
    checkpoint: str
    problem: str
    """Why it has no scores; empty if it has."""


def identity(checkpoint: Path) -> str:
    """Return what tells a checkpoint from another one of the same step; empty if it is gone."""
    with suppress(OSError):
        return sha256(read_file(checkpoint / MANIFEST)).hexdigest()[:16]
    return ""


def write_attempt(run: RunDirectory, attempt: EvaluationAttempt) -> None:
    """Record that an evaluation starts.

    Raises:
        RunDirectoryError: if it cannot be written.
    """
    _write(_folder(run) / f"{checkpoint_name(attempt.step)}.json", attempt)


def read_attempt(run: RunDirectory, checkpoint: Path) -> EvaluationAttempt | None:
    """Return the newest attempt to evaluate a checkpoint, or None."""
    path = _folder(run) / f"{checkpoint.name}.json"
    with suppress(RunDirectoryError):
        attempt = read_typed(path, EvaluationAttempt, run.path) if path.exists() else None
        return attempt if attempt and attempt.checkpoint == identity(checkpoint) else None
    return None


def write_ending(run: RunDirectory, checkpoint: Path, problem: str = "") -> None:
    """Record that a checkpoint has its scores, or why it gets none.

    Raises:
        RunDirectoryError: if it cannot be written.
    """
    ending = EvaluationEnding(
        checkpoint_step(checkpoint), read_progress(checkpoint).tokens, identity(checkpoint), problem
    )
    _write(_ended(run, checkpoint.name), ending)


def read_ending(run: RunDirectory, checkpoint: Path) -> EvaluationEnding | None:
    """Return how the evaluation of a checkpoint has ended, or None if it has not."""
    ending = _read_ending(run, checkpoint.name)
    return ending if ending and ending.checkpoint == identity(checkpoint) else None


def endings(run: RunDirectory) -> list[EvaluationEnding]:
    """Return how evaluations have ended, by step, also of checkpoints that are gone."""
    names = (path.name.removesuffix(_ENDED) for path in _folder(run).glob(f"*{_ENDED}"))
    found = (_read_ending(run, name) for name in names)
    return sorted((ending for ending in found if ending is not None), key=lambda ending: ending.step)


def waiting_checkpoints(checkpoints: Sequence[Path], every_tokens: int) -> list[Path]:
    """Return those of a run's checkpoints whose evaluation has not ended and that are to be evaluated.

    Args:
        checkpoints: some or all checkpoints of one run, oldest first.
        every_tokens: evaluate the first checkpoint at or after each multiple of this many tokens; 0: each.
    """
    if not checkpoints:
        return []
    run = RunDirectory(checkpoints[0].parents[1])
    waiting = [path for path in checkpoints if read_ending(run, path) is None]
    if not every_tokens:
        return waiting
    # A checkpoint that was evaluated may be gone: the next one after the same multiple does not take its place.
    steps = {ending.tokens // every_tokens: ending.step for ending in endings(run)}
    taken = {multiple: checkpoint_name(step) for multiple, step in steps.items()}
    return [
        path
        for path in first_of_each(every_tokens, checkpoints)
        if path in waiting and taken.get(read_progress(path).tokens // every_tokens, path.name) == path.name
    ]


_ENDED = ".ended.json"


def _write(path: Path, record: EvaluationAttempt | EvaluationEnding) -> None:
    try:
        write_json(path, record)
    except OSError as error:
        raise unwritable(path, error) from None


def _folder(run: RunDirectory) -> Path:
    return run.evaluations / "jobs"


def _ended(run: RunDirectory, name: str) -> Path:
    return _folder(run) / f"{name}{_ENDED}"


def _read_ending(run: RunDirectory, name: str) -> EvaluationEnding | None:
    path = _ended(run, name)
    with suppress(RunDirectoryError):  # a damaged one: the checkpoint is evaluated again
        return read_typed(path, EvaluationEnding, run.path) if path.exists() else None
    return None
