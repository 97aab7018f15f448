"""Formats of records: by which fields each is recognised, and how its records become texts or conversations.

A format is a row of ``FORMATS`` with a function that reads a record. ``data.text_field`` and ``data.fields`` say what a
source calls the fields.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from llama_core.config.settings import DataConfig
from llama_core.data.bad_lines import (
    MAX_EXAMPLES,
    MalformedRecordError,
    UnusableRecordError,
    checked_text,
    json_type,
)
from llama_core.data.pairs import (
    SYSTEM_ROLES,
    LabelledAnswer,
    Message,
    Pair,
    begin_alike,
    has_prompt,
    no_prompt,
    pair_of_messages,
    pair_of_texts,
)
from llama_core.data.token_masks import LABELS, MASKS, counted_tokens
from llama_core.data.tool_calls import without_nulls
from llama_core.errors import ConfigError, not_one_of, why_unreadable
from llama_core.objectives.next_token import NEXT_TOKEN
from llama_core.objectives.traits import Reads


class Tokens(NamedTuple):
    """A document that is token ids already."""

    ids: npt.NDArray[Any]
    """The ids, integers [tokens]."""
    ignored: npt.NDArray[np.bool_] | None = None
    """Those that do not count in the loss, a mask [tokens]; None if all do."""


class Conversation(NamedTuple):
    """The messages of a record, and the tools that they may call."""

    messages: list[Any]
    """Each with ``role`` and, unless it calls tools, ``content``."""
    tools: list[Any]
    """JSON schemas; empty if there are none."""


Content = str | Conversation | Tokens | Pair | LabelledAnswer
"""A text, a conversation, token ids, a pair of answers, or a labelled one."""
_TEXT_FIELD = "text"
_TOOLS_FIELD = "tools"
_MOST_NAMED = 12
"""Most ignored fields that a note names."""
_MOST_KEPT = 100
"""Most ignored fields that are counted: there may be another one in each record."""
INPUT_IDS = "input_ids"
"""The field of token ids."""


@dataclass(frozen=True)
class Record:
    """A record, whose fields are found by the names that the formats give them."""

    values: Mapping[str, Any]
    names: "FieldNames"
    used: set[str] = dataclasses.field(default_factory=set)
    """The fields that were read, by the source's names."""

    def get(self, field: str) -> Any:
        """Return the value of a field; None if it is null or missing."""
        name = self.names[field]
        self.used.add(name)
        return self.values.get(name)

    def ignore(self, field: str) -> None:
        """Take a field that was read for one that is not used."""
        self.used.discard(self.names[field])

    def string(self, field: str) -> str:
        """Return the value of a field.

        Raises:
            UnusableRecordError: if it is not a string.
        """
        value = self.get(field)
        if not isinstance(value, str):
            raise UnusableRecordError("wrong type", f"{self.names[field]!r} is {json_type(value)}, not a string")
        return value


@dataclass(frozen=True)
class RecordFormat:
    """A format of records."""

    title: str
    """What its records are, in the plural."""
    fields: tuple[str, ...]
    """The fields by which a record is recognised: it has all of them, and none is null."""
    read: Callable[[Record], Content]
    """Returns the text, the conversation or the token ids of a record.

    Raises ``UnusableRecordError`` for a record to leave out, ``MalformedRecordError`` for one that ends the reading.
    """
    optional: tuple[str, ...] = ()
    """Other fields that it reads where a record has them."""
    of_messages: tuple[str, ...] = ()
    """The fields of each message, if a field holds a list of them."""
    one: str = ""
    """What one of its records is, if nothing else can be read instead."""
    is_plain: bool = False
    """Whether its records go unannounced, because they are what a text and a conversation are here."""
    is_only_told: bool = False
    """Whether its records are always read as another format, and only counted, to tell what is not used of them."""

    @property
    def all_fields(self) -> tuple[str, ...]:
        """All fields of a record and its messages that it reads."""
        return (*self.fields, *self.optional, *self.of_messages)

    def described(self, names: "FieldNames") -> str:
        """Return what its records are, with the fields that it reads."""
        fields = " and ".join(repr(names[field]) for field in self.fields)
        if self.of_messages:
            fields += f" with {' and '.join(repr(names[field]) for field in self.of_messages)}"
        if self.optional:
            *others, last = [repr(names[field]) for field in self.optional]
            fields += f"; where given, {', '.join(others)}{' and ' if others else ''}{last}"
        return f"{self.title} ({fields})"


