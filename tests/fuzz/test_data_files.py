"""Training data, token caches and chat templates, from anywhere."""

import gzip
import json
import os
import shutil
from datetime import date
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import CHATML, PUBLIC_LLAMA2, PUBLIC_LLAMA3
from malformed import WORDS, cases, changed, damaged, damaged_json, junk, keep_the_law, naming, write
from tool_templates import OURS, PUBLISHED

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig
from llama_core.data.bad_lines import MalformedRecordError, UnusableRecordError
from llama_core.data.chat import ChatFormat
from llama_core.data.check import check_data
from llama_core.data.datasets import load_datasets
from llama_core.data.formats import Conversation, FieldNames, FormatCounts, read_record
from llama_core.data.templates import rendering
from llama_core.data.templates.chat_template import BUILT_IN, ChatTemplate
from llama_core.data.templates.rendering import TemplateRefusalError
from llama_core.data.tokenizer import TemplateSource
from llama_core.errors import DataError

SPEC = model_spec("tiny_llama3_50m")
SAID = {"role": "assistant", "content": "hi there"}
CHAT = {"messages": [{"role": "user", "content": "hello"}, SAID]}
RECORDS = [
    {"text": "some text to train on, with é and 漢"},
    CHAT,
    {"text": "x" * 300},
    {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi there"}]},
    {"instruction": "add", "input": "1 + 1", "output": "2"},
    {"prompt": "hello", "completion": "hi there"},
    {"messages": [{"role": "system"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}, SAID]},
] * 2


def lines_of(rng):
    records = [json.dumps(changed(rng, one) if rng.random() < 0.4 else one).encode() for one in RECORDS]
    content = b"\n".join(records)
    return damaged(rng, content) if rng.random() < 0.4 else content


def array_of(rng):
    records = [changed(rng, one) if rng.random() < 0.4 else one for one in RECORDS]
    content = json.dumps(records, indent=rng.choice((None, 1))).encode()
    return damaged(rng, content) if rng.random() < 0.4 else content


def packed(rng, content, pack):
    content = pack(content)
    return damaged(rng, content) if rng.random() < 0.5 else content


def zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


def table_of(rng):
    """Return a Parquet file whose columns have any types."""
    types = (
             pa.string(), pa.int64(), pa.binary(), pa.list_(pa.string()), pa.float64(), pa.bool_(), pa.timestamp("s"),
             pa.timestamp("ns"), pa.date64(), pa.duration("us"), pa.large_string(), pa.struct([("role", pa.string())]),
             pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])), pa.decimal128(38, 9), pa.null(),
    )  # fmt: skip
    columns, names = [], []
    for name in rng.sample(["text", "messages", "text", "conversations", "a.b", ""], rng.randrange(1, 4)):
        kind = rng.choice(types)
        values = [
            rng.choice((None, "x", b"\xff", 2**62, -(2**62), [{"role": "user", "content": "x"}], {"role": "x"}))
        ] * 3
        try:
            columns.append(pa.array(values, kind))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            columns.append(pa.array([None] * 3, kind))
        names.append(name)
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(pa.Table.from_arrays(columns, names), sink)
    except pa.ArrowException:
        return b"PAR1"
    content = sink.getvalue().to_pybytes()
    return damaged(rng, content) if rng.random() < 0.5 else content


FORMS = {
    ".jsonl": lines_of,
    ".json": array_of,
    ".txt": lines_of,
    ".jsonl.gz": lambda rng: packed(rng, lines_of(rng), gzip.compress),
    ".jsonl.zst": lambda rng: packed(rng, lines_of(rng), zstd),
    ".json.gz": lambda rng: packed(rng, array_of(rng), gzip.compress),
    ".json.zst": lambda rng: packed(rng, array_of(rng), zstd),
    ".parquet": table_of,
}


def test_any_data_file_is_read_or_refused_by_its_name(tmp_path):
    for number, rng in cases("data"):
        suffix = rng.choice(list(FORMS))
        path = tmp_path / f"data{suffix}"
        write(path, FORMS[suffix](rng))
        limit = rng.choice((0, 100))
        data = DataConfig(
            source=str(path), max_bad_lines=limit, validation_fraction=0, cache_dir=str(tmp_path / "cache")
        )
        load = partial(load_datasets, data, SPEC, seq_len=16)
        with naming(number):
            keep_the_law([partial(check_data, data, SPEC), load], tmp_path, names=[path.name, "max_bad_lines"])


def test_a_pipe_among_the_data_is_refused(tmp_path):
    os.mkfifo(tmp_path / "data.jsonl")
    with pytest.raises(DataError, match="not a regular file"):
        check_data(DataConfig(source=str(tmp_path)), SPEC)


