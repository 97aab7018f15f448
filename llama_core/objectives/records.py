"""The kinds of records that objectives read. Planning and reports know their words and traits, ``data`` reads them."""

from dataclasses import dataclass

from llama_core.registry import Registry


@dataclass(frozen=True)
class RecordKind:
    """What an objective reads of a record."""

    name: str
    """Value of an objective's ``reads``: the records in messages, in the plural."""
    one: str
    """One of them."""
    module: str
    """The module that reads and packs them; a string, because a configuration names its objective without reading data.

    ``FORMATS`` are the formats by which records are recognised, the one that is made for them first. ``rows_of`` is how
    they are packed, ``what_is_missing`` tells what a record of no format lacks, and ``about`` what may be unintended in
    the rows. What a format reads is a text, a conversation, token ids or an ``AnswerRecord``, which renders itself.
    """
    holds_answers: bool = False
    """Whether they are answers to prompts: only those count in the loss, and a row holds several of them. They are
    learnt in one epoch with a low rate. The sample has none."""
    has_labels: bool = False
    """Whether each answer is good or bad by itself, and is not compared with another one."""


DOCUMENTS = RecordKind("documents", one="document", module="llama_core.data.records.documents")
"""Texts and conversations, also as token ids."""
PAIRS = RecordKind("pairs", one="pair of answers", module="llama_core.data.records.pairs", holds_answers=True)
"""Two answers to a prompt, one of which is better."""
LABELLED_ANSWERS = RecordKind(
    "labelled answers",
    one="labelled answer",
    module="llama_core.data.records.labelled_answers",
    holds_answers=True,
    has_labels=True,
)
"""Answers to prompts, each of which is good or bad."""

RECORD_KINDS = Registry("records", RecordKind, "reads", DOCUMENTS, PAIRS, LABELLED_ANSWERS)
