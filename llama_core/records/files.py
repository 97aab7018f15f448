"""Write records atomically, so that a reader never sees half of one, and read them back."""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar
from uuid import uuid4

from pydantic import AfterValidator, TypeAdapter, ValidationError

from llama_core.errors import RunDirectoryError
from llama_core.redaction import redacted_values
from llama_core.units import format_bytes

SCHEMA_VERSION = 1
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The errors that Python raises for a record whose keys or values this software does not write."""
T = TypeVar("T")


def _iso_time(text: str) -> str:
    try:
        datetime.fromisoformat(text).timestamp()
    except OverflowError:
        raise ValueError("a time that this machine cannot represent") from None
    return text


Time = Annotated[str, AfterValidator(_iso_time)]
"""A time as ISO 8601."""


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether ``error``, or one that led to it, says that a disk or the user's quota on it is used up."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return True
        error = error.__cause__ or error.__context__
    return False


def no_room(folder: Path, num_bytes: int = 0) -> str:
    """Return the clause that the disk of ``folder`` is full, with the free and, if known, the needed bytes."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    needed = f"over {format_bytes(num_bytes)} needed, " if num_bytes else ""
    quota = " (your quota may be used up)" if free > 2 * num_bytes > 0 else ""
    return f"the disk of {folder} is full: {needed}{format_bytes(free)} free{quota}"


def now() -> str:
    """Return the current time in UTC as ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def timestamp() -> str:
    """Return the current time in UTC as ISO 8601, to the microsecond, so that no two jobs share one."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` when the block ends without an error.

    Args:
        path: the file to make or replace.
        durable: flush the bytes to disk first, so that a power cut leaves the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with named(path, instead_of=temporary):
            yield temporary
            if durable:
                with temporary.open("rb") as written:
                    os.fsync(written.fileno())
            temporary.replace(path)
    finally:
        with suppress(OSError):  # a disk that has become read-only; the error above says so
            temporary.unlink(missing_ok=True)


@contextmanager
def named(path: Path, instead_of: Path | None = None) -> Iterator[None]:
    """Make an ``OSError`` name ``path`` if it names no file, as after a failed write, or names ``instead_of``."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in {None, str(instead_of)}:
            error.filename = str(path)
        raise


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append each record as a line of JSON, after a line break if the last line was cut short, as by a full disk."""
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    with named(path), path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read(1) == b"\n" else f"\n{lines}"
        file.write(lines.encode())


def remove_temporaries(folder: Path, before: float) -> None:
    """Remove what ``atomic_write`` has left in ``folder`` when its process was killed.

    Args:
        folder: where it wrote.
        before: seconds since the epoch. Older files are removed, because their writers have ended.
    """
    for temporary in folder.glob(".*.tmp"):
        with suppress(OSError):
            if temporary.stat().st_mtime < before:
                temporary.unlink()


def by_dotted_key(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted key."""
    values: dict[str, Any] = {}
    for key, value in nested.items():
        values |= by_dotted_key(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


def write_json(path: Path, record: object, *, durable: bool = True) -> None:
    """Write a mapping or dataclass atomically as JSON with its ``schema_version`` and without secrets.

    See ``atomic_write`` and ``redacted``.
    """
    payload = asdict(record) if is_dataclass(record) and not isinstance(record, type) else record
    if not isinstance(payload, Mapping):
        raise TypeError(f"a record is a mapping or a dataclass, not {type(record).__name__}")
    with atomic_write(path, durable=durable) as temporary:
        record = {"schema_version": SCHEMA_VERSION, **redacted_values(payload)}
        temporary.write_text(json.dumps(record, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the record in ``path`` without its ``schema_version``.

    Raises:
        RunDirectoryError: if the file is missing, damaged, or of another schema version.
    """
    try:
        record = json.loads(path.read_text(), parse_int=_integer)
    except FileNotFoundError:
        raise RunDirectoryError(f"{path} does not exist; run the step that writes it first") from None
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise damaged(path, error) from None
    if not isinstance(record, dict) or record.pop("schema_version", None) != SCHEMA_VERSION:
        raise RunDirectoryError(f"{path} was written by another version of this software; start a new run")
    return record


def _integer(digits: str) -> int:
    number = int(digits)
    if abs(number) >= 2**63:
        raise ValueError(f"an integer of {len(digits)} digits is too large")
    return number


def read_typed(path: Path, kind: type[T]) -> T:
    """Return the record in ``path`` as ``kind``, a dataclass or any other type, with its keys and types checked.

    A dataclass may have defaults for keys of newer versions; keys that it lacks are ignored.

    Raises:
        RunDirectoryError: as ``read_json``, or naming the first key that is missing or wrong.
    """
    return checked_record(read_json(path), kind, path)


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Return the records of a file with one record as JSON in each line; an empty list if there is no file.

    A line that is not JSON was cut short when its process was killed or its disk was full. It is left out.

    Raises:
        RunDirectoryError: if the file cannot be read, or naming the first key of a whole line that is missing or wrong.
    """
    records = []
    try:
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                records.append(json.loads(line, parse_int=_integer))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from None
    return [checked_record(record, kind, path) for record in records]


def checked_record(record: object, kind: type[T], path: Path) -> T:
    """Return a record that was read from ``path`` as ``kind``; see ``read_typed``."""
    try:
        checked: T = _adapter(kind).validate_python(record)  # type: ignore[arg-type]  # every type is hashable
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(map(str, detail["loc"]))
        raise damaged(path, f"{key}: {detail['msg'][0].lower()}{detail['msg'][1:]}") from None
    return checked


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@contextmanager
def intact(path: Path) -> Iterator[None]:
    """Turn an error from wrong keys or values of the record in ``path`` into one line that names the file."""
    try:
        yield
    except DAMAGE as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None


def damaged(path: Path, problem: object) -> RunDirectoryError:
    """Return the error for a file whose contents this software does not write."""
    return RunDirectoryError(f"{path} is damaged ({problem}); restore it from a backup, or remove it")


def user_path(text: str | Path) -> Path:
    """Return the path of ``text``, where ``~`` is the home directory of a user who exists."""
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:  # no user of this name
        return path


def cache_directory(configured: str | None) -> Path:
    """Return where caches are kept: as configured, else below $XDG_CACHE_HOME, else below ~/.cache."""
    if configured is not None:
        return user_path(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llama-training-infra"
