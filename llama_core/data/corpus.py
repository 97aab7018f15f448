"""Read documents from .jsonl, .jsonl.gz and Parquet files one by one, and count unusable lines.

A record with ``messages`` is a conversation, whatever else it holds; any other is a text.

A file that somebody writes meanwhile may end early, between two lines even, and look whole. So size, time and bytes
read must be the same at its end as they were when the files were found.
"""

import gzip
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Literal, Protocol

from llama_core.errors import DataError
from llama_core.records.files import user_path
from llama_core.units import MIB

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
MAX_EXAMPLES = 5

CONVERSATION_FIELD = "messages"
"""The field that makes a record a conversation."""

BadLineKind = Literal["invalid JSON", "missing field", "empty", "wrong type", "invalid UTF-8", "no assistant turn"]
OnProgress = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus, with the size and times that show whether it has changed."""

    path: Path
    num_bytes: int
    mtime_ns: int
    """When its contents were written, or a time that somebody has set since."""
    ctime_ns: int
    """When the kernel last saw a change of contents, name or rights; nobody can set it."""


class Digest(Protocol):
    """What takes the bytes of files, such as ``hashlib.sha256()``."""

    def update(self, block: memoryview, /) -> None:
        """Take the next bytes."""


@dataclass(frozen=True)
class Turns:
    """The turns of a conversation."""

    counted: tuple[tuple[int, int], ...]
    """The spans of characters whose tokens count in the loss, as begin and end, in order."""
    messages: str
    """The messages as JSON: the conversation itself, whatever the template."""
    num_assistant_turns: int
    has_system: bool
    """Whether it begins with a system prompt."""
    num_empty_turns: int
    """Messages without content, which were dropped."""


@dataclass(frozen=True)
class Document:
    """One text, or one conversation rendered as text, to train on."""

    text: str
    location: str
    """``file:line`` (a row number in Parquet), from 1."""
    turns: Turns | None = None
    """Turns of a conversation; None for a text, where every token counts in the loss."""


RenderConversation = Callable[[object, str], Document]
"""Makes a document from a record's messages and its location.

Raises ``UnusableRecordError`` for a conversation to leave out, ``DataError`` for a malformed one.
"""


class UnusableRecordError(ValueError):
    """A record that gives no document, with the kind of problem and the reason in a few words."""

    def __init__(self, kind: BadLineKind, reason: str) -> None:
        super().__init__(f"{kind} ({reason})")
        self.kind = kind


@dataclass
class BadLines:
    """The unusable lines of a corpus: how many of each kind, and the first few."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    """``file:line: kind (reason)`` of the first few."""

    @property
    def total(self) -> int:
        """Lines of all kinds."""
        return sum(self.counts.values())

    def add(self, location: str, problem: UnusableRecordError, limit: int) -> None:
        """Count one line.

        Raises:
            DataError: if there are now more than ``limit``.
        """
        self.counts[problem.kind] = self.counts.get(problem.kind, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{location}: {problem}")
        self.check(limit)

    def check(self, limit: int) -> None:
        """Refuse more than ``limit`` unusable lines.

        Raises:
            DataError: naming the first ones.
        """
        if self.total > limit:
            raise DataError(f"more than data.max_bad_lines={limit} {self}; fix them or raise the limit")

    def __str__(self) -> str:
        """Return the counts and the first lines as text, for a message."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        return f"unusable lines ({counts}); the first: {'; '.join(self.examples)}"


def find_files(source: str) -> list[SourceFile]:
    """Return the files of ``source``: itself, or all files below a folder, in order of their paths.

    In a folder, it skips files with other endings and names that begin with a dot.

    Raises:
        DataError: if there is no file, or one cannot be accessed.
    """
    path = user_path(source)
    with _accessing(path):
        if path.is_dir():
            paths = sorted(_walk(path))
            if not paths:
                raise DataError(f"folder {source!r} holds no {_one_of_suffixes()} file")
        elif not path.exists():
            raise DataError(
                f"data source {source!r} does not exist; "
                f"use 'sample', or the path of a {_one_of_suffixes()} file or of a folder of them"
            )
        elif not path.name.lower().endswith(SUFFIXES):
            raise DataError(f"data source {source!r} is of an unknown kind; use a {_one_of_suffixes()} file")
        else:
            paths = [path]
        stats = [(path, path.stat()) for path in paths]
        for path, found in stats:
            if not stat.S_ISREG(found.st_mode):  # such as a pipe, where reading would wait
                raise DataError(f"{path} is not a regular file; write the data into a file")
    return [SourceFile(path, found.st_size, found.st_mtime_ns, found.st_ctime_ns) for path, found in stats]


