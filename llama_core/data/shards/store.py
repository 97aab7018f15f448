"""Where shards are kept: find the shard of some files, or build it.

A shard is a directory, named after the kinds and sizes of its files, the formats of records, the tokenizer, the cache
format, if it holds conversations how they become text, and the SHA-256 of the files' contents. It is written under a
temporary name and renamed when complete, so a directory with the final name is a complete shard. Files that are moved
or copied elsewhere have the same shards.

The digest costs nothing while the files are tokenised, but terabytes cannot be read again at each start. So a shard
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
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from errno import EEXIST, ENOTEMPTY
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from llama_core.config.settings import TokenDtype
from llama_core.data.chat import ChatFormat
from llama_core.data.corpus import Document, OnProgress, Tally, read_documents
from llama_core.data.file_kinds.kinds import identity_of
from llama_core.data.files.source_file import SourceFile, digest_of
from llama_core.data.formats import FieldNames
from llama_core.data.shards.shard import RECORD, Shard, ShardFacts, ShardRecord, remove_entry
from llama_core.data.shards.writing import write_shard
from llama_core.data.tokenizer import Tokenizer, token_dtype
from llama_core.data.undivided import TokenLayout
from llama_core.errors import DataError, RunDirectoryError
from llama_core.machine.kernel import lock_domain
from llama_core.records.files import read_typed, remove_temporaries

logger = logging.getLogger(__name__)

FORMAT_VERSION = 6
ABANDONED_AFTER_SECONDS = 24 * 3600
SETTLED_AFTER_SECONDS = 2.0
"""A file system may give two changes the same time if less than this lies between them."""
LOOKING_THREADS = 16
"""Threads that look at the files of shards: on a network each look is a wait."""
_DIGITS = 24
"""Of a digest, in names."""
_TEMPORARY = ".tmp"
_LOCK = ".lock"
"""Suffixes of a build's temporary directory, and of the file that its builder holds locked."""


@dataclass(frozen=True)
class Recipe:
    """How files become tokens."""

    names: FieldNames
    tokenizer: Tokenizer
    chat: ChatFormat
    max_bad_lines: int
    """How many records of a source may be left out."""
    token_dtype: TokenDtype | None = None
    """``data.token_dtype``."""

    @property
    def layout(self) -> TokenLayout:
        """How files without a table of documents hold token ids."""
        return TokenLayout(self.tokenizer, self.token_dtype)

    @cached_property
    def made_by(self) -> Mapping[bool, str]:
        """What identifies the maker of the tokens, for files with conversations and without.

        The format matters only if there are conversations, and only reading the files shows that.
        """
        tokenizer = self.tokenizer.fingerprint
        return {False: tokenizer, True: f"{tokenizer} {self.chat.fingerprint}"}

    def key(self, files: Sequence[SourceFile], *, has_conversations: bool) -> str:
        """Return the name of the shard of ``files`` without the digest of their contents."""
        kinds = [(identity_of(file, self.layout), *(part.num_bytes for part in file.parts)) for file in files]
        return f"shard-{short_digest([FORMAT_VERSION, self.names.identity, self.made_by[has_conversations], kinds])}"

    def keys(self, files: Sequence[SourceFile]) -> tuple[str, str]:
        """Return the names that a shard of ``files`` may have: without conversations, and with some."""
        return self.key(files, has_conversations=False), self.key(files, has_conversations=True)

    def manifest_key(self, files: Sequence[SourceFile]) -> str:
        """Return what identifies the files of a source under the times that they have now."""
        seen = [(str(file.path.absolute()), identity_of(file, self.layout), *_times(file)) for file in files]
        return short_digest([FORMAT_VERSION, self.names.identity, self.made_by[True], seen])


class ShardAndRecord(NamedTuple):
    """A shard, and what was found while it was built."""

    shard: Shard
    record: ShardRecord


