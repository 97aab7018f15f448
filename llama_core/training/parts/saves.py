"""Checkpoints: when one is saved, and the end of a run that was asked to stop."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from llama_core.config.run import RunConfig
from llama_core.errors import StoppedError, TrainingFailedError
from llama_core.parallel.ranks import has_lost_the_others, is_first_rank, most_over_ranks
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.training.checkpoint import Checkpointer
from llama_core.training.engine import Engine
from llama_core.training.parts.activity import ActivityLog
from llama_core.training.parts.checkpoint_interval import CheckpointInterval
from llama_core.training.parts.part import FinishedStep, LoopPart, RunProgress

logger = logging.getLogger(__name__)


class Saves(LoopPart):
    """Saves checkpoints: in intervals, after the last step, and before a run stops because it was asked to.

    Args:
        run: the run.
        config: its configuration.
        num_ranks: ranks of this attempt.
        progress: how far the run is.
        checkpointer: writes them.
        engine: holds what they hold.
        gather: makes all parts ready, and returns the state of the loop and of its parts, as JSON.
        activity: is told of saves.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        num_ranks: int,
        progress: RunProgress,
        *,
        checkpointer: Checkpointer,
        engine: Engine,
        gather: Callable[[], dict[str, Any]],
        activity: ActivityLog,
    ) -> None:
        self._run = run
        self._patience_s = float(config.launch.collective_timeout_s)
        self._progress = progress
        self._checkpointer = checkpointer
        self._engine = engine
        self._gather = gather
        self._activity = activity
        self._interval = CheckpointInterval(config, num_ranks)

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``, also if nobody asks the run to stop."""
        return self._progress.is_over or self._interval.is_due(step)

    def after_step(self, step: FinishedStep) -> None:
        """Save if it is due; publish a checkpoint that has been written meanwhile.

        Raises:
            StoppedError: if any rank was asked to stop before the last step; a checkpoint has been saved.
            CheckpointError: if a checkpoint cannot be written.
        """
        if step.bad is not None:  # the run is about to return to an earlier step
            return
        if step.is_newest:
            stops = step.asked_to_stop and not self._progress.is_over
            if stops or self.is_due(step.step):
                self._save()
            if stops:
                raise StoppedError(f"stopped after step {step.step} of {self._progress.total_steps}")
        self._checkpointer.poll()

    def _save(self) -> None:
        step = self._progress.step
        self._activity.tell("saving a checkpoint", "checkpoints")
        step_seconds = self._interval.seconds_per_step(step)
        began = time.perf_counter()
        self._checkpointer.save(step, self._engine, self._gather())
        if self._interval.is_auto:
            self._choose_interval(time.perf_counter() - began, step_seconds)
        self._activity.tell_step()

    def _choose_interval(self, save_seconds: float, step_seconds: float) -> None:
        """Choose when to save next, from the longest times that any rank has measured: all ranks choose alike."""
        before = self._interval.num_steps
        save, step = most_over_ranks(round(1e6 * save_seconds), max(1, round(1e6 * step_seconds)))
        chosen = self._interval.choose(self._progress.step, 1e-6 * save, 1e-6 * step)
        if is_first_rank():
            record = {**asdict(chosen), "reason": chosen.reason}
            write_json(self._run.checkpoint_interval, record, durable=False)
            if chosen.num_steps != before:
                logger.info("%s", chosen.reason)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps between checkpoints."""
        return {"checkpoint_every": self._interval.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count the steps to the next checkpoint from this one."""
        self._interval.restore(self._progress.step, state["checkpoint_every"])

    def end(self, error: BaseException | None) -> None:
        """Complete the checkpoint that is being written, however the loop ended.

        Raises:
            CheckpointError: if it cannot be written.
        """
        self._activity.tell("writing a checkpoint", "checkpoints")
        try:
            if error is None or isinstance(error, TrainingFailedError):  # on all ranks
                self._checkpointer.finish()
            elif isinstance(error, Exception) and has_lost_the_others(error):
                # those that are silent will not take part in writing
                self._checkpointer.finish_alone(self._patience_s)
            else:
                self._checkpointer.finish_alone()
        finally:
            self._engine.end_saving()
