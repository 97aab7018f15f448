"""The token cache: a source as tokens, in shards that are each tokenised once.

A manifest (``source-*.json``) remembers the shards of a source under the sizes and times of all its files. With it, a
run opens one small file instead of one for each shard.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from llama_core.data.bad_lines import BadLines
from llama_core.data.chat import ConversationCounts
from llama_core.data.corpus import OnProgress
from llama_core.data.files.source_file import SourceFile, total_bytes
from llama_core.data.formats import FormatCounts
from llama_core.data.shards.grouping import grouped
from llama_core.data.shards.shard import Shard, ShardFacts
from llama_core.data.shards.store import (
    LOOKING_THREADS,
    Recipe,
    ShardAndRecord,
    are_settled,
    build_shard,
    find_shards,
    remove_abandoned,
    short_digest,
)
from llama_core.data.tokenizer import Tokenizer, token_dtype
from llama_core.errors import DataError, RunDirectoryError
from llama_core.records.files import read_typed, write_json


@dataclass(frozen=True)
class _Entry:
    """A shard in a manifest."""

    name: str
    """Its directory's."""
    facts: ShardFacts


@dataclass(frozen=True)
class _Manifest:
    """The contents of ``source-*.json``."""

    shards: list[_Entry]
    bad_lines: BadLines
    formats: FormatCounts
    conversations: ConversationCounts


@dataclass(frozen=True, eq=False)
class TokenCache:
    """A tokenised source."""

    shards: tuple[Shard, ...]
    """Its shards, in the order of their digests: wherever the files are, it is the same."""
    eos_id: int
    """The tokenizer's end-of-text id."""
    directory: Path
    """Where the shards are."""
    bad_lines: BadLines
    """The lines that were left out."""
    formats: FormatCounts
    """The formats of the records."""
    conversations: ConversationCounts
    """Counts of the conversations."""

    @property
    def num_documents(self) -> int:
        """Documents in all."""
        return sum(shard.facts.num_documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Their tokens, including BOS and EOS."""
        return sum(shard.facts.num_tokens for shard in self.shards)

    @property
    def has_conversations(self) -> bool:
        """Whether some documents are conversations."""
        return any(shard.facts.has_conversations for shard in self.shards)

    @cached_property
    def digest(self) -> str:
        """What two caches share only if they hold the same tokens."""
        return short_digest([shard.facts.digest for shard in self.shards])


def cached_tokens(
    files: Sequence[SourceFile],
    recipe: Recipe,
    directory: Path,
    *,
    on_progress: OnProgress = lambda done, total: None,
) -> TokenCache:
    """Return the tokens of ``files``, building in ``directory`` the shards that are not there.

    Processes that build the same shard at once do the work twice and share the first one's result.

    Raises:
        DataError: if the corpus cannot be read, changes meanwhile, is empty, or has too many unusable lines.
        OSError: if a shard cannot be written; nothing of it is left then, and the others are kept.
    """
    remove_abandoned(directory)
    manifest = manifest_of(files, recipe, directory)
    cache = _of_manifest(manifest, recipe.tokenizer)
    if cache is None:
        began = time.time()
        groups = grouped(files)
        found = find_shards(recipe, groups, directory)
        missing = [group for group, shard in zip(groups, found, strict=True) if shard is None]
        built = iter(_build_all(recipe, missing, directory, on_progress))
        cache = _joined([shard or next(built) for shard in found], directory, recipe.tokenizer)
        with suppress(OSError):  # if the cache is not writable, the next run only has to look at every shard
            if are_settled(files, began):
                write_manifest(manifest, cache)
    cache.bad_lines.check(recipe.max_bad_lines, cache.num_documents)
    if not cache.num_documents:
        left_out = f": {cache.bad_lines}" if cache.bad_lines.total else ""
        raise DataError(f"no document to train on{left_out}")
    return cache


def _build_all(
    recipe: Recipe, groups: Sequence[Sequence[SourceFile]], directory: Path, on_progress: OnProgress
) -> Iterator[ShardAndRecord]:
    total = sum(map(total_bytes, groups))
    before = 0
    for files in groups:
        yield build_shard(recipe, files, directory, on_progress=partial(_advance, on_progress, before, total))
        before += total_bytes(files)


def _advance(on_progress: OnProgress, before: int, total: int, done: int, total_of_shard: int) -> None:
    on_progress(before + done, total)


def _joined(found: Sequence[ShardAndRecord], directory: Path, tokenizer: Tokenizer) -> TokenCache:
    records = [record for _, record in found]
    shards = [shard for shard, _ in found]
    return TokenCache(
        shards=tuple(sorted(shards, key=lambda shard: (shard.facts.digest, shard.path.name))),
        eos_id=tokenizer.eos_id,
        directory=directory,
        bad_lines=sum((record.bad_lines for record in records), BadLines()),
        formats=sum((record.formats for record in records), FormatCounts()),
        conversations=sum((record.conversations for record in records), ConversationCounts()),
    )


def _of_manifest(path: Path, tokenizer: Tokenizer) -> TokenCache | None:
    """Return the tokens that a manifest lists; None if there is none, or a shard of it is missing or damaged."""
    try:
        manifest = read_typed(path, _Manifest)
    except RunDirectoryError:  # there is none yet, or it is damaged and will be written again
        return None
    dtype = token_dtype(tokenizer)
    shards = [Shard(path.parent / entry.name, entry.facts, dtype) for entry in manifest.shards]
    with ThreadPoolExecutor(LOOKING_THREADS, "shards") as pool:
        if any(pool.map(Shard.damage, shards)):
            return None
    return TokenCache(
        tuple(shards), tokenizer.eos_id, path.parent, manifest.bad_lines, manifest.formats, manifest.conversations
    )


def manifest_of(files: Sequence[SourceFile], recipe: Recipe, directory: Path) -> Path:
    """Return where the manifest of a source is, or would be."""
    return directory / f"source-{recipe.manifest_key(files)}.json"


def write_manifest(path: Path, cache: TokenCache) -> None:
    """Write which shards a source has."""
    shards = [_Entry(shard.path.name, shard.facts) for shard in cache.shards]
    write_json(path, _Manifest(shards, cache.bad_lines, cache.formats, cache.conversations))
