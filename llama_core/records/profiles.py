"""Where the time of profiled steps went, rank by rank."""

from dataclasses import dataclass, field
from pathlib import Path

from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed, write_json
from llama_core.records.step_parts import TRANSFERS


@dataclass(frozen=True)
class ProfileRecord:
    """The time of one rank's profiled steps, by kind of work."""

    rank: int
    seconds: dict[str, float]
    """Time of each kind of work: of kernels or, on the CPU, of operators. Kernels may overlap, so that the sum exceeds
    the span."""
    span_seconds: float | None = None
    """From the first kernel's start to the last one's end; None on the CPU, as are the next two."""
    idle_seconds: float | None = None
    """The part of the span in which no kernel ran."""
    exposed_seconds: float | None = None
    """The part of the span in which only transfers between ranks ran."""
    exposed: dict[str, float] = field(default_factory=dict)
    """``exposed_seconds`` by kind of transfer; empty on the CPU."""

    @property
    def communication_seconds(self) -> float:
        """Time of all transfers between ranks, or of waiting for them on the CPU."""
        return sum(self.seconds.get(kind, 0.0) for kind in TRANSFERS)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return a row for each kind of work, the longest first: its name, its time and its share."""
        total = self.span_seconds or sum(self.seconds.values()) or 1.0
        parts = dict(sorted(self.seconds.items(), key=lambda part: -part[1]))
        if self.exposed_seconds:
            parts["communication not hidden by computing"] = self.exposed_seconds
        if self.idle_seconds is not None:
            parts["idle"] = self.idle_seconds
        return [(kind, f"{seconds:.3f} s", f"{seconds / total:.1%}") for kind, seconds in parts.items()]


def write_profile(run: RunDirectory, record: ProfileRecord) -> None:
    """Write the record of one rank."""
    write_json(trace_file(run, record.rank, ".json"), record)


def read_profiles(run: RunDirectory) -> list[ProfileRecord]:
    """Return the records of the profiled ranks, in order.

    Raises:
        RunDirectoryError: naming a file that is damaged.
    """
    return [read_typed(path, ProfileRecord, run.path) for path in sorted(run.trace.glob("rank-*.json"))]


def trace_file(run: RunDirectory, rank: int, suffix: str) -> Path:
    """Return the path of a rank's file: its record is ``.json``, its trace ``.json.gz``, its memory ``.pickle``."""
    return run.trace / f"rank-{rank:05d}{suffix}"
