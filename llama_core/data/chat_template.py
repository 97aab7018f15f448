"""Chat templates: the Jinja of Hugging Face tokenizers, in a sandbox, and the spans of the assistant's text.

A template may mark the assistant's text with ``{% generation %} ... {% endgeneration %}``. For any other template, we
find it by rendering the conversation turn by turn.
"""

import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from datetime import date
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama_core.config.models import Family
from llama_core.data.tokenizer import TemplateSource
from llama_core.errors import DataError

Message = Mapping[str, Any]
"""``role``, ``content`` and any other keys that the template knows."""
Spans = tuple[tuple[int, int], ...]
"""The begin and end of each span of characters, in order."""

LLAMA2 = """
{%- set system, turns = '', messages -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if message.role != ('user', 'assistant')[loop.index0 % 2] -%}
        {{- raise_exception("after an optional system prompt, user and assistant take turns") -}}
    {%- elif message.role == 'user' -%}
        {%- set content = (system if loop.first else '') ~ message.content -%}
        {{- bos_token ~ '[INST] ' ~ content.strip() ~ ' [/INST]' -}}
    {%- else -%}
        {%- generation -%}{{- ' ' ~ message.content.strip() ~ ' ' ~ eos_token -}}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
"""
"""Meta's format of Llama 2 Chat and Code Llama Instruct.

Source: ``chat_completion`` in llama/generation.py of github.com/meta-llama/llama and of meta-llama/codellama.
"""

LLAMA3 = """
{%- for message in messages -%}
    {%- if message.role not in ('system', 'user', 'assistant') -%}
        {{- raise_exception("the roles are system, user and assistant, not " ~ message.role) -}}
    {%- endif -%}
    {{- '<|begin_of_text|>' if loop.first -}}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content.strip() ~ '<|eot_id|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content.strip() ~ '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt -}}
"""
"""Meta's format of Llama 3 Instruct, without tools.

Source: ``ChatFormat`` in llama/tokenizer.py of github.com/meta-llama/llama3; models/llama3_3/prompt_format.md of
github.com/meta-llama/llama-models.
"""

BUILT_IN = {
    "llama2": TemplateSource(LLAMA2, "Llama 2's format"),
    "llama3": TemplateSource(LLAMA3, "Llama 3's format"),
}
"""The published formats, by their names in ``data.chat_template``."""
OF_FAMILY: Mapping[Family, str] = {
    "llama1": "llama2",  # it had no chat model of its own
    "llama2": "llama2",
    "code_llama": "llama2",
    "llama3": "llama3",
}
"""The published format of each known family."""
LLAMA3_MARKERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
"""The special tokens that Llama 3's format spells out."""

MOST_STEPS = 1_000_000
"""Most turns of loops, and calls, of one rendering; a conversation of a thousand messages takes thousands."""
MOST_SECONDS = 60
"""Most time of one rendering."""
LARGEST_BITS = 4096
"""Most bits of a number that a template computes."""
_COUNTED = "counted"

_BEGIN, _END = (f"\0{secrets.token_hex(8)}\0" for _ in range(2))  # no conversation holds these
_HAS_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class TemplateRefusalError(ValueError):
    """A template's reason for not rendering a conversation."""


