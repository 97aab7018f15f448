"""Files of token ids that other tools have made: a record is a document of ids, found by an index beside the file.

Sources: ``TokenizedFile`` in datatrove's ``pipeline/tokens/tokenizer.py``; ``indexed_dataset.py`` in Megatron-LM.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_core.data.files.raw_record import RawRecord, already_read
from llama_core.data.files.source_file import MAX_BYTES_OF_RECORD, Digest, SourceFile, take_all, too_large
from llama_core.data.files.stored_ids import StoredIds
from llama_core.data.formats import INPUT_IDS, FieldNames
from llama_core.errors import DataError

_MEGATRON = b"MMIDIDX\x00\x00"
"""What an index of Megatron begins with."""
_MEGATRON_VERSION = 1
_MEGATRON_TYPES = {1: "<u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""The types of ids by their codes."""
_MAX_INDEX_BYTES, _FREE_BYTES = 20, 4096
"""Most bytes of an index for each byte of ids: those of a sequence and a document. Some documents may be empty."""
_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the type, number of sequences, number of documents and one."""


def datatrove_index(path: Path) -> Path:
    """Return where datatrove and nanotron keep the ends of the documents of a ``.ds`` file."""
    return path.with_name(f"{path.name}.index")


def datatrove_metadata(path: Path) -> Path:
    """Return where datatrove says how many tokens a ``.ds`` file has, and of which tokenizer."""
    return path.with_name(f"{path.name}.metadata")


def megatron_index(path: Path) -> Path:
    """Return where Megatron keeps the index of a ``.bin`` file."""
    return path.with_suffix(".idx")


def datatrove_records(file: SourceFile, names: FieldNames, content: Digest | None) -> Iterator[RawRecord]:
    """Yield the documents of a ``.ds`` file. Its ids have 2 or 4 bytes, which follows from its size.

    Raises:
        DataError: if the index does not fit the file.
    """
    index = _index(file)
    ends = _array(index, "<u8").astype(np.int64)
    num_tokens = int(ends[-1]) if len(ends) else 0
    itemsize = file.num_bytes / max(1, num_tokens)
    if itemsize not in {2, 4} or not _ascend(ends, num_tokens):
        raise _misfit(file, index, f"its last document ends after token {num_tokens:,}, of 2 or 4 bytes each")
    begins = np.concatenate([[0], ends[:-1]])
    yield from _documents(file, names, content, f"<u{itemsize:.0f}", begins, ends)


def megatron_records(file: SourceFile, names: FieldNames, content: Digest | None) -> Iterator[RawRecord]:
    """Yield the documents of a ``.bin`` file, as the ``.idx`` file beside it divides it.

    Raises:
        DataError: if the index is not Megatron's, or does not fit the file.
    """
    index = _index(file)
    with index.open() as opened:
        header = opened.read(_HEADER.size)
    magic, version, code, num_sequences, num_bounds = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    if (magic, version) != (_MEGATRON, _MEGATRON_VERSION) or code not in _MEGATRON_TYPES:
        raise DataError(f"{file.path}: {index.path.name} is no index of Megatron's (MMIDIDX, version 1, integers)")
    dtype = np.dtype(_MEGATRON_TYPES[code])
    stored = _array(index, "<u1")[_HEADER.size :]
    if len(stored) != 12 * num_sequences + 8 * num_bounds:
        raise DataError(
            f"{file.path}: {index.path.name} has other bytes than its {num_sequences:,} sequences take; copy it again"
        )
    lengths, offsets, bounds = np.split(stored, [4 * num_sequences, 12 * num_sequences])
    ends = (offsets.view("<i8") // dtype.itemsize) + lengths.view("<i4")
    begins = offsets.view("<i8") // dtype.itemsize
    sequences = bounds.view("<i8")
    if not _ascend(sequences, num_sequences):
        raise DataError(f"{file.path}: the documents of {index.path.name} do not follow each other; copy it again")
    filled = np.flatnonzero(np.diff(sequences))
    begins = begins[sequences[filled]]
    ends = ends[sequences[filled + 1] - 1]
    if len(ends) and (begins.min() < 0 or (ends < begins).any() or ends.max() > file.num_bytes // dtype.itemsize):
        raise _misfit(file, index, f"a document ends after token {int(ends.max()):,}, of {dtype.itemsize} bytes each")
    if (begins[1:] < ends[:-1]).any():  # a small file would become as many tokens as its index likes
        raise DataError(f"{file.path}: documents of {index.path.name} overlap; copy it again")
    yield from _documents(file, names, content, dtype.str, begins, ends)


def _ascend(numbers: npt.NDArray[np.int64], most: int) -> bool:
    """Return whether numbers begin at 0 or later, never fall, and end at ``most`` or earlier."""
    if not len(numbers):
        return True
    return bool((numbers >= 0).all() and numbers[-1] <= most and (np.diff(numbers) >= 0).all())


def _documents(  # noqa: PLR0917 - what is read, and where in it
    file: SourceFile,
    names: FieldNames,
    content: Digest | None,
    dtype: str,
    begins: npt.NDArray[Any],
    ends: npt.NDArray[Any],
) -> Iterator[RawRecord]:
    if content is not None:
        take_all(file, content)
    field = names[INPUT_IDS]
    longest = int((ends - begins).max(initial=0)) * np.dtype(dtype).itemsize
    if longest > MAX_BYTES_OF_RECORD:
        raise too_large(str(file.path), "a document")
    with StoredIds(file, np.dtype(dtype)) as tokens:
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True), start=1):
            position = file.num_bytes * number // len(ends)
            yield RawRecord(f":{number}", position, already_read({field: tokens[begin:end]}))


def _index(file: SourceFile) -> SourceFile:
    assert file.index is not None, "find_files leaves out a file without the index of its kind"
    if file.index.num_bytes > _MAX_INDEX_BYTES * (file.num_bytes + _FREE_BYTES):
        raise DataError(
            f"{file.index.path} has {file.index.num_bytes:,} bytes, more than the documents of {file.path.name} take; "
            "copy both again"
        )
    return file.index


def _array(file: SourceFile, dtype: str) -> npt.NDArray[Any]:
    with StoredIds(file, np.dtype(dtype)) as numbers:
        return numbers[:]


def _misfit(file: SourceFile, index: SourceFile, what: str) -> DataError:
    return DataError(f"{file.path} has {file.num_bytes:,} bytes, but by {index.path.name} {what}; copy both again")
