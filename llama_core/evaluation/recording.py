"""Write what a run's checkpoints score into its directory, as the scores become known."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from llama_core.config.evaluation import EvaluationConfig
from llama_core.errors import RunDirectoryError
from llama_core.evaluation.held_out import Evaluation
from llama_core.evaluation.tasks import Asked, TaskEvaluation
from llama_core.hugging_face.pretrained import is_checkpoint
from llama_core.records.checkpoints import checkpoint_step, run_of
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import LOSS, Score, write_scores
from llama_core.records.file_owners import other_owner
from llama_core.records.files import now, unwritable
from llama_core.records.progress import read_progress

Tell = Callable[[str], None]


def recorded_losses(
    found: Iterable[Evaluation],
    *,
    seq_len: int | None = None,
    num_sequences: int | None = None,
    tokenizer: str | None = None,
    dtype: str = "fp32",
    tell: Tell | None = lambda text: None,
    problems: list[str] | None = None,
) -> Iterator[Evaluation]:
    """Yield each evaluation after its loss is recorded, if the weights are a checkpoint in a run's directory.

    Args:
        found: what ``evaluate`` yields.
        seq_len: as it was asked for, also the next three.
        num_sequences: most rows.
        tokenizer: its name.
        dtype: dtype of the arithmetic.
        tell: called with a line if scores cannot be recorded, which then costs only the record; None if that is what
            they are for.
        problems: gets the line too, unless the run is somebody else's, in which nothing is recorded.
    """
    settings = _settings(
        "" if seq_len is None else f"{seq_len} tokens a sequence",
        _of_sequences(num_sequences),
        tokenizer=tokenizer,
        dtype=dtype,
    )
    for one in found:
        if (at := _Place.of(one.weights)) is not None:
            score = Score(
                step=at.step,
                tokens=at.tokens,
                task=one.data,
                metric=LOSS,
                value=one.rows.mean,
                standard_error=one.rows.standard_error,
                higher_is_better=False,
                examples=len(one.rows.counts),
                version="",
                settings=settings,
                time=now(),
            )
            at.write([score], tell, problems)
        yield one


def recorded_tasks(
    found: Iterable[TaskEvaluation],
    asked: Asked,
    *,
    tokenizer: str | None = None,
    dtype: str = "fp32",
    tell: Tell | None = lambda text: None,
    problems: list[str] | None = None,
) -> Iterator[TaskEvaluation]:
    """Yield each evaluation after its scores are recorded; see ``recorded_losses``.

    Args:
        found: what ``evaluate_tasks`` yields.
        asked: how the tasks were asked.
        tokenizer: as it was asked for, also ``dtype``.
        dtype: dtype of the arithmetic.
        tell: as in ``recorded_losses``.
        problems: as in ``recorded_losses``.
    """
    settings = _settings(str(asked), tokenizer=tokenizer, dtype=dtype)
    for one in found:
        at = _Place.of(one.weights)
        if at is not None and one.scores:
            time = now()
            scores = [score.of_checkpoint(at.step, at.tokens, settings=settings, time=time) for score in one.scores]
            at.write(scores, tell, problems)
        yield one


def settings_of_run(evaluation: EvaluationConfig, metric: str) -> str:
    """Return the ``settings`` of the scores that a run's own evaluations record.

    Args:
        evaluation: what the run's checkpoints are evaluated on.
        metric: that of a score.
    """
    asked = _of_sequences(evaluation.sequences) if metric == LOSS else str(Asked.of(evaluation))
    return _settings(asked, tokenizer=None, dtype=evaluation.dtype)


def _of_sequences(number: int | None) -> str:
    return "" if number is None else f"{number or 'all'} sequences"


def _settings(*parts: str, tokenizer: str | None, dtype: str) -> str:
    named = "" if tokenizer is None else f"tokenizer {tokenizer}"
    return ", ".join(part for part in (*parts, named, "" if dtype == "fp32" else dtype) if part)


class UnrecordedError(RunDirectoryError):
    """Scores that were asked for only to be recorded are not."""


class _Place:
    """A checkpoint in its run's directory."""

    def __init__(self, run: RunDirectory, checkpoint: Path) -> None:
        self._run = run
        self.step = checkpoint_step(checkpoint)
        self.tokens = read_progress(checkpoint).tokens

    @classmethod
    def of(cls, weights: Path) -> "_Place | None":
        """Return the place of weights; None if no run has them."""
        if not is_checkpoint(weights):
            return None
        checkpoint = weights.absolute()
        run = run_of(checkpoint)
        return cls(run, checkpoint) if run.path != checkpoint and run.config.exists() else None

    def write(self, scores: Sequence[Score], tell: Tell | None, problems: list[str] | None) -> None:
        """Write scores, of one file for each task, or tell why not.

        Raises:
            UnrecordedError: if there is nobody to tell.
        """
        owner = other_owner(self._run)
        why = f": {self._run.path} belongs to {owner}" if owner is not None else self._problem_of_writing(scores)
        if not why:
            return
        line = f"the scores of step {self.step:,} are not recorded{why}"
        if tell is None:
            raise UnrecordedError(line)
        tell(line)
        if owner is None and problems is not None:
            problems.append(line)

    def _problem_of_writing(self, scores: Sequence[Score]) -> str:
        try:
            if self._run.evaluations.is_symlink():  # it would lead us elsewhere
                raise RunDirectoryError(f"{self._run.evaluations} is a link; remove it")
            for task in dict.fromkeys(score.task for score in scores):
                write_scores(self._run, [score for score in scores if score.task == task])
        except OSError as error:
            return f": {unwritable(self._run.evaluations, error)}"
        except RunDirectoryError as error:
            return f" in {self._run.path}: {error}"
        return ""
