"""Pack documents into rows of one length, with targets and positions that keep documents apart."""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_core.data.token_cache import TokenCache
from llama_core.models.batch import IGNORE_INDEX

_DOCUMENTS = 0
_ROWS = 1


class PackedDataset:
    """Rows of ``seq_len`` tokens, cut out of the chosen documents laid end to end in an order drawn from ``seed``.

    Row i begins at token i * seq_len, and its last target is the first token of row i + 1: every token is an input
    once, and every token except a document's first is a target once. The last row is padded with end-of-text tokens
    that are not targets, and not dropped: a small corpus keeps all its text, and the held-out loss covers all of it.

    Takes 16 bytes of memory per document; tokens stay on disk.

    Args:
        cache: the tokenised corpus.
        documents: indices of the documents to pack.
        seq_len: tokens per row.
        seed: draws the order of the documents.
        document_mask: keep attention inside each document; otherwise batches carry no positions.
    """

    def __init__(
        self, cache: TokenCache, documents: npt.NDArray[Any], seq_len: int, *, seed: int, document_mask: bool = True
    ) -> None:
        self.cache = cache
        self.seq_len = seq_len
        self.document_mask = document_mask
        self.documents = documents[permutation(len(documents), seed, _DOCUMENTS)]
        lengths = cache.offsets[self.documents + 1] - cache.offsets[self.documents]
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    @property
    def num_documents(self) -> int:
        """Documents packed."""
        return len(self.documents)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, including BOS and EOS."""
        return int(self._starts[-1])

    @property
    def num_targets(self) -> int:
        """Tokens that count in the loss: all but the first of each document."""
        return self.num_tokens - self.num_documents

    @cached_property
    def digest(self) -> str:
        """16 hex digits that two datasets share exactly when they hold the same rows in the same order."""
        digest = hashlib.sha256(f"{self.cache.fingerprint} {self.seq_len} ".encode())
        digest.update(self.cache.text_hashes[self.documents].tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def share_of_whole_rows(self) -> float:
        """The share of the rows that are a single document, or part of one, without padding."""
        begins = np.arange(len(self)) * self.seq_len
        ends = begins + self.seq_len
        first_document = np.searchsorted(self._starts, begins, side="right")
        last_document = np.searchsorted(self._starts, ends - 1, side="right")
        return float(np.mean((first_document == last_document) & (ends <= self.num_tokens)))

    def __len__(self) -> int:
        """Return the number of rows; the last token is only a target, never an input."""
        num_inputs = max(0, self.num_tokens - 1)
        return (num_inputs + self.seq_len - 1) // self.seq_len

    def row(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return tokens, targets and positions of a row, each [seq_len].

        A target is the next token, or -100 if that belongs to another document or is padding. Positions count from 0
        at the start of the row and at each document's first token.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)} rows")
        begin = index * self.seq_len
        end = min(begin + self.seq_len + 1, self.num_tokens)
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left"))
        window = np.full(self.seq_len + 1, self.cache.eos_id, np.int64)
        for document in range(first, last):
            low = max(self._starts[document], begin)
            high = min(self._starts[document + 1], end)
            source = self.cache.offsets[self.documents[document]] + low - self._starts[document]
            window[low - begin : high - begin] = self.cache.tokens[source : source + high - low]
        tokens = window[:-1]
        targets = window[1:].copy()
        firsts = np.append(self._starts[first + 1 : last], end) - begin  # padding counts as another document
        targets[firsts[firsts <= self.seq_len] - 1] = IGNORE_INDEX
        targets[end - begin :] = IGNORE_INDEX
        segment_starts = np.zeros(self.seq_len, np.int64)
        inside = firsts[firsts < self.seq_len]
        segment_starts[inside] = inside
        return tokens, targets, np.arange(self.seq_len) - np.maximum.accumulate(segment_starts)


class PackedConversations(PackedDataset):
    """Rows of ``seq_len`` tokens that hold whole conversations, so that no answer is in a row without its prompt.

    The rest of a row is padding without targets. A conversation longer than a row is truncated, and left out if no
    token that remains counts. A text among the conversations is cut into pieces, each of which begins with the last
    target of the previous one.

    Takes 40 bytes of memory per document; tokens stay on disk.

    Args:
        cache: the tokenised corpus, which holds conversations.
        documents: indices of the documents to pack.
        seq_len: tokens per row.
        seed: draws the order of documents of the same length.
        document_mask: let a row hold several documents, and mask attention between them; otherwise each has its own
            row, and batches carry no positions.
    """

    def __init__(
        self, cache: TokenCache, documents: npt.NDArray[Any], seq_len: int, *, seed: int, document_mask: bool = True
    ) -> None:
        if cache.ignored is None or cache.is_conversation is None:
            raise ValueError("these documents are texts; use PackedDataset")
        super().__init__(cache, documents, seq_len, seed=seed, document_mask=document_mask)
        self._ignored = cache.ignored
        is_conversation = cache.is_conversation[self.documents]
        # a document's last token is a target, not an input
        num_inputs = np.diff(self._starts) - 1
        self.num_truncated = int((is_conversation & (num_inputs > seq_len)).sum())
        """Number of truncated conversations."""
        num_pieces = np.where(is_conversation, 1, -(-num_inputs // seq_len))
        document = np.repeat(np.arange(len(num_pieces)), num_pieces)
        before = (np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)) * seq_len
        begins = cache.offsets[self.documents[document]] + before
        lengths = np.minimum(num_inputs[document] - before, seq_len)
        num_targets = lengths - _count(self._ignored, begins + 1, begins + 1 + lengths)
        kept = num_targets > 0
        self.num_left_out = int((~kept).sum())
        """Number of conversations left out, because no token that fits into a row counts."""
        self._num_targets = int(num_targets.sum())
        begins = begins[kept]
        lengths = lengths[kept]
        rows = best_fit(lengths, seq_len) if document_mask else np.arange(len(lengths))
        order = np.argsort(rows, kind="stable")
        self._begins = begins[order]
        self._lengths = lengths[order]
        self._first_of_row = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2))

    @property
    def num_targets(self) -> int:
        """Tokens that count in the loss."""
        return self._num_targets

    @cached_property
    def digest(self) -> str:
        """16 hex digits that two datasets share exactly when they hold the same rows in the same order."""
        return hashlib.sha256(f"{super().digest} {self.document_mask}".encode()).hexdigest()[:16]

    @cached_property
    def share_of_whole_rows(self) -> float:
        """The share of the rows that are a single document, or part of one, without padding."""
        first_pieces = self._first_of_row[:-1]
        return float(np.mean(self._lengths[first_pieces] == self.seq_len))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._first_of_row) - 1

    def row(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return tokens, targets and positions of a row, each [seq_len].

        A target is the next token if that counts in the loss, else -100. Positions count from 0 at the first token of
        each document and of the padding.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)} rows")
        tokens = np.full(self.seq_len, self.cache.eos_id, np.int64)
        targets = np.full_like(tokens, IGNORE_INDEX)
        positions = np.arange(self.seq_len)
        place = 0
        for piece in range(self._first_of_row[index], self._first_of_row[index + 1]):
            begin = self._begins[piece]
            length = self._lengths[piece]
            window = self.cache.tokens[begin : begin + length + 1].astype(np.int64)
            here = slice(place, place + length)
            tokens[here] = window[:-1]
            targets[here] = np.where(self._ignored[begin + 1 : begin + length + 1], IGNORE_INDEX, window[1:])
            place += length
            positions[place:] = np.arange(self.seq_len - place)
        return tokens, targets, positions


def pack(
    cache: TokenCache, documents: npt.NDArray[Any], seq_len: int, *, seed: int, document_mask: bool = True
) -> PackedDataset:
    """Return some documents of a corpus as rows: whole conversations if there are any, else texts end to end."""
    kind = PackedDataset if cache.ignored is None else PackedConversations
    return kind(cache, documents, seq_len, seed=seed, document_mask=document_mask)


def best_fit(lengths: npt.NDArray[Any], capacity: int) -> npt.NDArray[np.int64]:
    """Return the row of each piece by best-fit decreasing: longest piece first, each into the fullest row with room.

    Args:
        lengths: lengths of the pieces, [pieces], none above ``capacity``.
        capacity: length of a row.

    Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830, section 3.
    """
    rows = np.empty(len(lengths), np.int64)
    by_space: defaultdict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []  # the distinct free spaces of rows, ascending
    num_rows = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            row = num_rows
            space = capacity
            num_rows += 1
        else:
            space = spaces[place]
            row = by_space[space].pop()
            if not by_space[space]:
                del spaces[place]
        rows[piece] = row
        if space > length:
            if not by_space[space - length]:
                insort(spaces, space - length)
            by_space[space - length].append(row)
    return rows


def _count(mask: npt.NDArray[np.bool_], begins: npt.NDArray[Any], ends: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return how many are set between each begin and end; these spans must not overlap or be empty."""
    counts = np.zeros(len(begins), np.int64)
    if len(begins):
        order = np.argsort(begins)
        bounds = np.stack([begins[order], ends[order]], axis=1).ravel()
        counts[order] = np.add.reduceat(mask[: bounds[-1]], bounds[:-1], dtype=np.int64)[::2]
    return counts


def permutation(length: int, seed: int, *stream: int) -> npt.NDArray[np.int64]:
    """Return a permutation of ``range(length)`` drawn from ``seed`` and a stream number.

    It sorts raw PCG64 output, which NumPy keeps the same in every version, unlike ``Generator.permutation``. A run
    that resumes after an upgrade therefore sees the same order.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=stream)
    return np.argsort(np.random.PCG64(sequence).random_raw(length), kind="stable")


def row_order(length: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order in which an epoch visits ``length`` rows."""
    return permutation(length, seed, _ROWS, epoch)
