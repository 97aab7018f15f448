"""Pack documents into rows of one length, with targets and positions that keep documents apart."""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from llama_core.data.selection import Part, Selection
from llama_core.models.batch import IGNORE_INDEX
from llama_core.objectives.records import DOCUMENTS, RECORD_KINDS
from llama_core.objectives.traits import ObjectiveType

_SAMPLED_ROWS = 1024
"""Rows by which properties of all rows are judged."""
_OPENED_PARTS = 64
"""Most shards whose tokens are opened before the first row is read: a run then keeps them, even if they are deleted."""


class PackedDataset:
    """Rows of ``seq_len`` tokens, cut out of the chosen documents of each shard, laid end to end.

    Row i of a shard begins at token i * seq_len, and its last target is the first token of row i + 1: every token is an
    input once, and every token except a document's first is a target once. The last row of a shard is padded with
    end-of-text tokens that are not targets, and not dropped: a small corpus keeps all its text, and the held-out loss
    covers all of it. The rows of the shards follow each other.

    Takes no memory per document or token: a row is found by arithmetic and a search in the mapped offsets.

    Args:
        selection: the documents to pack.
        seq_len: tokens per row.
        document_mask: keep attention inside each document; otherwise batches carry no positions.
    """

    unit: ClassVar[str] = DOCUMENTS.name
    """What is packed, in messages."""

    def __init__(self, selection: Selection, seq_len: int, *, document_mask: bool = True) -> None:
        self.per_token: tuple[str, ...] = ()
        """Names of the values, beside targets and positions, that a row has for each token."""
        self._reference_sizes: list[int] = []
        self._references: npt.NDArray[np.float32] | None = None
        self.selection = selection
        self.seq_len = seq_len
        self.document_mask = document_mask
        # the last token of a shard is only a target, never an input
        num_rows = [-(-(part.num_tokens - 1) // seq_len) for part in selection.parts]
        self._row_ends = np.cumsum(num_rows, dtype=np.int64)
        if len(selection.parts) <= _OPENED_PARTS:
            for part in selection.parts:
                part.open()

    @property
    def num_documents(self) -> int:
        """Documents packed."""
        return self.selection.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, including BOS and EOS."""
        return self.selection.num_tokens

    @property
    def num_targets(self) -> int:
        """Tokens that count in the loss: all but the first of each document."""
        return self.num_tokens - self.num_documents

    @property
    def reference_shape(self) -> tuple[int, int]:
        """How many entries ``set_references`` takes, and how many numbers are in each: one for a row of tokens."""
        return len(self), self.seq_len * sum(self._reference_sizes)

    def expect_references(self, objective: ObjectiveType) -> None:
        """Let every row have the values that a forward before the run makes of it; they are 0 until it has."""
        if objective.reference is not None:
            names = objective.reference.values
            self.per_token = (*self.per_token, *names)
            self._reference_sizes = [objective.values_per_token[name] for name in names]

    def references_in(self, measured: npt.NDArray[np.float32], index: int) -> npt.NDArray[np.float32]:
        """Return the entries of a row that ``set_references`` takes, [entries, numbers].

        Args:
            measured: what was measured of the row, by each forward over it: [values, forwards].
            index: the row.
        """
        return measured.reshape(1, -1)

    def set_references(self, references: npt.NDArray[np.float32]) -> None:
        """Give every row the values that a forward before the run has made of it.

        Args:
            references: the entries of all rows in their order, of ``reference_shape``.
        """
        if references.shape != self.reference_shape:
            raise ValueError(f"{references.shape} are not the values of {self.reference_shape}")
        self._references = references

    def _references_of(self, index: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the values of a row that come of a forward before the run, [seq_len] or [seq_len, numbers] each."""
        sizes = self._reference_sizes
        values = np.zeros((self.seq_len, sum(sizes)), np.float32)
        if self._references is not None:
            values = np.array(self._references[index]).reshape(values.shape)
        ends = np.cumsum(sizes)
        for size, end in zip(sizes, ends, strict=True):
            yield values[:, end - 1] if size == 1 else values[:, end - size : end]

    @cached_property
    def digest(self) -> str:
        """16 hex digits that two datasets share exactly when they hold the same rows in the same order."""
        return hashlib.sha256(f"{self.selection.digest} {self.seq_len}".encode()).hexdigest()[:16]

    @cached_property
    def share_of_whole_rows(self) -> float:
        """The share of the rows that are a single document, or part of one, without padding.

        If there are many rows, it is the share of a thousand of them, evenly spread.
        """
        num_sampled = min(len(self), _SAMPLED_ROWS)
        sampled = (index * len(self) // num_sampled for index in range(num_sampled))
        return float(np.mean([self._is_whole(*self._place(row)) for row in sampled]))

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._row_ends[-1]) if len(self._row_ends) else 0

    def row(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        """Return tokens, targets and positions of a row, each int64 [seq_len], and the values of ``per_token`` in fp32.

        A target is the next token, or -100 if that belongs to another document or is padding. Positions count from 0
        at the start of the row and at each document's first token.
        """
        part, begin = self._place(index)
        end = min(begin + self.seq_len + 1, part.num_tokens)
        window = np.full(self.seq_len + 1, self.selection.eos_id, np.int64)
        window[: end - begin] = part.tokens(begin, end)
        tokens = window[:-1]
        targets = window[1:].copy()
        firsts = np.append(part.firsts(begin, end), end) - begin  # padding counts as another document
        targets[firsts[firsts <= self.seq_len] - 1] = IGNORE_INDEX
        targets[end - begin :] = IGNORE_INDEX
        segment_starts = np.zeros(self.seq_len, np.int64)
        inside = firsts[firsts < self.seq_len]
        segment_starts[inside] = inside
        positions = np.arange(self.seq_len) - np.maximum.accumulate(segment_starts)
        return tokens, targets, positions, *self._references_of(index)

    def _place(self, index: int) -> tuple[Part, int]:
        """Return the documents of the shard that holds a row, and the token of theirs at which the row begins."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)} rows")
        number = int(np.searchsorted(self._row_ends, index, side="right"))
        first_row = int(self._row_ends[number - 1]) if number else 0
        return self.selection.parts[number], (index - first_row) * self.seq_len

    def _is_whole(self, part: Part, begin: int) -> bool:
        end = begin + self.seq_len
        return end <= part.num_tokens and not len(part.firsts(begin, end))


@dataclass(frozen=True)
class Pieces:
    """Documents of a shard that are in rows, or what fits of them."""

    begins: npt.NDArray[np.int64]
    """The first token of each, [pieces]."""
    lengths: npt.NDArray[np.int64]
    """How many of its tokens are inputs, [pieces]."""
    num_targets: npt.NDArray[np.int64]
    """How many of its targets count, [pieces]."""
    num_truncated: int
    """Conversations that are longer than a row."""


class PackedConversations(PackedDataset):
    """Rows of ``seq_len`` tokens that hold whole conversations, so that no answer is in a row without its prompt.

    The rest of a row is padding without targets. A conversation longer than a row is truncated, and left out if no
    token that remains counts. A text among the conversations is cut into pieces, each of which begins with the last
    target of the previous one.

    Takes 24 bytes of memory per document; tokens stay on disk.

    Args:
        selection: the documents to pack, of a source that holds conversations.
        seq_len: tokens per row.
        document_mask: let a row hold several documents, and mask attention between them; otherwise each has its own
            row, and batches carry no positions.
    """

    unit: ClassVar[str] = "conversations"

    def __init__(self, selection: Selection, seq_len: int, *, document_mask: bool = True) -> None:
        if not selection.has_conversations:
            raise ValueError("these documents are texts; use PackedDataset")
        super().__init__(selection, seq_len, document_mask=document_mask)
        found = [_pieces(part, seq_len) for part in selection.parts]
        self.num_truncated = sum(pieces.num_truncated for pieces in found)
        """Number of truncated conversations."""
        part_of_piece = np.repeat(np.arange(len(found)), [len(pieces.begins) for pieces in found])
        begins = concatenated([pieces.begins for pieces in found])
        lengths = concatenated([pieces.lengths for pieces in found])
        num_targets = concatenated([pieces.num_targets for pieces in found])
        kept = num_targets > 0
        self.num_left_out = int((~kept).sum())
        """Number of conversations left out, because no token that fits into a row counts."""
        self._num_targets = int(num_targets.sum())
        lengths = lengths[kept]
        rows = best_fit(lengths, seq_len) if document_mask else np.arange(len(lengths))
        order = np.argsort(rows, kind="stable")
        self._parts = part_of_piece[kept][order]
        self._begins = begins[kept][order]
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

    def row(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        """Return tokens, targets and positions of a row, each int64 [seq_len], and the values of ``per_token`` in fp32.

        A target is the next token if that counts in the loss, else -100. Positions count from 0 at the first token of
        each document and of the padding.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)} rows")
        tokens = np.full(self.seq_len, self.selection.eos_id, np.int64)
        targets = np.full_like(tokens, IGNORE_INDEX)
        positions = np.arange(self.seq_len)
        place = 0
        for piece in range(self._first_of_row[index], self._first_of_row[index + 1]):
            shard = self.selection.parts[self._parts[piece]].shard
            begin = self._begins[piece]
            length = self._lengths[piece]
            window = shard.tokens[begin : begin + length + 1].astype(np.int64)
            if shard.ignored is None:
                counted = window[1:]
            else:
                counted = np.where(shard.ignored[begin + 1 : begin + length + 1], IGNORE_INDEX, window[1:])
            here = slice(place, place + length)
            tokens[here] = window[:-1]
            targets[here] = counted
            place += length
            positions[place:] = np.arange(self.seq_len - place)
        return tokens, targets, positions, *self._references_of(index)


def packed_documents(selection: Selection) -> type[PackedDataset]:
    """Return how documents are packed: whole if there are conversations among them, else end to end."""
    return PackedConversations if selection.has_conversations else PackedDataset


def pack(
    selection: Selection, seq_len: int, *, document_mask: bool = True, reads: str = DOCUMENTS.name
) -> PackedDataset:
    """Return documents of a source as rows, as their kind of records wants it."""
    kind: type[PackedDataset] = import_module(RECORD_KINDS.named(reads).module).rows_of(selection)
    return kind(selection, seq_len, document_mask=document_mask)


def _pieces(part: Part, seq_len: int) -> Pieces:
    """Return what rows of ``seq_len`` tokens hold of each document of a part; reads all their lengths."""
    shard = part.shard
    documents = np.concatenate([np.arange(span.first, span.last) for span in part.spans])
    starts = np.asarray(shard.offsets[documents])
    num_inputs = np.asarray(shard.offsets[documents + 1]) - starts - 1  # a document's last token is only a target
    if (num_inputs < 0).any():
        raise shard.removed("its offsets do not ascend")
    is_conversation = np.zeros(len(documents), np.bool_)
    if shard.is_conversation is not None:
        is_conversation = shard.is_conversation[documents]
    num_pieces = np.where(is_conversation, 1, -(-num_inputs // seq_len))
    document = np.repeat(np.arange(len(num_pieces)), num_pieces)
    before = (np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)) * seq_len
    begins = starts[document] + before
    lengths = np.minimum(num_inputs[document] - before, seq_len)
    num_targets = lengths
    if shard.ignored is not None:
        num_targets = lengths - count_set(shard.ignored, begins + 1, begins + 1 + lengths)
    num_truncated = int((is_conversation & (num_inputs > seq_len)).sum())
    return Pieces(begins, lengths, num_targets, num_truncated)


def concatenated(arrays: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return some arrays as one; they may be none."""
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


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


def count_set(mask: npt.NDArray[np.bool_], begins: npt.NDArray[Any], ends: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return how many are set between each begin and end; these spans must not overlap or be empty."""
    counts = np.zeros(len(begins), np.int64)
    if len(begins):
        order = np.argsort(begins)
        bounds = np.stack([begins[order], ends[order]], axis=1).ravel()
        counts[order] = np.add.reduceat(mask[: bounds[-1]], bounds[:-1], dtype=np.int64)[::2]
    return counts
