"""Files in object stores and on web servers, as paths: ``s3://bucket/folder``.

A ``RemotePath`` does what this package asks of a path, so the rest reads a bucket as it reads a folder. It answers
errors as ``OSError``. Calls and reads whose connection breaks are tried again.
"""

import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from errno import EACCES, EIO, ENOENT
from functools import cache
from io import SEEK_CUR, SEEK_END, SEEK_SET, BufferedReader, RawIOBase
from pathlib import Path, PosixPath
from typing import IO, Any, Self, TypeVar

from llama_core.errors import DataError
from llama_core.records.files import user_path
from llama_core.redaction import redacted
from llama_core.storage.stores import is_forbidden, reason_of

logger = logging.getLogger(__name__)

PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
    "memory": "fsspec",
}
"""What reads each kind of address beside fsspec. Its others are refused: some unpack archives or run programs."""
_ON_THE_WEB = ("https", "http")
_QUERY = re.compile(r"\?[\w.%-]+=")
"""A query of a store, where a question mark alone stands for any character."""
_ADDRESS = re.compile(r"(?P<scheme>[a-z0-9]+):/+(?P<rest>.+)", re.DOTALL)
_WAITS_SECONDS = (1.0, 4.0, 16.0)
"""Between the attempts."""
_MISSING = (FileNotFoundError, NotADirectoryError)
_VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "content_settings", "generation")
"""What stores call the mark that changes with the contents of a file."""
_TIMES = ("LastModified", "updated", "last_modified", "mtime", "created")
_VERSION_BITS = 60
"""Of a version as a time in nanoseconds, which is then before 2007."""
_BLOCK_BYTES = 2**23
_Answer = TypeVar("_Answer")


def path_of(source: str) -> Path:
    """Return a path of a source, which is here or remote.

    Raises:
        DataError: if it is an address that cannot be used.
    """
    if "://" not in source:
        return user_path(source)
    shown = redacted(source.partition("?")[0])
    found = _ADDRESS.fullmatch(source)
    if "::" in source or found is None or found["scheme"] not in PACKAGES:
        known = ", ".join(f"{scheme}://" for scheme in PACKAGES if scheme != "memory")
        raise DataError(f"data source {shown!r} is no address that is read; use {known} or a path on this machine")
    has_query = "?" in source if found["scheme"] in _ON_THE_WEB else _QUERY.search(source) is not None
    if "@" in found["rest"].partition("/")[0] or has_query:
        raise DataError(
            f"data source {found['scheme']}://***: an address with credentials or a query would be recorded with the "
            "run; give credentials as the store's own tools take them, in the environment or their files"
        )
    return RemotePath(source)


def is_remote(text: str) -> bool:
    """Return whether the path of a source is an address."""
    return "://" in text


class RemotePath(PosixPath):
    """The path of a file or a folder elsewhere."""

    _listed: Mapping[str, Any] | None = None
    """What a listing, or the first look, said about it."""

    def __str__(self) -> str:
        """Return the address."""
        return super().__str__().replace(":/", "://", 1)

    @property
    def scheme(self) -> str:
        """Which kind of store it is in."""
        return self.parts[0].removesuffix(":")

    def _info(self) -> Mapping[str, Any]:
        if self._listed is None:
            self._listed = _attempt(self, lambda: _store(self.scheme).info(str(self)))
        return self._listed

    def as_listed(self) -> os.stat_result:
        """Return its size and times as they were when it was found."""
        return _stat(self._info())

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return its size and times as they are now; the version of its contents is in the place of the ``ctime``."""
        return type(self)(*self.parts).as_listed()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is a file or a folder."""
        try:
            self._info()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder."""
        return self.exists() and self._info()["type"] == "directory"

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a file."""
        return self.exists() and not self.is_dir()

    def absolute(self) -> Self:
        """Return itself."""
        return self

    def resolve(self, strict: bool = False) -> Self:
        """Return itself: there are no links."""
        return self

    def expanduser(self) -> Self:
        """Return itself."""
        return self

    def files(self) -> Iterator["RemotePath"]:
        """Yield the files below it, in one listing, but for those with a name that begins with a dot."""
        found = _attempt(self, lambda: _store(self.scheme).find(str(self), detail=True))
        for path in self._known(found):
            if not any(part.startswith(".") for part in path.relative_to(self).parts):
                yield path

    def glob(self, pattern: str, **settings: Any) -> Iterator["RemotePath"]:  # type: ignore[override]
        """Yield the files and folders below it that a pattern matches."""
        if self.scheme in _ON_THE_WEB:
            raise ValueError("a web server lists no files; name each")
        found = _attempt(self, lambda: _store(self.scheme).glob(f"{self}/{pattern}", detail=True))
        return self._known(found)

    def _known(self, found: Mapping[str, Mapping[str, Any]]) -> Iterator["RemotePath"]:
        for name, info in found.items():
            path = RemotePath(f"{self.scheme}://{name.removeprefix(f'{self.scheme}://').lstrip('/')}")
            path._listed = info
            yield path

    def open(self, mode: str = "r", buffering: int = -1, **settings: Any) -> IO[Any]:  # type: ignore[override]
        """Open the file to read its bytes."""
        assert mode == "rb", "sources are only read"
        raw = _Remote(self)
        return raw if buffering == 0 else BufferedReader(raw, _BLOCK_BYTES)  # type: ignore[return-value]


