"""Check whether data can be trained on, without tokenising all of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from llama_core.config.models import ModelSpec
from llama_core.config.settings import DATALOADER, SAMPLE, DataConfig, DataSource, name_of, paths_of
from llama_core.data.bad_lines import BadLines
from llama_core.data.chat import (
    ChatFormat,
    ConversationCounts,
    about_frame,
    about_vocabulary,
    chat_format,
    encode,
    notes,
)
from llama_core.data.corpus import Document, Tally, read_documents
from llama_core.data.files.source_file import SourceFile, total_bytes
from llama_core.data.find import find_files
from llama_core.data.formats import FieldNames, FormatCounts
from llama_core.data.tokenising import refuse_sample
from llama_core.data.tokenizer import Tokenizer, model_tokenizer
from llama_core.data.undivided import TokenLayout
from llama_core.errors import DataError
from llama_core.objectives.records import DOCUMENTS
from llama_core.units import MIB

CHECKED_RECORDS = 1000
"""Number of records to read from a source, over all its files, or over that many of them."""

CHECKED_CHARACTERS = 16 * MIB
"""Characters after which no more records of a file are read."""


@dataclass(frozen=True)
class DataCheck:
    """The result of checking the first records of a run's data."""

    summary: str
    """The records that were read, in one line."""
    notes: tuple[str, ...] = ()
    """A sentence for each property of the data that may be unintended."""
    num_tokens: int | None = None
    """Tokens of all files, extrapolated from the first records of each; None for the sample and for a dataloader."""
    num_held_out_tokens: int | None = None
    """The same of the files of ``data.validation``; 0 if it names none."""


def check_data(data: DataConfig, spec: ModelSpec, *, reads: str = DOCUMENTS.name) -> DataCheck:
    """Open the files of the run's data, read their first records and tokenise them. Writes nothing.

    Args:
        data: the data configuration.
        spec: the model. The tokenizer must fit its vocabulary; its family may have a format for conversations.
        reads: the name of the kind of records.

    Raises:
        DataError: if a file, its records or the tokenizer cannot be used.
        EnvironmentMismatchError: if the tokenizer needs a package that is missing.
    """
    if data.source == DATALOADER:
        return DataCheck("batches of the caller's own dataloader")
    tokenizer = model_tokenizer(data, spec)
    first = partial(_first_records, data=data, spec=spec, tokenizer=tokenizer, reads=reads)
    sources = {name: first(source) for name, source in data.training_sources.items()}
    held_out = [first(source, held_out=True) for source in data.validation_sources.values()]
    found = list(sources.values())
    chat = next((one.chat for one in found if one.conversations.num_conversations), found[0].chat)
    conversations = sum((one.conversations for one in found), ConversationCounts())
    num_documents = sum(one.num_documents for one in found)
    about_training = notes(data, spec, chat, conversations, num_documents)
    summaries = [f"{name}: {one.summary}" if name else one.summary for name, one in sources.items()]
    if chat is not None and num_documents > conversations.num_conversations:
        summaries.append(about_frame(data, chat))
    return DataCheck(
        "; ".join(summaries),
        (*(note for one in (*found, *held_out) for note in one.about), *about_vocabulary(tokenizer), *about_training),
        _num_tokens(found),
        _num_tokens(held_out),
    )


@dataclass(frozen=True)
class _FirstRecords:
    """What the first records of a source are."""

    summary: str
    about: tuple[str, ...]
    """A sentence on each thing about its files and records that may be unintended."""
    chat: ChatFormat | None = None
    """How conversations become text; None for the sample, which has none."""
    conversations: ConversationCounts = field(default_factory=ConversationCounts)
    num_documents: int = 0
    """Conversations and texts that were read."""
    num_tokens: int | None = None
    """Tokens of all of its files, extrapolated; None for the sample."""


def _num_tokens(sources: Sequence[_FirstRecords]) -> int | None:
    """Return the tokens of all of them; None if those of one are unknown."""
    counts = [one.num_tokens for one in sources if one.num_tokens is not None]
    return sum(counts) if len(counts) == len(sources) else None


def _first_records(
    source: DataSource,
    data: DataConfig,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    reads: str,
    *,
    held_out: bool = False,
) -> _FirstRecords:
    refuse_sample(source, reads)
    if source == SAMPLE:
        return _FirstRecords("the source of Python's standard library", ())
    name = name_of(source)
    found = find_files(*paths_of(source), held_out=held_out)
    names = FieldNames.of(data, reads)
    chat = chat_format(data, tokenizer, spec, found.files)
    bad_lines = BadLines()
    formats = FormatCounts()
    num_documents = 0
    num_tokens = 0.0
    conversations = ConversationCounts()
    checked = _spread(found.files)
    of_each = -(-CHECKED_RECORDS // len(checked))
    for file in checked:
        tally = Tally(bad_lines, formats)
        read = read_documents(
            [file],
            names,
            tally,
            render=chat.document,
            max_bad_lines=data.max_bad_lines,
            layout=TokenLayout(tokenizer, data.token_dtype),
        )
        documents, is_whole = _first_of(read, of_each)
        parts = [part for document in documents for part in document.parts]
        tokens = sum(len(ids) for ids, _ in encode(tokenizer, parts))
        num_tokens += tokens if is_whole else tokens * file.num_bytes / max(1, tally.num_bytes)
        num_documents += len(documents)
        conversations = sum(
            (ConversationCounts.of(document.turns) for document in documents if document.turns), conversations
        )
    if not num_documents:
        left_out = f": {bad_lines}" if bad_lines.total else ""
        raise DataError(f"data source {name!r} holds no document to train on{left_out}")
    texts = f"{num_documents - conversations.num_conversations:,} texts"
    what = f"{conversations}, template: {chat.template.name}" if conversations.num_conversations else texts
    about = [*found.notes(), *formats.notes(names)]
    if bad_lines.total:
        about.append(f"left out {bad_lines}")
    return _FirstRecords(
        f"the first records of {name!r}: {what}",
        tuple(f"{name}: {note}" for note in about),
        chat,
        conversations,
        num_documents,
        round(num_tokens * total_bytes(found.files) / max(1, total_bytes(checked))),
    )


def _first_of(documents: Iterator[Document], number: int) -> tuple[list[Document], bool]:
    """Return the first documents, up to ``CHECKED_CHARACTERS`` of them, and whether these are all."""
    first = []
    num_characters = 0
    for document in documents:
        first.append(document)
        num_characters += document.size
        if len(first) == number or num_characters >= CHECKED_CHARACTERS:
            return first, False
    return first, True


def _spread(files: Sequence[SourceFile]) -> Sequence[SourceFile]:
    """Return all files, or ``CHECKED_RECORDS`` of them at even distances."""
    number = min(CHECKED_RECORDS, len(files))
    return [files[index * len(files) // number] for index in range(number)]
