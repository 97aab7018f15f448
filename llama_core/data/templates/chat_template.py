"""Chat templates: the Jinja of Hugging Face tokenizers, in a sandbox, and the spans of the assistant's text.

A template may mark the assistant's text with ``{% generation %} ... {% endgeneration %}``. For any other template, we
find it by rendering the conversation turn by turn.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property

from llama_core.config.model_spec import Family
from llama_core.data.templates.confined import ConfinedRenderer
from llama_core.data.templates.rendering import InvalidTemplateError, Message, Renderer, Spans, Tools
from llama_core.data.templates.tool_calls import ToolSupport, tool_support
from llama_core.data.tokenizer import TemplateSource
from llama_core.errors import DataError

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

LLAMA4 = """
{%- for message in messages -%}
    {%- if message.role not in ('system', 'user', 'assistant') -%}
        {{- raise_exception("the roles are system, user and assistant, not " ~ message.role) -}}
    {%- endif -%}
    {{- '<|begin_of_text|>' if loop.first -}}
    {{- '<|header_start|>' ~ message.role ~ '<|header_end|>\\n\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content ~ '<|eot|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- (message.content.strip() if message.role == 'system' else message.content) ~ '<|eot|>' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|header_start|>assistant<|header_end|>\\n\\n' if add_generation_prompt -}}
"""
"""Meta's format of Llama 4 Instruct, without images and tools.

Source: models/llama4/prompt_format.md of github.com/meta-llama/llama-models; ``chat_template.json`` of
huggingface.co/meta-llama/Llama-4-Scout-17B-16E-Instruct, which strips system prompts alone.
"""

CHATML = """
{%- for message in messages -%}
    {%- if message.role not in ('system', 'user', 'assistant') -%}
        {{- raise_exception("the roles are system, user and assistant, not " ~ message.role) -}}
    {%- endif -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content ~ '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content ~ '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""
"""ChatML, the format of Qwen's chat models, without tools, thoughts and the system prompt that some of them add.

Source: huggingface.co/docs/transformers/chat_templating; ``tokenizer_config.json`` of huggingface.co/Qwen.
"""

MISTRAL = """
{%- set system, turns = '', messages -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content ~ '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in turns -%}
    {%- if message.role != ('user', 'assistant')[loop.index0 % 2] -%}
        {{- raise_exception("after an optional system prompt, user and assistant take turns") -}}
    {%- elif message.role == 'user' -%}
        {{- ' [INST] ' ~ (system if loop.first else '') ~ message.content ~ ' [/INST]' -}}
    {%- else -%}
        {%- generation -%}{{- ' ' ~ message.content ~ eos_token -}}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
"""
"""Mistral's format of Mistral 7B Instruct 0.1 and 0.2, whose system prompt begins the first turn.

Source: tokenizer V1 in docs.mistral.ai/cookbook/concept-deep-dive-tokenization-templates.
"""

GEMMA = """
{%- set system, turns = '', messages -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content ~ '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in turns -%}
    {%- if message.role != ('user', 'assistant')[loop.index0 % 2] -%}
        {{- raise_exception("after an optional system prompt, user and assistant take turns") -}}
    {%- elif message.role == 'user' -%}
        {{- '<start_of_turn>user\\n' ~ (system if loop.first else '') ~ message.content.strip() -}}
    {%- else -%}
        {{- '<start_of_turn>model\\n' -}}
        {%- generation -%}{{- message.content.strip() ~ '<end_of_turn>' -}}{%- endgeneration -%}
    {%- endif -%}
    {{- '\\n' if message.role == 'assistant' else '<end_of_turn>\\n' -}}
{%- endfor -%}
{{- '<start_of_turn>model\\n' if add_generation_prompt -}}
"""
"""Google's format of Gemma's instruct models, whose system prompt begins the first turn.

Source: ai.google.dev/gemma/docs/core/prompt-structure.
"""

BUILT_IN = {
    "llama2": TemplateSource(LLAMA2, "Llama 2's format"),
    "llama3": TemplateSource(LLAMA3, "Llama 3's format"),
    "llama4": TemplateSource(LLAMA4, "Llama 4's format"),
    "mistral": TemplateSource(MISTRAL, "Mistral's format"),
    "chatml": TemplateSource(CHATML, "ChatML"),
    "gemma": TemplateSource(GEMMA, "Gemma's format"),
}
"""The published formats, by their names in ``data.chat_template``."""
OF_FAMILY: Mapping[Family, str] = {
    "llama1": "llama2",  # it had no chat model of its own
    "llama2": "llama2",
    "code_llama": "llama2",
    "llama3": "llama3",
    "llama4": "llama4",
    "mistral": "mistral",
    "qwen": "chatml",
    "gemma": "gemma",
}
"""The published format of each known family."""
MARKERS = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "llama4": ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
}
"""The special tokens that a published format spells out, by its name."""


class ChatTemplate:
    """One chat template.

    The published formats are rendered in this process, and any other template in one with limits (``confined.py``).
    ``strftime_now`` gives the date of the data, so that the same data give the same tokens on any day.

    Args:
        source: the template and its name.
        named_tokens: the tokenizer's special tokens, by the names that templates know.
        today: the date that the template sees.
    """

    def __init__(self, source: TemplateSource, named_tokens: Mapping[str, str], today: date) -> None:
        self.source = source.template
        self.name = source.name
        self.named_tokens = named_tokens
        self.is_built_in = source in BUILT_IN.values()
        self._variables = {"tools": None, "documents": None, **named_tokens}
        self._today = today
        self._sources = [source.template] if source.with_tools is None else [source.template, source.with_tools]
        kind = Renderer if self.is_built_in else ConfinedRenderer
        self._tool_support: dict[bool, ToolSupport] = {}
        self._renderer = kind(source.template, self._variables, today)
        self._tool_renderer = self._renderer
        if source.with_tools is not None:
            self._tool_renderer = kind(source.with_tools, self._variables, today)

    @property
    def digest(self) -> str:
        """Digest of its text."""
        return hashlib.sha256(json.dumps(self._sources).encode()).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """A digest that two templates share only if they render the same text."""
        is_dated = any("strftime_now" in text for text in self._sources)
        today = self._today.isoformat() if is_dated else None
        return hashlib.sha256(json.dumps([*self._sources, self._variables, today]).encode()).hexdigest()

    def may_read(self, key: str) -> bool:
        """Return whether the template spells a key of a message, without which it cannot read it by its name."""
        return key in self._words

    @cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(word for text in self._sources for word in re.findall(r"\w+", text))

    def tool_support(self, *, with_tools: bool) -> ToolSupport:
        """Return what the template makes of tools.

        Args:
            with_tools: where the conversation has tools; some tokenizers have two templates.

        Raises:
            DataError: if the template is not valid Jinja.
        """
        if with_tools not in self._tool_support:
            self._tool_support[with_tools] = tool_support(self.render, with_tools=with_tools)
        return self._tool_support[with_tools]

    def render(self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = False) -> str:
        """Return a conversation as text.

        Args:
            messages: the conversation.
            tools: the JSON schemas of the tools that the assistant may call; None if there are none.
            add_generation_prompt: end with the beginning of the assistant's next turn.

        Raises:
            DataError: if the template is not valid Jinja.
            TemplateRefusalError: if the template raises, or takes too much time or memory.
        """
        try:
            return self._renderer_for(tools).render(messages, tools, add_generation_prompt=add_generation_prompt)
        except InvalidTemplateError as error:
            raise self._invalid(error) from None

    @cached_property
    def end_of_turn(self) -> str:
        """The text that follows the assistant's content, which tells it to stop; empty if there is none.

        Raises:
            DataError: if the template is not valid Jinja.
            TemplateRefusalError: if the template raises.
        """
        content, turns = _conversation_with_a_known_answer()
        return self.render(turns).rpartition(content)[2].strip()

    @property
    def learns_end_of_turn(self) -> bool:
        """Whether what ends the assistant's turn is part of its span, and so counts in the loss.

        Raises:
            DataError: if the template is not valid Jinja.
            TemplateRefusalError: if the template raises.
        """
        content, turns = _conversation_with_a_known_answer()
        text, spans = self.render_with_spans(turns)
        ends = text.rindex(content) + len(content)
        return not text[ends:].strip() or any(begin < ends < end for begin, end in spans)

    def render_with_spans(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, Spans]:
        """Return a conversation as text, and the assistant's spans: content and end of turn, without the header.

        Raises:
            DataError, TemplateRefusalError: as ``render``; also if the spans cannot be found.
        """
        try:
            return self._renderer_for(tools).render_with_spans(messages, tools)
        except InvalidTemplateError as error:
            raise self._invalid(error) from None

    def _renderer_for(self, tools: Tools) -> Renderer | ConfinedRenderer:
        """Return what renders conversations with these tools: with some, the template for tools if there is one."""
        return self._renderer if tools is None else self._tool_renderer

    def _invalid(self, error: InvalidTemplateError) -> DataError:
        return DataError(
            f"chat template {self.name!r} is not valid Jinja: {error}; fix it, or name another as data.chat_template"
        )


def _conversation_with_a_known_answer() -> tuple[str, list[Message]]:
    """Return an answer that no template holds, and a question with that answer."""
    content = secrets.token_hex(8)
    return content, [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
