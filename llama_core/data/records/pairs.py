"""Records of two answers to a prompt, one of which is better."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from llama_core.data.bad_lines import MAX_EXAMPLES, MalformedRecordError, UnusableRecordError, checked_text
from llama_core.data.chat import ChatFormat, no_answer
from llama_core.data.corpus import Document
from llama_core.data.formats import TOOLS_FIELD, Content, FieldNames, Record, RecordFormat
from llama_core.data.packing import (
    PackedConversations,
    PackedDataset,
    Pieces,
    best_fit,
    concatenated,
    count_set,
    packed_documents,
)
from llama_core.data.records.turns import (
    Message,
    history_of,
    instruction_of,
    says_only,
    system_before,
    system_of,
    tools_of,
    turns_in,
)
from llama_core.data.selection import Part, Selection
from llama_core.data.templates.message_keys import SYSTEM_ROLES
from llama_core.models.batch import IGNORE_INDEX
from llama_core.objectives.next_token import NEXT_TOKEN
from llama_core.objectives.preferences import ANSWER, REFERENCE
from llama_core.objectives.records import PAIRS as KIND
from llama_core.objectives.records import RECORD_KINDS
from llama_core.objectives.traits import ObjectiveType

_QUESTIONS = ("prompt", "question", "instruction", "input")
"""What a pair of answers may call its prompt; the first that a record has counts, and an instruction with its input."""
_FEWEST_OF_PAIR = 2
"""Fewest tokens of a row that a pair or a labelled answer takes, so that there are two numbers of answers for each."""


class Pair(NamedTuple):
    """Two answers to a prompt: each a list of messages, or all three plain texts."""

    prompt: list[Message] | str
    chosen: list[Message] | str
    rejected: list[Message] | str
    tools: Sequence[Message] = ()
    """JSON schemas of the tools that the assistant may call."""

    @property
    def is_text(self) -> bool:
        """Whether it is of plain texts: a prompt and what may follow it, without a chat template."""
        return isinstance(self.prompt, str)

    @property
    def messages(self) -> list[Any]:
        """All messages of the prompt and of both answers; none of plain texts."""
        parts = (self.prompt, self.chosen, self.rejected)
        return [message for part in parts if isinstance(part, list) for message in part]

    def document(self, chat: ChatFormat, location: str, tools: Sequence[Message]) -> Document:
        """Return the chosen answer with its prompt, and the other one beside it; only answers count."""
        identity = json.dumps(["pair", *self[:3]], sort_keys=True, default=str)
        if self.is_text:
            chosen, rejected = (chat.text(str(self.prompt), str(answer)) for answer in (self.chosen, self.rejected))
        else:
            chosen, rejected = (
                chat.answer(self.prompt, answer, name, location, tools)
                for answer, name in ((self.chosen, "chosen"), (self.rejected, "rejected"))
            )
        of_chosen, of_rejected = (
            Document(text, location, replace(turns, messages=identity)) for text, turns in (chosen, rejected)
        )
        if of_chosen.text == of_rejected.text:  # a template may strip the spaces in which they differ
            raise equal_answers()
        return replace(of_chosen, other=of_rejected)


def pair_of_texts(chosen: str, rejected: str) -> Pair:
    """Return the pair of two texts that hold their prompt: the words with which both begin.

    Raises:
        UnusableRecordError: if they are equal, begin differently, or one has nothing after the prompt.
    """
    if chosen == rejected:
        raise equal_answers()
    end = next(
        (place for place, letters in enumerate(zip(chosen, rejected, strict=False)) if letters[0] != letters[1]), -1
    )
    end = min(len(chosen), len(rejected)) if end < 0 else end
    while end and not chosen[end - 1].isspace():  # a word may begin alike
        end -= 1
    if not chosen[:end].strip():
        raise no_prompt("prompt", "chosen", "rejected")
    pair = Pair(chosen[:end], chosen[end:], rejected[end:])
    for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if isinstance(answer, str) and not answer.strip():
            raise no_answer(name)
    return pair


def pair_of_messages(prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]) -> Pair:
    """Return the pair of two lists of messages, with those with which both begin as the end of the prompt.

    Raises:
        UnusableRecordError: if the answers are equal, or one of them is missing.
    """
    if chosen == rejected:
        raise equal_answers()
    together = 0
    while together < min(len(chosen), len(rejected)) and chosen[together] == rejected[together]:
        together += 1
    pair = Pair([*prompt, *chosen[:together]], list(chosen[together:]), list(rejected[together:]))
    for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if not answer:
            raise no_answer(name)
    return pair


def has_prompt(pair: Pair) -> bool:
    """Return whether a pair of messages has a turn that says something before its answers, beside a system prompt."""
    return any(_asks(message) for message in pair.prompt)


def _asks(message: object) -> bool:
    if not isinstance(message, dict) or message.get("role") in SYSTEM_ROLES:
        return False
    content = message.get("content")
    return bool(content.strip()) if isinstance(content, str) else True


def begin_alike(chosen: Sequence[Message], rejected: Sequence[Message]) -> bool:
    """Return whether two lists of messages hold their prompt."""
    return bool(chosen and rejected and chosen[0] == rejected[0])


def equal_answers() -> UnusableRecordError:
    """Return the error of a pair that prefers nothing."""
    return UnusableRecordError("equal answers", "the chosen answer is the rejected one")


def no_prompt(prompt: str, chosen: str, rejected: str) -> UnusableRecordError:
    """Return the error of a pair whose answers are to nothing, with the names of its fields."""
    return UnusableRecordError("missing field", f"no {prompt!r}, and {chosen!r} and {rejected!r} begin differently")


def _read_pair(record: Record) -> Pair:
    """Return the answers of a record, each of which is a text or a list of messages."""
    names = record.names
    field = next((field for field in _QUESTIONS if record.values.get(names[field]) is not None), "prompt")
    asked = history_of(record)
    if record.get(field) is not None:
        asked += [instruction_of(record)] if field in ("instruction", "input") else turns_in(record, field, "user")
    tools = tools_of(record)
    if not asked and not any(isinstance(record.get(answer), list) for answer in PAIRS.fields):
        if tools or system_of(record):
            with_system = names["system" if system_of(record) else TOOLS_FIELD]
            raise UnusableRecordError("missing field", f"no {names['prompt']!r} beside {with_system!r}")
        return pair_of_texts(*(checked_text(record.string(answer)) for answer in PAIRS.fields))
    chosen, rejected = (turns_in(record, answer, "assistant") for answer in PAIRS.fields)
    if isinstance(record.get(field), str) and begin_alike(chosen, rejected):
        if not any(says_only(message, asked[-1]["content"]) for message in chosen):
            record.ignore(field)
        record.ignore("history")
        asked = []  # the prompt once more, beside conversations that begin with it
    system = system_before(record, asked or chosen)
    pair = pair_of_messages([*system, *asked], chosen, rejected)
    if not has_prompt(pair):
        raise no_prompt(names["prompt"], names["chosen"], names["rejected"])
    return pair._replace(tools=tools)


def _refuse_preferences(record: Record) -> Content:
    names = record.names
    found = [names[field] for field in ("prompt", "chosen", "rejected") if record.get(field) is not None]
    chosen = record.get("chosen")
    has_turns = isinstance(chosen, list) and not isinstance(record.get("prompt"), list)
    if has_turns:
        setting = "data.fields.messages"
    elif record.get("prompt") is not None:
        setting = "data.fields.completion"
    else:
        setting = "data.text_field"
    raise MalformedRecordError(
        f"this file holds preferences ({', '.join(map(repr, found))}); {_TRAIN_ON_BOTH}, or "
        f"set {setting}={names['chosen']} to train on the chosen answers alone"
    )


_TRAIN_ON_BOTH = "train on both answers with --objective dpo"
PREFERENCES = RecordFormat(
    "preferences", ("chosen",), _refuse_preferences, optional=("rejected",), advice=_TRAIN_ON_BOTH
)
"""What they are to somebody who reads documents."""
PAIRS = RecordFormat(
    "pairs of answers",
    ("chosen", "rejected"),
    _read_pair,
    optional=(*_QUESTIONS, "system", "history", TOOLS_FIELD),
    of_messages=("role", "content"),
)
"""The format of records for an objective that reads pairs."""

FORMATS = (PAIRS,)


def rows_of(selection: Selection) -> type[PackedDataset]:
    """Return how some documents are packed."""
    return PackedPairs if selection.has_pairs else packed_documents(selection)


def about(sources: Sequence[PackedDataset]) -> Iterator[str]:
    """Yield a sentence on what may be unintended in the rows of some sources."""
    yield from ()


def what_is_missing(values: Mapping[str, Any], names: FieldNames) -> str:
    """Return which fields a record lacks that is no answer to a prompt, and what to do about it."""
    fields = ", ".join(repr(key) for key in list(values)[:MAX_EXAMPLES]) or "no fields"
    wanted = " and ".join(repr(names[field]) for field in names.formats[0].fields)
    one = RECORD_KINDS.named(names.reads).one
    return f"no {wanted} among {fields}, which make a {one}; {_choice_of_objective(values, names)}"


def _choice_of_objective(values: Mapping[str, Any], names: FieldNames) -> str:
    """Return what to do about a record that is not what the run's objective reads."""
    others = FieldNames(names.text, names.given).recognise(values)
    told = next((row for row in others if row.is_only_told), None)
    if told is not None:
        return f"these answers have labels: {told.advice}"
    others = [row for row in others if not row.advice]
    if others:
        return f"to train on {others[0].title}, leave out --objective (training.objective={NEXT_TOKEN.name})"
    needed = names.formats[0].fields
    return f"if they have other names, set {' and '.join(f'data.fields.{field}' for field in needed)}"


