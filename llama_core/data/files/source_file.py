"""One file of a corpus: open it, decompress it, and refuse it if it changes meanwhile.

A file that somebody writes meanwhile may end early, between two lines even, and look whole. So size, time and bytes
read must be the same at its end as they were when the files were found.
"""

import gzip
import hashlib
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import SEEK_SET, BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast

from llama_core.data.files.remote import RemotePath
from llama_core.errors import DataError
from llama_core.records.files import open_file
from llama_core.units import MIB, format_bytes

MAX_BYTES_OF_RECORD = 256 * MIB
"""Most bytes of a line, a value of a JSON array or a text file: a few compressed bytes may stand for any number."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus, with the size and times that show whether it has changed."""

    path: Path
    num_bytes: int
    mtime_ns: int
    """When its contents were written, or a time that somebody has set since."""
    ctime_ns: int
    """When the kernel last saw a change of contents, name or rights; nobody can set it."""
    index: "SourceFile | None" = None
    """The file beside it that says where its documents are, if its kind has one."""
    place: "SourcePlace | None" = None
    """Where it is, if it was found in a folder; None if somebody named it, and links are their own."""

    @property
    def parts(self) -> tuple["SourceFile", ...]:
        """It and its index."""
        return (self,) if self.index is None else (self, self.index)

    @property
    def is_public(self) -> bool:
        """Whether every user of this machine may read it."""
        if isinstance(self.path, RemotePath):
            return False
        path = self.path.resolve()
        folders = (folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
        return bool(path.stat().st_mode & stat.S_IROTH) and all(folders)

    def open(self) -> IO[bytes]:
        """Open it for reading, where it was found.

        Raises:
            OSError: if it cannot be opened, or somebody has put a link in its place since.
        """
        if isinstance(self.path, RemotePath):
            return self.path.open("rb")
        return open_file(self.path) if self.place is None else self.place.open()


class SourcePlace(NamedTuple):
    """Where a file of a folder is, without a link on the way."""

    file: Path
    """The path to which links lead."""
    below: Path
    """The folder below which no link is followed any more: somebody could put one there meanwhile."""

    def open(self) -> BufferedReader:
        """Open the file; raises ``OSError`` as ``open_file``."""
        return open_file(self.file, self.below)


def total_bytes(files: Iterable[SourceFile]) -> int:
    """Return the bytes of some files together."""
    return sum(file.num_bytes for file in files)


class Digest(Protocol):
    """What takes the bytes of files, such as ``hashlib.sha256()``."""

    def update(self, block: memoryview, /) -> None:
        """Take the next bytes."""


@dataclass(frozen=True)
class Stream:
    """An open file."""

    content: IO[bytes]
    """Its decompressed contents."""
    raw: IO[bytes]
    """The file itself, whose position says how much of it has been read."""


@dataclass(frozen=True)
class Compression:
    """A compressed form of a file, known by the end of its name."""

    suffix: str
    name: str
    decompress: Callable[[IO[bytes]], IO[bytes]]
    may_be: str
    """What may be wrong with a stream that cannot be decompressed."""


def _open_gzip(file: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=file))


def _open_zstd(file: IO[bytes]) -> IO[bytes]:
    import pyarrow as pa

    return BufferedReader(pa.CompressedInputStream(file, "zstd"), MIB)


COMPRESSIONS = (
    Compression(".gz", "gzip", _open_gzip, "damaged or cut short"),
    # its decoder refuses windows for which it would need more than 128 MiB
    Compression(".zst", "zstd", _open_zstd, "damaged, cut short, or made with a window above 128 MiB (--long)"),
)


def compression_of(path: Path) -> Compression | None:
    """Return how the file of a name is compressed, or None."""
    name = path.name.lower()
    return next((one for one in COMPRESSIONS if name.endswith(one.suffix)), None)


@contextmanager
def opened(file: SourceFile, content: Digest | None) -> Iterator[Stream]:
    """Yield the open file, which the block reads to its end.

    Args:
        file: the file as it was found.
        content: takes the bytes of the file as they are read.

    Raises:
        DataError: if it cannot be decompressed, or has another size than before.
    """
    with BufferedReader(_Tapped(file, content), MIB) as raw:
        compression = compression_of(file.path)
        if compression is None:
            yield Stream(raw, raw)
        else:
            with _decompressing(file.path, compression):
                yield Stream(compression.decompress(raw), raw)
        if raw.tell() != file.num_bytes:
            raise _changed(file, f"{file.num_bytes:,} bytes before, {raw.tell():,} read")


@contextmanager
def _decompressing(path: Path, compression: Compression) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error) as error:
        if getattr(error, "errno", None) is not None:  # of the disk
            raise
        raise DataError(
            f"{path}: the {compression.name} stream is {compression.may_be} ({error}); copy or compress it again"
        ) from None


def too_large(location: str, what: str) -> DataError:
    """Return the error for a record of more than ``MAX_BYTES_OF_RECORD``."""
    return DataError(
        f"{location}: {what} has more than the {format_bytes(MAX_BYTES_OF_RECORD)} that a document may have; split it"
    )


class _Tapped(RawIOBase):
    """A file whose bytes also go into a digest, as they are read."""

    def __init__(self, file: SourceFile, content: Digest | None) -> None:
        self._file: Any = file.open()
        self._content = content

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET, /) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int | None:
        num_read: int = self._file.readinto(buffer)
        if self._content is not None:
            self._content.update(memoryview(buffer)[:num_read])
        return num_read


def take_all(file: SourceFile, content: Digest) -> None:
    """Give every byte of a file and of its index to ``content``."""
    block = bytearray(MIB)
    for part in file.parts:
        with _Tapped(part, content) as stream:
            while stream.readinto(block):
                pass


def digest_of(files: Sequence[SourceFile]) -> str:
    """Return the SHA-256 of the contents of ``files``, one after another; reads every byte of them.

    Raises:
        DataError: if a file cannot be read, or changes meanwhile.
    """
    content = hashlib.sha256()
    for file in files:
        with reading(file):
            take_all(file, content)
    return content.hexdigest()


@contextmanager
def reading(file: SourceFile) -> Iterator[None]:
    """Refuse a file that is another at the end of the block than when it was found, and turn errors into one line."""
    with accessing(file.path):
        try:
            _check_unchanged(file)
            yield
        except (DataError, OSError):
            _check_unchanged(file)  # it is not damaged if somebody is writing it
            raise
        _check_unchanged(file)


@contextmanager
def accessing(path: Path) -> Iterator[None]:
    """Turn an error of reading ``path`` into one line."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {error.strerror or error}") from None


def _check_unchanged(file: SourceFile) -> None:
    for part in file.parts:
        found = part.path.stat()
        if found.st_size != part.num_bytes:
            raise _changed(part, f"{part.num_bytes:,} bytes before, {found.st_size:,} now")
        if found.st_mtime_ns != part.mtime_ns:
            raise _changed(part, "it was written again")


def _changed(file: SourceFile, what: str) -> DataError:
    return DataError(
        f"{file.path} changed while it was read ({what}); make sure that nothing writes to it, then start again"
    )
