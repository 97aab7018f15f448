"""Files of token ids without a table of documents: these are divided by the tokens that end and begin them.

OLMo's ``.npy`` are bare ids, and so are nanoGPT's ``.bin``. A header says how wide the ids are: that of NumPy, or that
of llm.c, whose documents begin with the token that ends those of others.

Sources: ``data/numpy_dataset.py`` in OLMo-core; ``data/openwebtext/prepare.py`` in nanoGPT; ``dev/data/data_common.py``
in llm.c.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llama_core.config.settings import TokenDtype
from llama_core.data.files.raw_record import RawRecord, already_read
from llama_core.data.files.source_file import MAX_BYTES_OF_RECORD, Digest, SourceFile, take_all
from llama_core.data.files.stored_ids import StoredIds
from llama_core.data.formats import INPUT_IDS, FieldNames
from llama_core.data.tokenizer import Tokenizer, token_dtype
from llama_core.errors import DataError
from llama_core.records.files import open_file
from llama_core.units import format_bytes

_NUMPY = b"\x93NUMPY"
_OF_NUMPY = (ArithmeticError, MemoryError, RecursionError, SyntaxError, TokenError, TypeError, ValueError)
"""What NumPy raises for a header that it cannot read: it parses it like code."""
_LLMC_HEADER = 256
"""Numbers of 4 bytes in a header of llm.c: magic, version, number of tokens; the others are 0."""
_LLMC_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""The types of ids by magic and version, for the tokenizers of GPT-2 and of Llama 3."""
_SEARCHED_TOKENS = 2**20
"""Tokens that are searched for the ends of documents at a time."""
_TELLING_TOKENS = 64
"""So many ids, of which every second is 0, are wider than they were taken for."""


@dataclass(frozen=True)
class TokenLayout:
    """How files without a table of documents hold token ids."""

    tokenizer: Tokenizer
    """Has made the ids."""
    given: TokenDtype | None = None
    """``data.token_dtype``."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of ids that no header describes: as given, or the smallest one for the vocabulary."""
        return token_dtype(self.tokenizer) if self.given is None else np.dtype(self.given).newbyteorder("<")


class _Ids(NamedTuple):
    tokens: StoredIds
    """All ids of a file."""
    is_typed: bool
    """Whether a header gives their type."""


def undivided_records(
    file: SourceFile, names: FieldNames, content: Digest | None, layout: TokenLayout
) -> Iterator[RawRecord]:
    """Yield the documents of a file, each with the token that ends it; those without any other token are dropped.

    Raises:
        DataError: if the file does not hold whole ids of the tokenizer, or a document is too large.
    """
    if content is not None:
        take_all(file, content)
    ids = _ids(file, layout)
    field = names[INPUT_IDS]
    with ids.tokens as tokens:
        for number, (begin, end) in enumerate(_documents(file, ids, layout), start=1):
            position = file.num_bytes * end // len(tokens)
            yield RawRecord(f":{number}", position, already_read({field: tokens[begin:end]}))


def has_llmc_header(path: Path) -> bool:
    """Return whether a file begins like those of llm.c."""
    with open_file(path) as opened:
        return _llmc_header(opened) is not None


def _llmc_header(opened: IO[bytes]) -> tuple[np.dtype[Any], int] | None:
    """Return the type and the number of the ids of a file of llm.c; None if it is none."""
    header = np.frombuffer(opened.read(4 * _LLMC_HEADER).ljust(4 * _LLMC_HEADER, b"\0"), "<i4")
    magic, version, num_tokens = header[:3].tolist()
    dtype = _LLMC_TYPES.get((magic, version))
    return None if dtype is None or header[3:].any() else (np.dtype(dtype), num_tokens)


def _ids(file: SourceFile, layout: TokenLayout) -> _Ids:
    path = file.path
    with file.open() as opened:
        if opened.read(len(_NUMPY)) == _NUMPY:
            opened.seek(0)
            return _Ids(_numpy_ids(file, opened), is_typed=True)
        opened.seek(0)
        llmc = _llmc_header(opened)
    if llmc is not None:
        of_header, num_tokens = llmc
        expected = 4 * _LLMC_HEADER + num_tokens * of_header.itemsize
        if expected != file.num_bytes:
            raise DataError(
                f"{path} has {file.num_bytes:,} bytes, but {expected:,} by its header of llm.c, which gives "
                f"{num_tokens:,} tokens; copy it again"
            )
        return _Ids(StoredIds(file, of_header, 4 * _LLMC_HEADER), is_typed=True)
    dtype = layout.dtype
    if file.num_bytes % dtype.itemsize:
        raise DataError(
            f"{path} has {file.num_bytes:,} bytes, which are no whole numbers of {dtype.itemsize}; copy it again, or "
            f"set data.token_dtype={_other(dtype)} if it holds such ids"
        )
    return _Ids(StoredIds(file, dtype), is_typed=False)


