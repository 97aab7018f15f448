"""The bytes of one rank while it trains, by category and phase."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

Category = Literal["weights", "gradients", "moments", "activations", "loss", "communication", "temporaries"]
"""What bytes are for. ``moments`` are the states of whichever optimizer, as records have called them from the start."""
Phase = Literal["forward", "backward", "optimizer"]
STATES: tuple[Category, ...] = ("weights", "gradients", "moments")


@dataclass(frozen=True)
class MemoryProfile:
    """The bytes alive at the peak of each phase of a step, by category."""

    phases: Mapping[Phase, Mapping[Category, int]]

    @property
    def peak_phase(self) -> Phase:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> Mapping[Category, int]:
        """The categories at the peak of the whole step."""
        return self.phases[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once: the maximum over the phases, not their sum."""
        return sum(self.peak.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and moments in the optimizer step, when all of them exist."""
        return sum(self.phases["optimizer"].get(category, 0) for category in STATES)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the profile that ``as_dict`` recorded."""
        return cls(record["phases"])

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as a record, with the derived peak for readers."""
        return {
            "phases": {phase: dict(categories) for phase, categories in self.phases.items()},
            "peak_phase": self.peak_phase,
            "peak_bytes": self.peak_bytes,
        }
