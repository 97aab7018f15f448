"""A folder in an object store, such as ``s3://bucket/prefix``, with its errors as ``OSError`` in one line each.

The packages of the stores find credentials themselves, in the environment or their own files. None passes through here.
"""

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from errno import EACCES, EFBIG, EIO, ENOENT
from pathlib import Path
from typing import Any, TypeVar

from llama_core.errors import StorageError
from llama_core.imports import how_to_install
from llama_core.records.files import MAX_BYTES
from llama_core.redaction import one_line, redacted, without_queries

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "file": "fsspec", "memory": "fsspec"}
"""What writes to each kind of address beside fsspec."""
_OPTIONS: dict[str, dict[str, Any]] = {
    # botocore's own timeouts are a minute, and its attempts would come on top of ours; a part in memory takes 50 MiB
    "s3": {
        "config_kwargs": {"connect_timeout": 5, "retries": {"mode": "standard", "max_attempts": 2}},
        "max_concurrency": 4,
    },
    "file": {"auto_mkdir": True},
}
_ADDRESS = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[^/]*)(?P<path>/.*)?", re.DOTALL)
_WAITS_SECONDS = (1.0, 4.0, 16.0)
"""Between the attempts to copy a file."""
_FORBIDDEN = frozenset((401, 403))
"""What a server answers to somebody without the right to do it."""
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "DefaultCredentialsError")
_Answer = TypeVar("_Answer")


def is_url(text: object) -> bool:
    """Return whether what a user names is an address rather than a path."""
    return isinstance(text, str) and "://" in text


def checked_url(url: str) -> str:
    """Return an address of a folder without its last slashes.

    Raises:
        StorageError: if it has no bucket, a protocol that is not known, or credentials.
    """
    found = _ADDRESS.fullmatch(url)
    shown = redacted(url.partition("?")[0])
    if found is None or found["scheme"] not in PACKAGES:
        known = ", ".join(f"{scheme}://" for scheme in PACKAGES if scheme != "memory")
        raise StorageError(f"{shown!r} is no address of an object store; use {known}")
    if re.search("[@:]", found["bucket"]) or "?" in url or "#" in url:
        raise StorageError(
            f"{found['scheme']}://***: an address with credentials or a query would be recorded with the run; give "
            "credentials as the store's own tools take them, in the environment or their files"
        )
    path = (found["path"] or "").strip("/")
    if found["scheme"] not in {"file", "memory"} and not found["bucket"]:
        raise StorageError(f"{shown!r} names no bucket; write {found['scheme']}://BUCKET/PREFIX")
    if {".", ".."}.intersection(path.split("/")):
        raise StorageError(f"{shown!r}: an address has no . or .. in it; write the folder that it leads to")
    return url.rstrip("/")


