"""When the actions of a pipeline ran in one optimizer step."""

from dataclasses import dataclass

from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed, write_json


@dataclass(frozen=True)
class LaneRecord:
    """One step of one pipeline rank. Times are in seconds since the ranks began the step together."""

    actions: tuple[str, ...]
    """Its computations in the order they ran, such as ``0F3``."""
    begins: tuple[float, ...]
    """When each began, after its inputs had arrived."""
    ends: tuple[float, ...]


def write_lane(run: RunDirectory, pp_rank: int, record: LaneRecord) -> None:
    """Write the record of a pipeline position."""
    write_json(run.timeline(pp_rank), record)


def read_lanes(run: RunDirectory, num_ranks: int) -> list[LaneRecord]:
    """Return the records of a pipeline of ``num_ranks``; empty if a position has none.

    Raises:
        RunDirectoryError: if one is damaged or of another version.
    """
    paths = [run.timeline(pp_rank) for pp_rank in range(num_ranks)]
    if not all(path.exists() for path in paths):
        return []
    return [read_typed(path, LaneRecord, run.path) for path in paths]
