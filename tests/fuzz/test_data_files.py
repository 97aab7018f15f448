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

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig
from llama_core.data import rendering
from llama_core.data.chat_template import BUILT_IN, ChatTemplate
from llama_core.data.check import check_data
from llama_core.data.datasets import load_datasets
from llama_core.data.rendering import TemplateRefusalError
from llama_core.data.tokenizer import TemplateSource
from llama_core.errors import DataError

SPEC = model_spec("tiny_llama3_50m")
CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi there"}]}
RECORDS = [{"text": "some text to train on, with é and 漢"}, CHAT, {"text": "x" * 300}] * 3


def lines_of(rng):
    records = [json.dumps(changed(rng, one) if rng.random() < 0.4 else one).encode() for one in RECORDS]
    content = b"\n".join(records)
    return damaged(rng, content) if rng.random() < 0.4 else content


def table_of(rng):
    """Return a Parquet file whose columns have any types."""
    types = (
             pa.string(), pa.int64(), pa.binary(), pa.list_(pa.string()), pa.float64(), pa.bool_(), pa.timestamp("s"),
             pa.timestamp("ns"), pa.date64(), pa.duration("us"), pa.large_string(), pa.struct([("role", pa.string())]),
             pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])), pa.decimal128(38, 9), pa.null(),
    )  # fmt: skip
    columns, names = [], []
    for name in rng.sample(["text", "messages", "text", "a.b", ""], rng.randrange(1, 4)):
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


def test_any_data_file_is_read_or_refused_by_its_name(tmp_path):
    for number, rng in cases("data"):
        suffix = rng.choice((".jsonl", ".jsonl", ".jsonl.gz", ".parquet"))
        content = table_of(rng) if suffix == ".parquet" else lines_of(rng)
        if suffix == ".jsonl.gz":
            content = gzip.compress(content, 1)
            content = damaged(rng, content) if rng.random() < 0.5 else content
        path = tmp_path / f"data{suffix}"
        write(path, content)
        limit = rng.choice((0, 100))
        data = DataConfig(
            source=str(path), max_bad_lines=limit, validation_fraction=0, cache_dir=str(tmp_path / "cache")
        )
        load = partial(load_datasets, data, SPEC, seq_len=16, seed=0)
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
        train = load_datasets(data, SPEC, seq_len=16, seed=0).train
        for row in range(len(train)):
            train.row(row)

    for number, rng in cases("token cache", share=0.4):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        rows()
        (entry,) = (tmp_path / "cache").glob("tokens-*")
        path = rng.choice(sorted(path for path in entry.iterdir()))
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
    monkeypatch.setattr(rendering, "MOST_STEPS", 10_000)
    with pytest.raises(TemplateRefusalError):
        ChatTemplate(TemplateSource(source, "endless"), {}, date(2026, 1, 31)).render(CHAT["messages"])


def test_counting_steps_does_not_change_what_loops_render():
    source = (
        "{% for m in messages if m.role %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.content }}{% endfor %}"
    )
    rendered = ChatTemplate(TemplateSource(source, "loops"), {}, date(2026, 1, 31)).render(CHAT["messages"])
    assert rendered == "1/2Falsehello2/2Truehi there"