@dataclass(frozen=True)
class Store:
    """A folder in a store. Names are paths below it.

    Each method makes one attempt beside those of the store's package, but ``get`` a few. All raise
    ``FileNotFoundError`` for a file or a bucket that is not there, ``PermissionError`` for what the store forbids, else
    ``OSError`` with its reason.
    """

    url: str
    """As ``checked_url`` returns it."""

    def __truediv__(self, name: str) -> "Store":
        """Return a folder below this one."""
        return Store(f"{self.url}/{name}")

    def __str__(self) -> str:
        """Return the address."""
        return self.url

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    def find(self) -> dict[str, int]:
        """Return the bytes of each file below the folder, by its name; none if there is no such folder."""

        def listed() -> dict[str, int]:
            system = _system(self.url)
            found = system.find(self.url, detail=True)
            begins = system._strip_protocol(self.url).rstrip("/") + "/"
            return {name.removeprefix(begins): info["size"] for name, info in found.items() if name.startswith(begins)}

        try:
            return self._once(listed)
        except FileNotFoundError:
            self.require_bucket()
            return {}

    def read(self, name: str, most_bytes: int = MAX_BYTES) -> bytes:
        """Return the contents of a file."""

        def content() -> bytes:
            with _system(self.url).open(self._path(name), "rb", block_size=2**20) as file:
                found: bytes = file.read(most_bytes + 1)
            return found

        found = self._once(content, name)
        if len(found) > most_bytes:
            raise OSError(EFBIG, f"it has more than {most_bytes:,} bytes", self._path(name))
        return found

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a small file, in one request."""
        self._once(lambda: _system(self.url).pipe_file(self._path(name), content), name)

    def put(self, file: Path, name: str) -> None:
        """Copy a file here to the store, in parts if it is large."""
        file.stat()  # so that a file that is missing here is not taken for one that is missing there
        self._once(lambda: _system(self.url).put_file(str(file), self._path(name)), name)

    def get(self, name: str, file: Path) -> None:
        """Copy a file of the store to a new file here, in parts."""
        for wait in (*_WAITS_SECONDS, None):
            try:
                self._once(lambda: _system(self.url).get_file(self._path(name), str(file)), name)
                return
            except (FileNotFoundError, PermissionError):
                raise
            except OSError:
                if wait is None:
                    raise
                time.sleep(wait)

    def remove(self, names: Collection[str]) -> None:
        """Delete files; one that is gone already is no error."""
        for name in names:
            try:
                self._once(lambda name=name: _system(self.url).rm_file(self._path(name)), name)  # type: ignore[misc]
            except FileNotFoundError:
                continue

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def require_bucket(self) -> None:
        """Tell an empty folder from a bucket that does not exist.

        Raises:
            FileNotFoundError: if there is no bucket.
        """
        scheme, _, rest = self.url.partition("://")
        if scheme in {"file", "memory"}:
            return
        bucket = f"{scheme}://{rest.partition('/')[0]}"
        if not self._once(lambda: _system(self.url).exists(bucket)):
            raise FileNotFoundError(ENOENT, "there is no such bucket", bucket)

    def _once(self, call: Callable[[], _Answer], name: str = "") -> _Answer:
        where = self._path(name) if name else self.url
        try:
            return call()
        except StorageError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(ENOENT, "there is no such file or bucket", where) from None
        except Exception as error:  # each store has errors of its own
            if is_forbidden(error) or type(error).__name__ in _NO_CREDENTIALS:
                raise PermissionError(EACCES, f"your credentials do not allow it ({reason_of(error)})", where) from None
            raise OSError(EIO, reason_of(error), where) from None


def store_at(url: str) -> Store:
    """Return the folder of an address.

    Raises:
        StorageError: if the address cannot be used, or the package of its protocol is missing.
    """
    store = Store(checked_url(url))
    _system(store.url)
    return store


def said(error: OSError) -> str:
    """Return an error of a store as a clause that names the address."""
    return one_line(redacted(f"{error.filename}: {error.strerror}" if error.filename else str(error)))


def is_forbidden(error: Exception) -> bool:
    """Return whether a store refuses to let this user do it: it says so in its own way, and will again."""
    answered = getattr(error, "response", None)
    statuses = (getattr(error, "status", None), getattr(answered, "status_code", None))  # aiohttp's; the Hub's
    says_so = str(error).startswith("Forbidden: ")  # gcsfs raises a plain OSError
    return isinstance(error, PermissionError) or says_so or not _FORBIDDEN.isdisjoint(statuses)


def reason_of(error: Exception) -> str:
    """Return an error of a store in a line; it may name the address to which a server led us, with its signature."""
    return one_line(redacted(without_queries(f"{type(error).__name__}: {error}")))


def _system(url: str) -> Any:
    scheme = url.partition("://")[0]
    package = PACKAGES[scheme]
    try:
        import fsspec

        return fsspec.filesystem(scheme, use_listings_cache=False, **_OPTIONS.get(scheme, {}))
    except (ImportError, ValueError):  # fsspec says ValueError for a package that is there but too old
        raise StorageError(f"{scheme}:// needs the package {package!r}; {how_to_install(package)}") from None
