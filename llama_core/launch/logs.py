"""Follow the output of the ranks, line by line while they print it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from llama_core.launch.attempts import LOG_HEADER
from llama_core.records.directory import RunDirectory
from llama_core.records.files import open_file, unreadable

NOTABLE = ("WARNING ", "ERROR ", "CRITICAL ")
"""Prefixes of the lines that are shown to someone who waits for a run."""

LOGS_AT_ONCE = 64
"""Most logs in one look: thousands of ranks would be as many requests to a shared file system, every few seconds."""

_BLOCK = 1 << 20


class LogFollower:
    """Reads the lines added to the ranks' logs since it last looked.

    Args:
        run: the run.
        rank: the rank to follow; None for all.
        last_lines: number of existing lines to start with; None for all of them.
    """

    def __init__(self, run: RunDirectory, rank: int | None = None, last_lines: int | None = 0) -> None:
        self._run = run
        self._name = re.compile(r"rank-[0-9]{5,9}\.log" if rank is None else f"rank-{rank:05d}\\.log")
        self._first: list[Path] = []
        self._waiting: list[Path] = []
        self._read_to = {path: self._start(path, last_lines) for path in self._paths()}

    def new_lines(self, *, of_all: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the lines completed since the last look, with their rank.

        A look is at ``LOGS_AT_ONCE`` logs: always the first one, and the others by turns.

        Args:
            of_all: look at every log.
        """
        for path in self._paths() if of_all else self._next_paths():
            with self._opened(path) as file:
                end = os.fstat(file.fileno()).st_size  # what comes meanwhile is of the next look
            rank = int(path.stem.removeprefix("rank-"))
            while self._read_to.get(path, 0) < end and (lines := self._read_on(path)):
                for line in lines:
                    yield rank, line

    def notable_lines(self, *, of_all: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the new lines that are warnings or errors; see ``new_lines``."""
        return ((rank, line) for rank, line in self.new_lines(of_all=of_all) if line.startswith(NOTABLE))

    def _read_on(self, path: Path) -> list[str]:
        """Return the lines that are complete in the next block of a log."""
        start = self._read_to.get(path, 0)
        with self._opened(path) as file:
            file.seek(start)
            read = file.read(_BLOCK)
        complete, newline, _ = read.rpartition(b"\n")
        if len(read) == _BLOCK and not newline:
            complete = read  # a line that long is a progress bar's
        self._read_to[path] = start + len(complete) + len(newline)
        return (complete + newline).decode(errors="replace").splitlines()

    def _next_paths(self) -> list[Path]:
        if not self._waiting:
            paths = self._paths()
            self._first = paths[:1]
            self._waiting = paths[1:]
        now = self._waiting[: LOGS_AT_ONCE - 1]
        self._waiting = self._waiting[LOGS_AT_ONCE - 1 :]
        return self._first + now

    def _paths(self) -> list[Path]:
        """List the logs, without asking the file system about each of them."""
        folder = self._run.logs
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            return sorted(
                folder / e.name for e in entries if self._name.fullmatch(e.name) and not e.is_dir(follow_symlinks=False)
            )
        return []

    def _start(self, path: Path, last_lines: int | None) -> int:
        """Return the offset of the last lines of a file, leaving out lines from before its newest attempt."""
        if last_lines is None:
            return 0
        with self._opened(path) as file:
            if not last_lines:
                return file.seek(0, os.SEEK_END)
            return start_of_last_lines(file, last_lines)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[BufferedReader]:
        try:
            with open_file(path, self._run.path) as file:
                yield file
        except OSError as error:
            raise unreadable(path, error) from None


def start_of_last_lines(file: BinaryIO, num_lines: int, block: int = _BLOCK) -> int:
    """Return the offset of the last lines of a file, reading back to it or to the newest attempt, in blocks."""
    start = file.seek(0, os.SEEK_END)
    for line in islice(_lines_from_the_end(file, block), num_lines):
        header = line.rfind(LOG_HEADER.encode())
        start -= len(line) - max(0, header)
        if header >= 0:
            break
    return start


def _lines_from_the_end(file: BinaryIO, block: int) -> Iterator[bytes]:
    """Yield the lines of a file with their ends, the last one first."""
    position = file.seek(0, os.SEEK_END)
    rest = b""
    while position:
        size = min(block, position)
        position = file.seek(position - size)
        first, *lines = (file.read(size) + rest).splitlines(keepends=True)
        yield from reversed(lines)
        rest = first
        if len(rest) >= _BLOCK:  # a line that long is a progress bar's
            yield rest
            rest = b""
    if rest:
        yield rest
