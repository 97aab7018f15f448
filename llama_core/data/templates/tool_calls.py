"""Calls of tools in conversations: check them, and write their arguments in the form that a chat template takes."""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llama_core.data.bad_lines import json_type
from llama_core.data.templates.rendering import Message, TemplateRefusalError, Tools
from llama_core.errors import DataError, why_unreadable

RESULT_ROLES = ("tool", "ipython")
"""The roles of a tool's result; Llama 3 calls it ipython."""
_CALLS = "tool_calls"
_ARGUMENTS = "arguments"
_CALL_ID = "a1B2c3D4e"
"""Mistral's templates take nothing but nine letters and digits."""


@dataclass(frozen=True)
class ToolSupport:
    """What a chat template makes of tools."""

    shows_tools: bool
    """Whether the tools of a conversation are in its text."""
    shows_calls: bool
    """Whether the assistant's calls are."""
    shows_results: bool
    """Whether messages of the role tool are."""
    takes_objects: bool
    """Whether it writes arguments that are an object as they should be, and not as Python would print them."""
    takes_text: bool
    """Whether it writes arguments that are JSON text as they are, and not as a string in quotes."""
    needs_content: bool
    """Whether it refuses a call without content, as transformers passes on what was null or missing."""

    def in_its_form(self, message: Message) -> Message:
        """Return a checked message with its calls in a form that the template takes."""
        if not message.get(_CALLS):
            return message
        if self.needs_content:
            message = {"content": "", **message}
        if self.takes_objects == self.takes_text:
            return message
        convert = _as_object if self.takes_objects else _as_text
        return {**message, _CALLS: [_with_arguments(call, convert) for call in message[_CALLS]]}


def tool_support(render: Callable[[Sequence[Message], Tools], str], *, with_tools: bool) -> ToolSupport:
    """Return what a template makes of tools, by rendering some.

    A template that refuses these conversations may still render others: for those it counts as one that shows all.

    Args:
        render: returns messages and tools as text. Raises ``TemplateRefusalError``.
        with_tools: tell it of a tool; some tokenizers have another template where there are none.
    """
    tool, called, key, value, result = (secrets.token_hex(8) for _ in range(5))
    parameters = {"type": "object", "properties": {key: {"type": "string", "description": key}}, "required": [key]}
    schema = {"type": "function", "function": {"name": tool, "description": tool, "parameters": parameters}}
    question = {"role": "user", "content": "?"}
    answer = {"role": "tool", "tool_call_id": _CALL_ID, "name": called, "content": result}

    def rendered(*messages: Message) -> str | None:
        try:
            return render([question, *messages], [schema] if with_tools else None)
        except TemplateRefusalError:
            return None

    def calling(arguments: object, **content: str) -> Message:
        function = {"name": called, _ARGUMENTS: arguments}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        return {"role": "assistant", **content, _CALLS: [call]}

    arguments = {key: value}
    as_text = json.dumps(arguments)
    told = rendered()
    of_object = rendered(calling(arguments, content=""))
    of_text = rendered(calling(as_text, content=""))
    usual = as_text if of_object is None else arguments
    answered = rendered(calling(usual, content=""), answer)
    texts = [text for text in (of_object, of_text) if text is not None]
    return ToolSupport(
        shows_tools=not with_tools or told is None or tool in told,
        shows_calls=not texts or any(called in text for text in texts),
        shows_results=answered is None or result in answered,
        takes_objects=of_object is not None and value in of_object and str(arguments) not in of_object,
        takes_text=of_text is not None and as_text in of_text,
        needs_content=rendered(calling(usual)) is None,
    )


