"""Ending a run early: after some evaluations, none of which had a lower held-out loss than an earlier one."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llama_core.config.settings import UNNAMED, TrainingConfig
from llama_core.parallel.ranks import from_first_rank
from llama_core.training.parts.part import FinishedStep, LoopPart, RunProgress


@dataclass(frozen=True)
class _Lowest:
    """The lowest held-out loss of a name so far."""

    loss: float = math.inf
    step: int = 0
    """The step that it came after; 0 if no loss was finite yet."""
    evaluations_since: int = 0


class Patience(LoopPart):
    """Counts the evaluations since the lowest held-out loss, of every name: a resumed run may watch another one.

    Args:
        training: says how many evaluations are waited for, and by which loss.
        progress: learns why the run ends early.
    """

    def __init__(self, training: TrainingConfig, progress: RunProgress) -> None:
        self._max_evaluations = training.patience
        self._name = training.keep_best_by
        self._progress = progress
        self._lowest: dict[str, _Lowest] = {}

    def after_step(self, step: FinishedStep) -> None:
        """Count the evaluation after the step, if there was one."""
        if step.evaluation.rows:
            self.add(step.step, step.evaluation.loss, step.evaluation.named_losses)
            self._end_early_if_due()

    def add(self, step: int, eval_loss: float | None, eval_losses: Mapping[str, float]) -> None:
        """Take the losses of an evaluation: the one over all tokens, and those by name."""
        for name, loss in {UNNAMED: eval_loss, **eval_losses}.items():
            before = self._lowest.get(name, _Lowest())
            if loss is not None and loss < before.loss:
                self._lowest[name] = _Lowest(loss, step)
            else:  # not a number is no lower loss either
                self._lowest[name] = _Lowest(before.loss, before.step, before.evaluations_since + 1)

    def judge(self) -> str:
        """Return why the run should end, as a clause; empty if it should go on."""
        lowest = self._lowest.get(self._name, _Lowest())
        if not self._max_evaluations or lowest.evaluations_since < self._max_evaluations:
            return ""
        of = f" of {self._name}" if self._name else ""
        than = f"lower held-out loss{of} than {lowest.loss:.4f} of step {lowest.step}"
        if not lowest.step:
            than = f"finite held-out loss{of}"
        count = lowest.evaluations_since
        plural = "" if count == 1 else "s"
        return f"no {than} in {count} evaluation{plural} (training.patience={self._max_evaluations})"

    def state_dict(self) -> dict[str, Any]:
        """Return what has been counted."""
        return {"patience": {name: asdict(lowest) for name, lowest in self._lowest.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what ``state_dict`` returned; the settings may have changed since."""
        self._lowest = {name: _Lowest(**lowest) for name, lowest in state.get("patience", {}).items()}
        self._end_early_if_due()

    def _end_early_if_due(self) -> None:
        """End the run before its last step if patience has run out, on all ranks if on the first."""
        progress = self._progress
        is_early = self._max_evaluations > 0 and progress.step < progress.total_steps
        progress.ended_early = from_first_rank(self.judge()) if is_early else ""