def digest_of(files: Sequence[SourceFile]) -> str:
    """Return the SHA-256 of the contents of ``files``, one after another; reads every byte of them.

    Raises:
        DataError: if a file cannot be read, or changes meanwhile.
    """
    content = hashlib.sha256()
    for file in files:
        with _reading(file):
            _take_all(file.path, content)
    return content.hexdigest()


def read_documents(
    files: Sequence[SourceFile],
    text_field: str,
    bad_lines: BadLines,
    *,
    render: RenderConversation,
    max_bad_lines: int,
    on_progress: OnProgress = lambda done, total: None,
    content: Digest | None = None,
) -> Iterator[Document]:
    """Yield the documents of ``files`` in order, holding one line (or Parquet batch) at a time.

    Args:
        files: what ``find_files`` returned.
        text_field: the field that holds the text, in records that are not conversations.
        bad_lines: counts the lines that are left out.
        render: makes documents from conversations: ``ChatFormat.document``.
        max_bad_lines: how many lines may be left out.
        on_progress: called about once per MiB, and at the end of each file.
        content: takes every byte of the files, as ``digest_of`` does.

    Raises:
        DataError: if a file cannot be read or has changed since ``files`` were found, a conversation is malformed, or
            too many lines are unusable.
    """
    total = sum(file.num_bytes for file in files)
    before = reported = 0
    for file in files:
        for number, position, read_record in _records(file, text_field, content):
            location = f"{file.path}:{number}"
            try:
                record = _parsed(read_record)
                messages = _messages(record, text_field)
                document = (
                    Document(text_of(record, text_field), location) if messages is None else render(messages, location)
                )
            except UnusableRecordError as problem:
                bad_lines.add(location, problem, max_bad_lines)
            else:
                yield document
            if before + position >= reported + MIB:
                reported = before + position
                on_progress(reported, total)
        before += file.num_bytes
        reported = before
        on_progress(before, total)


def share_read(file: SourceFile, text_field: str, last: Document) -> float:
    """Return the share of a file, by its bytes, that ends with the document ``last``."""
    num_records = int(last.location.rpartition(":")[2])
    ends = (position for number, position, _ in _records(file, text_field) if number == num_records)
    return next(ends) / file.num_bytes


