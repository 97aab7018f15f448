"""Kinds of data files, known by the ends of their names. A kind is a row of ``KINDS`` with a function that reads it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llama_core.data.bad_lines import UnusableRecordError
from llama_core.data.file_kinds.json_values import json_records
from llama_core.data.file_kinds.parquet import arrow_records, parquet_records
from llama_core.data.file_kinds.token_files import (
    datatrove_index,
    datatrove_metadata,
    datatrove_records,
    megatron_index,
    megatron_records,
)
from llama_core.data.files.raw_record import RawRecord
from llama_core.data.files.source_file import (
    COMPRESSIONS,
    MAX_BYTES_OF_RECORD,
    Digest,
    SourceFile,
    compression_of,
    opened,
    too_large,
)
from llama_core.data.formats import FieldNames
from llama_core.data.undivided import TokenLayout


@dataclass(frozen=True)
class FileKind:
    """A kind of data file."""

    suffixes: tuple[str, ...]
    """The ends of its names, before that of a compression."""
    records: Callable[[SourceFile, FieldNames, Digest | None], Iterator[RawRecord]] | None
    """Yields the records of a file, and gives its bytes to a digest; None if no file of the kind tells where they are.

    Raises ``DataError`` if the file cannot be read, or holds a record that is too large.
    """
    is_document: bool = False
    """Whether a file is one text, whatever it holds."""
    may_be_compressed: bool = True
    """Whether the file as a whole may be compressed."""
    is_mapped: bool = False
    """Whether a file is mapped into memory, and must be on this machine."""
    index: Callable[[Path], Path] | None = None
    """Returns where the index of a file is, which says where its documents are; None if it has none."""
    may_lack_index: bool = False
    """Whether a file without its index is read as ids that are divided by the tokens between documents."""
    about: Callable[[Path], Path] | None = None
    """Returns where else is something about a file, which is not read."""

    @property
    def holds_records(self) -> bool:
        """Whether a file has records: one of texts or ids may have any contents."""
        return not self.is_document and not self.is_mapped


def _json_lines(file: SourceFile, names: FieldNames, content: Digest | None) -> Iterator[RawRecord]:
    with opened(file, content) as stream:
        lines = iter(partial(stream.content.readline, MAX_BYTES_OF_RECORD + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_BYTES_OF_RECORD:
                raise too_large(f"{file.path}:{number}", "the line")
            yield RawRecord(f":{number}", stream.raw.tell(), partial(_parse_line, line, number))


def _parse_line(line: bytes, number: int) -> object:
    if not line.strip():
        raise UnusableRecordError("empty", "the line is blank")
    return json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))


def _whole_text(file: SourceFile, names: FieldNames, content: Digest | None) -> Iterator[RawRecord]:
    with opened(file, content) as stream:
        text = stream.content.read(MAX_BYTES_OF_RECORD + 1)
        if len(text) > MAX_BYTES_OF_RECORD:
            raise too_large(str(file.path), "the text")
        yield RawRecord("", file.num_bytes, partial(_parse_text, text, names))


def _parse_text(text: bytes, names: FieldNames) -> object:
    if not text.strip():
        raise UnusableRecordError("empty", "the file is blank")
    return {names.text: text.decode("utf-8-sig")}


KINDS = (
    FileKind((".jsonl", ".ndjson"), _json_lines),
    FileKind((".json",), json_records),
    FileKind((".parquet",), parquet_records, may_be_compressed=False),
    FileKind((".txt", ".md"), _whole_text, is_document=True),
    FileKind((".arrow",), arrow_records, may_be_compressed=False),
    FileKind(
        (".ds",),
        datatrove_records,
        may_be_compressed=False,
        is_mapped=True,
        index=datatrove_index,
        about=datatrove_metadata,
    ),
    FileKind(
        (".bin",), megatron_records, may_be_compressed=False, is_mapped=True, index=megatron_index, may_lack_index=True
    ),
    FileKind((".npy",), None, may_be_compressed=False, is_mapped=True),
)


def kind_of(path: Path) -> FileKind | None:
    """Return the kind of a file by its name, or None if it is of none."""
    compression = compression_of(path)
    name = path.name.lower().removesuffix(compression.suffix if compression else "")
    for kind in KINDS:
        if name.endswith(kind.suffixes) and (compression is None or kind.may_be_compressed):
            return kind
    return None


def index_of(path: Path) -> Path | None:
    """Return where the index of a file is; None if its kind has none."""
    kind = kind_of(path)
    return None if kind is None or kind.index is None else kind.index(path)


def companions(path: Path) -> tuple[Path, ...]:
    """Return where the files are that belong to a file and are no data of their own."""
    kind = kind_of(path)
    return () if kind is None else tuple(where(path) for where in (kind.index, kind.about) if where is not None)


def is_undivided(file: SourceFile) -> bool:
    """Return whether a file holds token ids, and nothing says where its documents are."""
    kind = kind_of(file.path)
    return kind is not None and (kind.records is None or (kind.may_lack_index and file.index is None))


def records_of(file: SourceFile, names: FieldNames, content: Digest | None) -> Iterator[RawRecord]:
    """Yield the records of a file that is not undivided, as ``FileKind.records`` does."""
    kind = kind_of(file.path)
    assert kind is not None, "find_files leaves out other files"
    assert kind.records is not None, "the file is undivided"
    return kind.records(file, names, content)


def identity_of(file: SourceFile, layout: TokenLayout) -> str:
    """Return what decides how the bytes of a file are read: its kind and compression, and else the type of its ids."""
    kind = kind_of(file.path)
    compression = compression_of(file.path)
    form = f"{kind.suffixes[0] if kind else ''}{compression.suffix if compression else ''}"
    return f"{form} {layout.dtype.str}" if is_undivided(file) else form


def known_kinds() -> str:
    """Return what a file of a known kind is called, for a message: ``.jsonl, ... or .bin file``."""
    plain = [suffix for kind in KINDS for suffix in kind.suffixes]
    compressible = [suffix for kind in KINDS if kind.may_be_compressed for suffix in kind.suffixes]
    compressed = " or ".join(compression.suffix for compression in COMPRESSIONS)
    return f"{', '.join(plain[:-1])} or {plain[-1]} file ({', '.join(compressible)} also with {compressed})"