@dataclass(frozen=True)
class FieldNames:
    """What a source calls the fields of the formats."""

    text: str = "text"
    """The field of a text."""
    given: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The source's names of other fields, by the formats' names."""
    reads: Reads = "documents"
    """What is read of a record; the formats follow from it."""

    @classmethod
    def of(cls, data: DataConfig, reads: Reads = "documents") -> "FieldNames":
        """Return the names that a configuration gives.

        Raises:
            ConfigError: if it names a field that no format has.
        """
        known = list(dict.fromkeys(field for row in formats_of(reads) if row is not TEXT for field in row.all_fields))
        for field in data.fields:
            if field == _TEXT_FIELD:
                raise ConfigError("data.fields: the field of a text is data.text_field; set that instead of 'text'")
            if field not in known:
                raise ConfigError(f"data.fields: {field!r}{not_one_of(field, known)}")
        return cls(data.text_field, data.fields, reads)

    @property
    def formats(self) -> tuple[RecordFormat, ...]:
        """The formats that a record may have."""
        return formats_of(self.reads)

    def __getitem__(self, field: str) -> str:
        """Return the source's name of a format's field."""
        return self.text if field == _TEXT_FIELD else self.given.get(field, field)

    @property
    def identity(self) -> list[Any]:
        """What decides which records are read and how, as JSON."""
        read = [row for row in self.formats if not row.is_only_told]
        return [self.text, sorted(self.given.items()), [[row.title, row.all_fields] for row in read]]

    @cached_property
    def columns(self) -> dict[str, None]:
        """The names of all fields that a format may read in a record, in order."""
        return dict.fromkeys(self[field] for row in self.formats for field in (*row.fields, *row.optional))

    def are_given_for(self, row: RecordFormat) -> bool:
        """Return whether a name is given for a field by which a format is recognised."""
        return not self.given.keys().isdisjoint(row.fields)

    def recognise(self, values: Mapping[str, Any]) -> list[RecordFormat]:
        """Return the formats that a record may be of, the one to read it as first."""
        # most records lack the first field of most formats
        return [row for row, names in self._rows if names[0] in values and self._holds(values, names, row)]

    def has_format(self, columns: Container[str]) -> bool:
        """Return whether the rows of a table with some columns may be of a format."""
        return any(all(name in columns for name in names) for _, names in self._rows)

    @cached_property
    def _rows(self) -> list[tuple[RecordFormat, list[str]]]:
        """All formats with the names of the fields by which they are recognised; first those that were given names."""
        rows = sorted(self.formats, key=lambda row: (row.is_only_told, not self.are_given_for(row)))
        return [(row, [self[field] for field in row.fields]) for row in rows]

    def _holds(self, values: Mapping[str, Any], names: Sequence[str], row: RecordFormat) -> bool:
        for name in names:
            value = values.get(name)
            # a string in the field that somebody chose for texts is a text, whatever the field is called
            if value is None or (name == self.text and row is not TEXT and isinstance(value, str)):
                return False
        return True


@dataclass
class FormatCounts:
    """How many records were read as which format."""

    read: dict[str, int] = dataclasses.field(default_factory=dict)
    """Records by the title of the format that they were read as."""
    unused: dict[str, int] = dataclasses.field(default_factory=dict)
    """Records that are of another format too, by its title."""
    ignored: dict[str, int] = dataclasses.field(default_factory=dict)
    """Records with a field that nothing reads, by the field as a note names it; of the first ``_MOST_KEPT``."""
    num_nulls: int = 0
    """Keys that a table gave to the tools or the arguments of calls, as null, and that were dropped."""
    num_kept_nulls: int = 0
    """Those that are null in JSON, and were kept."""

    def add(self, rows: Sequence[RecordFormat], record: Record) -> None:
        """Count a record that was read as the first of some formats."""
        used, *others = rows
        self.read[used.title] = self.read.get(used.title, 0) + 1
        told = set[str]()
        if not record.names.are_given_for(used):  # else somebody has chosen
            for row in others:
                if row is not TEXT:  # a text that a template made of `messages` is ignored like any other field
                    self.unused[row.title] = self.unused.get(row.title, 0) + 1
                    told.update(record.names[field] for field in (*row.fields, *row.optional))
        for name, value in record.values.items():
            if name not in record.used and name not in told and _is_given(value):
                self.ignore(repr(name))

    def ignore(self, field: str) -> None:
        """Count a record with a field that nothing reads."""
        if field in self.ignored or len(self.ignored) < _MOST_KEPT:
            self.ignored[field] = self.ignored.get(field, 0) + 1

    def __add__(self, other: Self) -> Self:
        """Return the counts of both."""
        ignored = Counter(self.ignored) + Counter(other.ignored)
        return type(self)(
            dict(Counter(self.read) + Counter(other.read)),
            dict(Counter(self.unused) + Counter(other.unused)),
            dict(list(ignored.items())[:_MOST_KEPT]),
            self.num_nulls + other.num_nulls,
            self.num_kept_nulls + other.num_kept_nulls,
        )

    def notes(self, names: FieldNames) -> Iterator[str]:
        """Yield a sentence on what records were recognised as, and one on what of them is not used."""
        used = [row for row in names.formats if row.title in self.read]
        if not all(row.is_plain for row in used):
            described = ", ".join(f"{self.read[row.title]:,} {row.described(names)}" for row in used)
            yield f"recognised by their fields: {described}"
        for row in names.formats:
            if row.title in self.unused:
                yield f"{self.unused[row.title]:,} records also hold {_what_is_unused(row, names)}"
        if self.ignored:
            yield f"fields that are not used: {_counted(self.ignored)}"
        if self.num_nulls:
            yield (
                f"{self.num_nulls:,} null in calls of tools or in their schemas left out: a table gives all objects of "
                "a column the same keys; where null is meant, write arguments and tools as JSON text"
            )
        if self.num_kept_nulls:
            yield (
                f"{self.num_kept_nulls:,} null in calls of tools or in their schemas are trained on as they are; if "
                "they come from a table, which fills them in, leave them out"
            )
        if names.given and not any(names.are_given_for(row) for row in used):
            fields = ", ".join(f"{field}={name}" for field, name in names.given.items())
            yield f"data.fields ({fields}) chooses no format: no record has all fields of one under these names"


def _is_given(value: object) -> bool:
    """Return whether a field holds something: neither null nor an empty text, list or object."""
    return value is not None and not (isinstance(value, str | list | dict) and not value)


def _counted(fields: Mapping[str, int]) -> str:
    """Return fields with the number of records that have each."""
    first = [f"{field} ({number:,})" for field, number in list(fields.items())[:_MOST_NAMED]]
    num_more = len(fields) - len(first)
    if num_more:
        at_least = "at least " if len(fields) == _MOST_KEPT else ""
        return f"{', '.join(first)} and {at_least}{num_more} more"
    return ", ".join(first)


def _what_is_unused(row: RecordFormat, names: FieldNames) -> str:
    if row is PREFERENCES:
        return f"preferences ({names['chosen']!r}), which are not used; {_TRAIN_ON_BOTH}"
    if row.is_only_told:
        return f"{names['label']!r}, which is not used; {_TRAIN_ON_LABELS}"
    choice = f"data.fields.{row.fields[0]}={names[row.fields[0]]}"
    return f"{row.described(names)}, which are not used; set {choice} to train on these instead"


def read_record(
    values: object, names: FieldNames, counts: FormatCounts, *, is_row: bool = False, unread: Iterable[str] = ()
) -> Content:
    """Return the text, the conversation or the token ids of a record.

    Args:
        values: the record, any JSON value.
        names: what its source calls the fields.
        counts: counts the record.
        is_row: whether it is of a table, which writes null where an object lacks a key.
        unread: fields that it has beside ``values``.

    Raises:
        UnusableRecordError: if it gives no text and no conversation.
        MalformedRecordError: if its conversation is malformed, or it holds preferences.
    """
    if not isinstance(values, dict):
        raise UnusableRecordError("wrong type", f"a record is an object, not {json_type(values)}")
    rows = names.recognise(values)
    if not rows:
        raise _unrecognised(values, names)
    num_nulls = 0
    if is_row:
        values, num_nulls = without_nulls(values, names[_TOOLS_FIELD])
    record = Record(values, names)
    content = rows[0].read(record)
    counts.add(rows, record)
    counts.num_nulls += num_nulls
    if not is_row:
        counts.num_kept_nulls += _num_nulls(content)
    for name in unread:
        counts.ignore(repr(name))
    return content


def _unrecognised(values: dict[str, Any], names: FieldNames) -> UnusableRecordError:
    needed = dict.fromkeys(names[field] for row in names.formats for field in row.fields)
    null = [repr(name) for name in needed if name in values and values[name] is None]
    if null:
        return UnusableRecordError("wrong type", f"{' and '.join(null)} {'is' if len(null) == 1 else 'are'} null")
    return UnusableRecordError("missing field", what_is_missing(values, names))


def _num_nulls(content: Content) -> int:
    """Return how many values in the tools of messages, and in the arguments of their calls, are null."""
    match content:
        case Conversation():
            messages = content.messages
        case Pair(prompt=list(prompt), chosen=list(chosen), rejected=list(rejected)):
            messages = [*prompt, *chosen, *rejected]
        case LabelledAnswer():
            messages = [*content.prompt, *content.answer]
        case _:
            return 0
    calls = [message.get("tool_calls") for message in messages if isinstance(message, dict)]
    if not (content.tools or any(calls)):
        return 0
    return without_nulls({_TOOLS_FIELD: content.tools, "calls": calls}, _TOOLS_FIELD)[1]


def what_is_missing(values: Mapping[str, Any], names: FieldNames) -> str:
    """Return which fields a record of no known format lacks, and what to do about it.

    Args:
        values: the record, or any values of the same types.
        names: what its source calls the fields.
    """
    fields = ", ".join(repr(key) for key in list(values)[:MAX_EXAMPLES]) or "no fields"
    if names.reads == "documents":
        return f"no {names.text!r} and no conversation among {fields}; {choice_of_field(values, names)}"
    row = names.formats[0]
    wanted = " and ".join(repr(names[field]) for field in row.fields)
    return f"no {wanted} among {fields}, which make a {row.one}; {_choice_of_objective(values, names)}"


def _choice_of_objective(values: Mapping[str, Any], names: FieldNames) -> str:
    """Return what to do about a record that is not what the run's objective reads."""
    others = FieldNames(names.text, names.given).recognise(values)
    if names.reads == "pairs" and any(row.is_only_told for row in others):
        return f"these answers have labels: {_TRAIN_ON_LABELS}"
    others = [row for row in others if row is not PREFERENCES]
    if others:
        return f"to train on {others[0].title}, leave out --objective (training.objective={NEXT_TOKEN.name})"
    needed = names.formats[0].fields
    return f"if they have other names, set {' and '.join(f'data.fields.{field}' for field in needed)}"


