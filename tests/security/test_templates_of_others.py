"""A chat template comes with somebody's tokenizer: no filter of it takes more time or memory than it may."""

import gc
import signal
import sys
from datetime import date
from pathlib import Path

import pytest
from chat_templates import CHATML, PUBLIC_LLAMA2, PUBLIC_LLAMA3
from tiers import nightly

from llama_core.data.templates import confined, rendering
from llama_core.data.templates.chat_template import ChatTemplate
from llama_core.data.templates.rendering import Renderer, TemplateRefusalError
from llama_core.data.tokenizer import TemplateSource
from llama_core.errors import EnvironmentMismatchError

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi 漢 \U0001f600 \ud800 there\n"}]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TODAY = date(2026, 1, 31)


def template(source):
    return ChatTemplate(TemplateSource(source, "theirs"), NAMES, TODAY)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ([('ab'*450000)]*900000)|map('title')|select('none')|list }}",
        nightly("{{ ([('ab'*450000)]*900000)|map('urlize')|select('none')|list }}"),
        nightly("{{ ([('ab'*450000)]*900000)|map('wordwrap', 1)|select('none')|list }}"),
    ],
)
def test_a_filter_that_computes_for_hours_is_stopped(source, monkeypatch):
    monkeypatch.setattr(rendering, "MAX_SECONDS", 2)
    with pytest.raises(TemplateRefusalError, match="it takes more than 2 s"):
        template(source).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{% set a = 'a' * 900000 %}{{ a | replace('a', a) }}",
        "{{ 'a' | center(10**11) }}",
        nightly("{{ 'a'.ljust(10**11) }}"),
        nightly("{{ 'a'|batch(10**12, 'b')|list }}"),
        nightly("{{ '{:100000000000}'.format(1) }}"),
        nightly("{{ (['a' * 900000] * 900000) | join }}"),
    ],
)
def test_a_filter_that_asks_for_all_memory_is_refused(source):
    with pytest.raises(TemplateRefusalError, match="it takes more than 2 GiB of memory"):
        template(source).render(CHAT)


def test_a_conversation_of_too_many_characters_is_refused():
    with pytest.raises(TemplateRefusalError, match="more than 16,777,216 characters"):
        template("{{ 'a' | center(17000000) }}").render(CHAT)


@pytest.mark.wide
@pytest.mark.parametrize("end", ["{{ 'a' | center(10**11) }}", "{{ ([('ab'*450000)]*900000)|map('title')|list }}"])
def test_after_a_refusal_the_next_conversation_is_rendered(end, monkeypatch):
    monkeypatch.setattr(rendering, "MAX_SECONDS", 5)
    theirs = template(f"{{% if messages | length == 1 %}}{end}{{% endif %}}{{{{ messages[0].content }}}}")
    assert theirs.render(CHAT) == "hello"
    with pytest.raises(TemplateRefusalError):
        theirs.render(CHAT[:1])
    assert theirs.render(CHAT) == "hello"


def test_after_an_interrupt_the_answer_is_that_to_the_next_conversation(monkeypatch):
    theirs = template("{{ messages[0].content }}")
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(confined, "_receive", _interrupted)
        theirs.render(CHAT[1:])
    assert theirs.render(CHAT) == "hello"


def test_ctrl_c_in_the_terminal_does_not_end_its_process():
    theirs = template("{{ messages[0].content }}")
    theirs.render(CHAT)
    process = theirs._renderer._process
    process.send_signal(signal.SIGINT)
    assert theirs.render(CHAT) == "hello"
    assert theirs._renderer._process is process


def _interrupted(process, ends_at):
    raise KeyboardInterrupt


@pytest.mark.parametrize("source", [CHATML, PUBLIC_LLAMA2, PUBLIC_LLAMA3])
def test_a_template_renders_the_same_in_its_own_process_as_in_ours(source):
    ours = Renderer(source, {"tools": None, "documents": None, **NAMES}, TODAY)
    assert template(source).render_with_spans(CHAT) == ours.render_with_spans(CHAT)
    theirs = template(source).render(CHAT[:1], add_generation_prompt=True)
    assert theirs == ours.render(CHAT[:1], add_generation_prompt=True)


def test_a_process_that_cannot_start_is_one_line_with_its_reason(monkeypatch):
    monkeypatch.setattr(confined, "_PROGRAM", (sys.executable, "-c", "raise SystemExit('no Jinja here')"))
    with pytest.raises(EnvironmentMismatchError, match=r"cannot start .* no Jinja here"):
        template("{{ messages }}").render(CHAT)


def test_its_process_knows_no_secret_and_ends_with_it(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "marker-of-a-secret")
    theirs = template("{{ messages[0].content }}")
    assert theirs.render(CHAT) == "hello"
    pid = theirs._renderer._process.pid
    assert b"marker-of-a-secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    del theirs
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
