"""The rollbacks of a run: a bad step, the checkpoint that training returned to, and the data it left out.

The weights of a step depend on the data before it, so they also depend on these records. Whoever resumes or repeats the
run finds here where to leave data out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llama_core.records.directory import RunDirectory
from llama_core.records.files import checked_record, read_json, write_json
from llama_core.units import listed

MAX_NAMED = 4
"""Most ranks that a line names with their nodes."""


@dataclass(frozen=True)
class Suspect:
    """A rank that may hold wrong values."""

    rank: int
    host: str
    """Its node."""
    device: str
    """The vendor's name of its device, with the index of a GPU."""

    def __str__(self) -> str:
        """Return the rank, its node and device."""
        return f"rank {self.rank} on {self.host} ({self.device})"


def named(suspects: Sequence[Suspect]) -> str:
    """Return the ranks in words; of many, the first ones."""
    return listed(suspects, MAX_NAMED)


@dataclass(frozen=True)
class Rollback:
    """One return to a checkpoint, or to the step before a bad one that was taken again at once."""

    step: int
    """The step of the checkpoint, or the one before the bad step."""
    bad_step: int
    """The step that was bad. Its data, and those of all steps since ``step``, are left out, if they are at fault."""
    reason: str
    """What was bad about it, with the values that show it."""
    data: Mapping[str, Any] | None
    """The position in the data at which training goes on: after those of the bad step. None if no data are left out."""
    time: float
    """Seconds since the epoch."""
    suspects: tuple[Suspect, ...] = ()
    """The ranks that may hold wrong values, if replicas differed, or that may have computed wrongly."""
    at_once: bool = False
    """Whether the bad step was good when it was taken again, without a return to a checkpoint."""

    def __str__(self) -> str:
        """Return what the run did, and why."""
        what = "taken again at once" if self.at_once else f"went back to the checkpoint of step {self.step:,}"
        return f"{what}: {self.reason}"


def read_rollbacks(run: RunDirectory) -> list[Rollback]:
    """Return the run's rollbacks, oldest first.

    Raises:
        RunDirectoryError: if their file is damaged.
    """
    if not run.rollbacks.exists():
        return []
    return checked_record(read_json(run.rollbacks).get("rollbacks"), list[Rollback], run.rollbacks)


def write_rollbacks(run: RunDirectory, rollbacks: Sequence[Rollback]) -> None:
    """Replace the record of the run's rollbacks."""
    write_json(run.rollbacks, {"rollbacks": [asdict(rollback) for rollback in rollbacks]})


def data_skips(rollbacks: Sequence[Rollback]) -> dict[int, Mapping[str, Any]]:
    """Return the position in the data to go to after each step where data are left out, by step.

    A rollback to an earlier step drops the ones after it: the steps that they belong to are taken again, on other data.
    """
    skips: dict[int, Mapping[str, Any]] = {}
    for rollback in rollbacks:
        if rollback.data is None:
            continue
        skips = {step: data for step, data in skips.items() if step < rollback.step} | {rollback.step: rollback.data}
    return skips
