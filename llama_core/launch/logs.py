"""Follow the output of the ranks, line by line while they print it."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from llama_core.launch.attempts import LOG_HEADER
from llama_core.records.directory import RunDirectory

NOTABLE = ("WARNING ", "ERROR ", "CRITICAL ")
"""Prefixes of the lines that are shown to someone who waits for a run."""

LOGS_AT_ONCE = 64
"""Most logs in one look: thousands of ranks would be as many requests to a shared file system, every few seconds."""

_MOST_BYTES = 1 << 20


class LogFollower:
    """Reads the lines added to the ranks' logs since it last looked.

    Args:
        run: the run.
        rank: the rank to follow; None for all.
        last_lines: number of existing lines to start with; None for all of them.
    """

    def __init__(self, run: RunDirectory, rank: int | None = None, last_lines: int | None = 0) -> None:
        self.folder = run.logs
        self._name = re.compile(r"rank-[0-9]{5,9}\.log" if rank is None else f"rank-{rank:05d}\\.log")
        self._first: list[Path] = []
        self._waiting: list[Path] = []
        self._read_to = {path: _start(path, last_lines) for path in self._paths()}

    def new_lines(self, *, of_all: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the lines completed since the last look, with their rank.

        A look is at ``LOGS_AT_ONCE`` logs: always the first one, and the others by turns.

        Args:
            of_all: look at every log.
        """
        for path in self._paths() if of_all else self._next_paths():
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

    def notable_lines(self, *, of_all: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the new lines that are warnings or errors; see ``new_lines``."""
        return ((rank, line) for rank, line in self.new_lines(of_all=of_all) if line.startswith(NOTABLE))

    def _next_paths(self) -> list[Path]:
        if not self._waiting:
            paths = self._paths()
            self._first, self._waiting = paths[:1], paths[1:]
        now, self._waiting = self._waiting[: LOGS_AT_ONCE - 1], self._waiting[LOGS_AT_ONCE - 1 :]
        return self._first + now

    def _paths(self) -> list[Path]:
        """List the logs, without asking the file system about each of them."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            return sorted(self.folder / e.name for e in entries if self._name.fullmatch(e.name) and e.is_file())
        return []


def _start(path: Path, last_lines: int | None) -> int:
    """Return the offset of the last lines of a file, leaving out lines from before its newest attempt."""
    if last_lines is None:
        return 0
    size = path.stat().st_size
    if not last_lines:
        return size
    with path.open("rb") as file:
        file.seek(max(0, size - _MOST_BYTES))
        content = file.read(_MOST_BYTES)
    newest = content.rfind(LOG_HEADER.encode())
    lines = content[max(0, newest) :].splitlines(keepends=True)
    return size - sum(map(len, lines[max(0, len(lines) - last_lines) :]))
