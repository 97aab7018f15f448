"""Evaluations: the loss of held-out rows after some steps."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llama_core.config.settings import TrainingConfig
from llama_core.models.batch import Batch
from llama_core.models.measures import Measures
from llama_core.parallel.measured import measured, measured_totals
from llama_core.planning.plan import ParallelPlan
from llama_core.records.held_out import HeldOutRows
from llama_core.training.engine import Engine, evaluating
from llama_core.training.inputs import StepInputs
from llama_core.training.parts.activity import ActivityLog
from llama_core.training.parts.part import FinishedStep, HeldOutEvaluation, LoopPart, RunProgress


class HeldOut(LoopPart):
    """Evaluates after the last step, every ``eval_every`` steps, and before the checkpoints that ``keep_best`` ranks.

    Args:
        training: its settings.
        plan: how the model is divided.
        progress: how far the run is.
        batches: functions by name, or as ``UNNAMED``, that return this rank's share of held-out batches; empty to
            evaluate nothing.
        engine: this rank's part of the model.
        inputs: cuts batches into microbatches.
        is_saved: says whether a checkpoint follows a step.
        activity: is told of evaluations.
    """

    def __init__(
        self,
        training: TrainingConfig,
        plan: ParallelPlan,
        progress: RunProgress,
        *,
        batches: Mapping[str, Callable[[], Iterable[Batch]]],
        engine: Engine,
        inputs: StepInputs,
        is_saved: Callable[[int], bool],
        activity: ActivityLog,
    ) -> None:
        self._training = training
        self._plan = plan
        self._progress = progress
        self.batches = batches
        self._engine = engine
        self._inputs = inputs
        self._is_saved = is_saved
        self._activity = activity
        objective = engine.model.objective  # routers measure nothing in an evaluation
        self._names = objective.names if isinstance(objective, Measures) else ()
        """What is measured of held-out rows beside their loss."""
        self.last = HeldOutEvaluation()
        """The newest evaluation of this process."""

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after ``step``."""
        if not self.batches:
            return False
        every = self._training.eval_every
        is_due = every > 0 and step % every == 0
        is_ranked = self._training.keep_best > 0 and self._is_saved(step)
        return is_due or is_ranked or self._progress.is_over

    def after_step(self, step: FinishedStep) -> None:
        """Evaluate if it is due. After a bad step, the run is about to lose these weights."""
        if step.bad is None and step.is_newest and self.is_due(step.step):
            self.evaluate()
            step.evaluation = self.last
            self._activity.tell_step()
        if self.batches:
            step.measured |= {f"eval_{name}": step.evaluation.measured.get(name) for name in self._names}

    def ensure(self) -> None:
        """Evaluate if this process has not: a run that is resumed after its last step takes none."""
        if self.batches and not self.last.rows:
            self.evaluate()

    def evaluate(self) -> None:
        """Evaluate the present weights, as ``last``; all ranks call it together."""
        self._activity.tell("evaluating", "evaluation")
        rows = self.rows()
        model = self._engine.model
        of_rows = measured(model, measured_totals(model, self._plan)).values
        known = {name: value for name, value in of_rows.items() if name in self._names and value is not None}
        self.last = HeldOutEvaluation(self._progress.step, rows, known)

    def rows(self) -> dict[str, HeldOutRows]:
        """Return the loss of the rows of the held-out batches, by name; all ranks call it together."""
        with evaluating(self._engine):
            return {name: self._rows_of(batches()) for name, batches in self.batches.items()}

    def _rows_of(self, batches: Iterable[Batch]) -> HeldOutRows:
        microbatches = [piece for batch in batches for piece in self._inputs.on_device(batch)]
        return HeldOutRows.of(*self._engine.evaluate(microbatches)) if microbatches else HeldOutRows((), ())

    def state_dict(self) -> dict[str, Any]:
        """Return the losses after this step, which rank its checkpoint; None if it was not evaluated."""
        evaluation = self.last if self.last.step == self._progress.step else HeldOutEvaluation()
        return {"eval_loss": evaluation.loss, "eval_losses": evaluation.named_losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forget the last evaluation: it may be of a step that is taken again, on other data."""
        self.last = HeldOutEvaluation()
