"""Write a shard: tokenise documents in the order in which they come, then put them into that of their hashes."""

import hashlib
import os
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from io import BufferedWriter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_core.data.bad_lines import UnusableRecordError
from llama_core.data.chat.chat_format import ConversationCounts, encode
from llama_core.data.files.corpus import Document, Tally
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
from llama_core.data.tokenizers.tokenizer import Tokenizer, token_dtype
from llama_core.records.files import write_json
from llama_core.units import MIB

_ARRIVING = ".arriving"
"""Ends the names of files whose documents are not in order yet."""
_COPIED_TOKENS = 2**20
"""Tokens that are put in order at a time, with an index of 8 bytes for each."""


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
    num_special = len(tokenizer.before) + len(tokenizer.after)
    offsets = array("q", [0])
    hashes = array("Q")
    is_conversation = array("B")
    seconds = array("q")
    conversations = ConversationCounts()
    tokens_path = folder / (TOKENS + _ARRIVING)
    ignored_path = folder / (IGNORED + _ARRIVING)
    with tokens_path.open("wb") as tokens_file, ignored_path.open("wb") as ignored_file:
        for batch in _batches(documents):
            encoded = iter(encode(tokenizer, [part for document in batch for part in document.parts]))
            for document in batch:
                parts = [next(encoded) for _ in document.parts]
                if any(_is_empty(document, *part, num_special) for part in parts):
                    problem = UnusableRecordError("empty", "the tokenizer gives it no token")
                    tally.bad_lines.add(document.location, problem, max_bad_lines, len(hashes))
                    continue
                ids, ignored = _one_after_another(parts)
                before_second = document.tokens_before_second(len(parts[0][0]))
                if before_second is not None:
                    seconds.append(before_second)
                if ignored is not None:
                    _write_at(ignored_file, offsets[-1], ignored)
                if document.turns is not None:
                    conversations += ConversationCounts.of(document.turns)
                tokens_file.write(ids.astype(dtype, copy=False).tobytes())
                offsets.append(offsets[-1] + len(ids))
                hashes.append(_hash(document))
                is_conversation.append(ignored is not None)
        has_masks = any(is_conversation)
        ignored_file.truncate(offsets[-1] if has_masks else 0)
    text_hashes = np.asarray(hashes, "<u8")
    order = np.argsort(text_hashes, kind="stable")
    begins = np.asarray(offsets, "<i8")
    lengths = np.diff(begins)[order]
    ordered_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
    in_order = _InOrder(folder)
    in_order.write(TEXT_HASHES, [text_hashes[order]])
    in_order.write(OFFSETS, [ordered_offsets])
    in_order.gather(TOKENS, dtype, begins[order], lengths)
    if has_masks:
        in_order.write(IS_CONVERSATION, [np.asarray(is_conversation, "u1")[order]])
        in_order.gather(IGNORED, np.dtype("u1"), begins[order], lengths)
    else:
        ignored_path.unlink()
    if seconds:
        in_order.write(SECONDS, [np.asarray(seconds, "<i8")[order]])
    record = ShardRecord(
        num_documents=len(hashes),
        num_tokens=offsets[-1],
        has_conversations=has_masks,
        digest=in_order.digest.hexdigest()[:24],
        has_pairs=bool(seconds),
        tokenizer=tokenizer.name,
        files=[str(file.path) for file in files],
        bad_lines=tally.bad_lines,
        formats=tally.formats,
        conversations=conversations,
    )
    write_json(folder / RECORD, record)
    return record


def _write_at(file: BufferedWriter, place: int, values: npt.NDArray[np.bool_]) -> None:
    """Write bytes past the end of a file, which leaves zeros for the texts in between."""
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
        """Write the documents that have these begins and lengths where they arrived, and remove that file."""
        arrived = self._folder / (name + _ARRIVING)
        with closing(_gathered(arrived, dtype, begins, lengths)) as parts:  # an open file would keep a full disk full
            self.write(name, parts)
        arrived.unlink()


def _gathered(
    arrived: Path, dtype: np.dtype[Any], begins: npt.NDArray[Any], lengths: npt.NDArray[Any]
) -> Generator[npt.NDArray[Any]]:
    """Yield the documents of ``arrived`` that have these begins and lengths, some of them at a time."""
    if not len(begins):
        return
    source = np.memmap(arrived, dtype, mode="r")
    ends = np.cumsum(lengths)
    bounds = np.searchsorted(ends, np.arange(0, ends[-1], _COPIED_TOKENS), side="left")
    for first, last in pairwise([*np.unique(bounds).tolist(), len(ends)]):
        yield source[_joined(begins[first:last], lengths[first:last])]


def _joined(begins: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the places of spans, one span after another."""
    before = np.cumsum(lengths) - lengths
    places: npt.NDArray[np.int64] = np.arange(lengths.sum()) + np.repeat(begins - before, lengths)
    return places


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into batches of about 2**20 characters, so that a tokenizer can use all cores."""
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


def _one_after_another(
    parts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]],
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    """Return the tokens of a document and which of them are ignored; those of a pair are one after another."""
    if len(parts) == 1:
        return parts[0]
    masks = [ignored for _, ignored in parts if ignored is not None]
    return np.concatenate([ids for ids, _ in parts]), np.concatenate(masks)


def _is_empty(
    document: Document, ids: npt.NDArray[Any], ignored: npt.NDArray[np.bool_] | None, num_special: int
) -> bool:
    """Return whether no token of a document counts in the loss, but for those that begin and end every text."""
    if document.ids is not None:
        return len(ids) < 2
    return len(ids) == num_special if ignored is None else bool(ignored[1:].all())


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