def _numpy_ids(file: SourceFile, opened: IO[bytes]) -> StoredIds:
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        version = np.lib.format.read_magic(opened)
        shape, _, dtype = headers[version](opened)
    except (KeyError, *_OF_NUMPY):  # whose words would have the file trusted, to run code in it
        raise DataError(
            f"{file.path} is not a readable array of NumPy: its header is damaged, or of objects; copy it again, or "
            "write a row of integers with numpy.save"
        ) from None
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(
            f"{file.path} is an array of {dtype} with {len(shape)} dimensions, not a row of token ids; "
            "write integers with one dimension"
        )
    begin, (number,) = opened.tell(), shape
    if number < 0 or begin + number * dtype.itemsize > file.num_bytes:
        raise DataError(
            f"{file.path} has {file.num_bytes:,} bytes, but {number:,} ids by its header of NumPy; copy it again"
        )
    return StoredIds(file, dtype, begin, number)


def _documents(file: SourceFile, ids: _Ids, layout: TokenLayout) -> Iterator[tuple[int, int]]:
    """Yield the first token of each document and the one after its last."""
    tokens = ids.tokens
    tokenizer = layout.tokenizer
    begin = 0
    for first in range(0, len(tokens), _SEARCHED_TOKENS):
        piece = tokens[first : first + _SEARCHED_TOKENS]
        _check_known(file, ids, first, piece, layout)
        cuts = np.flatnonzero(piece == tokenizer.eos_id) + 1
        if tokenizer.bos_id is not None and tokenizer.bos_id != tokenizer.eos_id:
            cuts = np.union1d(cuts, np.flatnonzero(piece == tokenizer.bos_id))
        for end in (first + cuts).tolist():
            if _says_something(tokens[begin:end], tokenizer):
                yield begin, end
            begin = end
        unended = (first + len(piece) - begin) * tokens.dtype.itemsize
        if unended > MAX_BYTES_OF_RECORD:
            raise DataError(
                f"{file.path}: no end of text (token {tokenizer.eos_id} of tokenizer {tokenizer.name!r}) in the "
                f"{format_bytes(MAX_BYTES_OF_RECORD)} after token {begin:,}; name the tokenizer that made these ids "
                "as data.tokenizer"
            )
    if _says_something(tokens[begin:], tokenizer):
        yield begin, len(tokens)


def _says_something(document: npt.NDArray[Any], tokenizer: Tokenizer) -> bool:
    """Return whether a document has a token to learn, other than those that begin and end every text."""
    if len(document) > 2:
        return True
    return len(document) == 2 and document.tolist() != [tokenizer.bos_id, tokenizer.eos_id]


def _check_known(file: SourceFile, ids: _Ids, first: int, piece: npt.NDArray[Any], layout: TokenLayout) -> None:
    """Refuse ids that the tokenizer does not have, and wide ids that were taken for pairs of narrow ones.

    Args:
        file: holds the ids.
        ids: all of them.
        first: the place of the first one to check.
        piece: those to check.
        layout: how they were read.
    """
    tokenizer = layout.tokenizer
    unknown = np.flatnonzero((piece < 0) | (piece >= tokenizer.vocab_size))
    if len(unknown):
        place = int(unknown[0])
        told = f"{file.path}: token {first + place:,}, {piece[place]}, is none of the {tokenizer.vocab_size:,} of "
        told += f"tokenizer {tokenizer.name!r}; name the one that made these ids as data.tokenizer"
        if not ids.is_typed:
            told += (
                f", or set data.token_dtype={_other(piece.dtype)}, if the file holds that and not {piece.dtype.name}"
            )
        raise DataError(told)
    are_halves = len(piece) >= _TELLING_TOKENS and not piece[1::2].any()
    if are_halves and not ids.is_typed and piece.dtype.itemsize == 2:
        raise DataError(
            f"{file.path}: every second of the {len(piece):,} ids from {first:,} on is 0, so they seem to be uint32 "
            "and not uint16; set data.token_dtype=uint32"
        )


def _other(dtype: np.dtype[Any]) -> TokenDtype:
    return "uint32" if dtype.itemsize == 2 else "uint16"
