"""Tells bad steps from good ones, and what becomes of the run after a bad one."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from llama_core.config.run import RunConfig
from llama_core.config.settings import OnBadStep, TrainingConfig
from llama_core.data.supply import Supply
from llama_core.errors import BadStepError, NonFiniteError
from llama_core.parallel.ranks import first_complaint, from_first_rank, is_first_rank
from llama_core.records.directory import RunDirectory
from llama_core.records.rollbacks import Rollback, data_skips, read_rollbacks, write_rollbacks
from llama_core.training.engine import Engine
from llama_core.training.initial_weights import InitialWeights
from llama_core.training.parts.part import FinishedStep, LoopPart, RunProgress
from llama_core.training.parts.spikes import BadStep, Spikes

logger = logging.getLogger(__name__)


class StepCheck(LoopPart):
    """Says of each step whether it was good, and counts. Ranks judge alike, because they see the same values.

    Args:
        training: what a spike is, and whether a bad step is only skipped.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._is_only_skipped = training.on_bad_step == "skip"
        self._spikes = Spikes(training)
        self.num_sound_steps = 0
        """Steps so far, of this process and those before, whose loss and gradient were finite."""
        self.skipped_in_a_row = 0
        """Steps up to the newest whose loss or gradient was not finite."""

    def after_step(self, step: FinishedStep) -> None:
        """Judge the step."""
        values = step.values
        overflowed = values.overflowed(step.loss_scale)
        step.is_sound = values.updated or overflowed
        if step.is_sound:
            self.num_sound_steps += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1
        # the gradient of an overflow says nothing
        step.spike = "" if overflowed else self._spikes.find(values.loss, values.grad_norm)
        reason = step.spike
        if not step.is_sound:
            reason = f"loss {values.loss:.4g} and gradient norm {values.grad_norm:.4g}"
        if reason and not self._is_only_skipped:
            step.bad = BadStep(step.step, reason, is_finite=step.is_sound, data=step.position)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been counted, and the values that spikes are told by."""
        return {"sound_steps": self.num_sound_steps, "spikes": self._spikes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what ``state_dict`` returned."""
        self.num_sound_steps = state["sound_steps"]
        self._spikes.load_state_dict(state["spikes"])
        self.skipped_in_a_row = 0


