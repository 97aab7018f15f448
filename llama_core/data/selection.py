"""The documents of a source that are trained on, and those that are held out, as spans of its shards.

Most shards are one span of each: the lowest hashes are held out, and the rest is trained on. Nothing is kept for a
single document, unless it is held out of the middle of a shard because a validation source holds it too.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llama_core.data.shards.shard import Shard
from llama_core.data.shards.store import short_digest
from llama_core.data.shards.token_cache import TokenCache
from llama_core.errors import RunDirectoryError
from llama_core.records.files import read_typed, write_json

_HASHES = 2**64
"""How many hashes a text may have."""


class TokenSpan(NamedTuple):
    """Documents of a shard that follow each other."""

    first: int
    """Number of the first document."""
    last: int
    """Number of the document after them."""
    begin: int
    """Number of their first token."""
    end: int
    """Number of the token after them."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some documents of a shard, whose tokens are one stream."""

    shard: Shard
    spans: tuple[TokenSpan, ...]
    """The documents, in order; no span is empty."""

    @cached_property
    def num_documents(self) -> int:
        """Documents in all spans."""
        return sum(span.last - span.first for span in self.spans)

    @cached_property
    def num_tokens(self) -> int:
        """Their tokens."""
        return sum(span.end - span.begin for span in self.spans)

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """Where each span ends in the stream."""
        return np.cumsum([span.end - span.begin for span in self.spans])

    def open(self) -> None:
        """Open the files that rows are read from, which otherwise happens at the first row."""
        _ = self.shard.tokens, self.shard.offsets, self.shard.ignored

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shard's tokens that are some tokens of the stream.

        Yields:
            The places in the shard at which they begin and end, and the place in the stream at which they begin.
        """
        number = int(np.searchsorted(self._ends, begin, side="right"))
        while begin < end:
            span = self.spans[number]
            low = span.end - (int(self._ends[number]) - begin)
            high = min(span.end, low + end - begin)
            yield low, high, begin
            begin += high - low
            number += 1

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return some tokens of the stream."""
        tokens = np.empty(end - begin, np.int64)
        for low, high, place in self.pieces(begin, end):
            tokens[place - begin : place - begin + high - low] = self.shard.tokens[low:high]
        return tokens

    def firsts(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return where documents begin in the stream, after ``begin`` and before ``end``."""
        offsets = self.shard.offsets
        found = [np.empty(0, np.int64)]
        for low, high, place in self.pieces(begin, end):
            first = np.searchsorted(offsets, low, side="left")
            last = np.searchsorted(offsets, high, side="left")
            found.append(np.asarray(offsets[first:last]) - low + place)
        firsts = np.concatenate(found)
        return firsts[(begin < firsts) & (firsts < end)]


@dataclass(frozen=True, eq=False)
class Selection:
    """Some documents of a source."""

    parts: tuple[Part, ...]
    """Those of each shard; no part is empty."""
    eos_id: int
    """The tokenizer's end-of-text id."""
    has_conversations: bool
    """Whether the source holds conversations, here or elsewhere."""

    @property
    def has_pairs(self) -> bool:
        """Whether the documents are pairs of answers."""
        return any(part.shard.facts.has_pairs for part in self.parts)

    @cached_property
    def num_documents(self) -> int:
        """Documents in all."""
        return sum(part.num_documents for part in self.parts)

    @cached_property
    def num_tokens(self) -> int:
        """Their tokens, including BOS and EOS."""
        return sum(part.num_tokens for part in self.parts)

    @cached_property
    def digest(self) -> str:
        """What two selections share only if they hold the same documents in the same order."""
        return short_digest([(part.shard.facts.digest, part.spans) for part in self.parts])


@dataclass(frozen=True, eq=False)
class Split:
    """The documents of a source."""

    train: Selection
    held_out: Selection


def everything(cache: TokenCache) -> Selection:
    """Return all documents of a source."""
    return _selection(cache, [[_whole(shard)] for shard in cache.shards])


def hold_out_lowest(caches: Mapping[str, TokenCache], fraction: float) -> dict[str, Split]:
    """Hold out the documents of each source with a hash in the lowest ``fraction`` of possible hashes.

    A document stays on its side when others come or go, and equal texts are on the same side, also those of several
    sources. If chance would hold out none of a source with two or more different texts, the one with the lowest hash is
    held out of all sources.
    """
    bound = int(fraction * float(_HASHES))
    nothing = np.empty(0, np.uint64)
    splits = {name: _split(cache, bound, nothing) for name, cache in caches.items()}
    if fraction == 0:
        return splits
    without = [cache for name, cache in caches.items() if not splits[name].held_out.parts]
    lowest = np.array([found for cache in without for found in _lowest_of_several(cache)], np.uint64)
    if len(lowest):
        splits = {name: _split(cache, bound, np.unique(lowest)) for name, cache in caches.items()}
    return splits


def hold_out_known(caches: Mapping[str, TokenCache], known: Sequence[TokenCache]) -> dict[str, Split]:
    """Hold out the documents that other sources hold too."""
    hashes = np.unique(np.concatenate([shard.text_hashes for cache in known for shard in cache.shards]))
    return {name: _split(cache, 0, hashes) for name, cache in caches.items()}


def _lowest_of_several(cache: TokenCache) -> list[np.uint64]:
    """Return the lowest hash of a source, if it has two or more different texts."""
    filled = [shard.text_hashes for shard in cache.shards if shard.facts.num_documents]
    lowest = min(hashes[0] for hashes in filled)
    return [lowest] if lowest < max(hashes[-1] for hashes in filled) else []


@dataclass(frozen=True)
class _HeldOut:
    """The contents of ``split-*.json``."""

    spans: list[list[TokenSpan]]
    """The documents that are held out of each shard."""


def _split(cache: TokenCache, bound: int, known: npt.NDArray[np.uint64]) -> Split:
    """Hold out the documents with a hash below ``bound`` or among ``known``, which ascend; look only the first time."""
    identity = [cache.digest, bound, hashlib.sha256(known.tobytes()).hexdigest()]
    path = cache.directory / f"split-{short_digest(identity)}.json"
    held_out = _remembered(path, cache)
    if held_out is None:
        held_out = [_held_out_of(shard, bound, known) for shard in cache.shards]
        with suppress(OSError):  # if the cache is not writable, the next run only has to look again
            write_json(path, _HeldOut(held_out))
    rest = [_rest(shard, spans) for shard, spans in zip(cache.shards, held_out, strict=True)]
    return Split(_selection(cache, rest), _selection(cache, held_out))


def _remembered(path: Path, cache: TokenCache) -> list[list[TokenSpan]] | None:
    try:
        record = read_typed(path, _HeldOut)
    except RunDirectoryError:  # there is none yet, or it is damaged and will be written again
        return None
    fits = len(record.spans) == len(cache.shards) and all(map(_follow, cache.shards, record.spans))
    return record.spans if fits else None


def _follow(shard: Shard, spans: Sequence[TokenSpan]) -> bool:
    """Return whether spans lie in a shard, one after another."""
    documents = [0, *(number for span in spans for number in (span.first, span.last)), shard.facts.num_documents]
    tokens = [0, *(number for span in spans for number in (span.begin, span.end)), shard.facts.num_tokens]
    return documents == sorted(documents) and tokens == sorted(tokens)


def _held_out_of(shard: Shard, bound: int, known: npt.NDArray[np.uint64]) -> list[TokenSpan]:
    hashes = shard.text_hashes
    num_lowest = int(np.searchsorted(hashes, np.uint64(bound), side="left"))
    bounds = [(0, num_lowest)]
    if len(known):
        firsts = np.searchsorted(hashes, known, side="left")
        lasts = np.searchsorted(hashes, known, side="right")
        found = (lasts > firsts) & (firsts >= num_lowest)
        bounds += zip(firsts[found].tolist(), lasts[found].tolist(), strict=True)
    offsets = shard.offsets
    spans = [TokenSpan(first, last, int(offsets[first]), int(offsets[last])) for first, last in bounds if last > first]
    if not _follow(shard, spans):
        raise shard.removed("its offsets or hashes do not ascend")
    return spans


def _whole(shard: Shard) -> TokenSpan:
    return TokenSpan(0, shard.facts.num_documents, 0, shard.facts.num_tokens)


def _rest(shard: Shard, spans: Sequence[TokenSpan]) -> list[TokenSpan]:
    """Return the documents of a shard that are in none of some spans."""
    whole = _whole(shard)
    before = [TokenSpan(0, 0, 0, 0), *spans]
    after = [*spans, TokenSpan(whole.last, whole.last, whole.end, whole.end)]
    return [TokenSpan(one.last, other.first, one.end, other.begin) for one, other in zip(before, after, strict=True)]


def _selection(cache: TokenCache, spans: Sequence[Sequence[TokenSpan]]) -> Selection:
    filled = [tuple(span for span in of_shard if span.last > span.first) for of_shard in spans]
    parts = [Part(shard, of_shard) for shard, of_shard in zip(cache.shards, filled, strict=True) if of_shard]
    return Selection(tuple(parts), cache.eos_id, cache.has_conversations)