def choice_of_field(values: Mapping[str, Any], names: FieldNames) -> str:
    """Return which setting reads a record of no known format."""
    choices: list[str] = []
    for name, value in values.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict):
            choices += _choice_of_messages(name, first, names)
    if choices:
        return f"set {choices[0]} to read conversations"
    strings = [name for name, value in values.items() if isinstance(value, str)]
    if strings:
        return f"set data.text_field to one of {', '.join(strings[:MAX_EXAMPLES])}, or name the fields with data.fields"
    return "none of them holds text; set data.fields.input_ids if one holds token ids"


def _choice_of_messages(name: str, message: Mapping[str, Any], names: FieldNames) -> Iterator[str]:
    """Yield the setting that reads a field as messages, if the first of them looks like one."""
    for row in (MESSAGES, SHAREGPT):
        if all(names[field] in message for field in row.of_messages):
            yield f"data.fields.{row.fields[0]}={name}"
            return
    if len([key for key, value in message.items() if isinstance(value, str)]) > 1:
        keys = ", ".join(map(repr, list(message)[:MAX_EXAMPLES]))
        yield f"data.fields.messages={name}, and data.fields.role and data.fields.content to the names among {keys},"


def _read_messages(record: Record) -> Conversation:
    return Conversation(_after_system(record, _messages(record, "messages", "role", "content")), _tools(record))


