"""Check whether data can be trained on, without tokenising all of it."""

from dataclasses import dataclass
from itertools import islice

from llama_core.config.models import ModelSpec
from llama_core.config.settings import DATALOADER, SAMPLE, DataConfig
from llama_core.data.chat import ConversationCounts, chat_format, encode, notes
from llama_core.data.corpus import BadLines, find_files, read_documents, share_read
from llama_core.data.tokenizer import Tokenizer, check_fits, load_tokenizer
from llama_core.errors import DataError

CHECKED_RECORDS = 1000
"""Number of records to read from a source, over all its files."""


@dataclass(frozen=True)
class DataCheck:
    """The result of checking the first records of a run's data."""

    summary: str
    """The records that were read, in one line."""
    notes: tuple[str, ...] = ()
    """A sentence for each property of the data that may be unintended."""
    num_tokens: int | None = None
    """Tokens of all files, extrapolated from the first records of each; None for the sample and for a dataloader."""


def check_data(data: DataConfig, spec: ModelSpec) -> DataCheck:
    """Open every file of the run's data, read its first records and tokenise them. Writes nothing.

    Args:
        data: the data configuration.
        spec: the model. The tokenizer must fit its vocabulary; its family may have a format for conversations.

    Raises:
        DataError: if a file, its records or the tokenizer cannot be used.
        EnvironmentMismatchError: if the tokenizer needs a package that is missing.
    """
    if data.source == DATALOADER:
        return DataCheck("batches of the caller's own dataloader")
    tokenizer = load_tokenizer(data.tokenizer)
    check_fits(tokenizer, spec.vocab_size)
    checked = _check_source(data.source, data, spec, tokenizer)
    if data.validation is not None:
        _check_source(data.validation, data, spec, tokenizer)
    return checked


def _check_source(source: str, data: DataConfig, spec: ModelSpec, tokenizer: Tokenizer) -> DataCheck:
    if source == SAMPLE:
        about = notes(data, spec, None, ConversationCounts(), 0)
        return DataCheck("the source of Python's standard library", tuple(about))
    files = find_files(source)
    bad_lines = BadLines()
    chat = chat_format(data, tokenizer, spec, files)
    num_documents = 0
    num_tokens = 0.0
    conversations = ConversationCounts()
    of_each = -(-CHECKED_RECORDS // len(files))
    for file in files:
        read = read_documents(
            [file], data.text_field, bad_lines, render=chat.document, max_bad_lines=data.max_bad_lines
        )
        documents = list(islice(read, of_each))
        tokens = sum(len(ids) for ids, _ in encode(tokenizer, documents))
        is_whole = len(documents) < of_each
        num_tokens += tokens if is_whole else tokens / share_read(file, data.text_field, documents[-1])
        num_documents += len(documents)
        conversations = sum(
            (ConversationCounts.of(document.turns) for document in documents if document.turns), conversations
        )
    if not num_documents:
        raise DataError(
            f"data source {source!r} holds no document to train on{f': {bad_lines}' if bad_lines.total else ''}"
        )
    texts = f"{num_documents - conversations.num_conversations:,} texts"
    found = f"{conversations}, template: {chat.template.name}" if conversations.num_conversations else texts
    return DataCheck(
        f"the first records of {source!r}: {found}",
        tuple(notes(data, spec, chat, conversations, num_documents)),
        round(num_tokens),
    )