def find_shards(recipe: Recipe, groups: Sequence[Sequence[SourceFile]], directory: Path) -> list[ShardAndRecord | None]:
    """Return the shard of each group of files in ``directory``; None for one that is not there.

    Reads the files of a group if their times do not prove that they are those of a shard.
    """
    by_key: dict[str, list[Path]] = {}
    for entry in sorted(directory.glob("shard-*")):
        by_key.setdefault(entry.name.rpartition("-")[0], []).append(entry)

    def find(files: Sequence[SourceFile]) -> ShardAndRecord | None:
        for key in recipe.keys(files):
            entry = _entry_of(by_key.get(key, []), key, files)
            found = None if entry is None else _open(entry, recipe.tokenizer, files)
            if found is not None:
                return found
        return None

    with ThreadPoolExecutor(LOOKING_THREADS, "shards") as pool:
        return list(pool.map(find, groups))


def probably_missing(
    recipe: Recipe, groups: Sequence[tuple[SourceFile, ...]], directory: Path, *, others: Container[str] = ()
) -> list[tuple[SourceFile, ...]]:
    """Return the groups of files without a shard of their kinds and sizes in ``directory``.

    Looks at names only, unlike ``find_shards``: other files of the same sizes may have made these shards.

    Args:
        recipe: how the files become tokens.
        groups: the files of each shard.
        directory: where shards are.
        others: names of shards that surely are of other files.
    """
    names = (entry.name for entry in directory.glob("shard-*"))
    present = Counter(name.rpartition("-")[0] for name in names if name not in others)
    missing = []
    for group in groups:
        key = next((key for key in recipe.keys(group) if present[key]), None)
        if key is None:
            missing.append(group)
        else:
            present[key] -= 1
    return missing


def build_shard(
    recipe: Recipe,
    files: Sequence[SourceFile],
    directory: Path,
    *,
    on_progress: OnProgress = lambda done, total: None,
) -> ShardAndRecord:
    """Tokenise ``files`` into a shard in ``directory``.

    Raises:
        DataError: if a file cannot be read or changes meanwhile, or too many records are unusable.
        OSError: if the shard cannot be written; nothing of it is left then.
    """
    began = time.time()
    content = hashlib.sha256()
    has_conversations = False

    def render(content: Any, location: str, tools: Sequence[Any]) -> Document:
        nonlocal has_conversations
        has_conversations = True
        return recipe.chat.document(content, location, tools)

    with _building(directory) as building:
        if not all(file.is_public for file in files):
            building.chmod(0o700)  # tokens spell the documents
        tally = Tally()
        documents = read_documents(
            files,
            recipe.names,
            tally,
            render=render,
            max_bad_lines=recipe.max_bad_lines,
            on_progress=on_progress,
            content=content,
            layout=recipe.layout,
        )
        write_shard(building, files, documents, recipe.tokenizer, tally, max_bad_lines=recipe.max_bad_lines)
        entry = directory / _entry_name(recipe.key(files, has_conversations=has_conversations), content.hexdigest())
        _publish(building, entry)
    _remember(entry, files, began)
    built = _open(entry, recipe.tokenizer, files)
    if built is None:
        raise DataError(f"shard {str(entry)!r} of the token cache was damaged while it was opened; start again")
    return built


def _entry_name(key: str, content: str) -> str:
    return f"{key}-{content[:_DIGITS]}"


