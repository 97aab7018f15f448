"""Formats of records: by which fields each is recognised, and how its records become texts or conversations.

A format is a row of ``FORMATS`` of a kind of records (``data/records/``) with a function that reads a record.
``data.text_field`` and ``data.fields`` say what a source calls the fields.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from llama_core.config.settings import DataConfig
from llama_core.data.bad_lines import (
    UnusableRecordError,
    json_type,
)
from llama_core.errors import ConfigError, not_one_of
from llama_core.objectives.records import DOCUMENTS, RECORD_KINDS


class Tokens(NamedTuple):
    """A document that is token ids already."""

    ids: npt.NDArray[Any]
    """The ids, integers [tokens]."""
    ignored: npt.NDArray[np.bool_] | None = None
    """Those that do not count in the loss, a mask [tokens]; None if all do."""


class Spoken(Protocol):
    """Messages, and the tools that they may call."""

    @property
    def messages(self) -> Sequence[Any]:
        """All messages of a record."""

    @property
    def tools(self) -> Sequence[Any]:
        """JSON schemas; empty if there are none."""


class Conversation(NamedTuple):
    """The messages of a record, and the tools that they may call."""

    messages: list[Any]
    """Each with ``role`` and, unless it calls tools, ``content``."""
    tools: list[Any]
    """JSON schemas; empty if there are none."""


Content = str | Tokens | Spoken
"""A text, token ids, a conversation, or answers to a prompt."""
TEXT_FIELD = "text"
TOOLS_FIELD = "tools"
_MAX_NAMED = 12
"""Most ignored fields that a note names."""
_MAX_KEPT = 100
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
    is_plain: bool = False
    """Whether its records go unannounced, because they are what a text and a conversation are here."""
    is_only_told: bool = False
    """Whether its records are always read as another format, and only counted, to tell what is not used of them."""
    advice: str = ""
    """What to do with its records, if no data.fields reads them instead of others."""

    @property
    def is_text(self) -> bool:
        """Whether its records are texts, whose field ``data.text_field`` names."""
        return self.fields == (TEXT_FIELD,)

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
    reads: str = DOCUMENTS.name
    """The name of the kind of records; the formats follow from it."""

    @classmethod
    def of(cls, data: DataConfig, reads: str = DOCUMENTS.name) -> "FieldNames":
        """Return the names that a configuration gives.

        Raises:
            ConfigError: if it names a field that no format has.
        """
        known = list(dict.fromkeys(field for row in formats_of(reads) if not row.is_text for field in row.all_fields))
        for field in data.fields:
            if field == TEXT_FIELD:
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
        return self.text if field == TEXT_FIELD else self.given.get(field, field)

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
            is_for_texts = name == self.text and TEXT_FIELD not in row.fields
            if value is None or (is_for_texts and isinstance(value, str)):
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
    """Records with a field that nothing reads, by the field as a note names it; of the first ``_MAX_KEPT``."""
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
                if not row.is_text:  # a text that a template made of `messages` is ignored like any other field
                    self.unused[row.title] = self.unused.get(row.title, 0) + 1
                    told.update(record.names[field] for field in (*row.fields, *row.optional))
        for name, value in record.values.items():
            if name not in record.used and name not in told and _is_given(value):
                self.ignore(repr(name))

    def ignore(self, field: str) -> None:
        """Count a record with a field that nothing reads."""
        if field in self.ignored or len(self.ignored) < _MAX_KEPT:
            self.ignored[field] = self.ignored.get(field, 0) + 1

    def __add__(self, other: Self) -> Self:
        """Return the counts of both."""
        ignored = Counter(self.ignored) + Counter(other.ignored)
        return type(self)(
            dict(Counter(self.read) + Counter(other.read)),
            dict(Counter(self.unused) + Counter(other.unused)),
            dict(list(ignored.items())[:_MAX_KEPT]),
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
    first = [f"{field} ({number:,})" for field, number in list(fields.items())[:_MAX_NAMED]]
    num_more = len(fields) - len(first)
    if num_more:
        at_least = "at least " if len(fields) == _MAX_KEPT else ""
        return f"{', '.join(first)} and {at_least}{num_more} more"
    return ", ".join(first)


def _what_is_unused(row: RecordFormat, names: FieldNames) -> str:
    if row.is_only_told:  # its last field makes the difference
        return f"{names[row.fields[-1]]!r}, which is not used; {row.advice}"
    if row.advice:
        return f"{row.title} ({names[row.fields[0]]!r}), which are not used; {row.advice}"
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
        values, num_nulls = without_nulls(values, names[TOOLS_FIELD])
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
    if isinstance(content, str | Tokens):
        return 0
    calls = [message.get("tool_calls") for message in content.messages if isinstance(message, dict)]
    if not (content.tools or any(calls)):
        return 0
    return without_nulls({TOOLS_FIELD: content.tools, "calls": calls}, TOOLS_FIELD)[1]


def without_nulls(values: dict[str, Any], tools: str) -> tuple[dict[str, Any], int]:
    """Return a row of a table without null in its objects, and how many of them were in tools or arguments of calls.

    Args:
        values: the row.
        tools: the field of its tools.

    Raises:
        UnusableRecordError: if it is nested too deeply.
    """
    num_nulls = 0

    def cleaned(value: Any, *, is_told: bool) -> Any:
        nonlocal num_nulls
        if isinstance(value, list):
            return [cleaned(item, is_told=is_told) for item in value]
        if not isinstance(value, dict):
            return value
        kept = {key: item for key, item in value.items() if item is not None}
        if is_told:  # elsewhere null is no value anyway
            num_nulls += len(value) - len(kept)
        return {key: cleaned(item, is_told=is_told or key == "arguments") for key, item in kept.items()}

    try:
        kept = {name: cleaned(value, is_told=name == tools) for name, value in values.items()}
    except RecursionError:
        raise UnusableRecordError("not supported", "its values are nested too deeply") from None
    return kept, num_nulls


def formats_of(reads: str) -> tuple[RecordFormat, ...]:
    """Return the formats of a kind of records, the one that is made for them first."""
    formats: tuple[RecordFormat, ...] = import_module(RECORD_KINDS.named(reads).module).FORMATS
    return formats


def what_is_missing(values: Mapping[str, Any], names: FieldNames) -> str:
    """Return which fields a record of no known format lacks, and what to do about it.

    Args:
        values: the record, or any values of the same types.
        names: what its source calls the fields.
    """
    missing: str = import_module(RECORD_KINDS.named(names.reads).module).what_is_missing(values, names)
    return missing


def choice_of_field(values: Mapping[str, Any], names: FieldNames) -> str:
    """Return which setting reads a record as a document, if it has no known format."""
    choice: str = import_module(DOCUMENTS.module).choice_of_field(values, names)
    return choice