def _read_sharegpt(record: Record) -> Conversation:
    return Conversation(_after_system(record, _messages(record, "conversations", "from", "value")), _tools(record))


def _read_alpaca(record: Record) -> Conversation:
    asked = [*_history(record), _instruction(record)]
    return Conversation(_after_system(record, [*asked, _message("assistant", record.string("output"))]), [])


def _read_completion(record: Record) -> Conversation:
    """Return the conversation of a pair, each part of which is a string or itself a list of messages."""
    messages = [*_history(record), *_turns(record, "prompt", "user"), *_turns(record, "completion", "assistant")]
    return Conversation(_after_system(record, messages), _tools(record))


def _read_text(record: Record) -> str:
    text = record.string(_TEXT_FIELD)
    if not text.strip():
        raise UnusableRecordError("empty", f"{record.names.text!r} is blank")
    return checked_text(text)


def _read_tokens(record: Record) -> Tokens:
    given = record.get(INPUT_IDS)
    try:
        ids = np.array(given if isinstance(given, list | np.ndarray) else None, ndmin=1)
    except ValueError:  # lists of several lengths
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise UnusableRecordError("wrong type", f"{record.names[INPUT_IDS]!r} is not a list of token ids")
    masks = {}
    for field in (LABELS, *MASKS):
        value = record.get(field)
        if isinstance(value, list | np.ndarray):
            masks[field] = value
        else:
            record.ignore(field)  # such as the label of a class
    return Tokens(*counted_tokens(ids.astype(np.int64), masks, record.names))


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


