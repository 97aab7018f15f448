"""The token cache: a corpus is tokenised once, into memory-mapped files that later runs open at once.

A cache is a directory, named after a digest of the source files, the field, the tokenizer and the format. It is
written under a temporary name and renamed when complete: a directory with the final name is a whole cache.
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
from dataclasses import dataclass
from errno import EEXIST, ENOTEMPTY
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_core.data.corpus import BadLines, Document, OnProgress, SourceFile, UnusableRecordError, read_documents
from llama_core.data.tokenizer import Tokenizer
from llama_core.errors import DataError, RunDirectoryError
from llama_core.records.files import read_json, write_json
from llama_core.units import MIB

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
ABANDONED_AFTER_SECONDS = 24 * 3600
_OFFSET_DTYPE, _HASH_DTYPE = "<i8", "<u8"


@dataclass(frozen=True, eq=False)
class TokenCache:
    """A tokenised corpus."""

    tokens: npt.NDArray[Any]
    """Ids of all documents, one document after another, each between BOS and EOS; uint16 or uint32 [tokens]."""
    offsets: npt.NDArray[Any]
    """Where each document begins, and the end of the last, int64 [documents + 1]."""
    text_hashes: npt.NDArray[Any]
    """A hash of each document's text, uint64 [documents]; it decides what is held out."""
    tokenizer_fingerprint: str
    """The tokenizer that made the ids."""
    eos_id: int
    """Its end-of-text id."""
    bad_lines: BadLines
    """What was left out."""
    path: Path
    """The cache's directory."""

    @property
    def num_documents(self) -> int:
        """Documents in all."""
        return len(self.text_hashes)


def cache_directory(configured: str | None) -> Path:
    """Return where caches are kept: as configured, else below $XDG_CACHE_HOME, else below ~/.cache."""
    if configured is not None:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llama-training-infra"


def cached_tokens(
    files: Sequence[SourceFile],
    text_field: str,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    max_bad_lines: int,
    on_progress: OnProgress = lambda done, total: None,
) -> TokenCache:
    """Return the token cache of ``files``, building it in ``directory`` unless it is there.

    Processes that build the same cache at once do the work twice and share the first one's result.

    Raises:
        DataError: if the corpus cannot be read, is empty, or has more than ``max_bad_lines`` unusable lines.
        OSError: if the cache cannot be written; nothing of it is left then.
    """
    entry = directory / f"tokens-{_key(files, text_field, tokenizer)}"
    cache = _open(entry, tokenizer)
    if cache is None:
        shutil.rmtree(entry, ignore_errors=True)
        with _building(entry) as building:
            bad_lines = BadLines()
            documents = read_documents(
                files, text_field, bad_lines, max_bad_lines=max_bad_lines, on_progress=on_progress
            )
            _write(building, documents, tokenizer, bad_lines, max_bad_lines)
        cache = _open(entry, tokenizer)
        if cache is None:
            raise DataError(f"token cache {str(entry)!r} was damaged while it was opened; start again")
    cache.bad_lines.check(max_bad_lines)
    return cache


def _key(files: Sequence[SourceFile], text_field: str, tokenizer: Tokenizer) -> str:
    sources = [(str(file.path.resolve()), file.num_bytes, file.mtime_ns) for file in files]
    identity = json.dumps([FORMAT_VERSION, text_field, tokenizer.fingerprint, sources])
    return hashlib.sha256(identity.encode()).hexdigest()[:24]


def _token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _open(entry: Path, tokenizer: Tokenizer) -> TokenCache | None:
    """Return the cache in ``entry``; None if there is none, or files of it are missing or cut short."""
    if not entry.exists():
        return None
    try:
        record = read_json(entry / "cache.json")
        num_documents = record["num_documents"]
        return TokenCache(
            tokens=_map(entry / "tokens.bin", _token_dtype(tokenizer), record["num_tokens"]),
            offsets=_map(entry / "offsets.bin", np.dtype(_OFFSET_DTYPE), num_documents + 1),
            text_hashes=_map(entry / "text_hashes.bin", np.dtype(_HASH_DTYPE), num_documents),
            tokenizer_fingerprint=tokenizer.fingerprint,
            eos_id=tokenizer.eos_id,
            bad_lines=BadLines(record["bad_lines"], record["bad_line_examples"]),
            path=entry,
        )
    except (RunDirectoryError, FileNotFoundError, KeyError, ValueError) as error:
        logger.warning("token cache %s is damaged (%s) and is made again", entry, error)
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
    offsets, hashes = array("q", [0]), array("Q")
    with (folder / "tokens.bin").open("wb") as tokens_file:
        for batch in _batches(documents):
            encoded = tokenizer.encode_documents([document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                if len(ids) == num_special:
                    problem = UnusableRecordError("empty", "the tokenizer gives it no token")
                    bad_lines.add(document.location, problem, max_bad_lines)
                    continue
                tokens_file.write(ids.astype(dtype, copy=False).tobytes())
                offsets.append(offsets[-1] + len(ids))
                hashes.append(_text_hash(document.text))
        _sync(tokens_file)
    if not hashes:
        left_out = f": {bad_lines}" if bad_lines.total else ""
        raise DataError(f"no document to train on{left_out}")
    for name, values, stored_as in (
        ("offsets.bin", offsets, _OFFSET_DTYPE),
        ("text_hashes.bin", hashes, _HASH_DTYPE),
    ):
        with (folder / name).open("wb") as file:
            file.write(np.asarray(values, stored_as).tobytes())
            _sync(file)
    record = {
        "num_documents": len(hashes),
        "num_tokens": offsets[-1],
        "tokenizer": tokenizer.name,
        "bad_lines": bad_lines.counts,
        "bad_line_examples": bad_lines.examples,
    }
    write_json(folder / "cache.json", record)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents, so that a tokenizer can use all cores, into about a mebicharacter each."""
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
    """Put what was written on the disk, so that a renamed directory is whole even after a power cut."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _building(entry: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes ``entry`` when the block ends without an error."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(entry.parent)
    temporary = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        _publish(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, entry: Path) -> None:
    try:
        temporary.rename(entry)
    except OSError as error:
        if error.errno not in (EEXIST, ENOTEMPTY):  # another process has put the same cache there first
            raise


def _remove_abandoned(directory: Path) -> None:
    """Remove what builds that were killed left behind: temporary directories that nobody writes any more."""
    for temporary in directory.glob(".tokens-*.tmp"):
        with suppress(FileNotFoundError):  # its builder may finish just now
            touched = max(path.stat().st_mtime for path in [temporary, *temporary.iterdir()])
            if time.time() - touched > ABANDONED_AFTER_SECONDS:
                shutil.rmtree(temporary, ignore_errors=True)
