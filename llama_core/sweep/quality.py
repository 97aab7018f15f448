"""How good the models of trained elements are, by which a sweep ranks them: a held-out loss, or a score."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llama_core.config.evaluation import EvaluationConfig
from llama_core.evaluation.recording import settings_of_run
from llama_core.records.checkpoints import list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluation_jobs import read_ending
from llama_core.records.evaluations import Score
from llama_core.records.held_out import Difference, HeldOutRows
from llama_core.records.measurements import TrainingSummary
from llama_core.sweep.objective import SweepObjective
from llama_core.units import format_count

NOT_ENDED = "its last checkpoint has not been evaluated yet"


@dataclass(frozen=True)
class Quality:
    """How good an element's model is after its last step."""

    value: float
    """The loss, in the unit of the run's objective, or the score."""
    higher_is_better: bool
    standard_error: float | None
    """None if it is unknown."""
    sample: str
    """What it is a mean over, in words."""
    rows: HeldOutRows | None = None
    """A held-out loss row by row; None for a score, or if they are not recorded."""

    def behind(self, best: "Quality") -> Difference:
        """Return how far it lies behind another, positive if it is worse.

        Losses on the same held-out rows are compared row by row. Single answers are not kept, so the errors of two
        scores add up in squares: more than the error of the difference, since both models were asked the same.
        """
        if self.rows is not None and best.rows is not None:
            return self.rows.above(best.rows)
        amount = best.value - self.value if self.higher_is_better else self.value - best.value
        if self.standard_error is None or best.standard_error is None:
            return Difference(amount, None)
        return Difference(amount, math.hypot(self.standard_error, best.standard_error))


def best_first(qualities: Mapping[str, Quality]) -> list[str]:
    """Return the names of the elements, the best first."""

    def place(name: str) -> float:
        quality = qualities[name]
        return -quality.value if quality.higher_is_better else quality.value

    return sorted(qualities, key=place)


def quality_of(
    objective: SweepObjective, evaluation: EvaluationConfig, training: TrainingSummary, scores: Sequence[Score]
) -> Quality | None:
    """Return what ranks an element that has trained; None if it was not evaluated.

    Args:
        objective: what ranks the elements, not their throughput.
        evaluation: what the checkpoints of all elements are evaluated on.
        training: the element's.
        scores: what its checkpoints have scored, also in evaluations that the sweep did not ask for.
    """
    return _score(objective, evaluation, training, scores) if objective.kind == "score" else _loss(objective, training)


def _loss(objective: SweepObjective, training: TrainingSummary) -> Quality | None:
    summary = training.of_part(objective.part)
    if summary.eval_loss is None:
        return None
    rows = summary.eval_rows
    counted = f"{format_count(summary.eval_tokens)} held-out {summary.counted}"
    return Quality(
        value=summary.eval_loss,
        higher_is_better=False,
        standard_error=rows.standard_error if rows else None,
        sample=f"{len(rows.counts)} rows, {counted}" if rows else counted,
        rows=rows,
    )


def _score(
    objective: SweepObjective, evaluation: EvaluationConfig, training: TrainingSummary, scores: Sequence[Score]
) -> Quality | None:
    settings = settings_of_run(evaluation, objective.metric)
    for score in scores:
        asked = (score.task, score.metric, score.settings) == (objective.task, objective.metric, settings)
        if asked and score.step == training.steps and math.isfinite(score.value):
            return Quality(score.value, score.higher_is_better, score.standard_error, f"{score.examples:,} examples")
    return None


def why_not_evaluated(run: RunDirectory) -> str:
    """Return why a run that has trained lacks the score that ranks it."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        return "its last checkpoint is gone"
    ending = read_ending(run, checkpoints[-1])
    if ending is None:
        return NOT_ENDED
    return ending.problem or "its evaluation has no such score"
