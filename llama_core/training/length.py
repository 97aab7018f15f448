"""The number of steps that fit into ``training.minutes``, chosen once, at the end of the warm-up. Needs no torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from llama_core.units import format_duration


@dataclass(frozen=True)
class ChosenLength:
    """The record of a choice."""

    num_steps: int
    """Steps of the whole run."""
    step_seconds: float
    """Wall time of a step, on average over the steps that were timed."""
    timed_steps: int
    minutes: float
    """The time they fit into."""

    @property
    def reason(self) -> str:
        """The choice and its reason, in one line."""
        return (
            f"{self.num_steps:,} steps fit into {format_duration(60 * self.minutes)} (training.minutes): "
            f"a step takes {self.step_seconds:.3g} s, on average over {self.timed_steps}"
        )


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
