"""What the ranks measured before the first step of an attempt, and which of them are slow or have a fault."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from llama_core.records.directory import RunDirectory
from llama_core.records.files import Time, append_lines, read_lines


@dataclass(frozen=True)
class RankMeasurements:
    """What one rank measured of its machine and its device."""

    rank: int
    host: str
    """Its node, as its scheduler names it."""
    device: str
    """The vendor's name of its device, with the index of a GPU."""
    seconds: Mapping[str, float]
    """The best time of each measurement, by the name of its ``Check``."""
    clock_ahead: float = 0.0
    """Seconds that its host's clock is ahead of most ranks'."""
    faults: tuple[str, ...] = ()
    """What its device reports of itself, such as memory errors."""
    unmeasured: tuple[str, ...] = ()
    """What it could not measure or read, with the reason."""


@dataclass(frozen=True)
class NamedRank:
    """A rank that is slower than its peers, or whose machine has a fault."""

    rank: int
    host: str
    device: str
    findings: tuple[str, ...]
    """What is wrong, with what was measured and what its peers took."""
    slows_training: bool
    """Whether other ranks wait for it in every step, or its results may be wrong."""

    def __str__(self) -> str:
        """Return the rank, its node and device, and all findings."""
        return f"rank {self.rank} on {self.host} ({self.device}): {'; '.join(self.findings)}"


@dataclass(frozen=True)
class PreflightRecord:
    """The check before the first step of one attempt."""

    started_at: Time
    """When it began."""
    seconds: float
    """How long it took."""
    ranks: tuple[RankMeasurements, ...]
    named: tuple[NamedRank, ...] = ()
    """The ranks that are slow or have a fault; empty if all are well."""
    unmeasured: tuple[str, ...] = ()
    """What was not measured, a sentence for each reason, with the ranks."""
    usual: Mapping[str, float] = field(default_factory=dict)
    """The median of all ranks' best times, by the name of a ``Check``."""
    excluded: tuple[str, ...] = ()
    """The nodes without which the job starts again, instead of training."""
    job_id: str = ""
    """The job that excludes them; empty if none does."""
    submitted_at: str = ""
    """When it was submitted."""
    kept: str = ""
    """Why the job keeps nodes that it was to exclude; empty if it was to exclude none, or excludes them."""


def append_preflight(run: RunDirectory, record: PreflightRecord) -> None:
    """Add the check of an attempt to those of earlier ones.

    Raises:
        OSError: if the file cannot be written.
    """
    append_lines(run.preflights, [asdict(record)])


def read_preflights(run: RunDirectory) -> Sequence[PreflightRecord]:
    """Return the checks of all attempts, oldest first; empty if there were none.

    Raises:
        RunDirectoryError: if the file is damaged.
    """
    return read_lines(run.preflights, PreflightRecord, run.path)
