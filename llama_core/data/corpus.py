"""Read the documents of a corpus one by one, and count unusable records and the formats of the others.

A kind of file gives records (``file_kinds.py``), a format of records gives texts and messages (``formats.py``).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_core.data.bad_lines import BadLines, MalformedRecordError, UnusableRecordError
from llama_core.data.file_kinds.kinds import is_undivided, records_of
from llama_core.data.files.raw_record import RawRecord
from llama_core.data.files.source_file import Digest, SourceFile, reading, total_bytes
from llama_core.data.formats import Content, Conversation, FieldNames, FormatCounts, Tokens, read_record
from llama_core.data.undivided import TokenLayout, undivided_records
from llama_core.errors import DataError, why_unreadable
from llama_core.units import MIB

CHARACTERS_PER_TOKEN = 4
"""Of usual texts, about."""
OnProgress = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""


@dataclass(frozen=True)
class Turns:
    """The turns of a conversation."""

    counted: tuple[tuple[int, int], ...]
    """The spans of characters whose tokens count in the loss, as begin and end, in order."""
    messages: str
    """The messages as JSON: the conversation itself, whatever the template."""
    num_assistant_turns: int
    has_system: bool
    """Whether it begins with a system prompt."""
    num_empty_turns: int
    """Messages without content, which were dropped."""
    num_tools: int = 0
    """Tools that the assistant is told of."""
    num_calls: int = 0
    """Calls of tools in all assistant turns."""
    num_muted: int = 0
    """Assistant turns that the record says are not trained on."""
    num_lost_thoughts: int = 0
    """Thoughts that the template leaves out of the text."""
    num_lost_prompts: int = 0
    """System and developer messages that it leaves out."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of the messages that nothing reads."""


@dataclass(frozen=True)
class Document:
    """One text, or one conversation rendered as text, to train on."""

    text: str
    location: str
    """``file:line``, from 1: a row in Parquet, with the record's number in a JSON array; for a text file, its path."""
    turns: Turns | None = None
    """Turns of a conversation; None for a text, where every token counts in the loss."""
    ids: npt.NDArray[np.int64] | None = None
    """Its tokens, if the record holds them and no text."""
    ignored: npt.NDArray[np.bool_] | None = None
    """Those of ``ids`` that do not count in the loss; None if all do."""
    other: "Document | None" = None
    """The rejected answer with its prompt, if this is the chosen one of a pair."""
    is_good: bool | None = None
    """Whether it is a good answer with its prompt, or a bad one; None if it is neither."""

    @property
    def parts(self) -> "tuple[Document, ...]":
        """The document itself, or both of a pair."""
        return (self,) if self.other is None else (self, self.other)

    @property
    def size(self) -> int:
        """About how many characters it has."""
        own = len(self.text) if self.ids is None else CHARACTERS_PER_TOKEN * len(self.ids)
        return own if self.other is None else own + self.other.size

    def tokens_before_second(self, num_tokens: int) -> int | None:
        """Return how many of the tokens of a pair are before its second answer; None if it holds no answers.

        An answer alone is the first or the second of a pair that lacks the other one.

        Args:
            num_tokens: those of its first part.
        """
        if self.other is None and self.is_good is None:
            return None
        return 0 if self.is_good is False else num_tokens


RenderConversation = Callable[[Any, str, Sequence[Any]], Document]
"""Makes a document from the messages or the answers, the location and the tools of a record.

Raises ``UnusableRecordError`` for a conversation to leave out, ``DataError`` for a malformed one.
"""


@dataclass
class Tally:
    """What has been read of a corpus so far."""

    bad_lines: BadLines = field(default_factory=BadLines)
    """The records that were left out."""
    formats: FormatCounts = field(default_factory=FormatCounts)
    """The formats of the others."""
    num_bytes: int = 0
    """Bytes of the files up to the end of the last document, or somewhat more."""
    num_documents: int = 0
    """Documents so far."""


def read_documents(
    files: Sequence[SourceFile],
    names: FieldNames,
    tally: Tally,
    *,
    render: RenderConversation,
    max_bad_lines: int,
    on_progress: OnProgress = lambda done, total: None,
    content: Digest | None = None,
    layout: TokenLayout | None = None,
) -> Iterator[Document]:
    """Yield the documents of ``files`` in order, holding one record (or Parquet batch) at a time.

    Args:
        files: what ``find_files`` found.
        names: what the files call the fields of a record.
        tally: counts the documents and the records that are left out.
        render: makes documents from conversations: ``ChatFormat.document``.
        max_bad_lines: how many records may be left out.
        on_progress: called about once per MiB, and at the end of each file.
        content: takes every byte of the files, as ``digest_of`` does.
        layout: how files without a table of documents hold token ids; None if there are no such files.

    Raises:
        DataError: if a file cannot be read or has changed since ``files`` were found, a conversation is malformed, or
            too many records are unusable.
    """
    total = total_bytes(files)
    before = reported = 0
    for file in files:
        for raw in _raw_records(file, names, content, layout):
            location = f"{file.path}{raw.place}"
            tally.num_bytes = before + raw.position
            try:
                read = read_record(_parsed(raw.read), names, tally.formats, is_row=raw.is_row, unread=raw.unread)
                document = _document(read, location, render)
            except UnusableRecordError as problem:
                tally.bad_lines.add(location, problem, max_bad_lines, tally.num_documents)
            except MalformedRecordError as problem:
                raise DataError(f"{location}: {problem}") from None
            else:
                tally.num_documents += 1
                for key in _ignored_keys(document):
                    tally.formats.ignore(f"{key!r} of messages")
                yield document
            if tally.num_bytes >= reported + MIB:
                reported = tally.num_bytes
                on_progress(reported, total)
        before += file.num_bytes
        reported = before
        on_progress(before, total)


def _document(content: Content, location: str, render: RenderConversation) -> Document:
    if isinstance(content, Tokens):
        return Document("", location, ids=content.ids, ignored=content.ignored)
    if isinstance(content, str):
        return Document(content, location)
    spoken = content.messages if isinstance(content, Conversation) else content
    return render(spoken, location, content.tools)


def _ignored_keys(document: Document) -> Iterable[str]:
    """Return the keys of a record's messages that nothing reads."""
    return dict.fromkeys(key for part in document.parts if part.turns for key in part.turns.ignored_keys)


def _raw_records(
    file: SourceFile, names: FieldNames, content: Digest | None, layout: TokenLayout | None
) -> Iterator[RawRecord]:
    with reading(file):
        if is_undivided(file):
            assert layout is not None, "the caller reads files of any kind"
            yield from undivided_records(file, names, content, layout)
        else:
            yield from records_of(file, names, content)


def _parsed(read: Callable[[], object]) -> object:
    try:
        return read()
    except UnusableRecordError:
        raise
    except UnicodeDecodeError as error:
        raise UnusableRecordError("invalid UTF-8", f"{error.reason} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise UnusableRecordError("invalid JSON", f"{error.msg} at column {error.colno}") from None
    except (ArithmeticError, ValueError, RecursionError) as error:
        raise UnusableRecordError("invalid JSON", why_unreadable(error)) from None
