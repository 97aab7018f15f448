"""Records that are texts, conversations or token ids: documents to train on."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llama_core.data.bad_lines import MAX_EXAMPLES, UnusableRecordError, checked_text
from llama_core.data.formats import (
    INPUT_IDS,
    TEXT_FIELD,
    TOOLS_FIELD,
    Conversation,
    FieldNames,
    Record,
    RecordFormat,
    Tokens,
)
from llama_core.data.packing import PackedDataset, packed_documents
from llama_core.data.records.labelled_answers import WITH_LABELS
from llama_core.data.records.pairs import PREFERENCES
from llama_core.data.records.token_masks import LABELS, MASKS, counted_tokens
from llama_core.data.records.turns import (
    after_system,
    history_of,
    instruction_of,
    message_of,
    messages_in,
    tools_of,
    turns_in,
)
from llama_core.data.selection import Selection


def _read_messages(record: Record) -> Conversation:
    return Conversation(after_system(record, messages_in(record, "messages", "role", "content")), tools_of(record))


def _read_sharegpt(record: Record) -> Conversation:
    return Conversation(after_system(record, messages_in(record, "conversations", "from", "value")), tools_of(record))


def _read_alpaca(record: Record) -> Conversation:
    asked = [*history_of(record), instruction_of(record)]
    return Conversation(after_system(record, [*asked, message_of("assistant", record.string("output"))]), [])


def _read_completion(record: Record) -> Conversation:
    """Return the conversation of a pair, each part of which is a string or itself a list of messages."""
    messages = [*history_of(record), *turns_in(record, "prompt", "user"), *turns_in(record, "completion", "assistant")]
    return Conversation(after_system(record, messages), tools_of(record))


def _read_text(record: Record) -> str:
    text = record.string(TEXT_FIELD)
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


MESSAGES = RecordFormat(
    "conversations",
    ("messages",),
    _read_messages,
    optional=("system", TOOLS_FIELD),
    of_messages=("role", "content"),
    is_plain=True,
)
TEXT = RecordFormat("texts", (TEXT_FIELD,), _read_text, is_plain=True)
SHAREGPT = RecordFormat(
    "ShareGPT conversations",
    ("conversations",),
    _read_sharegpt,
    optional=("system", TOOLS_FIELD),
    of_messages=("from", "value"),
)
FORMATS = (
    MESSAGES,
    TEXT,
    SHAREGPT,
    RecordFormat(
        "pairs of prompt and completion",
        ("prompt", "completion"),
        _read_completion,
        optional=("system", "history", TOOLS_FIELD),
    ),
    RecordFormat(
        "Alpaca instructions", ("instruction", "output"), _read_alpaca, optional=("input", "system", "history")
    ),
    PREFERENCES,
    RecordFormat("documents of token ids", (INPUT_IDS,), _read_tokens, optional=(LABELS, *MASKS)),
    WITH_LABELS,
)
"""All formats. A record that fits several is of the first, unless ``data.fields`` names fields of another."""


def rows_of(selection: Selection) -> type[PackedDataset]:
    """Return how some documents are packed."""
    return packed_documents(selection)


def about(sources: Sequence[PackedDataset]) -> Iterator[str]:
    """Yield a sentence on what may be unintended in the rows of some sources."""
    yield from ()


def what_is_missing(values: Mapping[str, Any], names: FieldNames) -> str:
    """Return which fields a record of no known format lacks, and what to do about it."""
    fields = ", ".join(repr(key) for key in list(values)[:MAX_EXAMPLES]) or "no fields"
    return f"no {names.text!r} and no conversation among {fields}; {choice_of_field(values, names)}"


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
