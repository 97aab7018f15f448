"""Records of one answer to a prompt, which is good or bad. A pair of answers is one of each."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from llama_core.data.bad_lines import UnusableRecordError, json_type
from llama_core.data.chat import ChatFormat
from llama_core.data.corpus import Document
from llama_core.data.formats import TOOLS_FIELD, Record, RecordFormat
from llama_core.data.packing import PackedDataset, Pieces, count_set, packed_documents
from llama_core.data.records import pairs
from llama_core.data.records.pairs import PAIRS, PackedPairs, places_of_pairs
from llama_core.data.records.turns import Message, after_system, history_of, tools_of, turns_in
from llama_core.data.selection import Part, Selection
from llama_core.objectives.preferences import MISMATCH, REFERENCE
from llama_core.objectives.records import LABELLED_ANSWERS as KIND


class LabelledAnswer(NamedTuple):
    """An answer to a prompt."""

    prompt: list[Message]
    answer: list[Message]
    is_good: bool
    tools: Sequence[Message] = ()
    """JSON schemas of the tools that the assistant may call."""

    @property
    def messages(self) -> list[Any]:
        """All messages of the prompt and of the answer."""
        return [*self.prompt, *self.answer]

    def document(self, chat: ChatFormat, location: str, tools: Sequence[Message]) -> Document:
        """Return the answer with its prompt; only the answer counts."""
        # both labels of one answer are on the same side of a split
        identity = json.dumps(["answer", self.prompt, self.answer], sort_keys=True, default=str)
        text, turns = chat.answer(self.prompt, self.answer, "completion", location, tools)
        return Document(text, location, replace(turns, messages=identity), is_good=self.is_good)


def _read_labelled(record: Record) -> LabelledAnswer:
    """Return the answer of a record, which is a text or a list of messages, as its prompt is."""
    label = record.get("label")
    if not isinstance(label, bool):
        raise UnusableRecordError("wrong type", f"{record.names['label']!r} is {json_type(label)}, not true or false")
    prompt = after_system(record, [*history_of(record), *turns_in(record, "prompt", "user")])
    return LabelledAnswer(prompt, turns_in(record, "completion", "assistant"), label, tools_of(record))


LABELLED = RecordFormat(
    "labelled answers",
    ("prompt", "completion", "label"),
    _read_labelled,
    optional=("system", "history", TOOLS_FIELD),
    of_messages=("role", "content"),
)
"""The format of records for an objective that reads labelled answers."""
WITH_LABELS = RecordFormat(
    "answers with labels",
    LABELLED.fields,
    _read_labelled,
    is_only_told=True,
    advice="train on good and bad answers with --objective kto",
)
"""What they are to somebody who reads documents: a prompt and its completion, with a label that is not used."""

FORMATS = (LABELLED, PAIRS)

what_is_missing = pairs.what_is_missing


def rows_of(selection: Selection) -> type[PackedDataset]:
    """Return how some documents are packed."""
    return PackedLabelledAnswers if selection.has_pairs else packed_documents(selection)


def about(sources: Sequence[PackedDataset]) -> Iterator[str]:
    """Yield a sentence on answers that have no row with another one, if there are any."""
    rows = [source for source in sources if isinstance(source, PackedLabelledAnswers)]
    num_alone = sum(source.num_alone for source in rows)
    if num_alone:
        yield (
            f"{num_alone:,} of {sum(map(len, rows)):,} sequences hold a single answer, which says nothing about the "
            "divergence from the reference, since a mismatch is with the prompt of another answer of its sequence; a "
            "longer training.seq_len holds more"
        )


class PackedLabelledAnswers(PackedPairs):
    """Rows of ``seq_len`` tokens that hold whole labelled answers, each with its prompt, as documents.

    They are pairs that lack one of their answers: a good answer has the first number of its pair, a bad one the second.
    The answers of a pair are two such. What is longer than a row is truncated.

    Takes 40 bytes of memory per answer, and 8 with ``references``; tokens stay on disk.
    """

    unit: ClassVar[str] = KIND.name
    referred: ClassVar[tuple[str, ...]] = (REFERENCE, MISMATCH)

    @cached_property
    def digest(self) -> str:
        """16 hex digits that two datasets share exactly when they hold the same rows in the same order."""
        return hashlib.sha256(f"{super().digest} {self.unit}".encode()).hexdigest()[:16]

    @staticmethod
    def _found(part: Part, seq_len: int) -> Pieces:
        """Return what rows hold of each answer of a part as one of a pair, [answers, 2]."""
        return _labelled(part, seq_len)

    @property
    def num_alone(self) -> int:
        """Rows with a single answer."""
        return int((np.diff(self._first_of_row) == 1).sum())

    def references_in(self, log_probabilities_AV: npt.NDArray[np.float32], index: int) -> npt.NDArray[np.float32]:
        """Return those of the answers of a row that ``set_references`` takes: after its own prompt, and another one."""
        is_bad = self._lengths_N2[list(self.pairs_of(index)), 0] == 0
        numbers = 1 + 2 * np.arange(len(is_bad)) + is_bad
        of_answers: npt.NDArray[np.float32] = log_probabilities_AV[numbers]
        return of_answers

    def _referred_of(self, references_2: npt.NDArray[np.float32], which: int) -> npt.NDArray[np.float32]:
        return references_2


def _labelled(part: Part, seq_len: int) -> Pieces:
    """Return what rows of ``seq_len`` tokens hold of each labelled answer of a part, [answers, 2]."""
    shard = part.shard
    begins_N2, sizes_N2 = places_of_pairs(part)
    if (sizes_N2 < 0).any() or (sizes_N2 == 1).any():
        raise shard.removed("its offsets and seconds do not ascend")
    which, pairs = np.nonzero(sizes_N2.T)  # all good answers first, so that those of a pair are apart
    begins = begins_N2[pairs, which]
    num_inputs = sizes_N2[pairs, which] - 1  # a document's last token is only a target
    lengths = np.minimum(num_inputs, seq_len)
    assert shard.ignored is not None, "every answer has tokens that do not count"
    num_targets = lengths - count_set(shard.ignored, begins + 1, begins + 1 + lengths)
    num_truncated = int((num_inputs > seq_len).sum())
    return Pieces(_in_places(begins, which), _in_places(lengths, which), _in_places(num_targets, which), num_truncated)


def _in_places(values: npt.NDArray[np.int64], which: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return each value in its place of two, the other of which is 0: [values, 2]."""
    places_N2 = np.zeros((len(values), 2), np.int64)
    places_N2[np.arange(len(values)), which] = values
    return places_N2