class BadSteps(LoopPart):
    """Ends a run after a bad step, or leaves out the data of the steps up to it once the run has gone back.

    A run goes back in the process, because everything else that the steps need is here: data, compiled blocks, and
    ranks that have found each other. A new attempt would need a launcher that starts one; only Slurm's does.

    Args:
        run: where rollbacks are recorded.
        config: its configuration.
        progress: how far it is.
        check: what it has counted.
        engine: holds the weights.
        initial_weights: what the run began with.
        batches: the data.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        progress: RunProgress,
        *,
        check: StepCheck,
        engine: Engine,
        initial_weights: InitialWeights,
        batches: Supply,
    ) -> None:
        self._run = run
        self._config = config
        self._progress = progress
        self._check = check
        self._engine = engine
        self._initial_weights = initial_weights
        self._batches = batches
        self.rollbacks = from_first_rank(read_rollbacks(run) if is_first_rank() else [])
        self._began_at = 0
        """The last step of the processes before this one."""

    def begin(self) -> None:
        """Remember which step is the first one of this process."""
        self._began_at = self._progress.step

    def before_step(self) -> None:
        """Go on after the data that a rollback has left out."""
        position = data_skips(self.rollbacks).get(self._progress.step)
        if position is not None:
            self._batches.load_state_dict(position)

    def after_step(self, step: FinishedStep) -> None:
        """End the run if a bad step must end it.

        Raises:
            NonFiniteError: after more than ``max_skipped_steps`` steps in a row without a finite loss and gradient,
                or after one, if ``on_bad_step`` stops the run or the rollbacks are used up, or if the weights that it
                began with are not finite; at the end, if no step had a finite loss and gradient.
            LossSpikeError: after a spike, if ``on_bad_step`` stops the run or the rollbacks are used up.
            WrongDeviceError: if a rank that may be wrong has been suspected before.
        """
        if step.mended is not None:
            self._end_if_suspected_again(step.mended)
            if is_first_rank():
                logger.warning("step %d was bad at first: %s", step.step, step.mended.reason)
            self._add(step.step - 1, step.mended, at_once=True)
        if step.bad is not None and step.bad.suspects:
            self._end_if_suspected_again(step.bad)
            return
        training = self._config.training
        skipped = self._check.skipped_in_a_row
        if skipped and step.step == self._began_at + 1:
            self._refuse_non_finite_weights(step)
        used = self._num_without_data
        if step.bad is not None:
            if training.on_bad_step == "stop":
                raise self.ends(step.bad, "training.on_bad_step=stop", "rollback", "skip")
            if used >= training.max_rollbacks:
                why = f"all {used} rollbacks are used up; training.max_rollbacks={training.max_rollbacks}"
                raise self.ends(step.bad, why, "skip")
            return
        if skipped > training.max_skipped_steps:
            raise NonFiniteError(
                f"the loss or gradient was not finite for {skipped} steps in a row, up to step {step.step}; "
                f"training.max_skipped_steps={training.max_skipped_steps}"
            )
        if step.is_newest and self._progress.is_over and not self._check.num_sound_steps:
            raise NonFiniteError(
                f"the loss or gradient was not finite in any of the {step.step} steps, so nothing was trained"
            )

    def ends(self, bad: BadStep, why: str, *remedies: OnBadStep) -> BadStepError:
        """Return the error that ends the run at a bad step; see ``BadStep.ends``."""
        return bad.ends(self._run, self._config.data.source, why, *remedies)

    def went_back(self, bad: BadStep) -> None:
        """Record the rollback, before any step on other data."""
        step = self._progress.step
        self._add(step, bad)
        if not is_first_rank():
            return
        what = f"takes steps {step + 1} to {bad.step} again"
        if bad.data is not None:
            count = f"rollback {self._num_without_data} of {self._config.training.max_rollbacks}"
            what = f"left out the data of steps {step + 1} to {bad.step} ({count})"
        logger.warning("step %d is bad: %s; returned to step %d, and %s", bad.step, bad.reason, step, what)

    def _add(self, step: int, bad: BadStep, *, at_once: bool = False) -> None:
        """Record that the run has returned to a step because of a bad one."""
        self.rollbacks.append(Rollback(step, bad.step, bad.reason, bad.data, time.time(), bad.suspects, at_once))
        if is_first_rank():
            write_rollbacks(self._run, self.rollbacks)

    @property
    def _num_without_data(self) -> int:
        """The rollbacks that have left out data."""
        return sum(rollback.data is not None for rollback in self.rollbacks)

    def _end_if_suspected_again(self, bad: BadStep) -> None:
        """End the run if one of the devices that may be wrong has been suspected before.

        Raises:
            WrongDeviceError: with the step where it was.
        """
        for suspect in bad.suspects:
            for before in self.rollbacks:
                # ranks may be on other nodes in another attempt
                if any((one.host, one.device) == (suspect.host, suspect.device) for one in before.suspects):
                    why = f"{suspect} may also have been wrong in step {before.bad_step}"
                    raise self.ends(bad, why)

    def _refuse_non_finite_weights(self, first: FinishedStep) -> None:
        """Check the weights that this process began with, since its first step had no finite loss and gradient.

        Raises:
            NonFiniteError: if one of them is NaN or infinite, with where it comes from.
        """
        name = next(self._engine.non_finite_weights(), "")
        where = name and self._initial_weights.where_read(name, self._engine.model, self._began_at)
        if place := first_complaint(where):
            raise NonFiniteError(
                f"loss {first.values.loss:.4g} and gradient norm {first.values.grad_norm:.4g} before any update, "
                f"because the weights are not finite: {place}",
                "start from other weights; if these were copied or downloaded, do it again",
            )
