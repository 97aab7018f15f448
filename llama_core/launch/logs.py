"""Follow the output of the ranks, line by line while they print it."""

import re
from collections.abc import Iterator
from pathlib import Path

from llama_core.launch.attempts import LOG_HEADER
from llama_core.records.directory import RunDirectory

NOTABLE = ("WARNING ", "ERROR ", "CRITICAL ")
"""Prefixes of the lines that are shown to someone who waits for a run."""

_MOST_BYTES = 1 << 20
_NAME = re.compile(r"rank-[0-9]{5,9}\.log")


class LogFollower:
    """Reads the lines added to the ranks' logs since the last call.

    Args:
        run: the run.
        rank: the rank to follow; None for all.
        last_lines: number of existing lines to start with; None for all of them.
    """

    def __init__(self, run: RunDirectory, rank: int | None = None, last_lines: int | None = 0) -> None:
        self.pattern = "rank-*.log" if rank is None else f"rank-{rank:05d}.log"
        self.folder = run.logs
        self._read_to = {path: _start(path, last_lines) for path in self._paths()}

    def new_lines(self) -> Iterator[tuple[int, str]]:
        """Yield every line completed since the last call, with its rank."""
        for path in self._paths():
            start = self._read_to.get(path, 0)
            if path.stat().st_size <= start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                read = file.read(_MOST_BYTES)
            complete, newline, _ = read.rpartition(b"\n")
            if len(read) == _MOST_BYTES and not newline:
                complete = read  # a line that long is a progress bar's
            self._read_to[path] = start + len(complete) + len(newline)
            rank = int(path.stem.removeprefix("rank-"))
            for line in complete.decode(errors="replace").splitlines():
                yield rank, line

    def notable_lines(self) -> Iterator[tuple[int, str]]:
        """Yield the new lines that are warnings or errors."""
        return ((rank, line) for rank, line in self.new_lines() if line.startswith(NOTABLE))

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(self.pattern) if _NAME.fullmatch(path.name) and path.is_file())


def _start(path: Path, last_lines: int | None) -> int:
    """Return the offset of the last lines of a file, leaving out lines from before its newest attempt."""
    if last_lines is None:
        return 0
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _MOST_BYTES))
        content = file.read(_MOST_BYTES)
    newest = content.rfind(LOG_HEADER.encode())
    lines = content[max(0, newest) :].splitlines(keepends=True)
    return size - sum(map(len, lines[len(lines) - last_lines :] if last_lines else ()))
