"""The record of a run's number of steps, if it was chosen while it ran."""

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
