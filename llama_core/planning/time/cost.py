"""How long a run takes and what it costs, from the time of a step, a number of tokens and a price."""

from dataclasses import asdict, dataclass
from typing import Any

from llama_core.planning.time.step_time import StepTime
from llama_core.units import format_count, format_duration

BILLION = 1e9


@dataclass(frozen=True)
class Cost:
    """The time and the price of training on some tokens."""

    tokens: float
    """Tokens to train on."""
    told_by: str
    """Where their number comes from."""
    seconds: float
    """Time of all steps, without checkpoints, evaluations and failures."""
    gpu_hours: float
    """That time on all devices."""
    dollars: float
    """Their price."""
    dollars_per_gpu_hour: float

    @classmethod
    def of(cls, step: StepTime, tokens: float, told_by: str, dollars_per_gpu_hour: float) -> "Cost":
        """Return the cost of training on ``tokens`` in steps like ``step``."""
        seconds = step.training_time(tokens)
        dollars = step.price(tokens, dollars_per_gpu_hour)
        return cls(tokens, told_by, seconds, seconds / 3600 * step.num_devices, dollars, dollars_per_gpu_hour)

    def summary(self) -> str:
        """Return the cost in one line."""
        return (
            f"{format_count(self.tokens)} tokens ({self.told_by}) take {format_days(self.seconds)}, "
            f"{self.gpu_hours:,.1f} GPU hours, "
            f"about ${self.dollars:,.2f} at ${self.dollars_per_gpu_hour:,.2f} per GPU hour"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the cost as a record."""
        return asdict(self)


def format_days(seconds: float) -> str:
    """Return a time in days if it is two or more, such as ``'12.3 days'``."""
    return f"{seconds / 86400:,.1f} days" if seconds >= 2 * 86400 else format_duration(seconds)
