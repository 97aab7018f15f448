"""How the fields of a record become messages: the usual names of roles, system prompts, histories and tools."""

import json
from collections.abc import Sequence
from typing import Any

from llama_core.data.bad_lines import MalformedRecordError, UnusableRecordError, json_type
from llama_core.data.formats import TOOLS_FIELD, Record
from llama_core.data.templates.message_keys import SYSTEM_ROLES
from llama_core.errors import why_unreadable

Message = dict[str, Any]

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "observation": "tool",
}
"""ShareGPT's names of the roles."""
_CALLER = "function_call"
"""ShareGPT's name of an assistant that calls tools."""


def instruction_of(record: Record) -> Message:
    """Return the question that a record has as an instruction, an input, or both."""
    asked = [record.string(field) for field in ("instruction", "input") if record.get(field) is not None]
    return message_of("user", "\n\n".join(text for text in asked if text.strip()))


def history_of(record: Record) -> list[Message]:
    """Return the turns that a record has before its question: pairs of a question and an answer, or messages.

    Raises:
        MalformedRecordError: if they are something else.
    """
    given = record.get("history")
    name = record.names["history"]
    remedy = "make it a list of pairs of a question and an answer"
    if given is None or (isinstance(given, str) and not given.strip()):
        return []
    if not isinstance(given, list):
        raise MalformedRecordError(f"{name!r} is {json_type(given)}; {remedy}")
    turns: list[Message] = []
    for place, turn in enumerate(given, start=1):
        which = f"turn {place} of {name!r}"
        if isinstance(turn, dict):
            turns.append(_with_usual_names(turn, record.names["role"], record.names["content"], which))
        elif isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn):
            turns += [message_of("user", turn[0]), message_of("assistant", turn[1])]
        else:
            raise MalformedRecordError(f"{which} is {json_type(turn)}, not two strings; {remedy}")
    return turns


def turns_in(record: Record, field: str, role: str) -> list[Message]:
    """Return the messages in a field; a text is the only message of ``role``."""
    if isinstance(record.get(field), list):
        return messages_in(record, field, "role", "content")
    return [message_of(role, record.string(field))]


def after_system(record: Record, messages: list[Any]) -> list[Any]:
    """Return messages after the system prompt that a record has beside them."""
    return [*system_before(record, messages), *messages]


def system_before(record: Record, messages: Sequence[Any]) -> list[Message]:
    """Return the system prompt that a record has beside its messages; none if they begin with one."""
    first = messages[0] if messages else None
    if not isinstance(first, dict) or first.get("role") not in SYSTEM_ROLES:
        return system_of(record)
    if system_of(record) and not says_only(first, record.string("system")):
        record.ignore("system")
    return []


def system_of(record: Record) -> list[Message]:
    """Return the system prompt that a record has beside its turns, as a list of one message or none."""
    if record.get("system") is None:
        return []
    prompt = record.string("system")
    return [message_of("system", prompt)] if prompt.strip() else []


def says_only(message: object, text: str) -> bool:
    """Return whether a message says a text and nothing else."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, str) and content.strip() == text.strip()


def tools_of(record: Record) -> list[Any]:
    """Return the schemas of a record's tools, which it holds as a list or as the JSON text of one.

    Raises:
        MalformedRecordError: if they are something else.
    """
    given = record.get(TOOLS_FIELD)
    if given is None:
        return []
    name = record.names[TOOLS_FIELD]
    remedy = "make it a list of JSON schemas, or the JSON text of one"
    tools = given
    if isinstance(given, str):
        try:
            tools = json.loads(given) if given.strip() else []
        except (ValueError, RecursionError) as error:
            raise MalformedRecordError(
                f"{name!r} is text that is not JSON ({why_unreadable(error)}); {remedy}"
            ) from None
    if not isinstance(tools, list):
        text = "the JSON text of " if isinstance(given, str) else ""
        raise MalformedRecordError(f"{name!r} is {text}{json_type(tools)}; {remedy}")
    for place, tool in enumerate(tools, start=1):
        if not isinstance(tool, dict):
            raise MalformedRecordError(f"tool {place} of {name!r} is {json_type(tool)}, not a JSON schema; {remedy}")
    return tools


def message_of(role: str, content: str) -> Message:
    """Return a message that is a text."""
    return {"role": role, "content": content}


def messages_in(record: Record, field: str, role: str, content: str) -> list[Any]:
    """Return the messages in a field of a record, with ``role`` and ``content`` instead of other names.

    Raises:
        MalformedRecordError: if they are not a list of objects with these fields.
        UnusableRecordError: if a message calls tools, but not in JSON.
    """
    role_name = record.names[role]
    content_name = record.names[content]
    messages = record.get(field)
    if not isinstance(messages, list):
        raise MalformedRecordError(
            f"{record.names[field]!r} is {json_type(messages)}, not a list of "
            f'{{"{role_name}": ..., "{content_name}": ...}} objects'
        )
    return [
        _with_usual_names(message, role_name, content_name, f"message {place}")
        for place, message in enumerate(messages, start=1)
    ]


def _with_usual_names(message: object, role: str, content: str, which: str) -> Message:
    if not isinstance(message, dict):
        raise MalformedRecordError(f"{which} is {json_type(message)}, not an object with {role!r} and {content!r}")
    if "role" in message and role not in message:  # people also write `conversations` with these names
        role = "role"
        content = "content"
    if role not in message:
        fields = ", ".join(map(repr, message)) or "no fields"
        raise MalformedRecordError(f"{which} has no {role!r}, only {fields}; give it {role!r} and {content!r}")
    speaker = message[role]
    if role == "role" and content == "content":
        return message
    renamed = {key: value for key, value in message.items() if key not in {role, content}}
    if speaker == _CALLER:
        return {**renamed, "role": "assistant", "tool_calls": _calls(message.get(content), which)}
    renamed["role"] = _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if content in message:
        renamed["content"] = message[content]
    return renamed


def _calls(written: object, which: str) -> list[Message]:
    """Return the calls that ShareGPT writes as JSON: an object with a name and arguments, or a list of some.

    Raises:
        UnusableRecordError: if they are something else.
    """
    try:
        calls = json.loads(written) if isinstance(written, str) else written
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise UnusableRecordError(
            "not supported", f'{which} is a {_CALLER!r}, but not the JSON of {{"name": ..., "arguments": ...}}'
        )
    return [{"type": "function", "function": call} for call in calls]
