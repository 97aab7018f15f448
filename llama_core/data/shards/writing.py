"""Write a shard: tokenise documents as they come, then put them into the order of their hashes.

::

    documents --> batches --> tokens.bin.arriving  --+--> sorted by hash --> tokens.bin
                              ignored.bin.arriving --+                       ignored.bin
                              numbers in memory    --+                       offsets.bin, ...
                                                                             shard.json

A hash is known only when its text is, so tokens go through the disk twice. Memory holds one batch,
a few numbers of each document, and the index of the tokens that are being put in order.
"""

import hashlib
import os
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from io import BufferedWriter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_core.data.bad_lines import UnusableRecordError
from llama_core.data.chat import ConversationCounts, encode
from llama_core.data.corpus import Document, Tally
from llama_core.data.files.source_file import SourceFile
from llama_core.data.shards.shard import (
    IGNORED,
    IS_CONVERSATION,
    OFFSETS,
    RECORD,
    SECONDS,
    TEXT_HASHES,
    TOKENS,
    ShardRecord,
)
from llama_core.data.tokenizer import Tokenizer, token_dtype
from llama_core.records.files import write_json
from llama_core.units import MIB

_ARRIVING = ".arriving"
"""Ends the names of files whose documents are not in order yet."""
_COPIED_TOKENS = 2**20
"""Tokens that are put in order at a time, with an index of 8 bytes for each."""
_EncodedText = tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]
"""The tokens of a text, and a mask of those that do not count in the loss; None if all count."""


def write_shard(
    folder: Path,
    files: Sequence[SourceFile],
    documents: Iterator[Document],
    tokenizer: Tokenizer,
    tally: Tally,
    *,
    max_bad_lines: int,
) -> ShardRecord:
    """Tokenise ``documents`` into the files of a shard; a shard may be empty.

    Args:
        folder: where to write.
        files: where the documents come from.
        documents: the documents, in any order.
        tokenizer: makes the ids.
        tally: counts the documents without tokens.
        max_bad_lines: how many records may be left out.

    Raises:
        DataError: of the documents, or if too many are unusable.
    """
    dtype = token_dtype(tokenizer)
    arrived = _tokenise(folder, documents, tokenizer, dtype, tally, max_bad_lines)
    digest = _put_in_order(folder, arrived, dtype)
    record = ShardRecord(
        num_documents=len(arrived.hashes),
        num_tokens=arrived.num_tokens,
        has_conversations=arrived.has_masks,
        digest=digest,
        has_pairs=arrived.has_pairs,
        tokenizer=tokenizer.name,
        files=[str(file.path) for file in files],
        bad_lines=tally.bad_lines,
        formats=tally.formats,
        conversations=arrived.conversations,
    )
    write_json(folder / RECORD, record)
    return record


@dataclass
class _Arrived:
    """What memory holds of the documents, in the order in which they come.

    Arrays of machine numbers, because a list would take some 40 bytes for each.
    """

    offsets: "array[int]" = field(default_factory=lambda: array("q", [0]))
    """Where each document begins, and the end of the last."""
    hashes: "array[int]" = field(default_factory=lambda: array("Q"))
    is_conversation: "array[int]" = field(default_factory=lambda: array("B"))
    """Which documents have a mask of tokens that do not count."""
    seconds: "array[int]" = field(default_factory=lambda: array("q"))
    """Tokens before each second answer; empty if the documents are no answers."""
    conversations: ConversationCounts = field(default_factory=ConversationCounts)
    has_masks: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self.offsets[-1]

    @property
    def has_pairs(self) -> bool:
        """Whether the documents are pairs of answers, or the halves of some."""
        return bool(self.seconds)

    def add(self, document: Document, *, num_tokens: int, num_first: int, has_mask: bool) -> None:
        """Append a document.

        Args:
            document: the document.
            num_tokens: how many tokens it has.
            num_first: how many of them are of its first part.
            has_mask: whether some may not count in the loss.
        """
        before_second = document.tokens_before_second(num_first)
        if before_second is not None:
            self.seconds.append(before_second)
        if document.turns is not None:
            self.conversations += ConversationCounts.of(document.turns)
        self.offsets.append(self.num_tokens + num_tokens)
        self.hashes.append(_hash(document))
        self.is_conversation.append(has_mask)
        self.has_masks |= has_mask


def _tokenise(  # noqa: PLR0917 - those of write_shard
    folder: Path,
    documents: Iterator[Document],
    tokenizer: Tokenizer,
    dtype: np.dtype[Any],
    tally: Tally,
    max_bad_lines: int,
) -> _Arrived:
    """Write tokens and masks as the documents come, and return what memory holds of these.

    The arguments are those of ``write_shard``, and the dtype of the tokens.
    """
    arrived = _Arrived()
    num_special = len(tokenizer.before) + len(tokenizer.after)
    tokens_path = folder / (TOKENS + _ARRIVING)
    ignored_path = folder / (IGNORED + _ARRIVING)
    with tokens_path.open("wb") as tokens_file, ignored_path.open("wb") as ignored_file:
        for document, parts in _encoded(documents, tokenizer):
            if any(_is_empty(document, part, num_special) for part in parts):
                problem = UnusableRecordError("empty", "the tokenizer gives it no token")
                tally.bad_lines.add(document.location, problem, max_bad_lines, len(arrived.hashes))
                continue
            ids, ignored = _one_after_another(parts)
            if ignored is not None:
                _write_at(ignored_file, arrived.num_tokens, ignored)
            tokens_file.write(ids.astype(dtype, copy=False).tobytes())
            num_first = len(parts[0][0])
            has_mask = ignored is not None
            arrived.add(document, num_tokens=len(ids), num_first=num_first, has_mask=has_mask)
        # the texts after the last mask have written none
        ignored_file.truncate(arrived.num_tokens if arrived.has_masks else 0)
    return arrived


