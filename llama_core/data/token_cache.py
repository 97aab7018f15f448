"""The token cache: tokenise a corpus once, into memory-mapped files that later runs open without delay.

A cache is a directory, named after a digest of the source files, the field, the tokenizer, the cache format and, if the
source holds conversations, how they become text. It is written under a temporary name and renamed when complete, so a
directory with the final name is a complete cache.
"""

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from errno import EEXIST, ENOTEMPTY
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_core.data.chat import ChatFormat, ConversationCounts, encode
from llama_core.data.corpus import BadLines, Document, OnProgress, SourceFile, UnusableRecordError, read_documents
from llama_core.data.tokenizer import Tokenizer
from llama_core.errors import DataError, RunDirectoryError
from llama_core.records.files import read_typed, write_json
from llama_core.units import MIB

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
ABANDONED_AFTER_SECONDS = 24 * 3600
_OFFSET_DTYPE, _HASH_DTYPE = "<i8", "<u8"


@dataclass(frozen=True)
class _Record:
    """The contents of ``cache.json``."""

    num_documents: int
    num_tokens: int
    tokenizer: str
    bad_lines: dict[str, int]
    bad_line_examples: list[str]
    conversations: ConversationCounts | None


@dataclass(frozen=True, eq=False)
class TokenCache:
    """A tokenised corpus."""

    tokens: npt.NDArray[Any]
    """Ids of all documents, one document after another, uint16 or uint32 [tokens]: texts between BOS and EOS,
    conversations as their template renders them."""
    offsets: npt.NDArray[Any]
    """Where each document begins, and the end of the last, int64 [documents + 1]."""
    text_hashes: npt.NDArray[Any]
    """A hash of each document's text or messages, uint64 [documents]; it decides what is held out."""
    fingerprint: str
    """Identifies the tokenizer and, if there are conversations, the format that made the ids."""
    eos_id: int
    """The tokenizer's end-of-text id."""
    bad_lines: BadLines
    """The lines that were left out."""
    path: Path
    """The cache's directory."""
    ignored: npt.NDArray[np.bool_] | None = None
    """Tokens that do not count in the loss, a mask [tokens]; None if all documents are texts, where all tokens do."""
    is_conversation: npt.NDArray[np.bool_] | None = None
    """Which documents are conversations, a mask [documents]; None if there are none."""
    conversations: ConversationCounts = field(default_factory=ConversationCounts)
    """Counts of the conversations."""

    @property
    def num_documents(self) -> int:
        """Documents in all."""
        return len(self.text_hashes)


def cached_tokens(
    files: Sequence[SourceFile],
    text_field: str,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    chat: ChatFormat,
    max_bad_lines: int,
    on_progress: OnProgress = lambda done, total: None,
) -> TokenCache:
    """Return the token cache of ``files``, building it in ``directory`` if it is not there.

    Processes that build the same cache at once do the work twice and share the first one's result.

    Raises:
        DataError: if the corpus cannot be read, is empty, or has more than ``max_bad_lines`` unusable lines.
        OSError: if the cache cannot be written; nothing of it is left then.
    """
    # the format matters only if the source holds conversations, and only reading it shows that
    made_by = {False: tokenizer.fingerprint, True: f"{tokenizer.fingerprint} {chat.fingerprint}"}
    entries = {key: directory / f"tokens-{_key(files, text_field, made_by[key])}" for key in made_by}

    def opened() -> TokenCache | None:
        caches = (_open(entries[key], tokenizer, made_by[key]) for key in entries)
        return next((cache for cache in caches if cache is not None), None)

    cache = opened()
    if cache is None:
        has_conversations = False

        def render(messages: object, location: str) -> Document:
            nonlocal has_conversations
            has_conversations = True
            return chat.document(messages, location)

        with _building(directory) as building:
            bad_lines = BadLines()
            documents = read_documents(
                files,
                text_field,
                bad_lines,
                render=render,
                max_bad_lines=max_bad_lines,
                on_progress=on_progress,
            )
            _write(building, documents, tokenizer, bad_lines, max_bad_lines)
            entry = entries[has_conversations]
            _publish(building, entry)
        cache = opened()
        if cache is None:
            raise DataError(f"token cache {str(entry)!r} was damaged while it was opened; start again")
    cache.bad_lines.check(max_bad_lines)
    return cache


def _key(files: Sequence[SourceFile], text_field: str, made_by: str) -> str:
    sources = [(str(file.path.resolve()), file.num_bytes, file.mtime_ns) for file in files]
    identity = json.dumps([FORMAT_VERSION, text_field, made_by, sources])
    return hashlib.sha256(identity.encode()).hexdigest()[:24]