def _read_pair(record: Record) -> Pair:
    """Return the answers of a record, each of which is a text or a list of messages."""
    names = record.names
    field = next((field for field in _QUESTIONS if record.values.get(names[field]) is not None), "prompt")
    asked = _history(record)
    if record.get(field) is not None:
        asked += [_instruction(record)] if field in ("instruction", "input") else _turns(record, field, "user")
    tools = _tools(record)
    if not asked and not any(isinstance(record.get(answer), list) for answer in PAIRS.fields):
        if tools or _system(record):
            with_system = names["system" if _system(record) else _TOOLS_FIELD]
            raise UnusableRecordError("missing field", f"no {names['prompt']!r} beside {with_system!r}")
        return pair_of_texts(*(checked_text(record.string(answer)) for answer in PAIRS.fields))
    chosen, rejected = (_turns(record, answer, "assistant") for answer in PAIRS.fields)
    if isinstance(record.get(field), str) and begin_alike(chosen, rejected):
        if not any(_is_text(message, asked[-1]["content"]) for message in chosen):
            record.ignore(field)
        record.ignore("history")
        asked = []  # the prompt once more, beside conversations that begin with it
    system = _system_before(record, asked or chosen)
    pair = pair_of_messages([*system, *asked], chosen, rejected)
    if not has_prompt(pair):
        raise no_prompt(names["prompt"], names["chosen"], names["rejected"])
    return pair._replace(tools=tools)


