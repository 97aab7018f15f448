"""Packing documents into rows of one length, with targets and positions that keep documents apart."""

import hashlib
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_core.data.token_cache import TokenCache
from llama_core.models.batch import IGNORE_INDEX

_DOCUMENTS, _ROWS = 0, 1


class PackedDataset:
    """Rows of ``seq_len`` tokens, cut out of the chosen documents laid end to end in an order drawn from ``seed``.

    Row i begins at token i * seq_len, and its last target is the first token of row i + 1: every token is an input
    once, and every token but a document's first is a target once. The last row is filled up with end-of-text tokens
    that are no targets, rather than dropped: a small corpus keeps all its text, and held-out loss is over all of it.

    Takes 16 bytes of memory per document; tokens stay on disk.

    Args:
        cache: the tokenised corpus.
        documents: indices of the documents to pack.
        seq_len: tokens per row.
        seed: draws the order of the documents.
        document_mask: whether attention shall stay inside each document; otherwise batches carry no positions.
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
        """Tokens of all documents, BOS and EOS counted."""
        return int(self._starts[-1])

    @cached_property
    def digest(self) -> str:
        """16 hex digits that two datasets share exactly when they hold the same rows in the same order."""
        digest = hashlib.sha256(f"{self.cache.tokenizer_fingerprint} {self.seq_len} ".encode())
        digest.update(self.cache.text_hashes[self.documents].tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        """Return the number of rows; the last end-of-text has no target after it and needs none."""
        num_inputs = max(0, self.num_tokens - 1)
        return (num_inputs + self.seq_len - 1) // self.seq_len

    def row(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return tokens, targets and positions of a row, each [seq_len].

        A target is the next token, or -100 where that belongs to another document or is padding. Positions count
        from 0 at the start of the row and at each document's first token.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)} rows")
        begin = index * self.seq_len
        end = min(begin + self.seq_len + 1, self.num_tokens)
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left"))
        window = np.full(self.seq_len + 1, self.cache.eos_id, np.int64)
        for document in range(first, last):
            low, high = max(self._starts[document], begin), min(self._starts[document + 1], end)
            source = self.cache.offsets[self.documents[document]] + low - self._starts[document]
            window[low - begin : high - begin] = self.cache.tokens[source : source + high - low]
        tokens, targets = window[:-1], window[1:].copy()
        firsts = np.append(self._starts[first + 1 : last], end) - begin  # padding stands apart like a document
        targets[firsts[firsts <= self.seq_len] - 1] = IGNORE_INDEX
        targets[end - begin :] = IGNORE_INDEX
        segment_starts = np.zeros(self.seq_len, np.int64)
        inside = firsts[firsts < self.seq_len]
        segment_starts[inside] = inside
        return tokens, targets, np.arange(self.seq_len) - np.maximum.accumulate(segment_starts)


def permutation(length: int, seed: int, *stream: int) -> npt.NDArray[np.int64]:
    """Return a permutation of ``range(length)`` drawn from ``seed`` and the number of a stream.

    It sorts raw PCG64 output, which NumPy keeps the same in every version, unlike ``Generator.permutation``: a run
    resumed after an upgrade sees the same order.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=stream)
    return np.argsort(np.random.PCG64(sequence).random_raw(length), kind="stable")


def row_order(length: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order in which an epoch visits ``length`` rows."""
    return permutation(length, seed, _ROWS, epoch)