def test_a_damaged_token_cache_is_built_again(tmp_path):
    write(tmp_path / "data.jsonl", b"\n".join(json.dumps(one).encode() for one in RECORDS))
    data = DataConfig(source=str(tmp_path / "data.jsonl"), validation_fraction=0, cache_dir=str(tmp_path / "cache"))

    def rows():
        train = load_datasets(data, SPEC, seq_len=16).train
        for row in range(len(train)):
            train.row(row)

    for number, rng in cases("token cache", share=0.4):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        rows()
        files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        path = rng.choice(sorted(files))
        content = path.read_bytes()
        path.unlink()
        if path.suffix == ".json" and rng.random() < 0.8:
            write(path, damaged_json(rng, json.loads(content)))
        else:
            write(path, None if rng.random() < 0.1 else damaged(rng, content))
        with naming(number):
            keep_the_law([rows], tmp_path)


TEMPLATES = [*(source.template for source in BUILT_IN.values()), PUBLIC_LLAMA2, PUBLIC_LLAMA3, CHATML]
STATEMENTS = (
    "{% for i in range(100000) %}", "{% endfor %}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(9) }}", "{{ 'a' * 10**10 }}",
    "{{ 9 ** 99999999 }}", "{{ '%99999999999d' % 1 }}", "{% include 'x' %}", "{% extends 'x' %}",
    "{% import 'os' as os %}", "{{ messages.pop() }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}", "{{ strftime_now('%Y' * 9) }}",
    "{{ raise_exception(messages) }}", "{% generation %}", "{% endgeneration %}", "{{", "{%", "{#", "{% if %}",
    "{% set ns = namespace(x=2) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ messages | tojson }}", "{{ x.y.z }}", "{{ 1 / 0 }}", "{{ '\ud800' }}", "{% break %}", "{{ lipsum(99999) }}",
)  # fmt: skip


def test_any_chat_template_renders_or_is_refused(tmp_path):
    def render(template):
        try:
            template.render_with_spans(CHAT["messages"])
            _ = template.end_of_turn, template.fingerprint
        except TemplateRefusalError:
            pass

    for number, rng in cases("chat template"):
        source = rng.choice(TEMPLATES)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(source) + 1)
            source = source[:at] + rng.choice((*STATEMENTS, *WORDS)) + source[at + rng.choice((0, 0, 1, 9)) :]
        names = {"bos_token": rng.choice(WORDS), "eos_token": str(junk(rng))}
        template = ChatTemplate(TemplateSource(source, "mine"), names, date(2026, 1, 31))
        with naming(number):
            keep_the_law([partial(render, template)], tmp_path)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = [{"id": f"abcDEF12{n}", "type": "function", "function": {"name": "add", "arguments": "{}"}} for n in range(2)]
RESULTS = [{"role": "tool", "tool_call_id": f"abcDEF12{n}", "name": "add", "content": "2"} for n in range(2)]
TOOL_CHAT = {
    "messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "tool_calls": CALLS}, *RESULTS, SAID],
    "tools": [TOOL, TOOL],
}


def test_any_conversation_with_tools_is_rendered_or_refused(tmp_path):
    formats = [
        ChatFormat(ChatTemplate(TemplateSource(source, "mine"), {"bos_token": ""}, date(2026, 1, 31)), "assistant")
        for source in (*PUBLISHED.values(), OURS)
    ]

    def render(record, chat):
        try:
            read = read_record(record, FieldNames(), FormatCounts())
            if isinstance(read, Conversation):
                chat.document(read.messages, "a.jsonl:1", read.tools)
        except (UnusableRecordError, MalformedRecordError) as error:
            raise DataError(str(error)) from None

    for number, rng in cases("conversation with tools"):
        record = changed(rng, TOOL_CHAT)
        with naming(number):
            keep_the_law([partial(render, record, rng.choice(formats))], tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% for a in range(999) recursive %}{{ loop(range(999)) }}{% endfor %}",
        STATEMENTS[3],
        STATEMENTS[4],
        STATEMENTS[5],
        STATEMENTS[6],
        STATEMENTS[21],
    ],
)
def test_a_template_that_would_not_end_is_refused(source, monkeypatch):
    monkeypatch.setattr(rendering, "MAX_STEPS", 10_000)
    with pytest.raises(TemplateRefusalError):
        ChatTemplate(TemplateSource(source, "endless"), {}, date(2026, 1, 31)).render(CHAT["messages"])


def test_counting_steps_does_not_change_what_loops_render():
    source = (
        "{% for m in messages if m.role %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.content }}{% endfor %}"
    )
    rendered = ChatTemplate(TemplateSource(source, "loops"), {}, date(2026, 1, 31)).render(CHAT["messages"])
    assert rendered == "1/2Falsehello2/2Truehi there"