def _token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _open(entry: Path, tokenizer: Tokenizer, made_by: str) -> TokenCache | None:
    """Return the cache in ``entry``; None if there is none, or after removing one with missing or short files."""
    if not entry.exists():
        if entry.is_symlink():
            entry.unlink()
        return None
    try:
        record = read_typed(entry / "cache.json", _Record)
        num_documents, conversations = record.num_documents, record.conversations
        masks: dict[str, Any] = {}
        if conversations is not None:
            masks = {
                "ignored": _map(entry / "ignored.bin", np.dtype(np.bool_), record.num_tokens),
                "is_conversation": _map(entry / "is_conversation.bin", np.dtype(np.bool_), num_documents),
                "conversations": conversations,
            }
        offsets = _map(entry / "offsets.bin", np.dtype(_OFFSET_DTYPE), num_documents + 1)
        if offsets[0] != 0 or offsets[-1] != record.num_tokens or (np.diff(offsets) < 0).any():
            raise ValueError("offsets.bin does not hold ascending offsets")
        return TokenCache(
            tokens=_map(entry / "tokens.bin", _token_dtype(tokenizer), record.num_tokens),
            offsets=offsets,
            text_hashes=_map(entry / "text_hashes.bin", np.dtype(_HASH_DTYPE), num_documents),
            fingerprint=made_by,
            eos_id=tokenizer.eos_id,
            bad_lines=BadLines(record.bad_lines, record.bad_line_examples),
            path=entry,
            **masks,
        )
    except (RunDirectoryError, OSError, ValueError) as error:
        logger.warning("token cache %s is damaged (%s); building it again", entry, error)
        if entry.is_symlink() or entry.is_file():
            entry.unlink()
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _map(path: Path, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    mapped = np.asarray(np.memmap(path, dtype, mode="r"))
    if len(mapped) != length:
        raise ValueError(f"{path.name} holds {len(mapped)} entries instead of {length}")
    return mapped


def _write(
    folder: Path, documents: Iterator[Document], tokenizer: Tokenizer, bad_lines: BadLines, max_bad_lines: int
) -> None:
    """Tokenise ``documents`` into ``folder``."""
    dtype = _token_dtype(tokenizer)
    num_special = 1 if tokenizer.bos_id is None else 2
    offsets, hashes, is_conversation = array("q", [0]), array("Q"), array("B")
    conversations = ConversationCounts()
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "ignored.bin").open("wb") as ignored_file:
        for batch in _batches(documents):
            for document, (ids, ignored) in zip(batch, encode(tokenizer, batch), strict=True):
                if len(ids) == num_special if ignored is None else ignored[1:].all():
                    problem = UnusableRecordError("empty", "the tokenizer gives it no token")
                    bad_lines.add(document.location, problem, max_bad_lines)
                    continue
                if document.turns is not None and ignored is not None:
                    ignored_file.seek(offsets[-1])  # past the texts before it, which leaves zeros
                    ignored_file.write(ignored.tobytes())
                    conversations += ConversationCounts.of(document.turns)
                tokens_file.write(ids.astype(dtype, copy=False).tobytes())
                offsets.append(offsets[-1] + len(ids))
                hashes.append(_text_hash(document.text if document.turns is None else document.turns.messages))
                is_conversation.append(document.turns is not None)
        ignored_file.truncate(offsets[-1] if conversations.num_conversations else 0)
        _sync(tokens_file)
        _sync(ignored_file)
    if not hashes:
        left_out = f": {bad_lines}" if bad_lines.total else ""
        raise DataError(f"no document to train on{left_out}")
    for name, values, stored_as in (
        ("offsets.bin", offsets, _OFFSET_DTYPE),
        ("text_hashes.bin", hashes, _HASH_DTYPE),
        ("is_conversation.bin", is_conversation, "u1"),
    ):
        with (folder / name).open("wb") as file:
            file.write(np.asarray(values, stored_as).tobytes())
            _sync(file)
    record = _Record(
        num_documents=len(hashes),
        num_tokens=offsets[-1],
        tokenizer=tokenizer.name,
        bad_lines=bad_lines.counts,
        bad_line_examples=bad_lines.examples,
        conversations=conversations if conversations.num_conversations else None,
    )
    write_json(folder / "cache.json", record)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into batches of about 2**20 characters, so that a tokenizer can use all cores."""
    batch: list[Document] = []
    length = 0
    for document in documents:
        batch.append(document)
        length += len(document.text)
        if length >= MIB:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _sync(file: BufferedWriter) -> None:
    """Flush a file to the disk, so that a renamed directory is complete even after a power cut."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _building(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory inside ``directory``, which is removed unless the block publishes it."""
    directory.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(directory)
    temporary = directory / f".tokens-{uuid.uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, entry: Path) -> None:
    try:
        temporary.rename(entry)
    except OSError as error:
        if error.errno not in (EEXIST, ENOTEMPTY):  # another process has published the same cache first
            raise


def _remove_abandoned(directory: Path) -> None:
    """Remove the temporary directories of killed builds: those that nobody writes any more."""
    for temporary in directory.glob(".tokens-*.tmp"):
        with suppress(FileNotFoundError):  # its builder may finish just now
            touched = max(path.stat().st_mtime for path in [temporary, *temporary.iterdir()])
            if time.time() - touched > ABANDONED_AFTER_SECONDS:
                shutil.rmtree(temporary, ignore_errors=True)
