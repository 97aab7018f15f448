"""The parts of a step's time, by kind of work: predicted before a run, measured in it, and which of them explains most.

The planner predicts every part. A profile of a GPU measures the same ones, except that it cannot tell a rank that waits
for its turn in a pipeline from one that waits for a message. A profile of a CPU knows neither which collective a thread
waits for nor why it idles. Clocks know few parts. So parts that a measurement does not tell apart are compared as one.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

PRODUCTS = "matrix products"
ATTENTION = "attention"
POINTWISE = "pointwise"
HEAD = "head and loss"
OPTIMIZER = "optimizer"
BUBBLE = "pipeline bubble"
DATA = "data"
HOST = "host"
"""Time in which a device has nothing to do, as Python has not launched its next kernel."""
SEND = "send"
COLLECTIVES: Mapping[str, str] = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": SEND,
}
"""Names of transfers between ranks, by ``planning.transfers.Collective``."""
OTHER_TRANSFERS = "other communication"
"""Transfers that a profile shows only as a wait."""
TRANSFERS = (*COLLECTIVES.values(), OTHER_TRANSFERS)
COMPUTING = (PRODUCTS, ATTENTION, POINTWISE, HEAD)
WHOLE = "whole step"

NEARLY = 0.05
"""Relative difference between a predicted and a measured step that needs no explanation."""


@dataclass(frozen=True)
class ComparedPart:
    """A part of a step, or several that a measurement does not tell apart."""

    name: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def added_seconds(self) -> float:
        """How much longer it took than predicted."""
        return self.measured_seconds - self.predicted_seconds


@dataclass(frozen=True)
class StepComparison:
    """A step's parts, as predicted and as measured."""

    parts: tuple[ComparedPart, ...]
    measured_by: str
    """How they were measured, in a clause."""

    @property
    def predicted_seconds(self) -> float:
        """The predicted step."""
        return sum(part.predicted_seconds for part in self.parts)

    @property
    def measured_seconds(self) -> float:
        """The measured step."""
        return sum(part.measured_seconds for part in self.parts)

    @property
    def added_seconds(self) -> float:
        """How much longer the step took than predicted."""
        return self.measured_seconds - self.predicted_seconds

    @property
    def is_as_predicted(self) -> bool:
        """Whether the whole step took about as long as predicted."""
        return abs(self.added_seconds) <= NEARLY * self.predicted_seconds

    @property
    def main(self) -> ComparedPart:
        """The part that explains most of the difference: of those that differ in its direction, the one by most."""
        direction = 1 if self.added_seconds >= 0 else -1
        return max(self.parts, key=lambda part: direction * part.added_seconds)

    @property
    def tells_parts(self) -> bool:
        """Whether both times are known by part; otherwise there is one part, the whole step."""
        return len(self.parts) > 1

    def verdict(self) -> str:
        """Return how the step differs from its prediction, and what part explains most of that, in a sentence."""
        predicted = self.predicted_seconds
        whole = f"A step took {self.measured_seconds:.3g} s ({self.measured_by}), predicted {predicted:.3g} s"
        if self.is_as_predicted:
            return f"{whole}: within {NEARLY:.0%}."
        if not self.tells_parts:
            return f"{whole} ({self.added_seconds / predicted:+.0%})."
        main = self.main
        share = "most" if 2 * main.added_seconds / self.added_seconds > 1 else "the largest share"
        return (
            f"{whole}; {main.name} explains {share} of the difference of {self.added_seconds:+.3g} s: "
            f"{main.measured_seconds:.3g} s, predicted {main.predicted_seconds:.3g} s ({main.added_seconds:+.3g} s)."
        )

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return a row for each part and one for the whole: its name, both times and their difference."""
        shown = list(self.parts)
        if self.tells_parts:
            shown.append(ComparedPart(WHOLE, self.predicted_seconds, self.measured_seconds))
        rows: list[tuple[str, str, str, str]] = []
        for part in shown:
            predicted = f"{part.predicted_seconds:.3g} s"
            rows.append((part.name, predicted, f"{part.measured_seconds:.3g} s", f"{part.added_seconds:+.2g} s"))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Return the parts as a record."""
        return {
            "measured_by": self.measured_by,
            "parts": {
                part.name: {
                    "predicted_seconds": part.predicted_seconds,
                    "measured_seconds": part.measured_seconds,
                }
                for part in self.parts
            },
            "main": self.main.name if self.tells_parts and not self.is_as_predicted else None,
        }


def compared(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    groups: Mapping[str, Collection[str]],
    measured_by: str,
) -> StepComparison:
    """Return a comparison of groups of parts; a group that was neither predicted nor measured is left out.

    Args:
        predicted: the seconds of each part.
        measured: the seconds of each part, or of a group by its name.
        groups: the parts in each group, by its name. Every part is in one.
        measured_by: how they were measured, in a clause.
    """
    parts = []
    for name, kinds in groups.items():
        of_group = {name, *kinds}
        times = [sum(by_kind.get(kind, 0.0) for kind in of_group) for by_kind in (predicted, measured)]
        if any(times):
            parts.append(ComparedPart(name, *times))
    return StepComparison(tuple(parts), measured_by)