def text_of(record: object, text_field: str) -> str:
    """Return the text of a record that is not a conversation.

    Raises:
        UnusableRecordError: if it has none.
    """
    if not isinstance(record, dict):
        raise UnusableRecordError("wrong type", f"a record is an object, not {json_type(record)}")
    if text_field not in record:
        fields = ", ".join(repr(key) for key in list(record)[:MAX_EXAMPLES])
        raise UnusableRecordError(
            "missing field", f"no {text_field!r} or {CONVERSATION_FIELD!r} among {fields or 'no fields'}"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise UnusableRecordError("wrong type", f"{text_field!r} is {json_type(text)}, not a string")
    if not text.strip():
        raise UnusableRecordError("empty", f"{text_field!r} is blank")
    return checked_text(text)


def checked_text(text: str) -> str:
    """Return ``text``.

    Raises:
        UnusableRecordError: if it cannot be written as UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is not a character
        raise UnusableRecordError("invalid UTF-8", f"lone surrogate at character {error.start + 1}") from None
    return text


def json_type(value: object) -> str:
    """Return JSON's name for the type of ``value``, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _messages(record: object, text_field: str) -> object:
    """Return the messages of a record if it is a conversation, else None; they may be of any type."""
    messages = record.get(CONVERSATION_FIELD) if isinstance(record, dict) else None
    is_text = text_field == CONVERSATION_FIELD and isinstance(messages, str)
    return None if is_text else messages


def _parsed(read_record: Callable[[], object]) -> object:
    try:
        return read_record()
    except UnusableRecordError:
        raise
    except UnicodeDecodeError as error:
        raise UnusableRecordError("invalid UTF-8", f"{error.reason} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise UnusableRecordError("invalid JSON", f"{error.msg} at column {error.colno}") from None
    except (ArithmeticError, ValueError, RecursionError) as error:
        raise UnusableRecordError("invalid JSON", str(error)) from None


_Record = tuple[int, int, Callable[[], object]]
"""Line or row number from 1, bytes of the file read so far, and a function that returns the record or raises."""


def _records(file: SourceFile, text_field: str, content: Digest | None = None) -> Iterator[_Record]:
    with _reading(file):
        if file.path.name.lower().endswith(".parquet"):
            if content is not None:  # its columns are not read in order
                _take_all(file.path, content)
            yield from _parquet_records(file.path, text_field)
        else:
            yield from _json_records(file, content)


def _json_records(source: SourceFile, content: Digest | None) -> Iterator[_Record]:
    with BufferedReader(_Tapped(source.path, content), MIB) as file:
        lines = gzip.GzipFile(fileobj=file) if source.path.name.lower().endswith(".gz") else file
        for number, line in enumerate(lines, start=1):
            yield number, file.tell(), partial(_parse_line, line, number)
        if file.tell() != source.num_bytes:
            raise _changed(source, f"{source.num_bytes:,} bytes before, {file.tell():,} read")


class _Tapped(FileIO):
    """A file whose bytes also go into a digest, as they are read."""

    def __init__(self, path: Path, content: Digest | None) -> None:
        super().__init__(path)
        self._content = content

    def readinto(self, buffer: Any) -> int | None:
        num_read = super().readinto(buffer)
        if self._content is not None:
            self._content.update(memoryview(buffer)[:num_read])
        return num_read


def _take_all(path: Path, content: Digest) -> None:
    block = bytearray(MIB)
    with _Tapped(path, content) as file:
        while file.readinto(block):
            pass


def _parse_line(line: bytes, number: int) -> object:
    if not line.strip():
        raise UnusableRecordError("empty", "the line is blank")
    return json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))


def _parquet_records(path: Path, text_field: str) -> Iterator[_Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = path.stat().st_size
    try:
        with path.open("rb") as handle, pq.ParquetFile(handle) as file:
            columns = file.schema_arrow.names
            if twice := [name for name in (text_field, CONVERSATION_FIELD) if columns.count(name) > 1]:
                raise DataError(f"{path} has two columns {twice[0]!r}; keep one")
            names = [name for name in dict.fromkeys((text_field, CONVERSATION_FIELD)) if name in columns]
            if not names:
                raise DataError(
                    f"{path} has no column {text_field!r} or {CONVERSATION_FIELD!r}; "
                    f"set data.text_field to one of {', '.join(columns)}"
                )
            number = 0
            num_rows = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=256, columns=names):
                for values in zip(*(batch.column(name) for name in names), strict=True):
                    number += 1
                    yield number, size * number // num_rows, partial(_parquet_record, names, values)
    except pa.ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {' '.join(str(error).split())}") from None


def _parquet_record(names: Sequence[str], values: Sequence[Any]) -> dict[str, object]:
    return {name: value.as_py() for name, value in zip(names, values, strict=True) if value.is_valid}


@contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    """Refuse a file that is another at the end of the block than when it was found, and turn errors into one line."""
    with _accessing(file.path):
        try:
            _check_unchanged(file)
            yield
        except (DataError, EOFError, OSError, zlib.error):
            _check_unchanged(file)  # it is not damaged if somebody is writing it
            raise
        _check_unchanged(file)


def _check_unchanged(file: SourceFile) -> None:
    found = file.path.stat()
    if found.st_size != file.num_bytes:
        raise _changed(file, f"{file.num_bytes:,} bytes before, {found.st_size:,} now")
    if found.st_mtime_ns != file.mtime_ns:
        raise _changed(file, "it was written again")


def _changed(file: SourceFile, what: str) -> DataError:
    return DataError(
        f"{file.path} changed while it was read ({what}); make sure that nothing writes to it, then start again"
    )


@contextmanager
def _accessing(path: Path) -> Iterator[None]:
    """Turn an error of reading ``path`` into one line."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the gzip stream is damaged or cut short ({error}); copy or compress it again"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {error.strerror or error}") from None


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield Path(parent, name)


def _one_of_suffixes() -> str:
    return f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
