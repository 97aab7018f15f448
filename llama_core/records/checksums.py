"""Sizes and checksums of files: taken while a file is written, and compared with the file later.

The checksum is zlib's CRC-32. It finds every flipped bit and every run of up to 32 damaged bits, misses other damage
once in 4 billion times, and costs little compared with a disk (docs/reliability.md). It does not protect against
somebody who changes files on purpose.
"""

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import IO, Any

from llama_core.records.files import open_file, size_of

THREADS = 4
"""Files that are read at once; zlib lets other threads run meanwhile."""
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class FileSum:
    """The size and the checksum of a file."""

    num_bytes: int
    crc32: str
    """Eight hexadecimal digits."""


class SummedFile:
    """A file opened for writing that knows its checksum. It cannot seek: bytes are summed in the order of writing."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._num_bytes = 0
        self._crc = 0
        self.tell = file.tell
        self.flush = file.flush
        self.fileno = file.fileno
        self.close = file.close

    def write(self, data: Any) -> int:
        """Write an object with the buffer protocol, whole."""
        self._crc = zlib.crc32(data, self._crc)
        self._num_bytes += memoryview(data).nbytes
        return self._file.write(data)

    def sum(self) -> FileSum:
        """Return the size and the checksum of what has been written."""
        return FileSum(self._num_bytes, f"{self._crc:08x}")


def file_sum(path: Path, below: Path | None = None, ended: Event | None = None) -> FileSum:
    """Return the size and the checksum of the file in ``path``.

    Args:
        path: the file.
        below: as for ``open_file``.
        ended: if it is set meanwhile, the result is that of the first part of the file.

    Raises:
        OSError: if it cannot be read, or is a link, a pipe or a device.
    """
    crc = 0
    num_bytes = 0
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with open_file(path, below) as file:
        while (count := file.raw.readinto(chunk)) and not (ended and ended.is_set()):
            crc = zlib.crc32(chunk[:count], crc)
            num_bytes = num_bytes + count
    return FileSum(num_bytes, f"{crc:08x}")


def find_damage(folder: Path, sums: Mapping[str, FileSum], *, below: Path, read: bool = True) -> str:
    """Compare files with their sums; return the file that differs and how, as a clause, or "" if all are as they were.

    Args:
        folder: where the files are.
        sums: the sum that each file must have, by its path in ``folder``.
        below: the run, or another folder below which no link is followed.
        read: compare the checksums too, which reads every byte; otherwise only the sizes.
    """
    ended = Event()
    problem_of = partial(_problem_of, folder, below=below, read=read, ended=ended)
    if not read:
        return next(filter(None, map(problem_of, sums.items())), "")
    with ThreadPoolExecutor(THREADS) as threads:
        try:
            return next(filter(None, threads.map(problem_of, sums.items())), "")
        finally:
            ended.set()  # an interrupt does not wait for a file that seems to have petabytes


def _problem_of(folder: Path, expected: tuple[str, FileSum], *, below: Path, read: bool, ended: Event) -> str:
    name, written = expected
    try:
        num_bytes = size_of(folder / name, below)
        if num_bytes != written.num_bytes:
            return f"{name} has {num_bytes} of {written.num_bytes} bytes"
        found = file_sum(folder / name, below, ended) if read else written
    except (FileNotFoundError, ValueError):  # ValueError: not a file name
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    if found != written:
        return f"{name} has the checksum {found.crc32}, but {written.crc32} was written"
    return ""
