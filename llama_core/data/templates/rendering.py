"""Render templates in Jinja's sandbox; as a program, ``python -P rendering.py``, in a process with limits.

A template comes with somebody's tokenizer, or with a task that asks a model. The sandbox keeps it from what is
dangerous and counts its loops and calls. But a single filter over large values can take hours or all memory, and only a
process can be stopped. The program needs nothing but Jinja, so that it starts at once.
"""

import base64
import io
import json
import math
import pickle
import random
import re
import resource
import secrets
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from datetime import date
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import IO, Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

Message = Mapping[str, Any]
"""``role``, ``content`` and any other keys that the template knows."""
Tools = Sequence[Mapping[str, Any]] | None
"""The JSON schemas of the tools that the assistant may call; None if there are none."""
Spans = tuple[tuple[int, int], ...]
"""The begin and end of each span of characters, in order."""

MAX_STEPS = 1_000_000
"""Most turns of loops, and calls, of one rendering; a conversation of a thousand messages takes thousands."""
MAX_SECONDS = 60
"""Most time of one answer of the process."""
MAX_BYTES = 2**31
"""Most memory of the process."""
TOO_LARGE = f"it takes more than {MAX_BYTES / 2**30:g} GiB of memory"
MAX_CHARACTERS = 2**24
"""Most characters of a rendered conversation."""
MAX_ANSWER_BYTES = 2**27
"""Most bytes of an answer: several for a character, and the spans."""
LARGEST_BITS = 4096
"""Most bits of a number that a template computes."""
REMEDY = "change the conversation, or name another data.chat_template"
"""The end of every refusal of a chat template."""
REMEDY_OF_TASKS = "mend the task, or choose another"
"""The end of every refusal of a task's template."""
MAX_TEMPLATES = 1000
"""Most templates of tasks that are kept compiled."""
_COUNTED = "counted"

_WIDE = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d{5}|\d*\.(?:\*|\d{5}))")
"""A place in a text for a value of many characters."""

_BEGIN, _END = (f"\0{secrets.token_hex(8)}\0" for _ in range(2))  # no conversation holds these
_HAS_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class TemplateRefusalError(ValueError):
    """A template's reason for not rendering a conversation."""


class InvalidTemplateError(ValueError):
    """Why a template is not valid Jinja."""