def checked_calls(message: Message, which: str, location: str) -> list[dict[str, Any]]:
    """Return the calls of a message, each with arguments: an object, or the JSON text of one.

    Raises:
        DataError: if the message is not the assistant's, or a call has no name or other arguments.
    """
    calls = message[_CALLS]
    if message.get("role") != "assistant":
        raise DataError(f"{location}: {which} calls tools as {message.get('role')!r}; only 'assistant' may")
    if not isinstance(calls, list):
        raise DataError(f"{location}: {which} has {json_type(calls)} as its {_CALLS!r}; make it a list of calls")
    return [_checked_call(call, f"call {place} of {which}", location) for place, call in enumerate(calls, start=1)]


def check_results(messages: Sequence[Message], location: str) -> None:
    """Refuse a tool's result that answers no call.

    Calls may be written into the content of an assistant turn. Where a conversation has calls of its own, each result
    answers one of the last turn that made some.

    Raises:
        DataError: naming the message.
    """
    has_calls = any(message.get(_CALLS) for message in messages)
    open_calls = 0
    ids: set[str] = set()
    spoke = False
    for place, message in enumerate(messages, start=1):
        if message["role"] in RESULT_ROLES:
            name = message.get("tool_call_id")
            _check_id(name, f"message {place}", "tool_call_id", location)
            if not spoke or (has_calls and not open_calls):
                raise DataError(
                    f"{location}: message {place} is the result of a tool, but no call before it is without one; add "
                    "the assistant's call, or remove the result"
                )
            if name is not None and ids and name not in ids:
                raise DataError(
                    f"{location}: message {place} answers the call {name!r}, which no message before it makes; the "
                    f"last ones are {', '.join(map(repr, sorted(ids)))}"
                )
            open_calls -= 1
        else:
            calls = message.get(_CALLS) or ()
            open_calls = len(calls)
            ids = {call["id"] for call in calls if call.get("id") is not None}
            spoke = message["role"] == "assistant"


def canonical(message: Message) -> Message:
    """Return a message with all arguments as objects, as two spellings of one conversation share them."""
    if not message.get(_CALLS):
        return message
    return {**message, _CALLS: [_with_arguments(call, _as_object) for call in message[_CALLS]]}


def _checked_call(call: object, which: str, location: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        given = call if not isinstance(call, dict) else call["function"]
        raise DataError(
            f"{location}: {which} is {json_type(given)}, not "
            '{"type": "function", "function": {"name": ..., "arguments": ...}}'
        )
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"{location}: {which} has {_described(name)} as the function's 'name'; name the tool")
    _check_id(call.get("id"), which, "id", location)
    arguments = function.get(_ARGUMENTS)
    if arguments is None:
        return _with_arguments(call, lambda _: {})
    if isinstance(arguments, str):
        _check_text(arguments, f"{which} of {name!r}", location)
    elif not isinstance(arguments, dict):
        raise DataError(
            f"{location}: {which} of {name!r} has {json_type(arguments)} as its 'arguments'; make it an object, or "
            "the JSON text of one"
        )
    return call


def _check_id(name: object, which: str, key: str, location: str) -> None:
    if name is not None and not isinstance(name, str):
        raise DataError(f"{location}: {which} has {json_type(name)} as its {key!r}; make it a string")


def _check_text(arguments: str, which: str, location: str) -> None:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{location}: {which} has 'arguments' that are not JSON ({why_unreadable(error)}); write {{}} where there "
            "are none"
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{location}: {which} has {json_type(value)} as its 'arguments'; make it an object")


def _described(name: object) -> str:
    if name is None:
        return "nothing"
    return "a blank string" if isinstance(name, str) else json_type(name)


def _with_arguments(call: dict[str, Any], convert: Callable[[Any], object]) -> dict[str, Any]:
    """Return a call with other arguments."""
    if "function" not in call:
        return {**call, _ARGUMENTS: convert(call.get(_ARGUMENTS))}
    function = call["function"]
    return {**call, "function": {**function, _ARGUMENTS: convert(function.get(_ARGUMENTS))}}


def _as_object(arguments: Any) -> object:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _as_text(arguments: Any) -> object:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