def _put_in_order(folder: Path, arrived: _Arrived, dtype: np.dtype[Any]) -> str:
    """Write the files of a shard in the order of the documents' hashes, and return their digest.

    The digest is over all files in the order in which they are written here: keep that order.
    """
    text_hashes = np.asarray(arrived.hashes, "<u8")
    # stable, so that the order of documents with equal hashes depends on nothing but their arrival
    order = np.argsort(text_hashes, kind="stable")
    begins = np.asarray(arrived.offsets, "<i8")
    lengths = np.diff(begins)[order]
    ordered_begins = begins[order]
    ordered_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")

    in_order = _InOrder(folder)
    in_order.write(TEXT_HASHES, [text_hashes[order]])
    in_order.write(OFFSETS, [ordered_offsets])
    in_order.gather(TOKENS, dtype, ordered_begins, lengths)
    if arrived.has_masks:
        in_order.write(IS_CONVERSATION, [np.asarray(arrived.is_conversation, "u1")[order]])
        in_order.gather(IGNORED, np.dtype("u1"), ordered_begins, lengths)
    else:
        (folder / (IGNORED + _ARRIVING)).unlink()
    if arrived.has_pairs:
        in_order.write(SECONDS, [np.asarray(arrived.seconds, "<i8")[order]])
    return in_order.digest.hexdigest()[:24]


def _write_at(file: BufferedWriter, place: int, values: npt.NDArray[np.bool_]) -> None:
    """Write bytes past the end of a file, which leaves zeros for the texts in between.

    All tokens of a text count, so a corpus of texts writes nothing, and the file stays empty.
    """
    file.seek(place)
    file.write(values.tobytes())


class _InOrder:
    """Writes the files of a shard, and takes their digest meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.digest = hashlib.sha256()

    def write(self, name: str, parts: Iterable[npt.NDArray[Any]]) -> None:
        with (self._folder / name).open("wb") as file:
            for part in parts:
                content = part.tobytes()
                self.digest.update(content)
                file.write(content)
            _sync(file)

    def gather(self, name: str, dtype: np.dtype[Any], begins: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Write documents, given where they arrived, in this order; remove the file of those."""
        arrived = self._folder / (name + _ARRIVING)
        # closed before the removal even after an error: an open file would keep a full disk full
        with closing(_gathered(arrived, dtype, begins, lengths)) as parts:
            self.write(name, parts)
        arrived.unlink()


def _gathered(
    arrived: Path, dtype: np.dtype[Any], begins: npt.NDArray[Any], lengths: npt.NDArray[Any]
) -> Generator[npt.NDArray[Any]]:
    """Yield the documents of ``arrived`` with these begins and lengths, some of them at a time."""
    if not len(begins):  # an empty file cannot be mapped
        return
    source = np.memmap(arrived, dtype, mode="r")
    ends = np.cumsum(lengths)
    # documents at which another ``_COPIED_TOKENS`` begin; a longer document is copied whole
    bounds = np.searchsorted(ends, np.arange(0, ends[-1], _COPIED_TOKENS), side="left")
    for first, last in pairwise([*np.unique(bounds).tolist(), len(ends)]):
        yield source[_joined(begins[first:last], lengths[first:last])]


def _joined(begins: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the places of spans, one span after another."""
    before = np.cumsum(lengths) - lengths
    # one running number over all spans, moved for each from where it is to where the span begins
    places: npt.NDArray[np.int64] = np.arange(lengths.sum()) + np.repeat(begins - before, lengths)
    return places


def _encoded(documents: Iterator[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, Sequence[_EncodedText]]]:
    """Yield each document with its tokens and mask, or with those of both parts of a pair."""
    for batch in _batches(documents):
        parts: list[Document] = []
        for document in batch:
            parts += document.parts
        encoded = iter(encode(tokenizer, parts))
        for document in batch:
            yield document, [next(encoded) for _ in document.parts]


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into some 2**20 characters each, so that a tokenizer can use all cores."""
    batch: list[Document] = []
    length = 0
    for document in documents:
        batch.append(document)
        length += document.size
        if length >= MIB:
            yield batch
            batch = []
            length = 0
    if batch:
        yield batch


def _one_after_another(parts: Sequence[_EncodedText]) -> _EncodedText:
    """Return the tokens and the mask of a document; those of a pair are one after another."""
    if len(parts) == 1:
        return parts[0]
    masks = [ignored for _, ignored in parts if ignored is not None]
    return np.concatenate([ids for ids, _ in parts]), np.concatenate(masks)


def _is_empty(document: Document, encoded: _EncodedText, num_special: int) -> bool:
    """Return whether no token counts in the loss, but for those that begin and end every text."""
    ids, ignored = encoded
    if document.ids is not None:
        return len(ids) < 2
    if ignored is None:
        return len(ids) == num_special
    return bool(ignored[1:].all())  # the first token is nobody's target


def _hash(document: Document) -> int:
    """Return a hash of the text, of the messages or, if there is neither, of the ids."""
    if document.ids is not None:
        identity = document.ids.astype("<i8").tobytes()
    else:
        identity = (document.text if document.turns is None else document.turns.messages).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def _sync(file: BufferedWriter) -> None:
    """Flush a file to the disk, so that a renamed directory is complete even after a power cut."""
    file.flush()
    os.fsync(file.fileno())
