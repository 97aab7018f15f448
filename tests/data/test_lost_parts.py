"""Thoughts and system prompts that a chat template leaves out are counted, and those that it writes are not."""

import json
from dataclasses import replace
from datetime import date

import pytest
from chat_templates import PLAIN_CHATML, PUBLIC_LLAMA2, PUBLIC_LLAMA3
from corpora import chat_of
from tool_templates import PUBLISHED, QWEN3
from trained_tokenizers import byte_level

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig
from llama_core.data.chat import ChatFormat
from llama_core.data.check import check_data
from llama_core.data.datasets import load_datasets
from llama_core.data.records.pairs import Pair
from llama_core.data.templates.chat_template import ChatTemplate
from llama_core.data.tokenizer import ByteTokenizer, TemplateSource

SPEC = replace(model_spec("tiny_llama3_50m"), vocab_size=300)
EACH = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}|{% endif %}\n{% endfor %}"
AS_JSON = EACH.replace(
    "{{ m.content }}", "{{ {'thought': m.reasoning_content | default(''), 'text': m.content} | tojson }}"
)
WITHOUT_SYSTEM = EACH.replace(
    "{% for m in messages %}", "{% for m in messages if m.role == 'user' or m.role == 'assistant' %}"
)
CUT = EACH.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")


def chat_with(source, loss_on="all"):
    template = ChatTemplate(TemplateSource(source, "mine"), ByteTokenizer.named_tokens, date(2026, 1, 31))
    return ChatFormat(template, loss_on)


def say(*contents, **thought):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return [message | (thought if message["role"] == "assistant" else {}) for message in messages]


def lost(chat, messages):
    turns = chat.document(messages, "").turns
    return turns.num_lost_thoughts, turns.num_lost_prompts


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("source", [PUBLIC_LLAMA3, PUBLIC_LLAMA2, PLAIN_CHATML], ids=["llama3", "llama2", "chatml"])
def test_the_thoughts_of_each_turn_that_a_template_does_not_write_are_counted(source, key):
    messages = say("Two and two?", "4", "And three?", "7", **{key: "I add them up."})
    assert lost(chat_with(source, "assistant"), messages) == (2, 0)
    assert lost(chat_of(), [*messages[:3], {"role": "assistant", "content": "7", key: " "}]) == (1, 0)


def test_a_thought_that_is_written_in_another_way_is_not_lost():
    messages = say("?", "!", reasoning_content='I say "yes",\nand é.')
    assert (
        json.dumps(messages[1]["reasoning_content"], ensure_ascii=False)
        in chat_with(AS_JSON).document(messages, "").text
    )
    assert lost(chat_with(AS_JSON), messages) == (0, 0)
    assert lost(chat_with(CUT), messages) == (1, 0)


def test_a_thought_before_the_answer_may_be_cut_off_too():
    messages = say("?", "<think>\nI think so.\n</think>\n\nYes.", "??", "No.")
    assert lost(chat_with(CUT), messages) == (1, 0)
    assert lost(chat_with(EACH), messages) == (0, 0)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_and_developer_messages_that_a_template_does_not_write_are_counted(role):
    messages = [{"role": role, "content": " Be kind. "}, *say("?", "!"), {"role": role, "content": "Be brief."}]
    assert lost(chat_with(WITHOUT_SYSTEM), messages) == (0, 2)
    assert lost(chat_with(EACH), messages) == (0, 0)
    assert lost(chat_with(EACH), [{"role": role, "content": None}, *say("?", "!")]) == (0, 0)


@pytest.mark.parametrize("name", ["Llama 3.1", "Qwen2.5", "Qwen3", "Mistral v0.3"])
def test_what_is_counted_is_what_transformers_does_not_write_either(name, tmp_path):
    names = ByteTokenizer.named_tokens
    folder = byte_level(tmp_path, list(names.values()), names)
    reference = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    thoughts = ["First I look.", "Then I count."]
    messages = say("Two and two?", "4", "And three?", "7")
    for message, thought in zip(messages[1::2], thoughts, strict=True):
        message["reasoning_content"] = thought
    theirs = reference.apply_chat_template(messages, chat_template=PUBLISHED[name], tokenize=False)
    missing = sum(thought not in theirs for thought in thoughts)
    assert lost(chat_with(PUBLISHED[name]), messages) == (missing, 0)
    assert missing == (1 if PUBLISHED[name] is QWEN3 else 2)


def test_both_answers_of_a_pair_are_looked_at():
    answers = [say("?", answer, thinking=f"It is {answer}.")[1:] for answer in ("yes", "no")]
    document = chat_of().document(Pair(say("?"), *answers), "")
    assert [part.turns.num_lost_thoughts for part in document.parts] == [1, 1]


def test_a_run_and_the_check_of_its_first_records_tell_both_with_their_numbers(tmp_path):
    (tmp_path / "mine.jinja").write_text(WITHOUT_SYSTEM)
    records = [{"messages": [{"role": "system", "content": "Be kind."}, *say(f"{n}?", "Yes.")]} for n in range(5)]
    records += [{"messages": say(f"{n}?", "No.", reasoning="It is not.")} for n in range(20)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"chat_template": str(tmp_path / "mine.jinja"), "loss_on": "all", "cache_dir": str(tmp_path / "cache")}
    data = DataConfig(source=str(source), validation_fraction=0, **settings)
    notes = load_datasets(data, SPEC, seq_len=64).statistics.notes
    assert check_data(data, SPEC).notes == notes
    assert len(notes) == 2
    assert "leaves out the thoughts of 20 of 25 assistant turns, which are not trained on" in notes[0]
    assert "leaves out 5 system or developer messages, which are not in the text" in notes[1]
