"""What other keys of a message than role and content say: whether it is trained on, its thought, and what is unread."""

import json
from collections.abc import Callable, Iterator

from llama_core.config.settings import LossOn
from llama_core.data.templates.rendering import Message
from llama_core.data.templates.tool_calls import RESULT_ROLES
from llama_core.errors import DataError

SYSTEM_ROLES = ("system", "developer")
"""Roles of a message that says how to answer, and asks nothing."""
COUNTING = ("weight", "train", "loss")
"""Keys that say whether a message is trained on: 0 or 1, false or true."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a thought, the first of which most templates read; gpt-oss's read ``thinking``."""
_END_OF_THOUGHT = "</think>"
"""What ends a thought that is written into the content of a message."""
_ALWAYS_READ = ("role", "content", "tool_calls", "function_call", "tool_call_id", *THOUGHTS)


def check_counting(message: Message, which: str, location: str) -> None:
    """Refuse a message that is to be trained on in part.

    Raises:
        DataError: naming the key and its value.
    """
    for key in ("weight", "train"):  # `loss` may be a number of another kind
        value = message.get(key)
        if value is not None and not (isinstance(value, int | float) and value in {0, 1}):
            given = json.dumps(value, default=str)[:40]
            raise DataError(
                f"{location}: {which} has {given} as its {key!r}; write 0 or false for a message that is not trained "
                "on and 1 or true for others, or give the key another name"
            )


def is_muted(message: Message) -> bool:
    """Return whether a message is an assistant's that its record says is not trained on."""
    return message["role"] == "assistant" and any(_counts(message, key) is False for key in COUNTING)


def _counts(message: Message, key: str) -> bool | None:
    """Return whether a key says that its message is trained on; None if it does not say."""
    value = message.get(key)
    if value is None or (key == "loss" and not isinstance(value, bool)):
        return None
    return bool(value)


def ignored_keys(message: Message, loss_on: LossOn, may_read: Callable[[str], bool]) -> Iterator[str]:
    """Yield the keys of a checked message that nothing reads, or follows.

    Args:
        message: the message.
        loss_on: which messages count where they do not say so.
        may_read: returns whether the template reads a key.
    """
    for key in message:
        if key in _ALWAYS_READ or (key == "name" and message["role"] in RESULT_ROLES):
            continue
        counts = _counts(message, key) if key in COUNTING else None
        if counts is None:
            is_ignored = not may_read(key)
        else:  # a question counts as `loss_on` says
            is_ignored = message["role"] != "assistant" and counts != (loss_on == "all")
        if is_ignored:
            yield key


def with_other_words(message: Message, text: str, word: str) -> Message:
    """Return a message with a word in place of its thought, or of its prompt, if a text does not hold that.

    Args:
        message: a checked message.
        text: the conversation as text.
        word: a word that the text does not hold.
    """
    content = str(message.get("content", ""))
    if message["role"] in SYSTEM_ROLES:
        return message if content.strip() in text else {**message, "content": word}
    if message["role"] != "assistant":
        return message
    thought = message.get("reasoning_content")
    if isinstance(thought, str):
        return message if thought.strip() in text else {**message, **dict.fromkeys(THOUGHTS, word)}
    inside, end, answer = content.rpartition(_END_OF_THOUGHT)
    if inside.replace("<think>", "").strip() in text:
        return message
    return {**message, "content": f"<think>{word}{end}{answer}"}