class Renderer:
    """Renders conversations with one template.

    The sandbox, its functions and its settings are those of transformers' ``apply_chat_template``, except for the date.

    Args:
        source: the Jinja text.
        variables: values that the template sees, by name.
        today: the date that the template sees.
        most_steps: most turns of loops, and calls, of one rendering.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], today: date, most_steps: int = MAX_STEPS) -> None:
        self.source = source
        self.variables = variables
        self.today = today
        self.most_steps = most_steps
        self.marks_the_assistant = _HAS_GENERATION_TAG.search(source) is not None

    def render(self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = False) -> str:
        """Return a conversation as text.

        Raises:
            InvalidTemplateError: if the template is not valid Jinja.
            TemplateRefusalError: if the template raises.
        """
        return self._render(messages, tools, add_generation_prompt).replace(_BEGIN, "").replace(_END, "")

    def render_with_spans(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, Spans]:
        """Return a conversation as text, and the assistant's spans: content and end of turn, without the header.

        Raises:
            InvalidTemplateError: if the template is not valid Jinja.
            TemplateRefusalError: if the template raises, or the spans cannot be found.
        """
        if self.marks_the_assistant:
            return _split_at_marks(self._render(messages, tools, False))
        whole = self.render(messages, tools)
        return whole, tuple(self._turns(messages, tools, whole))

    def end_of_turn(self, tools: Tools = None) -> str:
        """Return what follows the assistant's content at the end of a conversation.

        Raises:
            InvalidTemplateError, TemplateRefusalError: as ``render``.
        """
        content = secrets.token_hex(8)
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
        return self.render(turns, tools).rpartition(content)[2]

    def _turns(self, messages: Sequence[Message], tools: Tools, whole: str) -> Iterator[tuple[int, int]]:
        """Yield each assistant turn's span: from the end of its prompt to the end of the conversation up to it."""
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self.render(messages[:index], tools, add_generation_prompt=True)
                turn = self.render(messages[: index + 1], tools)
                end: int | None = None
                if turn.startswith(prompt) and whole.startswith(turn):
                    end = len(turn)
                elif whole.startswith(prompt):
                    end = self._end_inside(messages, tools, index, whole, len(prompt))
                if end is None:
                    raise TemplateRefusalError(
                        f"it renders message {index + 1} differently inside the conversation than at its end, so the "
                        "assistant's text cannot be found; mark it in the template with {% generation %} and "
                        "{% endgeneration %}, or set data.loss_on=all"
                    )
                yield len(prompt), end

    def _end_inside(self, messages: Sequence[Message], tools: Tools, index: int, whole: str, begin: int) -> int | None:
        """Return where a turn ends that is rendered otherwise when nothing follows it, as without a thought.

        It is the last end of a turn before the content of the next message, and that begins where changing it changes
        the text.

        Args:
            messages: the conversation.
            tools: the tools that the template is given.
            index: the turn's message.
            whole: the conversation as text.
            begin: where the turn begins.
        """
        end_of_turn = self.end_of_turn(tools)
        if index + 1 == len(messages) or not end_of_turn.strip():
            return None
        changed = [*messages[: index + 1], _changed(messages[index + 1]), *messages[index + 2 :]]
        pairs = enumerate(zip(whole, self.render(changed, tools), strict=False))
        same = next((place for place, (one, other) in pairs if one != other), begin)
        place = whole.rfind(end_of_turn, begin, same)
        return None if place < 0 else place + len(end_of_turn)

    def _render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool) -> str:
        template = self._template
        values = {**self.variables, "tools": tools}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return _rendered(self._sandbox, template, values, REMEDY)

    @cached_property
    def _sandbox(self) -> "_Sandbox":
        extensions = [_GenerationTag, jinja2.ext.loopcontrols]
        sandbox = _Sandbox(self.most_steps, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        sandbox.filters["tojson"] = _to_json
        sandbox.globals["raise_exception"] = _raise_exception
        sandbox.globals["strftime_now"] = self.today.strftime
        return sandbox

    @cached_property
    def _template(self) -> jinja2.Template:
        return _compiled(self._sandbox, self.source)


class TaskRenderer:
    """Renders the templates of lm-evaluation-harness's tasks, with the settings and the filter of the harness.

    Args:
        most_steps: most turns of loops, and calls, of one rendering.
    """

    def __init__(self, most_steps: int = MAX_STEPS) -> None:
        self._sandbox = _TaskSandbox(most_steps, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        self._sandbox.filters["regex_replace"] = _regex_replace
        self._compiled = lru_cache(MAX_TEMPLATES)(lambda source: _compiled(self._sandbox, source))

    def render(self, source: str, document: Mapping[str, Any]) -> str:
        """Return the text that a template makes of a document.

        Raises:
            InvalidTemplateError: if the template is not valid Jinja.
            TemplateRefusalError: if the template raises.
        """
        return _rendered(self._sandbox, self._compiled(source), document, REMEDY_OF_TASKS)


def _rendered(sandbox: "_Counted", template: jinja2.Template, values: Mapping[str, Any], remedy: str) -> str:
    try:
        sandbox.begin()
        text = template.render(**values)
        if len(text) > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"it renders more than {MAX_CHARACTERS:,} characters")
    except MemoryError:
        raise TemplateRefusalError(f"{TOO_LARGE}; {remedy}") from None
    except Exception as error:  # a template is a program and may raise anything
        reason = " ".join(str(error).split())
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise TemplateRefusalError(f"{kind}{reason}; {remedy}") from None
    return text


def _compiled(sandbox: SandboxedEnvironment, source: str) -> jinja2.Template:
    try:
        return sandbox.from_string(source)
    except Exception as error:  # Python's compiler, too, refuses some of what Jinja makes of a template
        where = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise InvalidTemplateError(f"{where}{error}") from None


class _Counted(SandboxedEnvironment):
    """A sandbox with a limit on the turns of loops and the calls of one rendering."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, most_steps: int, **options: Any) -> None:
        super().__init__(**options)
        self._steps = 0
        self._most_steps = most_steps
        self.filters[_COUNTED] = jinja2.pass_context(lambda context, value: self._count())

    def begin(self) -> None:
        """Count the steps of a rendering that begins now."""
        self._steps = 0

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            step = nodes.Filter(nodes.Const(True), _COUNTED, [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(step).set_lineno(loop.lineno))
            loop.test = loop.test and nodes.And(step, loop.test)
        return tree

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something in a template."""
        self._count()
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a product, a power, a remainder or a formatted text, unless it may be very large."""
        self._count()
        if _is_large(operator, left, right):
            raise jinja2.TemplateError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def _count(self) -> bool:
        self._steps += 1
        if self._steps > self._most_steps:
            raise jinja2.TemplateError(f"it takes more than {self._most_steps:,} steps")
        return True


class _Sandbox(_Counted, ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, which change no value."""


class _TaskSandbox(_Counted):
    """The sandbox of tasks' templates, some of which make a list item by item."""


def _regex_replace(string: str, pattern: str, repl: str, count: int = 0) -> str:
    return re.sub(pattern, repl, string, count=count)


def _is_large(operator: str, left: Any, right: Any) -> bool:
    if operator == "%":
        return isinstance(left, str) and _WIDE.search(left) is not None
    if isinstance(left, int) and isinstance(right, int):
        factor = right if operator == "**" else 1
        return abs(factor) > LARGEST_BITS or left.bit_length() * abs(factor) + right.bit_length() > LARGEST_BITS
    lengths = [len(side) for side in (left, right) if isinstance(side, Sized)]
    numbers = [side for side in (left, right) if isinstance(side, int)]
    return operator == "*" and math.prod([*lengths, *numbers]) > MAX_STEPS


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: puts a mark before and after the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _split_at_marks(rendered: str) -> tuple[str, Spans]:
    text, *marked = rendered.split(_BEGIN)
    spans = []
    for part in marked:
        inside, _, after = part.partition(_END)
        spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, tuple(spans)


def _changed(message: Message) -> Message:
    """Return a message with another content, and with calls of another tool."""
    other = secrets.token_hex(8)
    changed = {**message, "content": other} if message.get("content") or not message.get("tool_calls") else message
    calls = [
        {**call, "function": {**call.get("function", call), "name": other}} for call in message.get("tool_calls", ())
    ]
    return {**changed, "tool_calls": calls} if calls else changed


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Do the same as Jinja's own filter, but without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def main(requests: Iterable[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more, each a line of JSON.

    The first has the limit of steps and, to render conversations, the template and what it sees. The others are
    conversations, or else a task's template and a document.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    renderer: Renderer | TaskRenderer | None = None
    for line in requests:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if renderer is None:
                renderer = _renderer(*request)
            elif isinstance(renderer, TaskRenderer):
                answer = _answer_for_task(renderer, *request)
            else:
                answer = _answer(renderer, *request)
        except (TemplateRefusalError, InvalidTemplateError) as error:
            answer = {type(error).__name__: str(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _renderer(
    most_steps: int, source: str | None = None, variables: Mapping[str, Any] = MappingProxyType({}), today: str = ""
) -> Renderer | TaskRenderer:
    if source is None:
        return TaskRenderer(most_steps)
    return Renderer(source, variables, date.fromisoformat(today), most_steps)


def _answer_for_task(renderer: TaskRenderer, source: str, document: str, drawn: Sequence[Any] | None) -> dict[str, Any]:
    if drawn is not None:
        go_on_drawing(drawn)
    text = renderer.render(source, _Unpickler(io.BytesIO(base64.b64decode(document))).load())
    return {"text": text, "random": None if drawn is None else random.getstate()}


def go_on_drawing(state: Sequence[Any]) -> None:
    """Let Python's generator go on from a state that has been JSON."""
    version, numbers, rest = state
    random.setstate((version, tuple(numbers), rest))


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, kind: str) -> "_Withheld":
        return _Withheld(kind)


class _Withheld:
    """Stands for a value of a document that no template is given, by the name of its type."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def _refuse(self, *_: object) -> NoReturn:
        raise jinja2.TemplateError(f"the document holds a {self._kind}, which no template is given")

    __str__ = __repr__ = __format__ = __getattr__ = __getitem__ = __contains__ = __iter__ = __len__ = __bool__ = _refuse
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __mul__ = __rmul__ = _refuse
    __hash__ = object.__hash__


def _answer(
    renderer: Renderer, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool, with_spans: bool
) -> dict[str, Any]:
    if with_spans:
        text, spans = renderer.render_with_spans(messages, tools)
    else:
        text, spans = renderer.render(messages, tools, add_generation_prompt=add_generation_prompt), ()
    return {"text": text, "spans": spans}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever waits for the answer, and who may ask again
    main(sys.stdin.buffer, sys.stdout.buffer)
