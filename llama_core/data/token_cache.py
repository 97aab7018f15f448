"""The token cache: tokenise a corpus once, into memory-mapped files that later runs open without delay.

A cache is a directory, named after the source files' paths and sizes, the field, the tokenizer, the cache format, if
the source holds conversations how they become text, and the SHA-256 of the files' contents. It is written under a
temporary name and renamed when complete, so a directory with the final name is a complete cache.

The digest costs nothing while the files are tokenised, but terabytes cannot be read again at each start. So a cache
remembers, as an empty file ``seen-*``, the sizes and times under which the files had its contents. Times include the
``ctime``, which the kernel sets at every change and nobody else can set: a file that was restored with its old size and
``mtime`` has another, and is then read once more and compared. So is a file that was moved, copied or given other
rights; if its contents are the same, its times are remembered too. The inode would add nothing, because a file that
takes another's name has a ``ctime`` of its own, but networked file systems may number their files anew at each mount.
"""

import fcntl
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
from llama_core.data.corpus import (
    BadLines,
    Document,
    OnProgress,
    SourceFile,
    UnusableRecordError,
    digest_of,
    read_documents,
)
from llama_core.data.tokenizer import Tokenizer
from llama_core.errors import DataError, RunDirectoryError
from llama_core.machine.kernel import lock_domain
from llama_core.records.files import read_typed, remove_temporaries, write_json
from llama_core.units import MIB

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3
ABANDONED_AFTER_SECONDS = 24 * 3600
SETTLED_AFTER_SECONDS = 2.0
"""A file system may give two changes the same time if less than this lies between them."""
_DIGITS = 24
"""Of a digest, in names."""
_LOCK = "lock"
_OFFSET_DTYPE = "<i8"
_HASH_DTYPE = "<u8"


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
        DataError: if the corpus cannot be read, changes meanwhile, is empty, or has more than ``max_bad_lines``
            unusable lines.
        OSError: if the cache cannot be written; nothing of it is left then.
    """
    _remove_abandoned(directory)
    # the format matters only if the source holds conversations, and only reading it shows that
    made_by = {False: tokenizer.fingerprint, True: f"{tokenizer.fingerprint} {chat.fingerprint}"}
    keys = {key: f"tokens-{_key(files, text_field, made_by[key])}" for key in made_by}

    def opened() -> TokenCache | None:
        found = ((_find(directory, keys[key], files), made_by[key]) for key in keys)
        caches = (_open(entry, tokenizer, made) for entry, made in found if entry is not None)
        return next((cache for cache in caches if cache is not None), None)

    cache = opened()
    if cache is None:
        began = time.time()
        content = hashlib.sha256()
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
                content=content,
            )
            _write(building, documents, tokenizer, bad_lines, max_bad_lines)
            entry = directory / _entry_name(keys[has_conversations], content.hexdigest())
            _publish(building, entry)
        _remember(entry, files, began)
        cache = opened()
        if cache is None:
            sources = f"{files[0].path}{' and others' if len(files) > 1 else ''}"
            raise DataError(
                f"{sources} changed while it was read, or token cache {str(entry)!r} was damaged while it was opened; "
                "start again"
            )
    cache.bad_lines.check(max_bad_lines)
    return cache


def _key(files: Sequence[SourceFile], text_field: str, made_by: str) -> str:
    sources = [(str(file.path.resolve()), file.num_bytes) for file in files]
    return _digest([FORMAT_VERSION, text_field, made_by, sources])


def _entry_name(key: str, content: str) -> str:
    return f"{key}-{content[:_DIGITS]}"


def _digest(identity: list[Any]) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:_DIGITS]


def _find(directory: Path, key: str, files: Sequence[SourceFile]) -> Path | None:
    """Return where the cache of the contents of ``files`` is; None if there is none."""
    entries = list(directory.glob(f"{key}-*"))
    known = next((entry for entry in entries if _seen(entry, files).exists()), None)
    if known is None and entries:
        began = time.time()
        logger.info("comparing %s with its token cache: it has new times", files[0].path)
        name = _entry_name(key, digest_of(files))
        known = next((entry for entry in entries if entry.name == name), None)
        if known is not None:
            _remember(known, files, began)
    return known


def _seen(entry: Path, files: Sequence[SourceFile]) -> Path:
    """Return the file whose presence says that ``files`` had the contents of a cache, with their sizes and times."""
    return entry / f"seen-{_digest([(file.num_bytes, file.mtime_ns, file.ctime_ns) for file in files])}"


def _remember(entry: Path, files: Sequence[SourceFile], began: float) -> None:
    """Remember that ``files`` have the contents of a cache, if their times prove it.

    Args:
        entry: the cache.
        files: the files as they were found before they were read.
        began: when their reading began, in seconds since the epoch. A change shortly before that and another one in the
            same tick of the file system's clock would have the same time.
    """
    with suppress(OSError):  # if the cache is not writable, the next run only has to compare again
        unchanged = all(file.path.stat().st_ctime_ns == file.ctime_ns for file in files)
        newest = max(1e-9 * file.ctime_ns for file in files)
        if unchanged and began - newest > SETTLED_AFTER_SECONDS:
            _seen(entry, files).touch()


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
        num_documents = record.num_documents
        conversations = record.conversations
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
    offsets = array("q", [0])
    hashes = array("Q")
    is_conversation = array("B")
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
            batch = []
            length = 0
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
    temporary = directory / f".tokens-{_domain(directory)}-{uuid.uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        with _locked(temporary):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(temporary: Path) -> Iterator[None]:
    """Hold a lock in a temporary directory, by which others see that its builder lives."""
    lock = temporary / _LOCK
    with lock.with_suffix(".new").open("wb") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        lock.with_suffix(".new").rename(lock)  # nobody sees it without its lock
        yield


def _domain(directory: Path) -> str:
    """Return a name for the kernel and file system that know whether a builder in ``directory`` lives."""
    return _digest([lock_domain(directory.stat())])


def _publish(temporary: Path, entry: Path) -> None:
    try:
        temporary.rename(entry)
    except OSError as error:
        if error.errno not in (EEXIST, ENOTEMPTY):  # another process has published the same cache first
            raise


def _remove_abandoned(directory: Path) -> None:
    """Remove the temporary files of killed builds: those of this kernel at once, others when nobody writes them."""
    for temporary in directory.glob(".tokens-*.tmp"):
        with suppress(OSError):  # its builder may finish just now, or be somebody else
            is_alive = _is_alive(temporary)
            touched = max(path.stat().st_mtime for path in [temporary, *temporary.iterdir()])
            if is_alive is False or (is_alive is None and time.time() - touched > ABANDONED_AFTER_SECONDS):
                shutil.rmtree(temporary, ignore_errors=True)
    remove_temporaries(directory, before=time.time() - ABANDONED_AFTER_SECONDS)  # of the sample


def _is_alive(temporary: Path) -> bool | None:
    """Return whether the builder of a temporary directory lives; None if that cannot be told from here."""
    if not temporary.name.startswith(f".tokens-{_domain(temporary.parent)}-"):
        return None
    try:
        with (temporary / _LOCK).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it has none yet, or the file system knows no locks
        return None
    return False