class ChatTemplate:
    """One chat template.

    The sandbox, its functions and its settings are those of transformers' ``apply_chat_template``, except for the date:
    ``strftime_now`` uses the date of the data, so that the same data give the same tokens on any day.

    Args:
        source: the template and its name.
        named_tokens: the tokenizer's special tokens, by the names that templates know.
        today: the date that the template sees.
    """

    def __init__(self, source: TemplateSource, named_tokens: Mapping[str, str], today: date) -> None:
        self.source, self.name = source.template, source.name
        self.marks_the_assistant = _HAS_GENERATION_TAG.search(self.source) is not None
        self._variables = {"tools": None, "documents": None, **named_tokens}
        self._today = today

    @cached_property
    def fingerprint(self) -> str:
        """A digest that two templates share only if they render the same text."""
        today = self._today.isoformat() if "strftime_now" in self.source else None
        return hashlib.sha256(json.dumps([self.source, self._variables, today]).encode()).hexdigest()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return a conversation as text.

        Args:
            messages: the conversation.
            add_generation_prompt: end with the beginning of the assistant's next turn.

        Raises:
            DataError: if the template is not valid Jinja.
            TemplateRefusalError: if the template raises.
        """
        return self._render(messages, add_generation_prompt).replace(_BEGIN, "").replace(_END, "")

    @cached_property
    def end_of_turn(self) -> str:
        """The text that follows the assistant's content, which tells it to stop; empty if there is none.

        Raises:
            DataError: if the template is not valid Jinja.
            TemplateRefusalError: if the template raises.
        """
        content = secrets.token_hex(8)
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
        return self.render(turns).rpartition(content)[2].strip()

    def render_with_spans(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        """Return a conversation as text, and the assistant's spans: content and end of turn, without the header.

        Raises:
            DataError: as ``render``.
            TemplateRefusalError: if the template raises, or the spans cannot be found.
        """
        if self.marks_the_assistant:
            return _split_at_marks(self._render(messages, False))
        whole = self.render(messages)
        return whole, tuple(self._turns(messages, whole))

    def _turns(self, messages: Sequence[Message], whole: str) -> Iterator[tuple[int, int]]:
        """Yield each assistant turn's span: from the end of its prompt to the end of the conversation up to it."""
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self.render(messages[:index], add_generation_prompt=True)
                turn = self.render(messages[: index + 1])
                if not (turn.startswith(prompt) and whole.startswith(turn)):
                    raise TemplateRefusalError(
                        f"it renders message {index + 1} differently inside the conversation than at its end, so the "
                        "assistant's text cannot be found; mark it in the template with {% generation %} and "
                        "{% endgeneration %}, or set data.loss_on=all"
                    )
                yield len(prompt), len(turn)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        template = self._template
        try:
            self._sandbox.begin()
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._variables)
        except Exception as error:  # a template is a program and may raise anything
            reason = " ".join(str(error).split())
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise TemplateRefusalError(
                f"{kind}{reason}; change the conversation, or name another data.chat_template"
            ) from None

    @cached_property
    def _sandbox(self) -> "_Sandbox":
        sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        sandbox.filters["tojson"] = _to_json
        sandbox.globals["raise_exception"] = _raise_exception
        sandbox.globals["strftime_now"] = self._today.strftime
        return sandbox

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return self._sandbox.from_string(self.source)
        except Exception as error:  # Python's compiler, too, refuses some of what Jinja makes of a template
            where = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise DataError(
                f"chat template {self.name!r} is not valid Jinja: {where}{error}; fix it, or name another as "
                "data.chat_template"
            ) from None


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with a limit on the work of one rendering: a template comes with somebody's tokenizer."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._steps, self._ends_at = 0, math.inf
        self.filters[_COUNTED] = jinja2.pass_context(lambda context, value: self._count())

    def begin(self) -> None:
        """Count the steps of a rendering that begins now."""
        self._steps, self._ends_at = 0, time.monotonic() + MOST_SECONDS

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
        if self._steps > MOST_STEPS or time.monotonic() > self._ends_at:
            raise jinja2.TemplateError(f"it takes more than {MOST_STEPS:,} steps, or {MOST_SECONDS} s")
        return True


def _is_large(operator: str, left: Any, right: Any) -> bool:
    if operator == "%":
        return isinstance(left, str) and re.search(r"\*|\d{5}", left) is not None
    if isinstance(left, int) and isinstance(right, int):
        factor = right if operator == "**" else 1
        return abs(factor) > LARGEST_BITS or left.bit_length() * abs(factor) + right.bit_length() > LARGEST_BITS
    lengths = [len(side) for side in (left, right) if isinstance(side, Sized)]
    numbers = [side for side in (left, right) if isinstance(side, int)]
    return operator == "*" and math.prod([*lengths, *numbers]) > MOST_STEPS


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


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Do the same as Jinja's own filter, but without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