def short_digest(identity: list[Any]) -> str:
    """Return a digest of a JSON value, for names."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:_DIGITS]


def _entry_of(entries: Sequence[Path], key: str, files: Sequence[SourceFile]) -> Path | None:
    """Return which of the entries with a key is the shard of ``files``; None if none is."""
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
    """Return the file whose presence says that ``files`` had the contents of a shard, with their sizes and times."""
    return entry / f"seen-{short_digest(list(map(_times, files)))}"


def _times(file: SourceFile) -> list[int]:
    """Return the sizes and times of a file and its index."""
    return [number for part in file.parts for number in (part.num_bytes, part.mtime_ns, part.ctime_ns)]


def _remember(entry: Path, files: Sequence[SourceFile], began: float) -> None:
    """Remember that ``files`` have the contents of a shard, if their times prove it; see ``are_settled``."""
    with suppress(OSError):  # if the cache is not writable, the next run only has to compare again
        if are_settled(files, began):
            _seen(entry, files).touch()


def are_settled(files: Sequence[SourceFile], began: float) -> bool:
    """Return whether the times of files prove that they will have the same contents if they have the same times.

    Args:
        files: the files as they were found before they were read.
        began: when their reading began, in seconds since the epoch. A change shortly before that and another one in the
            same tick of the file system's clock would have the same time.
    """
    parts = [part for file in files for part in file.parts]
    unchanged = all(part.path.stat().st_ctime_ns == part.ctime_ns for part in parts)
    newest = max(1e-9 * part.ctime_ns for part in parts)
    return unchanged and began - newest > SETTLED_AFTER_SECONDS


def _open(entry: Path, tokenizer: Tokenizer, files: Sequence[SourceFile]) -> ShardAndRecord | None:
    """Return the shard in ``entry``; None if there is none, or after removing one with missing or short files.

    Args:
        entry: its directory.
        tokenizer: has made its tokens.
        files: where its files are now.
    """
    if not entry.exists():
        if entry.is_symlink():
            entry.unlink()
        return None
    try:
        record = read_typed(entry / RECORD, ShardRecord)
        facts = ShardFacts(
            record.num_documents,
            record.num_tokens,
            record.has_conversations,
            record.digest,
            has_pairs=record.has_pairs,
        )
        shard = Shard(entry, facts, token_dtype(tokenizer))
        damage = shard.damage()
    except RunDirectoryError as error:
        damage = str(error)
    if damage:
        logger.warning("shard %s of the token cache is damaged (%s); building it again", entry, damage)
        remove_entry(entry)
        return None
    moved = dict(zip(record.files, map(str, (file.path for file in files)), strict=False))
    return ShardAndRecord(shard, replace(record, bad_lines=record.bad_lines.at(moved)))


@contextmanager
def _building(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory inside ``directory``, which is removed unless the block publishes it.

    A lock beside it, by which others see that its builder lives, is held before it appears and until it is gone.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory) as lock:
        temporary = lock.with_suffix(_TEMPORARY)
        try:
            temporary.mkdir()
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[Path]:
    """Hold a new lock in ``directory``; yield its file, which the end of the block removes."""
    while True:
        lock = directory / f".shard-{_domain(directory)}-{uuid.uuid4().hex}{_LOCK}"
        with lock.open("xb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if not lock.exists():  # somebody has taken it for abandoned before it was locked
                continue
            try:
                yield lock
            finally:
                lock.unlink(missing_ok=True)
            return


def _domain(directory: Path) -> str:
    """Return a name for the kernel and file system that know whether a builder in ``directory`` lives."""
    return short_digest([lock_domain(directory.stat())])


def _publish(temporary: Path, entry: Path) -> None:
    try:
        temporary.rename(entry)
    except OSError as error:
        if error.errno not in (EEXIST, ENOTEMPTY):  # another process has published the same shard first
            raise


def remove_abandoned(directory: Path) -> None:
    """Remove what killed builds have left: those of this kernel at once, others when nobody writes them."""
    for temporary in {left.with_suffix(_TEMPORARY) for left in directory.glob(".shard-*.*")}:
        with suppress(OSError):  # its builder may finish just now, or be somebody else
            _remove_if_abandoned(temporary)
    remove_temporaries(directory, before=time.time() - ABANDONED_AFTER_SECONDS)  # of the sample


def _remove_if_abandoned(temporary: Path) -> None:
    lock = temporary.with_suffix(_LOCK)
    with ExitStack() as held:  # until both are gone, so that a builder that has only just begun takes another name
        is_dead = _take(lock, held)
        if is_dead or (is_dead is None and _is_old(temporary, lock)):
            shutil.rmtree(temporary, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _take(lock: Path, held: ExitStack) -> bool | None:
    """Take the lock of a build; return whether its builder is dead, None if that cannot be told from here."""
    if not lock.name.startswith(f".shard-{_domain(lock.parent)}-"):
        return None
    try:
        fcntl.flock(held.enter_context(lock.open("r+b")), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # a builder removes it last
        return True
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _is_old(temporary: Path, lock: Path) -> bool:
    """Return whether nobody has written a build for a long time."""
    left = [path for path in (lock, temporary, *temporary.glob("*")) if path.exists()]
    return time.time() - max(path.stat().st_mtime for path in left) > ABANDONED_AFTER_SECONDS
