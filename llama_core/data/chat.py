"""Conversations: check them, render them as text, and mark the tokens that count in the loss."""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from llama_core.config.models import ModelSpec
from llama_core.config.settings import DataConfig, LossOn
from llama_core.data.chat_template import (
    BUILT_IN,
    LLAMA3_MARKERS,
    OF_FAMILY,
    ChatTemplate,
)
from llama_core.data.corpus import Document, SourceFile, Turns, UnusableRecordError, checked_text, json_type
from llama_core.data.rendering import Message, Spans, TemplateRefusalError
from llama_core.data.tokenizer import Encoded, TemplateSource, Tokenizer, read_template
from llama_core.errors import DataError
from llama_core.records.files import user_path

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
"""The known roles; a template may accept fewer."""


@dataclass(frozen=True)
class ConversationCounts:
    """Counts of a source's conversations."""

    num_conversations: int = 0
    num_multi_turn: int = 0
    """Those with more than one assistant turn."""
    num_with_system: int = 0
    """Those that begin with a system prompt."""
    num_assistant_turns: int = 0
    """Assistant turns in all conversations."""
    num_empty_turns: int = 0
    """Messages without content, which were dropped."""

    @classmethod
    def of(cls, turns: Turns) -> Self:
        """Return the counts of one conversation."""
        several = turns.num_assistant_turns > 1
        return cls(1, int(several), int(turns.has_system), turns.num_assistant_turns, turns.num_empty_turns)

    def __add__(self, other: Self) -> Self:
        """Return the counts of both."""
        return type(self)(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        """Return the counts as text, for a message."""
        empty = f"; {self.num_empty_turns:,} empty turns dropped" if self.num_empty_turns else ""
        return (
            f"{self.num_conversations:,} conversations ({self.num_multi_turn:,} multi-turn, "
            f"{self.num_with_system:,} with a system prompt, {self.num_assistant_turns:,} assistant turns{empty})"
        )


@dataclass(frozen=True)
class ChatFormat:
    """How the conversations of a source become documents."""

    template: ChatTemplate
    loss_on: LossOn
    missing_markers: tuple[str, ...] = ()
    """Special tokens of a published format that the tokenizer lacks and reads as plain text."""

    @cached_property
    def fingerprint(self) -> str:
        """A digest that two formats share only if they make the same documents and count the same tokens."""
        return hashlib.sha256(f"{self.loss_on} {self.template.fingerprint}".encode()).hexdigest()

    def document(self, messages: object, location: str) -> Document:
        """Return a record's conversation as a document. Messages without content are dropped.

        A malformed conversation is an error instead of being left out: such data sets are small, and a fault in one
        record is usually in many.

        Args:
            messages: the value of the record's ``messages``.
            location: the record's place, for errors.

        Raises:
            UnusableRecordError: if it has no content or no assistant turn that counts, or the template refuses it
                without its empty turns.
            DataError: if ``messages`` is not a list of roles and contents, a role is unknown, or the template raises
                or renders no assistant text.
        """
        spoken = _checked(messages, location)
        kept = [message for message in spoken if message["content"].strip()]
        num_empty = len(spoken) - len(kept)
        num_turns = sum(message["role"] == "assistant" for message in kept)
        if not kept:
            raise UnusableRecordError("empty", "no message has any content")
        if not num_turns and self.loss_on == "assistant":
            raise UnusableRecordError(
                "no assistant turn", "none of it would count in the loss; set data.loss_on=all to count every token"
            )
        try:
            text, counted = self._render(kept)
        except TemplateRefusalError as error:
            if num_empty:
                raise UnusableRecordError(
                    "empty", f"chat template {self.template.name!r} refuses it without its empty turns: {error}"
                ) from None
            raise DataError(f"{location}: chat template {self.template.name!r} refuses it: {error}") from None
        checked_text(text)
        if not any(end > begin for begin, end in counted):
            raise DataError(
                f"{location}: chat template {self.template.name!r} renders no assistant text; set another "
                "data.chat_template, or data.loss_on=all"
            )
        identity = json.dumps(kept, sort_keys=True, default=str)
        has_system = kept[0]["role"] in {"system", "developer"}
        return Document(text, location, Turns(counted, identity, num_turns, has_system, num_empty))

    def _render(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        if self.loss_on == "assistant":
            return self.template.render_with_spans(messages)
        text = self.template.render(messages)
        return text, ((0, len(text)),)


def chat_format(data: DataConfig, tokenizer: Tokenizer, spec: ModelSpec, files: Sequence[SourceFile]) -> ChatFormat:
    """Return how conversations in ``files`` become documents.

    The template is the one that ``data`` names, else the tokenizer's, else the published one of the model's family. If
    the family is unknown, it is the published one whose markers the tokenizer has. It sees the date of the newest file,
    or today's if there are no files.

    Raises:
        DataError: if a template cannot be read.
    """
    name = data.chat_template
    missing = [marker for marker in LLAMA3_MARKERS if len(tokenizer.encode_rendered([marker])[0].ids) > 1]
    if name is None and tokenizer.chat_template is not None:
        source = tokenizer.chat_template
    else:
        name = name or OF_FAMILY.get(spec.family) or ("llama2" if missing else "llama3")
        source = BUILT_IN.get(name) or TemplateSource(read_template(user_path(name)), name)
    newest = max((file.mtime_ns // 10**9 for file in files), default=time.time())
    template = ChatTemplate(source, tokenizer.named_tokens, datetime.fromtimestamp(newest, UTC).date())
    return ChatFormat(template, data.loss_on, missing_markers=tuple(missing) if name == "llama3" else ())


def notes(
    data: DataConfig, spec: ModelSpec, chat: ChatFormat | None, conversations: ConversationCounts, num_documents: int
) -> Iterator[str]:
    """Yield a sentence for each property of the data that may be unintended.

    Args:
        data: the data configuration.
        spec: the model.
        chat: how conversations become text, if there are any.
        conversations: counts of the source's conversations.
        num_documents: number of conversations and texts in the source.
    """
    num_texts = num_documents - conversations.num_conversations
    if chat is not None and conversations.num_conversations:
        if chat.missing_markers:
            yield (
                f"tokenizer {data.tokenizer!r} reads {', '.join(chat.missing_markers)} of {chat.template.name} as "
                "plain text, many tokens each"
            )
        if num_texts:
            yield f"{num_texts:,} of the documents are texts, where every token counts in the loss"
        return
    if spec.instruct:
        yield (
            f"{spec.name} is an instruct model, but {data.source!r} holds no conversations: "
            "every token counts in the loss"
        )
    for key, value in data.model_dump(include={"chat_template", "loss_on"}, exclude_defaults=True).items():
        yield f"data.{key}={value} has no effect: {data.source!r} holds no conversations"


def encode(
    tokenizer: Tokenizer, documents: Sequence[Document]
) -> list[tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]]:
    """Return each document's tokens and a mask of those that do not count in the loss; None for a text: all count.

    The tokens of a conversation are those of its whole text, as transformers' ``apply_chat_template`` gives them.
    A token counts if any of its characters does.
    """
    texts = iter(tokenizer.encode_documents([document.text for document in documents if document.turns is None]))
    chats = iter(tokenizer.encode_rendered([document.text for document in documents if document.turns is not None]))
    return [
        (next(texts), None) if document.turns is None else _with_mask(next(chats), document.turns)
        for document in documents
    ]


def _with_mask(tokens: Encoded, turns: Turns) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    ignored = np.ones(len(tokens.ids), np.bool_)
    for begin, end in turns.counted:
        first = np.searchsorted(tokens.ends, begin, side="right")
        last = np.searchsorted(tokens.begins, end, side="left")
        ignored[first:last] = False
    return tokens.ids, ignored


def _checked(messages: object, location: str) -> list[Message]:
    """Return the messages of a record, without keys that are null.

    Raises:
        DataError: if they are not a list of roles and contents.
    """
    if not isinstance(messages, list):
        raise DataError(
            f'{location}: \'messages\' is {json_type(messages)}, not a list of {{"role": ..., "content": ...}} objects'
        )
    return [_checked_message(message, f"{location}: message {place}") for place, message in enumerate(messages, 1)]


def _checked_message(message: object, which: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{which} is {json_type(message)}, not an object with 'role' and 'content'")
    message = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in message:
        raise DataError(f"{which} calls tools, which is not supported; write the call into its 'content'")
    for key in ("role", "content"):
        if key not in message:
            raise DataError(f"{which} has no {key!r}, only {_listed(message)}; give it 'role' and 'content'")
        if not isinstance(message[key], str):
            raise DataError(f"{which} has {json_type(message[key])} as its {key!r}; make it a string")
    if message["role"] not in ROLES:
        raise DataError(f"{which} has the unknown role {message['role']!r}; use one of {', '.join(ROLES)}")
    return message


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys)) or "no keys"
