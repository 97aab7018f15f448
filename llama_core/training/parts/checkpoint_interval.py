"""The steps between checkpoints: as configured, or the number that loses the least time to saves and failures."""

import math
import time
from dataclasses import dataclass

from llama_core.config.run import RunConfig
from llama_core.units import format_duration

FIRST_STEPS = 100
"""Steps to the first checkpoint if the number is automatic: nothing has been measured before."""


def best_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the time between two saves that loses the least to saves and to work done again after failures.

    A save every ``T`` seconds costs a share ``save_seconds / T`` of the time, and a failure loses ``T / 2`` on average.

    Args:
        save_seconds: time that training waits for a save.
        mtbf_seconds: mean time between the failures of a job.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006.
    """
    return math.sqrt(2 * save_seconds * mtbf_seconds)


@dataclass(frozen=True)
class ChosenInterval:
    """The record of an automatic choice."""

    num_steps: int
    """Steps between checkpoints."""
    save_seconds: float
    """Time that training waited for the last save."""
    step_seconds: float
    """Wall time of a step, on average between the last two saves."""
    mtbf_hours: float
    """Mean time between failures of one node."""
    num_nodes: int

    @property
    def reason(self) -> str:
        """The choice and its reason, in one line."""
        mtbf = format_duration(3600 * self.mtbf_hours / self.num_nodes)
        every = f"{self.num_steps} steps" if self.num_steps > 1 else "step"
        return (
            f"a checkpoint every {every}: training waits {self.save_seconds:.3g} s for a save, a step takes "
            f"{self.step_seconds:.3g} s, and the job fails every {mtbf} (launch.node_mtbf_hours={self.mtbf_hours:g}, "
            f"nodes: {self.num_nodes})"
        )


class CheckpointInterval:
    """Says when a checkpoint is due. With ``training.checkpoint_every=auto``, each save sets the steps to the next.

    Args:
        config: the configuration.
        num_ranks: ranks of this attempt, which may be fewer than the configuration asks for (``launch.min_nodes``).
    """

    def __init__(self, config: RunConfig, num_ranks: int) -> None:
        every = config.training.checkpoint_every
        self.is_auto = every == "auto"
        self.num_steps = FIRST_STEPS if every == "auto" else every
        self._mtbf_hours = config.launch.node_mtbf_hours
        self._num_nodes = math.ceil(num_ranks * config.num_nodes / config.parallel.gpus)
        self._saved_at = 0
        self._saved_time = time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``."""
        if self.is_auto:
            return step - self._saved_at >= self.num_steps
        return self.num_steps > 0 and step % self.num_steps == 0

    def restore(self, step: int, num_steps: int | None) -> None:
        """Go on after the checkpoint of ``step``, which recorded ``num_steps``, if anything."""
        self._saved_at = step
        self._saved_time = time.perf_counter()
        if self.is_auto:
            self.num_steps = num_steps or FIRST_STEPS

    def seconds_per_step(self, step: int) -> float:
        """Return the wall time of a step since the last save, on average."""
        return (time.perf_counter() - self._saved_time) / max(1, step - self._saved_at)

    def choose(self, step: int, save_seconds: float, step_seconds: float) -> ChosenInterval:
        """Choose the steps from the save of ``step`` to the next, from measurements that all ranks share."""
        self._saved_at = step
        self._saved_time = time.perf_counter()
        seconds = best_interval(save_seconds, 3600 * self._mtbf_hours / self._num_nodes)
        self.num_steps = max(1, round(seconds / step_seconds))
        return ChosenInterval(self.num_steps, save_seconds, step_seconds, self._mtbf_hours, self._num_nodes)
