"""Answers to a prompt: two of which one is better, or one that is good or bad. What a record of preferences holds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from llama_core.data.bad_lines import UnusableRecordError

Message = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")
"""Roles of a message that says how to answer, and asks nothing."""


class Pair(NamedTuple):
    """Two answers to a prompt: each a list of messages, or all three plain texts."""

    prompt: list[Message] | str
    chosen: list[Message] | str
    rejected: list[Message] | str
    tools: Sequence[Message] = ()
    """JSON schemas of the tools that the assistant may call."""

    @property
    def is_text(self) -> bool:
        """Whether it is of plain texts: a prompt and what may follow it, without a chat template."""
        return isinstance(self.prompt, str)


class LabelledAnswer(NamedTuple):
    """An answer to a prompt."""

    prompt: list[Message]
    answer: list[Message]
    is_good: bool
    tools: Sequence[Message] = ()
    """JSON schemas of the tools that the assistant may call."""


def pair_of_texts(chosen: str, rejected: str) -> Pair:
    """Return the pair of two texts that hold their prompt: the words with which both begin.

    Raises:
        UnusableRecordError: if they are equal, begin differently, or one has nothing after the prompt.
    """
    if chosen == rejected:
        raise equal_answers()
    end = next(
        (place for place, letters in enumerate(zip(chosen, rejected, strict=False)) if letters[0] != letters[1]), -1
    )
    end = min(len(chosen), len(rejected)) if end < 0 else end
    while end and not chosen[end - 1].isspace():  # a word may begin alike
        end -= 1
    if not chosen[:end].strip():
        raise no_prompt("prompt", "chosen", "rejected")
    pair = Pair(chosen[:end], chosen[end:], rejected[end:])
    for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if isinstance(answer, str) and not answer.strip():
            raise no_answer(name)
    return pair


def pair_of_messages(prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]) -> Pair:
    """Return the pair of two lists of messages, with those with which both begin as the end of the prompt.

    Raises:
        UnusableRecordError: if the answers are equal, or one of them is missing.
    """
    if chosen == rejected:
        raise equal_answers()
    together = 0
    while together < min(len(chosen), len(rejected)) and chosen[together] == rejected[together]:
        together += 1
    pair = Pair([*prompt, *chosen[:together]], list(chosen[together:]), list(rejected[together:]))
    for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if not answer:
            raise no_answer(name)
    return pair


def has_prompt(pair: Pair) -> bool:
    """Return whether a pair of messages has a turn that says something before its answers, beside a system prompt."""
    return any(_asks(message) for message in pair.prompt)


def _asks(message: object) -> bool:
    if not isinstance(message, dict) or message.get("role") in SYSTEM_ROLES:
        return False
    content = message.get("content")
    return bool(content.strip()) if isinstance(content, str) else True


def begin_alike(chosen: Sequence[Message], rejected: Sequence[Message]) -> bool:
    """Return whether two lists of messages hold their prompt."""
    return bool(chosen and rejected and chosen[0] == rejected[0])


def equal_answers() -> UnusableRecordError:
    """Return the error of a pair that prefers nothing."""
    return UnusableRecordError("equal answers", "the chosen answer is the rejected one")


def no_answer(name: str) -> UnusableRecordError:
    """Return the error of a pair without one of its answers."""
    return UnusableRecordError("empty", f"no answer is left of {name!r} beside the prompt")


def no_prompt(prompt: str, chosen: str, rejected: str) -> UnusableRecordError:
    """Return the error of a pair whose answers are to nothing, with the names of its fields."""
    return UnusableRecordError("missing field", f"no {prompt!r}, and {chosen!r} and {rejected!r} begin differently")
