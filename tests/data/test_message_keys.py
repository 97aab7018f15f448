"""Messages that are not to be trained on, and the keys of messages that nothing reads."""

import json
import re
from dataclasses import replace
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import PUBLIC_LLAMA3
from corpora import chat_of

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig
from llama_core.data.bad_lines import UnusableRecordError
from llama_core.data.chat import ChatFormat, encode
from llama_core.data.datasets import load_datasets
from llama_core.data.templates.chat_template import ChatTemplate
from llama_core.data.tokenizer import ByteTokenizer, TemplateSource
from llama_core.errors import DataError
from llama_core.objectives.preferences import DPO

SPEC = replace(model_spec("tiny_llama3_50m"), vocab_size=300)
TURNS = ("First?", "One.", "Second?", "Two.", "Third?", "Three.")
OFF = {"weight": 0, "train": False, "loss": False}
ON = {"weight": 1, "train": True, "loss": True}


def talk(*keys, turns=TURNS):
    """A conversation with other keys in the messages, in order."""
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    for place, more in enumerate(keys):
        messages[place] |= more
    return messages


def without_marks(loss_on):
    source = TemplateSource(PUBLIC_LLAMA3, "public")
    return ChatFormat(ChatTemplate(source, ByteTokenizer.named_tokens, date(2026, 1, 31)), loss_on)


def counted(chat, messages):
    document = chat.document(messages, "a.jsonl:1")
    [(ids, ignored)] = encode(ByteTokenizer(), [document])
    return bytes(ids[~ignored].tolist()).decode()


@pytest.mark.parametrize("chat", [chat_of(), without_marks("assistant")], ids=["marks", "turn by turn"])
@pytest.mark.parametrize("key", OFF)
def test_an_assistant_message_that_is_switched_off_does_not_count_and_the_others_do(chat, key):
    off, on, unsaid = {key: OFF[key]}, {key: ON[key]}, {key: None}
    assert counted(chat, talk({}, off, {}, on, {}, unsaid)) == "Two.<|eot_id|>Three.<|eot_id|>"
    assert counted(chat, talk({}, {}, {}, off)) == "One.<|eot_id|>Three.<|eot_id|>"
    assert counted(chat, talk({}, {}, {}, on)) == counted(chat, talk())


@pytest.mark.parametrize("chat", [chat_of(loss_on="all"), without_marks("all")], ids=["marks", "turn by turn"])
def test_where_every_token_counts_those_of_a_message_that_is_switched_off_do_not(chat):
    whole = chat.document(talk(), "").text
    assert counted(chat, talk({}, {}, {}, {"weight": 0})) == whole.replace("Two.<|eot_id|>", "")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_the_messages_of_sharegpt_can_be_switched_off_too(tmp_path, form):
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "no", "train": False}]
    turns += [{"from": "human", "value": "??"}, {"from": "gpt", "value": "yes", "train": True}]
    records = [{"conversations": turns}] * 2
    path = tmp_path / f"a.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        pq.write_table(pa.Table.from_pylist(records), path)
    data = DataConfig(source=str(path), cache_dir=str(tmp_path / "cache"), validation_fraction=0)
    statistics = load_datasets(data, SPEC, seq_len=256).statistics
    assert statistics.num_targets == 2 * len("yes<|eot_id|>")
    assert "4 assistant turns, 2 of them not trained on" in statistics.summary()
    assert not any("not used" in note for note in statistics.notes)


def test_an_answer_of_a_pair_counts_but_for_the_messages_that_are_switched_off(tmp_path):
    chosen = talk({}, {}, {}, {"weight": 0}, {}, {})
    rejected = [*chosen[:2], *talk(turns=("Another?", "No."))]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"chosen": chosen, "rejected": rejected}))
    data = DataConfig(source=str(path), cache_dir=str(tmp_path / "cache"), validation_fraction=0)
    statistics = load_datasets(data, SPEC, seq_len=1024, objective=DPO).statistics
    assert statistics.num_targets == len("Three.<|eot_id|>") + len("No.<|eot_id|>")


@pytest.mark.parametrize(
    ("key", "value"), [("weight", 0.5), ("weight", "0"), ("train", 2), ("train", "no"), ("weight", [0])]
)
def test_a_message_that_is_to_be_trained_on_in_part_is_refused(key, value):
    with pytest.raises(
        DataError, match=rf"a\.jsonl:1: message 2 has {re.escape(json.dumps(value))} as its '{key}'; write 0 or"
    ):
        chat_of().document(talk({}, {key: value}), "a.jsonl:1")


def test_a_conversation_with_every_turn_switched_off_is_left_out():
    off = {"train": 0}
    with pytest.raises(UnusableRecordError, match="the record says that none of them is trained on"):
        chat_of().document(talk({}, off, {}, off, {}, off), "")


def test_a_template_that_does_not_mark_every_turn_once_is_refused():
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    source += "{% generation %}all of it{% endgeneration %}"
    template = ChatTemplate(TemplateSource(source, "mine"), {}, date(2026, 1, 31))
    with pytest.raises(DataError, match=r"marks 1 parts of 3 assistant turns, so nobody can say .* 'weight' means"):
        ChatFormat(template, "assistant").document(talk({}, {"weight": 0}), "a.jsonl:1")


@pytest.mark.parametrize(
    ("messages", "keys"),
    [
        (talk({"id": 1}, {"id": 2, "model": "x"}), ("id", "model")),
        (talk({"weight": 1}, {"weight": 1}), ("weight",)),  # of a question, which cannot count
        (talk({"weight": 0}, {"loss": 2.5}), ("loss",)),
        (talk({"name": "Ann"}), ("name",)),
        (talk({"tool_calls": []}, {"reasoning_content": "hm", "tool_calls": None}), ()),
    ],
)
def test_keys_of_messages_that_nothing_reads_are_known(messages, keys):
    assert chat_of().document(messages, "").turns.ignored_keys == keys


def test_a_key_that_the_template_reads_is_not_among_them():
    source = "{% for m in messages %}{{ m.role }} {{ m.name }}: {% generation %}{{ m.content }}{% endgeneration %}"
    template = ChatTemplate(TemplateSource(source + "{% endfor %}", "mine"), {}, date(2026, 1, 31))
    document = ChatFormat(template, "assistant").document(talk({"name": "Ann", "city": "Bern"}), "")
    assert document.turns.ignored_keys == ("city",)