class _Remote(RawIOBase):
    """An open file, which is opened again where its connection breaks."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._position = 0
        self._file: Any = None
        self._num_bytes = path.as_listed().st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = SEEK_SET, /) -> int:
        self._position = offset + {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._num_bytes}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        content = _attempt(self._path, lambda: self._read(len(buffer)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def _read(self, num_bytes: int) -> bytes:
        try:
            if self._file is None:
                self._file = _store(self._path.scheme).open(str(self._path), "rb", block_size=_BLOCK_BYTES)
            if self._file.tell() != self._position:
                self._file.seek(self._position)
            content: bytes = self._file.read(num_bytes)
        except Exception:
            self._file = None
            raise
        return content


def _stat(info: Mapping[str, Any]) -> os.stat_result:
    mode = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
    modified = next(filter(None, (_nanoseconds(info.get(key)) for key in _TIMES)), 0)
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), str(modified) if modified else "")
    if version:
        mark = int.from_bytes(hashlib.sha256(version.encode()).digest()) >> (256 - _VERSION_BITS)
    else:
        mark = time.time_ns()  # nothing proves that it is the same file the next time
    size = info.get("size")
    if size is None and mode == stat.S_IFREG:
        raise OSError(EIO, "the server does not tell its size; copy it to this machine")
    return os.stat_result(
        (mode, 0, 0, 1, 0, 0, size or 0, 0, modified // 10**9, mark // 10**9),
        {"st_mtime_ns": modified, "st_ctime_ns": mark},
    )


def _nanoseconds(given: Any) -> int:
    if isinstance(given, str):
        try:
            given = datetime.fromisoformat(given)
        except ValueError:
            return 0
    seconds = given.timestamp() if isinstance(given, datetime) else given
    return int(seconds * 1e9) if isinstance(seconds, int | float) else 0


@cache
def _store(scheme: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except (ImportError, ValueError):  # fsspec says ValueError for a package that is there but too old
        raise DataError(f"{scheme}:// needs {PACKAGES[scheme]}; pip install {PACKAGES[scheme]}") from None


def _attempt(path: RemotePath, call: Callable[[], _Answer]) -> _Answer:
    """Return what a call gives, after a few attempts.

    Raises:
        OSError: if none succeeds.
        DataError: if a package is missing.
    """
    for wait in (*_WAITS_SECONDS, None):
        try:
            return call()
        except DataError:
            raise
        except _MISSING:
            raise FileNotFoundError(ENOENT, "no such file", str(path)) from None
        except Exception as error:  # each store has errors of its own
            if is_forbidden(error):
                raise PermissionError(EACCES, "your credentials may not read it", str(path)) from None
            if wait is None:
                raise OSError(EIO, reason_of(error), str(path)) from None
            logger.warning("reading %s failed (%s); trying again in %g s", path, reason_of(error), wait)
        time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")
