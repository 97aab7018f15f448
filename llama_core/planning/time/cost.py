"""How long a run takes and what it costs, from the time of a step, a number of tokens and a price."""

from dataclasses import asdict, dataclass
from typing import Any

from llama_core.planning.time.step_time import StepTime
from llama_core.units import counted, format_count, format_duration

BILLION = 1e9


@dataclass(frozen=True)
class Cost:
    """The time and the price of training on some tokens."""

    tokens: float
    """Tokens to train on."""
    told_by: str
    """Where their number comes from."""
    seconds: float
    """Time of the reference and of all steps, without checkpoints, evaluations and failures."""
    gpu_hours: float
    """That time on all devices, spare ones included."""
    dollars: float
    """Their price."""
    dollars_per_gpu_hour: float
    reference_seconds: float | None = 0.0
    """The part of ``seconds`` before the first step, in which the reference of the objective is computed: 0 without
    one. None if it is unknown, because the length of the data is: then ``seconds`` are without it."""
    spare_devices: int = 0
    """Devices of spare nodes, which wait and are paid for."""

    @classmethod
    def of(
        cls,
        step: StepTime,
        tokens: float,
        told_by: str,
        dollars_per_gpu_hour: float,
        reference_seconds: float | None = 0.0,
        *,
        spare_devices: int = 0,
    ) -> "Cost":
        """Return the cost of training on ``tokens`` in steps like ``step``, after so long for the reference."""
        seconds = step.training_time(tokens) + (reference_seconds or 0.0)
        gpu_hours = seconds / 3600 * (step.num_devices + spare_devices)
        dollars = gpu_hours * dollars_per_gpu_hour
        return cls(tokens, told_by, seconds, gpu_hours, dollars, dollars_per_gpu_hour, reference_seconds, spare_devices)

    def summary(self) -> str:
        """Return the cost in one line."""
        reference = ""
        if self.reference_seconds is None:
            reference = " without the reference's forward over the data"
        elif self.reference_seconds > 0:
            reference = f" with {format_duration(self.reference_seconds)} for the reference"
        spares = f" with those of {counted(self.spare_devices, 'spare GPU')}" if self.spare_devices else ""
        return (
            f"{format_count(self.tokens)} tokens ({self.told_by}) take {format_days(self.seconds)}{reference}, "
            f"{self.gpu_hours:,.1f} GPU hours{spares}, "
            f"about ${self.dollars:,.2f} at ${self.dollars_per_gpu_hour:,.2f} per GPU hour"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the cost as a record."""
        return asdict(self)


def format_days(seconds: float) -> str:
    """Return a time in days if it is two or more, such as ``'12.3 days'``."""
    return f"{seconds / 86400:,.1f} days" if seconds >= 2 * 86400 else format_duration(seconds)
