"""The memory of one rank, and whether a device and its host can hold it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from llama_core.planning.memory.host import HostMemory
from llama_core.planning.memory.profile import STATES, MemoryProfile
from llama_core.units import GB, format_bytes

FILL_LIMIT = 0.9
"""Share of a device's usable bytes that tensors may take: a caching allocator reserves at least a tenth more."""

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
    host: HostMemory | None = None
    """The memory of a node's host; None if nobody asked."""
    host_bytes_on_fewest_nodes: int = 0
    """The host memory that a node's ranks take on ``launch.min_nodes`` nodes; 0 if the run always gets all nodes."""

    @property
    def holds_process(self) -> bool:
        """Whether the rank's whole process counts: on the CPU, its memory is the device's."""
        return self.host is not None and not self.host.on_cuda

    @property
    def held_bytes(self) -> int:
        """The most bytes the rank takes of the device."""
        if self.host is None or self.host.on_cuda:
            return self.profile.peak_bytes
        return self.host.rank_bytes(self.profile)

    @property
    def host_bytes_of_node(self) -> int:
        """The host memory that the ranks of a node take; 0 if nobody asked."""
        return 0 if self.host is None else self.host.node_bytes(self.host_profile)

    @property
    def host_bytes_to_ask_for(self) -> int:
        """The most host memory that the ranks of a node take on any number of nodes; 0 if nobody asked."""
        return max(self.host_bytes_of_node, self.host_bytes_on_fewest_nodes)

    @property
    def host_profile(self) -> MemoryProfile:
        """The rank that takes the most of a host: its states, not its activations, have copies there."""
        host = self.host
        return self.profile if host is None else max((self.profile, *self.ranks), key=host.rank_bytes)

    @property
    def host_problem(self) -> str:
        """Why the ranks of a node do not fit its memory beside their GPUs; empty if they do or it is unknown."""
        return self.host.problem(self.host_profile) if self.host is not None and self.host.on_cuda else ""

    @property
    def headroom_bytes(self) -> int:
        """Usable bytes minus those held at the peak; negative if it does not fit."""
        return self.usable_bytes - self.held_bytes

    @property
    def fits(self) -> bool:
        """Whether device and host hold the peak, and no search has refused every plan for lack of a margin."""
        return self.headroom_bytes >= 0 and not self.refusal and not self.host_problem

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
        if self.headroom_bytes < 0:
            return (
                f"the peak exceeds {self.device} by {format_bytes(-self.headroom_bytes)}; most of the peak "
                f"is {self._most_of_it}; try {_REMEDIES[self._most_of_it]}",
            )
        if self.host_problem:
            return (self.host_problem,)
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
        verdict = "fits" if self.headroom_bytes >= 0 else "does not fit"
        if self.refusal and self.headroom_bytes >= 0:
            verdict = "leaves the allocator too little of"
        peak = f"{format_bytes(self.profile.peak_bytes)} in the {self.profile.peak_phase}"
        if self.host is not None and not self.host.on_cuda:
            alive = format_bytes(self.host.alive_bytes(self.profile))
            peak = f"{alive} (tensors {peak}), {format_bytes(self.held_bytes)} with the whole process"
        return f"peak {peak}, {verdict} the {format_bytes(self.usable_bytes)} of {self.device}{self._host_verdict}"

    @property
    def _host_verdict(self) -> str:
        if self.host is None or not self.host.on_cuda:
            return ""
        taken = f"; about {format_bytes(self.host_bytes_of_node)} of host memory on each node"
        return taken + (f", more than {self.host.available_where}" if self.host_problem else "")

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the estimate that ``as_dict`` recorded."""
        return cls(
            MemoryProfile.from_dict(record),
            record["device"],
            record["usable_bytes"],
            tuple(map(MemoryProfile.from_dict, record["ranks"])),
            record["refusal"],
            HostMemory.from_dict(record["host"]) if record["host"] else None,
            record["host_bytes_on_fewest_nodes"],
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
            "host": self.host and self.host.as_dict(self.host_profile),
            "host_bytes_on_fewest_nodes": self.host_bytes_on_fewest_nodes,
            "refusal": self.refusal,
            "notes": list(self.notes),
            "ranks": [rank.as_dict() for rank in self.ranks],
        }
