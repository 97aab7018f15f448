"""Write records atomically, so that a reader never sees half of one, and read them back.

Somebody else may have made a run that we read. ``open_file`` is the only way to its files.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from uuid import uuid4

from pydantic import AfterValidator, TypeAdapter, ValidationError

from llama_core.errors import RequestError, RunDirectoryError, as_clause
from llama_core.redaction import redacted_values
from llama_core.units import MIB, format_bytes

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
MAX_BYTES = 64 * MIB
"""Most bytes of a record: much more than any that this software writes."""
MAX_BYTES_OF_LINES = 256 * MIB
"""Most bytes of a file that has a line for each step or activity."""
FREE_VALUES = 2**18
"""Values of a table that may take no room in its file; each further one takes a byte. Those that repeat take none."""
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
    inodes = os.statvfs(existing)
    if inodes.f_files and not inodes.f_favail:
        used = f"all of its {inodes.f_files:,} inodes are used"
        return f"the disk of {folder} is full: {used}, {format_bytes(free)} are free"
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
def atomic_write(path: Path, *, durable: bool = True, replaces: bool = True) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` when the block ends without an error.

    Args:
        path: the file to make or replace.
        durable: flush the bytes to disk first, so that a power cut leaves the old file or the new one.
        replaces: replace a file that another process has made meanwhile; otherwise that one stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with named(path, instead_of=temporary):
            yield temporary
            if durable:
                with temporary.open("rb") as written:
                    os.fsync(written.fileno())
            if replaces or not _link(temporary, path):
                temporary.replace(path)
    finally:
        with suppress(OSError):  # a disk that has become read-only; the error above says so
            temporary.unlink(missing_ok=True)


def _link(file: Path, path: Path) -> bool:
    """Return whether there is now a file in ``path``: the one that was there, or a second name of ``file``."""
    try:
        os.link(file, path)
    except FileExistsError:
        return True
    except OSError:  # a file system without links
        return False
    return True


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


# Opening a pipe for reading would otherwise wait for somebody who writes.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)


def open_file(path: Path, below: Path | None = None) -> BufferedReader:
    """Open a regular file for reading; a pipe or a device, which may never end, is refused.

    Args:
        path: the file.
        below: a folder that somebody else may have made, such as a run. No link below it is followed: it could stand
            for a private file of whoever reads. None if the user names the file, and links are the user's own.

    Raises:
        OSError: if it cannot be opened, is no regular file, or is reached through a link.
    """
    if below is None:
        descriptor = os.open(path, _READ)
    else:
        with _folder(path.parent, below) as folder:
            descriptor = _open_itself(path, _READ, folder)
    found = os.fstat(descriptor)
    problem = ""
    if not stat.S_ISREG(found.st_mode):
        problem = "it is no regular file"
    elif below is not None and found.st_nlink > 1 and found.st_uid != below.stat().st_uid:
        problem = "it is a second name (a hard link) of a file of another user"
    if problem:
        os.close(descriptor)
        raise OSError(errno.EINVAL, problem, str(path))
    return os.fdopen(descriptor, "rb")


def own_file(path: Path) -> Path:
    """Return where a file really is: in its folder, or in Hugging Face's cache, whose folders hold links to its files.

    For what people publish: a link that somebody else has made could stand for any file.

    Raises:
        OSError: if it is a link to another place.
    """
    folder = path.parent.resolve()
    target = path.resolve()
    own = {folder}
    for snapshot in (folder, folder.parent):  # a file may be in a folder of the repository
        if snapshot.parent.name == "snapshots":
            own.add(snapshot.parents[1] / "blobs")
    if target.parent not in own:
        raise OSError(errno.ELOOP, f"it is a link to {target}", str(path))
    return target


def read_file(path: Path, below: Path | None = None, most_bytes: int = MAX_BYTES) -> bytes:
    """Return the contents of a file; see ``open_file``.

    Raises:
        OSError: as ``open_file``, or if it has more than ``most_bytes``.
    """
    with open_file(path, below) as file:
        return contents_of(file, most_bytes)


def contents_of(file: BufferedReader, most_bytes: int = MAX_BYTES) -> bytes:
    """Return the contents of an open file.

    Raises:
        OSError: if it cannot be read, or has more than ``most_bytes``.
    """
    content = bytearray()
    # block by block: read(n) would take memory for n bytes, however few there are
    while len(content) <= most_bytes and (block := file.read1(MIB)):
        content += block
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(most_bytes)}", str(file.name))
    return bytes(content)


def table_of(
    content: bytes, *, columns: "Callable[[pa.Schema], pa.Schema] | None" = None, **options: Any
) -> "pa.Table":
    """Return the table in the contents of a Parquet file that this software writes.

    Args:
        content: the contents.
        columns: returns the columns to read, with their types, from those in the file; default: these.
        **options: as for ``pyarrow.parquet.read_table``.

    Raises:
        pyarrow.ArrowException: if it cannot be read.
        ValueError: if it has many more values than bytes, which would fill the memory.
    """
    import pyarrow.parquet as pq

    described = pq.read_metadata(_arrow_reader(content))
    num_values = 0
    for group in map(described.row_group, range(described.num_row_groups)):
        listed = sum(group.column(place).num_values for place in range(group.num_columns))
        num_values += max(listed, group.num_rows * group.num_columns)
    if num_values > FREE_VALUES + len(content):
        raise ValueError(f"{num_values:,} values in {format_bytes(len(content))}, more than are ever written")
    if columns is not None:
        options["schema"] = columns(described.schema.to_arrow_schema())
    return pq.read_table(_arrow_reader(content), **options)


def _arrow_reader(content: bytes) -> "pa.BufferReader":
    """Return a reader of a copy of ``content`` in Arrow's own memory.

    One of Arrow's threads may be the last to let go of what was read. With Python's memory it takes the interpreter's
    lock for that, and if the interpreter is ending by then, that aborts the process.
    """
    import pyarrow as pa

    copy = pa.BufferOutputStream()
    copy.write(content)
    return pa.BufferReader(copy.getvalue())


def size_of(path: Path, below: Path | None = None) -> int:
    """Return the bytes of a file; see ``open_file``.

    Raises:
        OSError: as ``open_file``.
    """
    with open_file(path, below) as file:
        return os.fstat(file.fileno()).st_size


def is_folder_itself(path: Path, below: Path) -> bool:
    """Return whether ``path`` is a folder that is reached through no link below ``below``."""
    try:
        with _folder(path, below):
            return True
    except OSError:
        return False


def is_same_folder(one: Path, other: Path, below: Path) -> bool:
    """Return whether ``one`` is the folder ``other``, which is reached through no link below ``below``."""
    try:
        with _folder(other, below) as descriptor:
            return os.path.samestat(one.stat(), os.fstat(descriptor))
    except (OSError, ValueError):  # ValueError: no name of a file
        return False


@contextmanager
def _folder(path: Path, below: Path) -> Iterator[int]:
    """Yield a descriptor of a folder, opened name by name, so that nobody can put a link in its place meanwhile."""
    descriptor = os.open(below, _FOLDER)
    reached = below
    try:
        for name in path.relative_to(below).parts:
            reached /= name
            inner = _open_itself(reached, _FOLDER, descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _open_itself(path: Path, flags: int, folder: int) -> int:
    """Open the last part of ``path`` in ``folder`` unless it is a link."""
    if path.name == "..":
        raise OSError(errno.EINVAL, "it leads out of its folder", str(path))
    try:
        return os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR} and path.is_symlink():
            error = OSError(errno.ELOOP, "it is a link, and links inside a run are not followed")
        error.filename = str(path)
        raise error from None


def by_dotted_key(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted key."""
    values: dict[str, Any] = {}
    for key, value in nested.items():
        values |= by_dotted_key(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


def write_json(path: Path, record: object, *, durable: bool = True, replaces: bool = True) -> None:
    """Write a mapping or dataclass atomically as JSON with its ``schema_version`` and without secrets.

    See ``atomic_write`` and ``redacted``.
    """
    payload = asdict(record) if is_dataclass(record) and not isinstance(record, type) else record
    if not isinstance(payload, Mapping):
        raise TypeError(f"a record is a mapping or a dataclass, not {type(record).__name__}")
    with atomic_write(path, durable=durable, replaces=replaces) as temporary:
        record = {"schema_version": SCHEMA_VERSION, **redacted_values(payload)}
        temporary.write_text(json.dumps(record, indent=2) + "\n")


def read_json(path: Path, below: Path | None = None) -> dict[str, Any]:
    """Return the record in ``path`` without its ``schema_version``.

    Args:
        path: the record.
        below: the run, below which no link is followed; by default the record's folder.

    Raises:
        RunDirectoryError: if the file is missing, damaged, or of another schema version.
    """
    try:
        record = json.loads(read_file(path, below or path.parent), parse_int=_integer)
    except FileNotFoundError:
        raise RunDirectoryError(f"{path} does not exist; run the step that writes it first") from None
    except OSError as error:
        raise unreadable(path, error) from None
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


def read_typed(path: Path, kind: type[T], below: Path | None = None) -> T:
    """Return the record in ``path`` as ``kind``, a dataclass or any other type, with its keys and types checked.

    Keys that a dataclass lacks are ignored. ``below`` is as for ``read_json``.

    Raises:
        RunDirectoryError: as ``read_json``, or naming the first key that is missing or wrong.
    """
    return checked_record(read_json(path, below), kind, path)


def read_lines(path: Path, kind: type[T], below: Path) -> list[T]:
    """Return the records of a file with one record as JSON in each line; an empty list if there is no file.

    A line that is not JSON was cut short when its process was killed or its disk was full. It is left out.
    ``below`` is as for ``read_json``.

    Raises:
        RunDirectoryError: if the file cannot be read, or naming the first key of a whole line that is missing or wrong.
    """
    records = []
    try:
        for line in read_file(path, below, MAX_BYTES_OF_LINES).decode().splitlines():
            with suppress(json.JSONDecodeError):
                records.append(json.loads(line, parse_int=_integer))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error) from None
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
        raise damaged(path, f"{key}: {as_clause(detail['msg'])}") from None
    except RequestError as error:  # values that are right each by itself
        raise damaged(path, error) from None
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


def unreadable(path: Path, error: OSError) -> RunDirectoryError:
    """Return the error for a file of a run that cannot be read."""
    return RunDirectoryError(f"cannot read {path}: {error.strerror or error}")


def unwritable(path: Path, error: OSError) -> RunDirectoryError:
    """Return the error for a file of a run that cannot be written."""
    cause = no_room(path.parent) if is_disk_full(error) else error.strerror or str(error)
    return RunDirectoryError(f"cannot write {path}: {cause}")


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
