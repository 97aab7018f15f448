"""Tells people of bad steps while a run goes on."""

import socket
import time

from llama_core.config.notify import NotifyConfig
from llama_core.notifications import Notice, notify
from llama_core.parallel.ranks import is_first_rank
from llama_core.records.directory import RunDirectory
from llama_core.training.parts.part import FinishedStep, LoopPart, RunProgress
from llama_core.training.parts.spikes import BadStep

PAUSE_SECONDS = 600.0
"""Least time between two notices; the next one counts the bad steps of the pause."""


class BadStepNotices(LoopPart):
    """Tells of bad steps that do not end the run; the end of a run is told by its job.

    Args:
        run: the run.
        config: whom to tell.
        progress: how far it is.
    """

    def __init__(self, run: RunDirectory, config: NotifyConfig, progress: RunProgress) -> None:
        self._run = run
        self._config = config
        self._progress = progress
        self._told_at = -PAUSE_SECONDS
        self._untold = 0

    def after_step(self, step: FinishedStep) -> None:
        """Tell of a bad step that the run goes on from; others make it go back, or end it."""
        if step.bad is None and (step.spike or not step.is_sound):
            reason = step.spike or f"loss {step.values.loss:.4g}, gradient norm {step.values.grad_norm:.4g}"
            self._tell(step.step, step.values.loss, reason)

    def went_back(self, bad: BadStep) -> None:
        """Tell that the run has gone back to a checkpoint."""
        self._tell(bad.step, None, f"{bad.reason}; returned to step {self._progress.step:,}")

    def _tell(self, step: int, loss: float | None, reason: str) -> None:
        if not is_first_rank():
            return
        if time.monotonic() - self._told_at < PAUSE_SECONDS:
            self._untold += 1
            return
        before = f"; {self._untold} more bad steps since the last notice" if self._untold else ""
        self._told_at = time.monotonic()
        self._untold = 0
        notify(self._config, Notice("spike", self._run.name, step, loss, f"{reason}{before}", socket.gethostname()))