def _is_text(message: object, text: str) -> bool:
    """Return whether a message says a text and nothing else."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, str) and content.strip() == text.strip()


def _instruction(record: Record) -> Message:
    """Return the question that a record has as an instruction, an input, or both."""
    asked = [record.string(field) for field in ("instruction", "input") if record.get(field) is not None]
    return _message("user", "\n\n".join(text for text in asked if text.strip()))


def _history(record: Record) -> list[Message]:
    """Return the turns that a record has before its question: pairs of a question and an answer, or messages.

    Raises:
        MalformedRecordError: if they are something else.
    """
    given = record.get("history")
    name = record.names["history"]
    remedy = "make it a list of pairs of a question and an answer"
    if given is None or (isinstance(given, str) and not given.strip()):
        return []
    if not isinstance(given, list):
        raise MalformedRecordError(f"{name!r} is {json_type(given)}; {remedy}")
    turns: list[Message] = []
    for place, turn in enumerate(given, start=1):
        which = f"turn {place} of {name!r}"
        if isinstance(turn, dict):
            turns.append(_with_usual_names(turn, record.names["role"], record.names["content"], which))
        elif isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn):
            turns += [_message("user", turn[0]), _message("assistant", turn[1])]
        else:
            raise MalformedRecordError(f"{which} is {json_type(turn)}, not two strings; {remedy}")
    return turns


def _read_labelled(record: Record) -> LabelledAnswer:
    """Return the answer of a record, which is a text or a list of messages, as its prompt is."""
    label = record.get("label")
    if not isinstance(label, bool):
        raise UnusableRecordError("wrong type", f"{record.names['label']!r} is {json_type(label)}, not true or false")
    prompt = _after_system(record, [*_history(record), *_turns(record, "prompt", "user")])
    return LabelledAnswer(prompt, _turns(record, "completion", "assistant"), label, _tools(record))


def _turns(record: Record, field: str, role: str) -> list[Message]:
    """Return the messages in a field; a text is the only message of ``role``."""
    if isinstance(record.get(field), list):
        return _messages(record, field, "role", "content")
    return [_message(role, record.string(field))]


def _system(record: Record) -> list[Message]:
    """Return the system prompt that a record has beside its turns, as a list of one message or none."""
    if record.get("system") is None:
        return []
    prompt = record.string("system")
    return [_message("system", prompt)] if prompt.strip() else []


def _after_system(record: Record, messages: list[Any]) -> list[Any]:
    """Return messages after the system prompt that a record has beside them."""
    return [*_system_before(record, messages), *messages]


def _system_before(record: Record, messages: Sequence[Any]) -> list[Message]:
    """Return the system prompt that a record has beside its messages; none if they begin with one."""
    first = messages[0] if messages else None
    if not isinstance(first, dict) or first.get("role") not in SYSTEM_ROLES:
        return _system(record)
    if _system(record) and not _is_text(first, record.string("system")):
        record.ignore("system")
    return []


def _tools(record: Record) -> list[Any]:
    """Return the schemas of a record's tools, which it holds as a list or as the JSON text of one.

    Raises:
        MalformedRecordError: if they are something else.
    """
    given = record.get(_TOOLS_FIELD)
    if given is None:
        return []
    name = record.names[_TOOLS_FIELD]
    remedy = "make it a list of JSON schemas, or the JSON text of one"
    tools = given
    if isinstance(given, str):
        try:
            tools = json.loads(given) if given.strip() else []
        except (ValueError, RecursionError) as error:
            raise MalformedRecordError(
                f"{name!r} is text that is not JSON ({why_unreadable(error)}); {remedy}"
            ) from None
    if not isinstance(tools, list):
        text = "the JSON text of " if isinstance(given, str) else ""
        raise MalformedRecordError(f"{name!r} is {text}{json_type(tools)}; {remedy}")
    for place, tool in enumerate(tools, start=1):
        if not isinstance(tool, dict):
            raise MalformedRecordError(f"tool {place} of {name!r} is {json_type(tool)}, not a JSON schema; {remedy}")
    return tools


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "observation": "tool",
}
"""ShareGPT's names of the roles."""
_CALLER = "function_call"
"""ShareGPT's name of an assistant that calls tools."""


def _messages(record: Record, field: str, role: str, content: str) -> list[Any]:
    """Return the messages in a field of a record, with ``role`` and ``content`` instead of other names.

    Raises:
        MalformedRecordError: if they are not a list of objects with these fields.
        UnusableRecordError: if a message calls tools, but not in JSON.
    """
    role_name = record.names[role]
    content_name = record.names[content]
    messages = record.get(field)
    if not isinstance(messages, list):
        raise MalformedRecordError(
            f"{record.names[field]!r} is {json_type(messages)}, not a list of "
            f'{{"{role_name}": ..., "{content_name}": ...}} objects'
        )
    return [
        _with_usual_names(message, role_name, content_name, f"message {place}")
        for place, message in enumerate(messages, start=1)
    ]


