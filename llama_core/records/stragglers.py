"""The ranks that fell behind their peers while a run trained, and those that caught up again."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from llama_core.records.directory import RunDirectory
from llama_core.records.files import append_lines, read_lines


@dataclass(frozen=True)
class Straggler:
    """A rank that begins or ceases to be slower than its peers."""

    rank: int
    host: str
    """Its node."""
    device: str
    """The vendor's name of its device, with the index of a GPU."""
    signal: str
    """The name of what was measured; a rank may fall behind by several at once."""
    finding: str
    """What was measured, and what its peers take."""
    since_step: int
    """The first of the steps by which it was judged."""
    step: int
    """The last of them."""
    is_over: bool = False
    """Whether it is as fast as its peers again, or the run has started again, where all ranks are judged anew."""

    def __str__(self) -> str:
        """Return the rank, its node and device, and what was found."""
        state = "no longer behind" if self.is_over else "behind"
        return f"rank {self.rank} on {self.host} ({self.device}), {state} since step {self.since_step}: {self.finding}"


def append_stragglers(run: RunDirectory, stragglers: Iterable[Straggler]) -> None:
    """Add what was found to what was found before.

    Raises:
        OSError: if the file cannot be written.
    """
    append_lines(run.stragglers, map(asdict, stragglers))


def read_stragglers(run: RunDirectory) -> Sequence[Straggler]:
    """Return what all attempts have found, oldest first; empty if no rank fell behind.

    Raises:
        RunDirectoryError: if the file is damaged.
    """
    return read_lines(run.stragglers, Straggler, run.path)


def still_behind(stragglers: Iterable[Straggler]) -> list[Straggler]:
    """Return the newest finding of each rank and signal by which it has not caught up."""
    newest = {(one.rank, one.signal): one for one in stragglers}
    return [one for one in newest.values() if not one.is_over]
