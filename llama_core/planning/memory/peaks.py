"""The memory of one rank while it trains, by category and phase, and whether a device can hold it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from llama_core.units import GB, MIB, format_bytes

Category = Literal["weights", "gradients", "moments", "activations", "loss", "communication", "temporaries"]
Phase = Literal["forward", "backward", "optimizer"]
STATES: tuple[Category, ...] = ("weights", "gradients", "moments")

FILL_LIMIT = 0.9
"""Share of a device's usable bytes that tensors may take: a caching allocator reserves at least a tenth more."""

PROCESS_BYTES = 450 * MIB
"""Memory of a rank's process on the CPU before its first tensor: the interpreter, torch and the data."""
STATES_SHARE, HEAP_SHARE = 1.2, 1.5
"""Resident bytes of a rank on the CPU over those of its weights, gradients and moments, and of its other tensors.

glibc keeps freed memory between tensors of other sizes, and kernels have buffers of their own: docs/memory.md.
"""

_REMEDIES: Mapping[str, str] = {
    "states": "parallel.zero_stage=3 over more parallel.gpus, parallel.tp or parallel.pp; or parallel.recompute=full",
    "activations": "parallel.microbatch_size=1, parallel.recompute=full, parallel.tp or parallel.cp, or a shorter "
    "training.seq_len",
    "loss": "parallel.tp, which divides the vocabulary, or parallel.microbatch_size=1",
    "communication": "parallel.zero_stage=3, which gathers one layer at a time, or parallel.tp or parallel.pp",
    "temporaries": "parallel.microbatch_size=1, parallel.tp or a shorter training.seq_len",
}
"""What reduces the largest part of a peak."""


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
    def process_bytes(self) -> int:
        """Resident bytes of the rank's process on the CPU, estimated from those of its tensors."""
        resident = []
        for categories in self.phases.values():
            states = sum(categories.get(category, 0) for category in STATES)
            resident.append(round(STATES_SHARE * states + HEAP_SHARE * (sum(categories.values()) - states)))
        return PROCESS_BYTES + max(resident)

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


@dataclass(frozen=True)
class MemoryEstimate:
    """A profile compared with the memory of a device."""

    profile: MemoryProfile
    device: str
    """Human-readable name of the device."""
    usable_bytes: int
    """Bytes a training process may use there."""
    ranks: tuple[MemoryProfile, ...] = ()
    """The profiles of all ranks of a pipeline; ``profile`` is the fullest of them."""
    refusal: str = ""
    """Why no plan fits with the margin that an allocator needs, and what would fit; empty if one does."""
    holds_process: bool = False
    """Whether the rank's whole process counts: on the CPU, its memory is the device's."""

    @property
    def held_bytes(self) -> int:
        """The most bytes the rank takes of the device."""
        return self.profile.process_bytes if self.holds_process else self.profile.peak_bytes

    @property
    def headroom_bytes(self) -> int:
        """Usable bytes minus those held at the peak; negative if it does not fit."""
        return self.usable_bytes - self.held_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the usable bytes, and no search has refused every plan for lack of a margin."""
        return self.headroom_bytes >= 0 and not self.refusal

    @property
    def notes(self) -> tuple[str, ...]:
        """Why it does not fit and what to do, or how little is left if it only just fits."""
        states = self.profile.state_bytes
        if self.refusal:
            return (self.refusal,)
        if states > self.usable_bytes:
            return (
                f"weights, gradients and moments alone take {states / GB:.1f} GB per device, more than the "
                f"{self.usable_bytes / GB:.1f} GB usable on {self.device}; divide them over more devices: "
                "parallel.gpus with parallel.zero_stage=3, parallel.tp or parallel.pp",
            )
        if not self.fits:
            return (
                f"the peak exceeds {self.device} by {format_bytes(-self.headroom_bytes)}; most of the peak "
                f"is {self._most_of_it}; try {_REMEDIES[self._most_of_it]}",
            )
        if self.held_bytes > FILL_LIMIT * self.usable_bytes:
            return (
                f"only {format_bytes(self.headroom_bytes)} of {self.device} is left, and fragmentation may use it up",
            )
        return ()

    @property
    def _most_of_it(self) -> str:
        """The largest part of the peak: the states, or one of the other categories."""
        peak = self.profile.peak
        sizes = {"states": sum(peak.get(category, 0) for category in STATES)}
        sizes |= {category: size for category, size in peak.items() if category not in STATES}
        return max(sizes, key=lambda name: sizes[name])

    def summary(self) -> str:
        """Return the verdict in one line."""
        verdict = "fits" if self.fits else "does not fit"
        if self.refusal and self.headroom_bytes >= 0:
            verdict = "leaves the allocator too little of"
        process = f" ({format_bytes(self.held_bytes)} with the whole process)" if self.holds_process else ""
        return (
            f"peak {format_bytes(self.profile.peak_bytes)} in the {self.profile.peak_phase}{process}, "
            f"{verdict} the {format_bytes(self.usable_bytes)} of {self.device}"
        )

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the estimate that ``as_dict`` recorded."""
        return cls(
            MemoryProfile.from_dict(record),
            record["device"],
            record["usable_bytes"],
            tuple(map(MemoryProfile.from_dict, record["ranks"])),
            record["refusal"],
            record.get("holds_process", False),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as a flat record."""
        return self.profile.as_dict() | {
            "device": self.device,
            "usable_bytes": self.usable_bytes,
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
            "holds_process": self.holds_process,
            "held_bytes": self.held_bytes,
            "refusal": self.refusal,
            "notes": list(self.notes),
            "ranks": [rank.as_dict() for rank in self.ranks],
        }
