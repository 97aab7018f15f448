"""Conversations: check them, render them as text, and mark the tokens that count in the loss."""

import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from llama_core.config.models import ModelSpec
from llama_core.config.settings import DataConfig, LossOn
from llama_core.data.bad_lines import UnusableRecordError, checked_text, json_type
from llama_core.data.corpus import Document, Turns
from llama_core.data.files.source_file import SourceFile
from llama_core.data.templates.chat_template import (
    BUILT_IN,
    MARKERS,
    OF_FAMILY,
    ChatTemplate,
)
from llama_core.data.templates.message_keys import (
    COUNTING,
    SYSTEM_ROLES,
    THOUGHTS,
    check_counting,
    ignored_keys,
    is_muted,
    with_other_words,
)
from llama_core.data.templates.rendering import Message, Spans, TemplateRefusalError, Tools
from llama_core.data.templates.tool_calls import RESULT_ROLES, canonical, check_results, checked_calls
from llama_core.data.tokenizer import Encoded, TemplateSource, Tokenizer, read_template
from llama_core.errors import DataError
from llama_core.records.files import user_path

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
"""The known roles; a template may accept fewer."""
_USES_MESSAGES = re.compile(r"\{[{%][^{}]{0,1000}\bmessages\b")
_CALLS = ("tool_calls", "function_call")
"""Keys of a message that are empty where it calls no tool."""


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
    num_with_tools: int = 0
    """Those whose assistant is told of tools."""
    num_calls: int = 0
    """Calls of tools in all conversations."""
    num_muted: int = 0
    """Assistant turns that their records say are not trained on."""
    num_lost_thoughts: int = 0
    """Thoughts that the template leaves out."""
    num_lost_prompts: int = 0
    """System and developer messages that it leaves out."""

    @classmethod
    def of(cls, turns: Turns) -> Self:
        """Return the counts of one conversation."""
        return cls(
            num_conversations=1,
            num_multi_turn=int(turns.num_assistant_turns > 1),
            num_with_system=int(turns.has_system),
            num_assistant_turns=turns.num_assistant_turns,
            num_empty_turns=turns.num_empty_turns,
            num_with_tools=int(turns.num_tools > 0),
            num_calls=turns.num_calls,
            num_muted=turns.num_muted,
            num_lost_thoughts=turns.num_lost_thoughts,
            num_lost_prompts=turns.num_lost_prompts,
        )

    def __add__(self, other: Self) -> Self:
        """Return the counts of both."""
        return type(self)(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        """Return the counts as text, for a message."""
        return self.summary("conversations")

    def summary(self, unit: str) -> str:
        """Return the counts as text, of conversations that are called ``unit``."""
        tools = f", {self.num_with_tools:,} with tools, {self.num_calls:,} tool calls"
        muted = f", {self.num_muted:,} of them not trained on" if self.num_muted else ""
        empty = f"; {self.num_empty_turns:,} empty turns dropped" if self.num_empty_turns else ""
        return (
            f"{self.num_conversations:,} {unit} ({self.num_multi_turn:,} multi-turn, "
            f"{self.num_with_system:,} with a system prompt, {self.num_assistant_turns:,} assistant turns{muted}"
            f"{tools if self.num_with_tools or self.num_calls else ''}{empty})"
        )


@runtime_checkable
class AnswerRecord(Protocol):
    """One or more answers to a prompt, in a record whose kind says how they are rendered (``data/records/``)."""

    def document(self, chat: "ChatFormat", location: str, tools: Sequence[Message]) -> Document:
        """Return them as a document; raises what ``ChatFormat.document`` does."""


@dataclass(frozen=True)
class ChatFormat:
    """How the conversations of a source become documents."""

    template: ChatTemplate
    loss_on: LossOn
    frame: tuple[str, str] = ("", "")
    """What a plain text begins and ends with: the tokenizer's BOS, or nothing, and its EOS."""
    missing_markers: tuple[str, ...] = ()
    """Special tokens of a published format that the tokenizer lacks and reads as plain text."""

    @cached_property
    def fingerprint(self) -> str:
        """A digest that two formats share only if they make the same documents and count the same tokens."""
        return hashlib.sha256(f"{self.loss_on} {self.template.fingerprint}".encode()).hexdigest()

    def document(
        self, content: "Sequence[Message] | AnswerRecord", location: str, tools: Sequence[Message] = ()
    ) -> Document:
        """Return a record's conversation, or its answers, as a document. Messages without content are dropped.

        A malformed conversation is an error instead of being left out: such data sets are small, and a fault in one
        record is usually in many.

        Args:
            content: the messages of the record, as a file holds them, or its answers.
            location: the record's place, for errors.
            tools: the JSON schemas of the tools that the assistant may call.

        Raises:
            UnusableRecordError: if it has no content or no assistant turn that counts, holds something other than text,
                or the template refuses it without its empty turns.
            DataError: if a message has no role or content, a role is unknown, a call or a tool's result is malformed,
                or the template raises, renders no assistant text, or knows no tools.
        """
        try:
            if isinstance(content, AnswerRecord):
                return content.document(self, location, tools)
            return self._document(content, location, tools)
        except RecursionError:
            raise UnusableRecordError("not supported", "its values are nested too deeply") from None

    def _document(self, messages: Sequence[Message], location: str, tools: Sequence[Message]) -> Document:
        spoken = [_checked(message, f"message {place}", location) for place, message in enumerate(messages, start=1)]
        check_results(spoken, location)
        kept = [message for message in spoken if _says_something(message)]
        num_empty = len(spoken) - len(kept)
        num_turns = sum(message["role"] == "assistant" for message in kept)
        if not kept:
            raise UnusableRecordError("empty", "no message has any content")
        if not num_turns and self.loss_on == "assistant":
            raise UnusableRecordError(
                "no assistant turn", "none of it would count in the loss; set data.loss_on=all to count every token"
            )
        shown = self._for_template(kept, location, tools)
        muted = [is_muted(message) for message in kept]
        try:
            text, counted = self._render(shown, tools or None, has_muted=any(muted))
        except TemplateRefusalError as error:
            raise self._refused(error, location, num_empty) from None
        checked_text(text)
        if not any(end > begin for begin, end in counted):
            raise DataError(
                f"{location}: chat template {self.template.name!r} renders no assistant text; set another "
                "data.chat_template, or data.loss_on=all"
            )
        if any(muted):
            counted = self._without_muted(counted, kept, len(text), location)
        identity = json.dumps([canonical(message) for message in kept], sort_keys=True, default=str)
        return Document(
            text, location, self._turns(shown, text, counted, tools, num_empty=num_empty, identity=identity)
        )

    def text(self, prompt: str, answer: str) -> tuple[str, Turns]:
        """Return a prompt and an answer that are plain texts, framed like others, and what counts of them."""
        begin = self.frame[0] + prompt
        text = begin + answer + self.frame[1]
        return text, Turns(((len(begin), len(text)),), "", 1, has_system=False, num_empty_turns=0)

    def answer(
        self, prompt: Iterable[Any], answer: Iterable[Any], name: str, location: str, tools: Sequence[Message]
    ) -> tuple[str, Turns]:
        """Return a prompt and one answer to it as text, and what counts of them: the answer's assistant turns."""
        asked = [_checked(message, f"message {n} of the prompt", location) for n, message in enumerate(prompt, 1)]
        said = [_checked(message, f"message {n} of {name!r}", location) for n, message in enumerate(answer, 1)]
        spoken = [*asked, *said]
        check_results(spoken, location)
        kept = [message for message in spoken if _says_something(message)]
        num_before = sum(message["role"] == "assistant" and _says_something(message) for message in asked)
        num_turns = sum(message["role"] == "assistant" for message in kept)
        if num_turns == num_before:
            raise no_answer(name)
        num_empty = len(spoken) - len(kept)
        shown = self._for_template(kept, location, tools)
        try:
            text, spans = self.template.render_with_spans(shown, tools or None)
        except TemplateRefusalError as error:
            raise self._refused(error, location, num_empty) from None
        checked_text(text)
        counted = spans[num_before:]
        if not any(end > begin for begin, end in counted):
            raise DataError(
                f"{location}: chat template {self.template.name!r} renders no text of the answer {name!r}; set another "
                "data.chat_template"
            )
        if any(map(is_muted, kept)):
            unmuted = self._spans_that_count(spans, kept, location)
            counted = tuple(span for span in counted if span in unmuted)
            if not counted:
                raise _all_muted()
        return text, self._turns(shown, text, counted, tools, num_empty=num_empty)

    def _turns(
        self,
        messages: Sequence[Message],
        text: str,
        counted: Spans,
        tools: Sequence[Message],
        *,
        num_empty: int,
        identity: str = "",
    ) -> Turns:
        """Return what is known of the turns of a conversation beside its text.

        Args:
            messages: the conversation, as it was rendered.
            text: what the template has made of it.
            counted: the spans of characters that count.
            tools: those that the assistant is told of.
            num_empty: messages that were dropped before.
            identity: the messages as JSON.
        """
        lost = self._lost(messages, text, tools)
        ignored = [key for message in messages for key in ignored_keys(message, self.loss_on, self.template.may_read)]
        return Turns(
            counted,
            identity,
            sum(message["role"] == "assistant" for message in messages),
            has_system=messages[0]["role"] in SYSTEM_ROLES,
            num_empty_turns=num_empty,
            num_tools=len(tools),
            num_calls=sum(len(message.get("tool_calls", ())) for message in messages),
            num_muted=sum(map(is_muted, messages)),
            num_lost_thoughts=sum(role == "assistant" for role in lost),
            num_lost_prompts=sum(role in SYSTEM_ROLES for role in lost),
            ignored_keys=tuple(dict.fromkeys(ignored)),
        )

    def _lost(self, messages: Sequence[Message], text: str, tools: Sequence[Message]) -> list[str]:
        """Return the role of each message whose thought, or else whose prompt, the template leaves out of the text.

        What is not in the text may only be written in another way, such as without spaces or as JSON. So each is
        replaced by a word, and the conversation rendered again.
        """
        words: dict[str, str] = {}
        marked: list[Message] = []
        for message in messages:
            word = secrets.token_hex(8)
            with_word = with_other_words(message, text, word)
            marked.append(with_word)
            if with_word is not message:
                words[word] = message["role"]
        if not words:
            return []
        try:
            rendered = self.template.render(marked, tools or None)
        except TemplateRefusalError:  # it may check what is in them
            rendered = text
        return [role for word, role in words.items() if word not in rendered]

    def _spans_that_count(self, spans: Spans, messages: Sequence[Message], location: str) -> Spans:
        """Return the spans of those assistant turns that their record does not say are not trained on.

        Raises:
            DataError: if the template does not show which span is of which turn.
        """
        turns = [message for message in messages if message["role"] == "assistant"]
        if len(spans) != len(turns):
            key = next(key for message in turns if is_muted(message) for key in COUNTING if key in message)
            raise DataError(
                f"{location}: chat template {self.template.name!r} marks {len(spans):,} parts of {len(turns):,} "
                f"assistant turns, so nobody can say which of them {key!r} means; mark each turn once"
            )
        return tuple(span for span, turn in zip(spans, turns, strict=True) if not is_muted(turn))

    def _without_muted(self, spans: Spans, messages: Sequence[Message], length: int, location: str) -> Spans:
        """Return the spans of characters that count in a conversation with turns that are not trained on.

        Args:
            spans: those of all assistant turns.
            messages: the conversation.
            length: characters of its text.
            location: the record's place, for errors.
        """
        counted = self._spans_that_count(spans, messages, location)
        if self.loss_on == "all":
            bounds = [0, *(bound for span in spans if span not in counted for bound in span), length]
            counted = tuple(zip(bounds[::2], bounds[1::2], strict=True))
        if not any(end > begin for begin, end in counted):
            raise _all_muted()
        return counted

    def _refused(self, error: TemplateRefusalError, location: str, num_empty: int) -> Exception:
        """Return the error of a conversation that the template refuses: to leave it out, if it had empty turns."""
        template = f"chat template {self.template.name!r}"
        if num_empty:
            return UnusableRecordError("empty", f"{template} refuses it without its empty turns: {error}")
        return DataError(f"{location}: {template} refuses it: {error}")

    def _for_template(self, messages: Sequence[Message], location: str, tools: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with their calls in the form that the template takes.

        Raises:
            DataError: if it would leave out calls, results or, being one of the published formats, tools.
        """
        has_calls = any(message.get("tool_calls") for message in messages)
        has_results = any(message["role"] == "tool" for message in messages)
        if not (has_calls or has_results or tools):
            return messages
        support = self.template.tool_support(with_tools=bool(tools))
        if has_calls and not support.shows_calls:
            missing = "calls of tools"
        elif has_results and not support.shows_results:
            missing = "results of tools"
        elif tools and self.template.is_built_in and not support.shows_tools:
            missing = "tools"
        else:
            return [support.in_its_form(message) for message in messages]
        raise DataError(
            f"{location}: chat template {self.template.name!r} has no {missing}; set data.chat_template to one that "
            "has, such as the model's own chat_template.jinja"
        )

    def _render(self, messages: Sequence[Message], tools: Tools, *, has_muted: bool) -> tuple[str, Spans]:
        """Return a conversation as text, and the spans that count: with muted turns, those of all the assistant's."""
        if self.loss_on == "assistant" or has_muted:
            return self.template.render_with_spans(messages, tools)
        text = self.template.render(messages, tools)
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
    if name is None and tokenizer.chat_template is not None:
        source = tokenizer.chat_template
    else:
        name = name or OF_FAMILY.get(spec.family) or _recognised(tokenizer)
        source = BUILT_IN.get(name) or TemplateSource(_named_template(name), name)
    newest = max((file.mtime_ns // 10**9 for file in files), default=time.time())
    template = ChatTemplate(source, tokenizer.named_tokens, datetime.fromtimestamp(newest, UTC).date())
    named = tokenizer.named_tokens
    begins = named.get("bos_token", "") if tokenizer.bos_id in tokenizer.before else ""
    frame = (begins, named.get("eos_token", ""))
    return ChatFormat(template, data.loss_on, frame, _missing_markers(name, tokenizer))


def _named_template(name: str) -> str:
    """Return the text of the template that a run's settings name.

    They may be somebody else's, and an export copies the text into a folder that people publish. So it has to be a
    template: no private file has Jinja with the variable that every template uses.
    """
    text = read_template(user_path(name))
    if not _USES_MESSAGES.search(text):
        raise DataError(f"chat template {name!r} has no Jinja that uses messages; name another data.chat_template")
    return text


def about_vocabulary(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a sentence if the tokenizer has tokens that the model lacks."""
    if tokenizer.beyond:
        first = min(tokenizer.beyond)
        yield (
            f"tokenizer {tokenizer.name!r} has {len(tokenizer.beyond):,} added tokens beyond the model's "
            f"{tokenizer.vocab_size:,}, such as {tokenizer.beyond[first]!r} ({first}); a text that spells it is refused"
        )


def about_frame(data: DataConfig, chat: ChatFormat) -> str:
    """Return what each plain text begins and ends with, and who says so."""
    begins, ends = chat.frame
    rule = "the tokenizer" if data.add_bos_token is None else f"add_bos_token={str(data.add_bos_token).lower()}"
    return f"a text ends with {ends} and begins with {begins or 'no BOS'} ({rule})"


def _recognised(tokenizer: Tokenizer) -> str:
    """Return the name of the published format whose markers the tokenizer has; Llama 2's needs none."""
    return next((name for name in MARKERS if not _missing_markers(name, tokenizer)), "llama2")


def _missing_markers(name: str | None, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the markers of a published format that the tokenizer reads as several tokens."""
    markers = MARKERS.get(name, ()) if name else ()
    return tuple(marker for marker in markers if len(tokenizer.encode_rendered([marker])[0].ids) > 1)


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
        if data.loss_on == "assistant" and not _learns_end_of_turn(chat.template):
            yield (
                f"chat template {chat.template.name!r} leaves the end of a turn out of its generation block, so the "
                "model does not learn to end one; move {% endgeneration %} behind it"
            )
        if conversations.num_with_tools and not chat.template.tool_support(with_tools=True).shows_tools:
            yield (
                f"chat template {chat.template.name!r} ignores tools: {conversations.num_with_tools:,} conversations "
                "have some, which are not in their text"
            )
        if conversations.num_lost_thoughts:
            yield (
                f"chat template {chat.template.name!r} leaves out the thoughts of {conversations.num_lost_thoughts:,} "
                f"of {conversations.num_assistant_turns:,} assistant turns, which are not trained on; set "
                "data.chat_template to one that writes them"
            )
        if conversations.num_lost_prompts:
            yield (
                f"chat template {chat.template.name!r} leaves out {conversations.num_lost_prompts:,} system or "
                "developer messages, which are not in the text; set data.chat_template to one that writes them"
            )
        if num_texts:
            yield f"{num_texts:,} of the documents are texts, where every token counts in the loss"
        return
    if spec.instruct:
        yield (
            f"{spec.name} is an instruct model, but {data.name!r} holds no conversations: "
            "every token counts in the loss"
        )
    for key, value in data.model_dump(include={"chat_template", "loss_on"}, exclude_defaults=True).items():
        yield f"data.{key}={value} has no effect: {data.name!r} holds no conversations"


def _learns_end_of_turn(template: ChatTemplate) -> bool:
    try:
        return template.learns_end_of_turn
    except (TemplateRefusalError, ValueError):  # it takes no conversation of two turns, or does not write the answer
        return True


def encode(
    tokenizer: Tokenizer, documents: Sequence[Document]
) -> list[tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]]:
    """Return each document's tokens and a mask of those that do not count in the loss; None for a text: all count.

    The tokens of a conversation are those of its whole text, as transformers' ``apply_chat_template`` gives them.
    A token counts if any of its characters does. Ids that a record holds are taken as they are, with its mask.

    Raises:
        DataError: if the tokenizer has no such id.
    """
    are_texts = [document.turns is None and document.ids is None for document in documents]
    chosen = zip(documents, are_texts, strict=True)
    texts = iter(tokenizer.encode_documents([document.text for document, is_text in chosen if is_text]))
    chats = iter(tokenizer.encode_rendered([document.text for document in documents if document.turns is not None]))
    encoded: list[tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]] = []
    for document in documents:
        if document.ids is not None:
            encoded.append((_known(document.ids, tokenizer, document.location), document.ignored))
        elif document.turns is not None:
            encoded.append(_with_mask(next(chats), document.turns))
        else:
            encoded.append((next(texts), None))
    return encoded


def _known(ids: npt.NDArray[np.int64], tokenizer: Tokenizer, location: str) -> npt.NDArray[np.int64]:
    unknown = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if len(unknown):
        raise DataError(
            f"{location}: token {unknown[0]} is none of the {tokenizer.vocab_size:,} of tokenizer {tokenizer.name!r}; "
            "another one has made these ids: name that as data.tokenizer"
        )
    return ids


def _with_mask(tokens: Encoded, turns: Turns) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    ignored = np.ones(len(tokens.ids), np.bool_)
    for begin, end in turns.counted:
        first = np.searchsorted(tokens.ends, begin, side="right")
        last = np.searchsorted(tokens.begins, end, side="left")
        ignored[first:last] = False
    return tokens.ids, ignored


def _checked(message: Message, which: str, location: str) -> Message:
    """Return a message without keys that are null, and with its content as a string, which a call may lack.

    Raises:
        UnusableRecordError: if it holds null or something other than text, or calls a function in the old form.
        DataError: if its role, its content or a call is missing or wrong.
    """
    if message.get("function_call"):
        raise UnusableRecordError("not supported", f"{which} has a 'function_call'; make it one of its 'tool_calls'")
    role = message.get("role")
    if not isinstance(role, str):
        raise DataError(f"{location}: {which} has {json_type(role)} as its 'role'; make it a string")
    if role not in ROLES:
        raise DataError(f"{location}: {which} has the unknown role {role!r}; use one of {', '.join(ROLES)}")
    check_counting(message, which, location)
    checked = {key: value for key, value in message.items() if value is not None and key not in _CALLS}
    thought = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    if thought is not None:  # as transformers does, so that a template finds it by either name
        checked = {"thinking": thought, **checked, "reasoning_content": thought}
    if message.get("tool_calls"):
        checked["tool_calls"] = checked_calls(message, which, location)
        if message.get("content") is None:
            return checked
    return checked | {"content": _content(message, which, location)}


def no_answer(name: str) -> UnusableRecordError:
    """Return the error of a record without one of its answers."""
    return UnusableRecordError("empty", f"no answer is left of {name!r} beside the prompt")


def _all_muted() -> UnusableRecordError:
    """Return the error of a conversation none of whose turns is trained on."""
    return UnusableRecordError("no assistant turn", "the record says that none of them is trained on")


def _says_something(message: Message) -> bool:
    """Return whether a message is kept: it has content, calls a tool or is the result of one."""
    return bool(message.get("tool_calls")) or message["role"] in RESULT_ROLES or bool(message["content"].strip())


def _content(message: Message, which: str, location: str) -> str:
    """Return the content of a message; a system prompt may lack it."""
    content = message.get("content")
    if content is None and message["role"] in SYSTEM_ROLES:
        return ""
    if "content" not in message:
        raise DataError(f"{location}: {which} has no 'content', only {_listed(message)}; give it 'role' and 'content'")
    if content is None:
        raise UnusableRecordError("wrong type", f"{which} has null for its text")
    if isinstance(content, list):
        return "".join(_text_of(part, f"part {place} of {which}", location) for place, part in enumerate(content, 1))
    if not isinstance(content, str):
        raise DataError(f"{location}: {which} has {json_type(content)} as its 'content'; make it a string")
    return content


def _text_of(part: object, which: str, location: str) -> str:
    """Return a part of a message's content, which templates write one after another."""
    if not isinstance(part, dict) or "type" not in part:
        raise DataError(f'{location}: {which} is {json_type(part)}, not {{"type": "text", "text": ...}}')
    text = part.get("text")
    if part["type"] != "text":
        raise UnusableRecordError("not supported", f"{which} is of type {part['type']!r}, not text")
    if not isinstance(text, str):
        raise DataError(f"{location}: {which} has {json_type(text)} as its 'text'; make it a string")
    return text


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys)) or "no keys"
