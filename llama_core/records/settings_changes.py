"""What a run has changed of its settings when it was resumed, and since which step."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llama_core.records.directory import RunDirectory
from llama_core.records.files import checked_record, read_json, write_json


@dataclass(frozen=True)
class SettingsChange:
    """Settings with which a run went on."""

    step: int
    """The step after which they hold."""
    before: Mapping[str, Any]
    """Their values until then, by dotted key."""
    after: Mapping[str, Any]
    """Their values since then."""

    def __str__(self) -> str:
        """Return the step and each setting with both values."""
        clauses = [f"{key} is {value} instead of {self.before[key]}" for key, value in self.after.items()]
        return f"since step {self.step:,}, {'; '.join(clauses)}"


def read_settings_changes(run: RunDirectory) -> tuple[SettingsChange, ...]:
    """Return the changes of a run's settings, oldest first.

    Raises:
        RunDirectoryError: if the record is damaged.
    """
    if not run.settings_changes.exists():
        return ()
    changes = read_json(run.settings_changes).get("changes")
    return tuple(checked_record(changes, list[SettingsChange], run.settings_changes))


def newest_values(changes: Sequence[SettingsChange]) -> dict[str, Any]:
    """Return the value that each changed setting has now."""
    return {key: value for change in changes for key, value in change.after.items()}


def first_values(changes: Sequence[SettingsChange]) -> dict[str, Any]:
    """Return the value that each changed setting had when the run began."""
    return {key: value for change in reversed(changes) for key, value in change.before.items()}


def record_settings_change(run: RunDirectory, change: SettingsChange) -> None:
    """Record with which settings a run goes on, if others than before.

    A change at the same or a later step is replaced: the run has not kept a step that it took with it.
    """
    recorded = read_settings_changes(run)
    kept = [one for one in recorded if one.step < change.step]
    if change.after:
        kept.append(change)
    if kept or recorded:
        write_json(run.settings_changes, {"changes": [asdict(one) for one in kept]})