def _with_usual_names(message: object, role: str, content: str, which: str) -> Message:
    if not isinstance(message, dict):
        raise MalformedRecordError(f"{which} is {json_type(message)}, not an object with {role!r} and {content!r}")
    if "role" in message and role not in message:  # people also write `conversations` with these names
        role = "role"
        content = "content"
    if role not in message:
        fields = ", ".join(map(repr, message)) or "no fields"
        raise MalformedRecordError(f"{which} has no {role!r}, only {fields}; give it {role!r} and {content!r}")
    speaker = message[role]
    if role == "role" and content == "content":
        return message
    renamed = {key: value for key, value in message.items() if key not in {role, content}}
    if speaker == _CALLER:
        return {**renamed, "role": "assistant", "tool_calls": _calls(message.get(content), which)}
    renamed["role"] = _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if content in message:
        renamed["content"] = message[content]
    return renamed


_TRAIN_ON_BOTH = "train on both answers with --objective dpo"
_TRAIN_ON_LABELS = "train on good and bad answers with --objective kto"


def _calls(written: object, which: str) -> list[Message]:
    """Return the calls that ShareGPT writes as JSON: an object with a name and arguments, or a list of some.

    Raises:
        UnusableRecordError: if they are something else.
    """
    try:
        calls = json.loads(written) if isinstance(written, str) else written
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise UnusableRecordError(
            "not supported", f'{which} is a {_CALLER!r}, but not the JSON of {{"name": ..., "arguments": ...}}'
        )
    return [{"type": "function", "function": call} for call in calls]


MESSAGES = RecordFormat(
    "conversations",
    ("messages",),
    _read_messages,
    optional=("system", _TOOLS_FIELD),
    of_messages=("role", "content"),
    is_plain=True,
)
TEXT = RecordFormat("texts", (_TEXT_FIELD,), _read_text, is_plain=True)
SHAREGPT = RecordFormat(
    "ShareGPT conversations",
    ("conversations",),
    _read_sharegpt,
    optional=("system", _TOOLS_FIELD),
    of_messages=("from", "value"),
)
PREFERENCES = RecordFormat("preferences", ("chosen",), _refuse_preferences, optional=("rejected",))
FORMATS = (
    MESSAGES,
    TEXT,
    SHAREGPT,
    RecordFormat(
        "pairs of prompt and completion",
        ("prompt", "completion"),
        _read_completion,
        optional=("system", "history", _TOOLS_FIELD),
    ),
    RecordFormat(
        "Alpaca instructions", ("instruction", "output"), _read_alpaca, optional=("input", "system", "history")
    ),
    PREFERENCES,
    RecordFormat("documents of token ids", (INPUT_IDS,), _read_tokens, optional=(LABELS, *MASKS)),
    RecordFormat("answers with labels", ("prompt", "completion", "label"), _read_labelled, is_only_told=True),
)
"""All formats. A record that fits several is of the first, unless ``data.fields`` names fields of another."""
_QUESTIONS = ("prompt", "question", "instruction", "input")
"""What a pair of answers may call its prompt; the first that a record has counts, and an instruction with its input."""
PAIRS = RecordFormat(
    "pairs of answers",
    ("chosen", "rejected"),
    _read_pair,
    optional=(*_QUESTIONS, "system", "history", _TOOLS_FIELD),
    of_messages=("role", "content"),
    one="pair of answers",
)
"""The format of records for an objective that reads pairs."""
LABELLED = RecordFormat(
    "labelled answers",
    ("prompt", "completion", "label"),
    _read_labelled,
    optional=("system", "history", _TOOLS_FIELD),
    of_messages=("role", "content"),
    one="labelled answer",
)
"""The format of records for an objective that reads labelled answers, for which a pair is a good and a bad one."""


def formats_of(reads: Reads) -> tuple[RecordFormat, ...]:
    """Return the formats of an objective's records, the one that it is made for first."""
    if reads == "pairs":
        return (PAIRS,)
    if reads == "labelled answers":
        return (LABELLED, PAIRS)
    return FORMATS
