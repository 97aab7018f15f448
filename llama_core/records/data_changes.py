"""How the data of a run changed when it was resumed: from which data it may go on, and where each source then began."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from llama_core.records.directory import RunDirectory
from llama_core.records.files import checked_record, read_json, write_json


@dataclass(frozen=True)
class DataChange:
    """What became of the sources of a mixture when a run went on with others, or with other weights."""

    row: int
    """Sequences that the run had read before."""
    kept: Mapping[str, int]
    """The sources that go on where they were, and how many sequences of each had been read; a source in sequences of
    another length is one of its own, such as ``code@8192``."""
    new: tuple[str, ...]
    """Sources that the data before did not have."""
    changed: tuple[str, ...]
    """Sources that begin anew, because their own sequences are others."""
    left: tuple[str, ...]
    """Sources that are no longer there."""
    step: int = 0
    """The step after which the data changed."""

    def __str__(self) -> str:
        """Return where the data changed, and what became of each source."""
        clauses = [f"{name} goes on after {read:,} sequences" for name, read in self.kept.items() if read]
        clauses += [f"{name} is new" for name in self.new]
        clauses += [f"{name} begins anew, because its documents are others" for name in self.changed]
        clauses += [f"{name} is no longer read" for name in self.left]
        return f"the data changed after step {self.step:,}: {'; '.join(clauses)}"


@dataclass(frozen=True)
class DataChanges:
    """The changes of a run's data."""

    may_follow: tuple[str, ...] = ()
    """Digests of the data that the user allowed the run to leave."""
    changes: tuple[DataChange, ...] = ()
    """The changes so far, oldest first."""


def read_data_changes(run: RunDirectory) -> DataChanges:
    """Return how the data of a run may change, and have changed.

    Raises:
        RunDirectoryError: if the record is damaged.
    """
    if not run.data_changes.exists():
        return DataChanges()
    record = read_json(run.data_changes)
    return DataChanges(
        tuple(checked_record(record.get("may_follow"), list[str], run.data_changes)),
        tuple(checked_record(record.get("changes"), list[DataChange], run.data_changes)),
    )


def allow_data_change(run: RunDirectory, digests: Sequence[str]) -> None:
    """Record that a run may go on from these data with others."""
    before = read_data_changes(run)
    may_follow = tuple(dict.fromkeys((*before.may_follow, *digests)))
    write_json(run.data_changes, asdict(DataChanges(may_follow, before.changes)))


def record_data_change(run: RunDirectory, change: DataChange) -> None:
    """Add a change. One after a later or the same step is replaced: the run has gone back before it."""
    before = read_data_changes(run)
    earlier = tuple(one for one in before.changes if one.step < change.step)
    write_json(run.data_changes, asdict(DataChanges(before.may_follow, (*earlier, change))))