class PackedPairs(PackedConversations):
    """Rows of ``seq_len`` tokens that hold whole pairs: both answers, each with its prompt, as documents of one row.

    A pair longer than a row is truncated: each answer may have half of the row, or what the other one leaves of it. It
    is left out if an answer keeps no token that counts. Beside targets, every token has the number of its answer, and
    with ``references`` what the reference makes of it; see ``llama_core.objectives.preferences``.

    Takes 40 bytes of memory per pair, and 8 with ``references``; tokens stay on disk.

    Args:
        selection: the pairs to pack.
        seq_len: tokens per row.
        document_mask: must be set, because every row holds several documents.
    """

    unit: ClassVar[str] = KIND.name
    referred: ClassVar[tuple[str, ...]] = (REFERENCE,)
    """The log-probabilities under a reference that every answer has, with ``references``."""

    def __init__(self, selection: Selection, seq_len: int, *, document_mask: bool = True) -> None:
        if not document_mask:
            raise ValueError("a row holds several answers, so that attention needs the document mask")
        PackedDataset.__init__(self, selection, seq_len)
        self.per_token = (ANSWER,)
        found = [self._found(part, seq_len) for part in selection.parts]
        self.num_truncated = sum(pairs.num_truncated for pairs in found)
        part_of_pair = np.repeat(np.arange(len(found)), [len(pairs.begins) for pairs in found])
        begins_N2 = concatenated([pairs.begins for pairs in found]).reshape(-1, 2)
        lengths_N2 = concatenated([pairs.lengths for pairs in found]).reshape(-1, 2)
        num_targets_N2 = concatenated([pairs.num_targets for pairs in found]).reshape(-1, 2)
        kept = ((num_targets_N2 > 0) | (lengths_N2 == 0)).all(1)
        self.num_left_out = int((~kept).sum())
        self._num_targets = int(num_targets_N2[kept].sum())
        lengths = np.maximum(lengths_N2[kept].sum(1), _FEWEST_OF_PAIR)
        rows = best_fit(lengths, seq_len)
        order = np.argsort(rows, kind="stable")
        self._parts = part_of_pair[kept][order]
        self._begins_N2 = begins_N2[kept][order]
        self._lengths_N2 = lengths_N2[kept][order]
        self._lengths = lengths[order]
        self._first_of_row = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2))

    @staticmethod
    def _found(part: Part, seq_len: int) -> Pieces:
        """Return what rows hold of each pair of a part, [pairs, 2]."""
        return _pairs(part, seq_len)

    @property
    def num_pairs(self) -> int:
        """Pairs in all rows."""
        return len(self._parts)

    @property
    def share_of_whole_rows(self) -> float:
        """The share of the rows that are taken as a single document: none, as a pair is two."""
        return 0.0

    @property
    def reference_shape(self) -> tuple[int, int]:
        """How many pairs there are, and two numbers of each."""
        return self.num_pairs, 2

    def expect_references(self, objective: ObjectiveType) -> None:
        """Let every row have the log-probabilities of its answers under the reference; they are 0 until it has."""
        if objective.reference is not None:
            self.set_references(np.zeros(self.reference_shape, np.float32))

    def set_references(self, references_N2: npt.NDArray[np.float32]) -> None:
        """Give every row the log-probabilities of its answers under the reference.

        Args:
            references_N2: those of every pair in the order of the rows, in nats: [pairs, 2].
        """
        super().set_references(np.array(references_N2))  # they are few
        self.per_token = (ANSWER, *self.referred)

    def references_in(self, log_probabilities_AV: npt.NDArray[np.float32], index: int) -> npt.NDArray[np.float32]:
        """Return those of the pairs of a row that ``set_references`` takes.

        Args:
            log_probabilities_AV: those of the answers of the row, by their numbers, for each of ``referred``.
            index: the row.
        """
        num_pairs = len(self.pairs_of(index))
        return log_probabilities_AV[1 : 1 + 2 * num_pairs, 0].reshape(-1, 2)

    def pairs_of(self, index: int) -> range:
        """Return the numbers of the pairs of a row."""
        return range(int(self._first_of_row[index]), int(self._first_of_row[index + 1]))

    def row(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        """Return tokens, targets and positions of a row, int64 [seq_len], and the values of ``per_token`` in fp32."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)} rows")
        tokens = np.full(self.seq_len, self.selection.eos_id, np.int64)
        targets = np.full_like(tokens, IGNORE_INDEX)
        positions = np.arange(self.seq_len)
        answers = np.zeros(self.seq_len, np.float32)
        references_VS = np.zeros((len(self.per_token) - 1, self.seq_len), np.float32)
        place = 0
        number = 0
        for pair in self.pairs_of(index):
            shard = self.selection.parts[self._parts[pair]].shard
            fewest = place + _FEWEST_OF_PAIR
            for which, (begin, length) in enumerate(zip(self._begins_N2[pair], self._lengths_N2[pair], strict=True)):
                number += 1
                if not length:  # a labelled answer has no other one
                    continue
                window = shard.tokens[begin : begin + length + 1].astype(np.int64)
                assert shard.ignored is not None, "every pair has tokens that do not count"
                is_ignored = shard.ignored[begin + 1 : begin + length + 1]
                here = slice(place, place + length)
                positions[place:] = np.arange(self.seq_len - place)
                tokens[here] = window[:-1]
                targets[here] = np.where(is_ignored, IGNORE_INDEX, window[1:])
                answers[here] = np.where(is_ignored, 0, number)
                first = place + int(np.argmin(is_ignored))
                answers[first] = -number
                if self._references is not None:
                    references_VS[:, first] = self._referred_of(self._references[pair], which)
                place += length
            place = max(place, fewest)
        positions[place:] = np.arange(self.seq_len - place)
        return tokens, targets, positions, answers, *references_VS

    def _referred_of(self, references_2: npt.NDArray[np.float32], which: int) -> npt.NDArray[np.float32]:
        """Return the values of ``referred`` of an answer of a pair, from what ``set_references`` got of the pair."""
        return references_2[which : which + 1]


def _pairs(part: Part, seq_len: int) -> Pieces:
    """Return what rows of ``seq_len`` tokens hold of each pair of a part, [pairs, 2]; reads all their lengths."""
    shard = part.shard
    begins_N2, sizes_N2 = places_of_pairs(part)
    num_inputs_N2 = sizes_N2 - 1  # a document's last token is only a target
    if (num_inputs_N2 < 1).any():
        raise shard.removed("its offsets and seconds do not ascend")
    chosen, rejected = num_inputs_N2.T
    chosen = np.minimum(chosen, np.maximum(seq_len // 2, seq_len - rejected))
    rejected = np.minimum(rejected, seq_len - chosen)
    lengths_N2 = np.stack([chosen, rejected], axis=1)
    assert shard.ignored is not None, "every pair has tokens that do not count"
    firsts = begins_N2.ravel() + 1
    num_ignored = count_set(shard.ignored, firsts, firsts + lengths_N2.ravel())
    num_truncated = int((lengths_N2 < num_inputs_N2).any(1).sum())
    return Pieces(begins_N2, lengths_N2, lengths_N2 - num_ignored.reshape(-1, 2), num_truncated)


def places_of_pairs(part: Part) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where both answers of each pair of a part begin in its shard, and their tokens, [pairs, 2] each."""
    shard = part.shard
    pairs = np.concatenate([np.arange(span.first, span.last) for span in part.spans])
    starts = np.asarray(shard.offsets[pairs])
    ends = np.asarray(shard.offsets[pairs + 1])
    seconds = starts + np.asarray(shard.seconds[pairs])
    return np.stack([starts, seconds], axis=1), np.stack([seconds - starts, ends - seconds], axis=1)
