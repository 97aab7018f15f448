"""The number of steps of a run; those that fit into ``training.minutes`` are chosen at the end of the warm-up."""

import logging
import time
from collections.abc import Callable

from llama_core.config.settings import TrainingConfig
from llama_core.parallel.ranks import from_first_rank, is_first_rank
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed, write_json
from llama_core.records.length import ChosenLength
from llama_core.training.parts.part import LoopPart, RunProgress

logger = logging.getLogger(__name__)


class StepTimer:
    """Chooses the length of a run from the wall time of its first steps.

    The learning rate of a warm-up does not depend on the length of the run, so these are steps of the run itself. The
    first step after a start is not timed: it sets up what the others use again.

    Args:
        minutes: how long to train.
        warmup_steps: steps after which the length is chosen.
        clock: returns the time in seconds.
    """

    def __init__(self, minutes: float, warmup_steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.minutes = minutes
        self.warmup_steps = warmup_steps
        self._clock = clock
        self._started = clock()
        self._first: tuple[int, float] | None = None

    def choose(self, step: int) -> ChosenLength | None:
        """Return the length of the run after step ``step``; None if it is too early to say."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
            return None
        first_step, first_end = self._first
        timed = step - first_step
        if step < self.warmup_steps or timed < 1:
            return None
        seconds = (now - first_end) / timed
        left = max(0.0, 60 * self.minutes - (now - self._started))
        return ChosenLength(step + int(left / seconds), seconds, timed, self.minutes)


class RunLength(LoopPart):
    """Knows the last step of the run, or chooses it as soon as a step has been timed after the warm-up.

    Args:
        run: where the choice is kept, for later attempts.
        training: its ``minutes`` and ``warmup_steps`` count if the number of steps is not known.
        progress: gets the number.
        total_steps: optimizer steps of the whole run; None to choose them.
    """

    def __init__(
        self, run: RunDirectory, training: TrainingConfig, progress: RunProgress, total_steps: int | None
    ) -> None:
        self._run = run
        self._progress = progress
        self._timer: StepTimer | None = None
        """Chooses the number of steps; None once it is known."""
        if total_steps is None:
            total_steps = self._chosen_before()
        if total_steps is None:
            total_steps = self._begin_to_choose(training)
        progress.total_steps = total_steps

    def step_begun(self) -> None:
        """Choose the number of steps, once the warm-up is over."""
        if self._timer is None:
            return
        chosen = from_first_rank(self._timer.choose(self._progress.step))
        if chosen is None:
            self._progress.total_steps = max(self._progress.total_steps, self._progress.step + 2)
            return
        self._timer = None
        self._progress.total_steps = chosen.num_steps
        if is_first_rank():
            write_json(self._run.length, chosen)
            logger.info("%s", chosen.reason)

    def _chosen_before(self) -> int | None:
        """Return the number that an earlier attempt has chosen; None if none has."""
        chosen = None
        if is_first_rank() and self._run.length.exists():
            chosen = read_typed(self._run.length, ChosenLength)
        chosen = from_first_rank(chosen)
        return None if chosen is None else chosen.num_steps

    def _begin_to_choose(self, training: TrainingConfig) -> int:
        """Begin to time steps; return a number to go on with until one is chosen."""
        assert training.minutes is not None
        assert training.warmup_steps is not None
        self._timer = StepTimer(training.minutes, training.warmup_steps)
        return training.warmup_steps + 1  # one more, so that no step counts as the last before
