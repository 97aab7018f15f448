"""Every kind of file and format of records gives the rows of the same text in JSON lines, and is announced."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import write_jsonl
from pyarrow import feather

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig
from llama_core.data import check
from llama_core.data.check import check_data
from llama_core.data.datasets import load_datasets
from llama_core.data.records import documents as formats
from llama_core.errors import ConfigError, DataError

TEXTS = [f"text number {n}, with é and 漢\nand a second line" for n in range(40)]
ASKED = [f"What is twice {n}?" for n in range(40)]
SAID = [f"That is {2 * n}." for n in range(40)]
PAIRS = list(zip(ASKED, SAID, strict=True))
SPEC = replace(model_spec("tiny_llama3_50m"), vocab_size=300)


def spoken(*contents, system=None):
    roles = ["system"] * (system is not None) + ["user", "assistant"] * len(contents)
    said = [*([] if system is None else [system]), *contents]
    return [{"role": role, "content": content} for role, content in zip(roles, said, strict=False)]


def load(folder, source, **settings):
    data = DataConfig(source=str(source), cache_dir=str(folder / "cache"), **settings)
    return load_datasets(data, SPEC, seq_len=384)


def rows_of(folder, source, **settings):
    train = load(folder, source, **settings).train
    return [np.concatenate(train.row(place)[:2]) for place in range(len(train))]


def rows_of_lines(folder, documents):
    return rows_of(folder, write_jsonl(folder / "reference.jsonl", documents))


def notes_of(folder, source, **settings):
    """The notes of a run on its data, which the check of the first records must give too."""
    notes = load(folder, source, **settings).statistics.notes
    data = DataConfig(source=str(source), cache_dir=str(folder / "cache"), **settings)
    assert check_data(data, SPEC).notes == notes
    return [note.removeprefix(f"{source}: ") for note in notes if note.startswith(f"{source}: ")]


def write_records(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


RECORDS = [{"text": text} for text in TEXTS]
FILES = {
    "a.ndjson": lines(RECORDS),
    "a.jsonl.gz": gzip.compress(lines(RECORDS)),
    "a.jsonl.zst": zstd(lines(RECORDS)),
    "two-frames.jsonl.zst": zstd(lines(RECORDS[:7])) + zstd(lines(RECORDS[7:])),
    "a.json": json.dumps(RECORDS).encode(),
    "indented.json": json.dumps(RECORDS, indent=2, ensure_ascii=False).encode(),
    "with-a-mark.json": b"\xef\xbb\xbf" + json.dumps(RECORDS).encode(),
    "a.json.gz": gzip.compress(json.dumps(RECORDS).encode()),
    "a.json.zst": zstd(json.dumps(RECORDS).encode()),
    "lines.json": lines(RECORDS),
    "one-after-another.json": "\n".join(json.dumps(record, indent=2) for record in RECORDS).encode(),
    "LOUD.JSON.GZ": gzip.compress(json.dumps(RECORDS).encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_rows_of_json_lines_and_goes_unannounced(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    assert np.array_equal(rows_of(tmp_path, tmp_path / name), rows_of_lines(tmp_path, TEXTS))
    assert notes_of(tmp_path, tmp_path / name) == []


def test_a_file_of_plain_text_is_one_document(tmp_path):
    folder = tmp_path / "docs"
    (folder / "more").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        content = text.encode()
        name = ("{}.txt", "{}.md", "{}.txt.gz", "more/{}.md.zst")[number % 4].format(f"{number:02}")
        pack = (bytes, bytes, gzip.compress, zstd)[number % 4]
        (folder / name).write_bytes(pack(content))
    in_order = sorted(range(40), key=lambda number: (number % 4 == 3, number))
    assert np.array_equal(rows_of(tmp_path, folder), rows_of_lines(tmp_path, [TEXTS[n] for n in in_order]))
    assert notes_of(tmp_path, folder) == ["40 files of plain text: a file is a document"]


def alpaca(asked, said):
    return {"instruction": "Calculate.", "input": asked, "output": said}


def sharegpt(asked, said):
    return {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]}


EARLIER = ["0?", "0."]
IN_PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "it?"}]
CHATS = {
    "sharegpt": (
        [sharegpt(*pair) for pair in PAIRS],
        [spoken(*pair) for pair in PAIRS],
        "40 ShareGPT conversations ('conversations' with 'from' and 'value'; where given, 'system' and 'tools')",
    ),
    "sharegpt with a system prompt": (
        [sharegpt(*pair) | {"system": "Be brief."} for pair in PAIRS],
        [spoken(*pair, system="Be brief.") for pair in PAIRS],
        "40 ShareGPT conversations ('conversations' with 'from' and 'value'; where given, 'system' and 'tools')",
    ),
    "conversations with roles": (
        [{"conversations": spoken(*pair)} for pair in PAIRS],
        [spoken(*pair) for pair in PAIRS],
        "40 ShareGPT conversations ('conversations' with 'from' and 'value'; where given, 'system' and 'tools')",
    ),
    "alpaca": (
        [alpaca(*pair) for pair in PAIRS],
        [spoken(f"Calculate.\n\n{asked}", said) for asked, said in PAIRS],
        "40 Alpaca instructions ('instruction' and 'output'; where given, 'input', 'system' and 'history')",
    ),
    "alpaca without input": (
        [
            {"instruction": asked, "output": said, "input": (None, "", " ")[len(said) % 3], "system": ""}
            for asked, said in PAIRS
        ],
        [spoken(*pair) for pair in PAIRS],
        "40 Alpaca instructions ('instruction' and 'output'; where given, 'input', 'system' and 'history')",
    ),
    "pairs": (
        [{"prompt": asked, "completion": said} for asked, said in PAIRS],
        [spoken(*pair) for pair in PAIRS],
        "40 pairs of prompt and completion ('prompt' and 'completion'; where given, 'system', 'history' and 'tools')",
    ),
    "pairs of messages": (
        [{"prompt": spoken(asked), "completion": spoken(asked, said)[1:]} for asked, said in PAIRS],
        [spoken(*pair) for pair in PAIRS],
        "40 pairs of prompt and completion ('prompt' and 'completion'; where given, 'system', 'history' and 'tools')",
    ),
    "alpaca with a history": (
        [{"instruction": asked, "output": said, "history": [EARLIER]} for asked, said in PAIRS],
        [spoken(*EARLIER, *pair) for pair in PAIRS],
        "40 Alpaca instructions ('instruction' and 'output'; where given, 'input', 'system' and 'history')",
    ),
    "alpaca with a blank history": (
        [{"instruction": asked, "output": said, "history": ""} for asked, said in PAIRS],
        [spoken(*pair) for pair in PAIRS],
        "40 Alpaca instructions ('instruction' and 'output'; where given, 'input', 'system' and 'history')",
    ),
    "pairs with a history of messages": (
        [{"prompt": asked, "completion": said, "history": spoken(*EARLIER)} for asked, said in PAIRS],
        [spoken(*EARLIER, *pair) for pair in PAIRS],
        "40 pairs of prompt and completion ('prompt' and 'completion'; where given, 'system', 'history' and 'tools')",
    ),
    "messages after a system prompt beside them": (
        [{"messages": spoken(*pair), "system": "Be brief."} for pair in PAIRS],
        [spoken(*pair, system="Be brief.") for pair in PAIRS],
        None,
    ),
    "messages that begin with the system prompt beside them": (
        [{"messages": spoken(*pair, system="Be brief."), "system": "Be brief. "} for pair in PAIRS],
        [spoken(*pair, system="Be brief.") for pair in PAIRS],
        None,
    ),
    "parts": (
        [{"messages": spoken(IN_PARTS, [{"type": "text", "text": said}])} for said in SAID],
        [spoken("What is it?", said) for said in SAID],
        None,
    ),
    "a system prompt without content": (
        [{"messages": [system, *spoken(*pair)]} for pair in PAIRS for system in ({"role": "system"},)],
        [spoken(*pair) for pair in PAIRS],
        None,
    ),
    "a system prompt of null and no tool calls": (
        [
            {
                "messages": [
                    {"role": "system", "content": None},
                    *spoken(asked),
                    {**spoken("", said)[1], "tool_calls": []},
                ]
            }
            for asked, said in PAIRS
        ],
        [spoken(*pair) for pair in PAIRS],
        None,
    ),
}


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", CHATS)
def test_every_format_gives_the_rows_of_messages_and_is_announced(tmp_path, name, form):
    records, conversations, announced = CHATS[name]
    path = tmp_path / f"chats.{form}"
    match form:
        case "jsonl":
            write_records(path, records)
        case "json":
            path.write_text(json.dumps(records))
        case "parquet":
            pq.write_table(pa.Table.from_pylist(records), path)
    assert np.array_equal(rows_of(tmp_path, path), rows_of_lines(tmp_path, conversations))
    assert notes_of(tmp_path, path) == ([f"recognised by their fields: {announced}"] if announced else [])


UNUSED = {
    "a text": ([{"text": text, "url": "x", "score": 0.5} for text in TEXTS], "'url' (40), 'score' (40)"),
    "messages": ([{"messages": spoken(*pair), "text": "rendered"} for pair in PAIRS], "'text' (40)"),
    "a system prompt beside another one": (
        [{"messages": spoken(*pair, system="Be brief."), "system": "Be long."} for pair in PAIRS],
        "'system' (40)",
    ),
    "sharegpt": (
        [sharegpt(*pair) | {"chat_template_kwargs": {"a": 1}} for pair in PAIRS],
        "'chat_template_kwargs' (40)",
    ),
    "keys of messages": (
        [{"messages": [message | {"seen_at": 7} for message in spoken(*pair)]} for pair in PAIRS],
        "'seen_at' of messages (40)",
    ),
    "alpaca": ([alpaca(*pair) | {"tools": "[]", "lang": "en"} for pair in PAIRS], "'tools' (40), 'lang' (40)"),
    "the class of token ids": ([{"input_ids": [7, 8, 9] * 9, "labels": 1} for _ in TEXTS], "'labels' (40)"),
}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("name", UNUSED)
def test_every_field_that_nothing_reads_is_named_once_with_the_number_of_its_records(tmp_path, name, form):
    records, named = UNUSED[name]
    path = tmp_path / f"a.{form}"
    match form:
        case "jsonl":
            write_records(path, records)
        case "parquet":
            pq.write_table(pa.Table.from_pylist(records), path)
        case "arrow":
            feather.write_feather(pa.Table.from_pylist(records), str(path), compression="uncompressed")
    notes = notes_of(tmp_path, path)
    assert [note for note in notes if "not used" in note] == [f"fields that are not used: {named}"]
    assert load(tmp_path, path).statistics.notes == load(tmp_path, path).statistics.notes


def test_fields_without_a_value_are_not_named(tmp_path):
    empty = {"a": None, "b": "", "c": [], "d": {}}
    assert notes_of(tmp_path, write_records(tmp_path / "a.jsonl", [{"text": text} | empty for text in TEXTS])) == []


def test_of_many_fields_the_first_are_named_and_the_others_counted(tmp_path):
    source = write_records(tmp_path / "a.jsonl", [{"text": 9 * TEXTS[0]} | {f"field {n}": n for n in range(15)}])
    [note] = notes_of(tmp_path, source)
    assert note.endswith("'field 10' (1), 'field 11' (1) and 3 more")


def test_a_field_of_its_own_in_each_record_takes_no_more_than_a_hundred_of_memory(tmp_path):
    source = write_records(tmp_path / "a.jsonl", [{"text": f"{n} {TEXTS[0]}", f"id {n}": n} for n in range(300)])
    [note] = notes_of(tmp_path, source)
    assert note.endswith("and at least 88 more")


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ("What? That.", "'history' is a string; make it a list of pairs of a question and an answer"),
        ([["What?"]], "turn 1 of 'history' is a list, not two strings; make it a list of pairs"),
        ([["What?", "That."], ["What?", None]], "turn 2 of 'history' is a list, not two strings; make it a list"),
        ([{"by": "user"}], "turn 1 of 'history' has no 'role', only 'by'; give it 'role' and 'content'"),
    ],
)
def test_a_malformed_history_is_one_line(tmp_path, history, problem):
    source = write_records(tmp_path / "a.jsonl", [{"instruction": "?", "output": "!", "history": history}])
    with pytest.raises(DataError) as refused:
        load(tmp_path, source)
    assert str(refused.value).startswith(f"{source}:1: {problem}")


def test_a_mixed_source_is_announced_in_one_line_with_the_number_of_each(tmp_path):
    records = [{"text": "a text"}, *(sharegpt(*pair) for pair in PAIRS[:2]), *(alpaca(*pair) for pair in PAIRS[2:5])]
    [note] = notes_of(tmp_path, write_records(tmp_path / "a.jsonl", records))
    assert note == (
        "recognised by their fields: 1 texts ('text'), 2 ShareGPT conversations ('conversations' with 'from' and "
        "'value'; where given, 'system' and 'tools'), 3 Alpaca instructions ('instruction' and 'output'; where given, "
        "'input', 'system' and 'history')"
    )


def test_a_second_run_announces_what_the_cache_remembers(tmp_path):
    source = write_records(tmp_path / "a.jsonl", [sharegpt(*pair) for pair in PAIRS])
    first = load(tmp_path, source).statistics
    assert load(tmp_path, source).statistics == first
    assert len(list((tmp_path / "cache").glob("shard-*"))) == 1


def test_a_format_that_is_added_makes_other_caches(tmp_path, monkeypatch):
    source = write_records(tmp_path / "a.jsonl", [{"haiku": text} for text in TEXTS])
    with pytest.raises(DataError, match="no document to train on: unusable lines"):
        load(tmp_path, source)
    write_records(source, [{"haiku": text, "text": "no poem " * 40} for text in TEXTS])
    before = rows_of(tmp_path, source)
    haiku = formats.RecordFormat("haikus", ("haiku",), lambda record: record.string("haiku"))
    monkeypatch.setattr(formats, "FORMATS", (haiku, *formats.FORMATS))
    assert np.array_equal(rows_of(tmp_path, source), rows_of_lines(tmp_path, TEXTS))
    assert notes_of(tmp_path, source)[0] == "recognised by their fields: 40 haikus ('haiku')"
    monkeypatch.undo()
    assert np.array_equal(rows_of(tmp_path, source), before)


def test_a_format_may_have_a_text_among_its_fields(tmp_path, monkeypatch):
    source = write_records(tmp_path / "a.jsonl", [{"text": text, "grade": "good"} for text in TEXTS])
    graded = formats.RecordFormat("graded texts", ("text", "grade"), lambda record: record.string("text"))
    monkeypatch.setattr(formats, "FORMATS", (graded, *formats.FORMATS))
    rows_of(tmp_path, source)
    assert notes_of(tmp_path, source)[0].startswith("recognised by their fields: 40 graded texts ('text' and 'grade')")


NAMED = {
    "pairs": (
        [{"question": asked, "answer": said, "text": "another"} for asked, said in PAIRS],
        {"prompt": "question", "completion": "answer"},
    ),
    "turns": (
        [{"dialog": [{"who": "human", "says": asked}, {"who": "gpt", "says": said}]} for asked, said in PAIRS],
        {"conversations": "dialog", "from": "who", "value": "says"},
    ),
    "messages": (
        [{"chat": [{"by": "user", "words": asked}, {"by": "assistant", "words": said}]} for asked, said in PAIRS],
        {"messages": "chat", "role": "by", "content": "words"},
    ),
    "one name": ([{"instruction": asked, "response": said} for asked, said in PAIRS], {"output": "response"}),
    "its own names, to choose it before a text": (
        [{"prompt": asked, "completion": said, "text": "another"} for asked, said in PAIRS],
        {"prompt": "prompt"},
    ),
    "the better answers": (
        [{"prompt": asked, "chosen": said, "rejected": "No."} for asked, said in PAIRS],
        {"completion": "chosen"},
    ),
    "the better conversations": (
        [{"prompt": "?", "messages": [], "chosen": spoken(*pair), "rejected": []} for pair in PAIRS],
        {"messages": "chosen"},
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_fields_can_be_named(tmp_path, name):
    records, fields = NAMED[name]
    source = write_records(tmp_path / "a.jsonl", records)
    expected = rows_of_lines(tmp_path, [spoken(*pair) for pair in PAIRS])
    assert np.array_equal(rows_of(tmp_path, source, fields=fields), expected)
    assert not any("records also hold" in note for note in notes_of(tmp_path, source, fields=fields))


def test_a_text_in_a_field_of_a_format_is_a_text_if_it_is_chosen(tmp_path):
    source = write_records(tmp_path / "a.jsonl", [{"prompt": "?", "completion": text} for text in TEXTS])
    assert np.array_equal(rows_of(tmp_path, source, text_field="completion"), rows_of_lines(tmp_path, TEXTS))


def test_other_names_of_fields_have_a_cache_of_their_own(tmp_path):
    source = write_records(tmp_path / "a.jsonl", [{"a": asked, "b": said, "text": "x" * 300} for asked, said in PAIRS])
    one = rows_of(tmp_path, source, fields={"prompt": "a", "completion": "b"})
    assert not np.array_equal(one, rows_of(tmp_path, source, fields={"prompt": "b", "completion": "a"}))
    assert not np.array_equal(one, rows_of(tmp_path, source))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"promt": "question"}, r"data\.fields: 'promt' is not one of messages, .*; did you mean 'prompt'\?"),
        ({"text": "body"}, r"data\.fields: the field of a text is data\.text_field; set that instead of 'text'"),
    ],
)
def test_a_field_that_no_format_has_is_refused(tmp_path, fields, problem):
    source = write_records(tmp_path / "a.jsonl", RECORDS)
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path, source, fields=fields)


def test_names_that_no_record_has_are_reported(tmp_path):
    notes = notes_of(tmp_path, write_records(tmp_path / "a.jsonl", RECORDS), fields={"prompt": "question"})
    assert notes == [
        "data.fields (prompt=question) chooses no format: no record has all fields of one under these names"
    ]


def test_a_format_that_is_not_used_is_reported_with_the_setting_that_chooses_it(tmp_path):
    source = write_records(tmp_path / "a.jsonl", [alpaca(*pair) | {"text": " ".join(pair)} for pair in PAIRS])
    assert notes_of(tmp_path, source) == [
        "40 records also hold Alpaca instructions ('instruction' and 'output'; where given, 'input', 'system' and "
        "'history'), which are not used; set data.fields.instruction=instruction to train on these instead"
    ]


BOTH = "train on both answers with --objective dpo"


@pytest.mark.parametrize(
    ("record", "found", "setting"),
    [
        ({"prompt": "?", "chosen": "!", "rejected": "no"}, "'prompt', 'chosen', 'rejected'", "data.fields.completion"),
        ({"chosen": "Human: ? !", "rejected": "Human: ? no"}, "'chosen', 'rejected'", "data.text_field"),
        ({"chosen": spoken("?", "!"), "rejected": spoken("?", "no")}, "'chosen', 'rejected'", "data.fields.messages"),
        (
            {"prompt": spoken("?"), "chosen": spoken("", "!")[1:], "rejected": spoken("", "no")[1:]},
            "'prompt', 'chosen', 'rejected'",
            "data.fields.completion",
        ),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_file_of_preferences_is_refused_and_the_remedy_trains_on_the_chosen_answers(
    tmp_path, record, found, setting, form
):
    path = tmp_path / f"a.{form}"
    if form == "jsonl":
        write_records(path, [record])
    else:
        pq.write_table(pa.Table.from_pylist([record]), path)
    with pytest.raises(DataError) as refused:
        load(tmp_path, path)
    assert str(refused.value) == (
        f"{path}:1: this file holds preferences ({found}); {BOTH}, or "
        f"set {setting}=chosen to train on the chosen answers alone"
    )
    remedy = {"fields": {setting.rpartition(".")[2]: "chosen"}} if ".fields." in setting else {"text_field": "chosen"}
    data = DataConfig(source=str(path), cache_dir=str(tmp_path / "cache"), **remedy)
    assert check_data(data, SPEC).num_tokens > 0


def test_preferences_beside_messages_are_reported(tmp_path):
    source = write_records(
        tmp_path / "a.jsonl", [{"messages": spoken(*pair), "chosen": "!", "rejected": "?"} for pair in PAIRS]
    )
    assert notes_of(tmp_path, source) == [f"40 records also hold preferences ('chosen'), which are not used; {BOTH}"]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {"conversations": "hello"},
            '\'conversations\' is a string, not a list of {"from": ..., "value": ...} objects',
        ),
        ({"conversations": ["hello"]}, "message 1 is a string, not an object with 'from' and 'value'"),
        ({"conversations": [{"value": "?"}]}, "message 1 has no 'from', only 'value'; give it 'from' and 'value'"),
        ({"conversations": [{"from": "narrator", "value": "?"}]}, "message 1 has the unknown role 'narrator'; use one"),
        ({"prompt": [7], "completion": "!"}, "message 1 is a number, not an object with 'role' and 'content'"),
    ],
)
def test_a_malformed_conversation_is_one_line_in_the_words_of_its_format(tmp_path, record, problem):
    source = write_records(tmp_path / "a.jsonl", [{"text": "a text"}, record])
    with pytest.raises(DataError) as refused:
        load(tmp_path, source)
    assert str(refused.value).startswith(f"{source}:2: {problem}")


CALL = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost"}}]}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"messages": [*spoken("?"), CALL]},
            "not supported (message 2 has a 'function_call'; make it one of its 'tool_calls')",
        ),
        (
            {"messages": [IMAGE, *spoken("", "!")[1:]]},
            "not supported (part 1 of message 1 is of type 'image_url', not text)",
        ),
        (
            {"conversations": [{"from": "human", "value": "?"}, {"from": "function_call", "value": "{}"}]},
            'not supported (message 2 is a \'function_call\', but not the JSON of {"name": ..., "arguments": ...})',
        ),
        ({"instruction": 7, "output": "!"}, "wrong type ('instruction' is a number, not a string)"),
        ({"prompt": "?", "completion": None}, "wrong type ('completion' is null)"),
        ({"text": None, "messages": None}, "wrong type ('messages' and 'text' are null)"),
        ({"body": 7, "system": None}, "missing field (no 'text' and no conversation among 'body', 'system'; none of"),
    ],
)
def test_one_conversation_that_cannot_be_trained_on_is_a_bad_line_among_the_others(tmp_path, record, reason):
    records = [{"messages": spoken(*pair)} for pair in PAIRS]
    source = write_records(tmp_path / "a.jsonl", [*records[:20], record, *records[20:]])
    statistics = load(tmp_path, source).statistics
    assert statistics.conversations.num_conversations == 40
    [example] = statistics.bad_line_examples
    assert example.startswith(f"{source}:21: {reason}")
    with pytest.raises(DataError, match=r"more than data\.max_bad_lines=0 unusable lines"):
        load(tmp_path, source, max_bad_lines=0)


@pytest.mark.parametrize(
    ("columns", "settings", "problem"),
    [
        ({"ids": [[1, 2]]}, {}, "has no 'text' and no conversation among 'ids'; none of them holds text"),
        ({"ids": [[1, 2]]}, {"text_field": "ids"}, ": column 'ids' is list<element: int64>, not text;"),
        (
            {"ids": [[1]], "body": ["x"]},
            {},
            "among 'ids', 'body'; set data.text_field to one of body, or name the fields",
        ),
        (
            {"text": [[1]], "body": ["x"]},
            {},
            ": column 'text' is list<element: int64>, not text; set data.text_field to",
        ),
    ],
)
def test_a_table_without_text_says_which_columns_hold_some(tmp_path, columns, settings, problem):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError) as refused:
        load(tmp_path, tmp_path / "a.parquet", **settings)
    assert problem in str(refused.value)


NAMELESS = {
    "conversation": ({"id": "x", "conversation": spoken("?", "!")}, {"messages": "conversation"}),
    "dialogue": ({"dialogue": sharegpt("?", "!")["conversations"]}, {"conversations": "dialogue"}),
}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", NAMELESS)
def test_a_field_of_messages_with_another_name_is_told_with_the_setting_that_reads_it(tmp_path, name, form):
    record, fields = NAMELESS[name]
    path = tmp_path / f"a.{form}"
    if form == "jsonl":
        write_records(path, [record])
    else:
        pq.write_table(pa.Table.from_pylist([record]), path)
    [(field, called)] = fields.items()
    with pytest.raises(DataError, match=rf"; set data\.fields\.{field}={called} to read conversations"):
        load(tmp_path, path)
    assert check_data(DataConfig(source=str(path), fields=fields), SPEC).num_tokens > 0


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_messages_with_other_keys_are_told_with_the_settings_of_these_too(tmp_path, form):
    path = tmp_path / f"a.{form}"
    record = {"talk": [{"speaker": "user", "words": "?"}, {"speaker": "assistant", "words": "!"}]}
    if form == "jsonl":
        write_records(path, [record])
    else:
        pq.write_table(pa.Table.from_pylist([record]), path)
    with pytest.raises(
        DataError, match=r"set data\.fields\.messages=talk, and .*role and .*content .* 'speaker', 'words'"
    ):
        load(tmp_path, path)
    fields = {"role": "speaker", "content": "words"}
    with pytest.raises(DataError, match=r"set data\.fields\.messages=talk to read conversations"):
        load(tmp_path, path, fields=fields)
    assert check_data(DataConfig(source=str(path), fields=fields | {"messages": "talk"}), SPEC).num_tokens > 0


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([{"body": 7}] * 101, "none of the first 101 records can be trained on: unusable lines (101 missing field)"),
        ([{"text": ""}] * 101, "none of the first 101 records can be trained on: unusable lines (101 empty)"),
        ([{"text": "x"}, *[{"text": ""}] * 101], "more than data.max_bad_lines=100 unusable lines (101 empty)"),
    ],
)
def test_a_higher_limit_is_advised_only_where_other_records_were_usable(tmp_path, records, told):
    source = write_records(tmp_path / "a.jsonl", records)
    for read in (lambda: load(tmp_path, source), lambda: check_data(DataConfig(source=str(source)), SPEC)):
        with pytest.raises(DataError) as refused:
            read()
        assert told in str(refused.value)
        assert ("raise the limit" in str(refused.value)) == (records[0] == {"text": "x"})


def test_a_dictionary_of_strings_is_a_text_column(tmp_path):
    pq.write_table(pa.table({"text": pa.array(TEXTS).dictionary_encode()}), tmp_path / "a.parquet")
    assert np.array_equal(rows_of(tmp_path, tmp_path / "a.parquet"), rows_of_lines(tmp_path, TEXTS))


def test_a_check_of_long_records_reads_only_the_first_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "CHECKED_CHARACTERS", 10_000)
    source = write_records(tmp_path / "a.jsonl", [{"text": "x" * 998}] * 500)
    found = check_data(DataConfig(source=str(source)), SPEC)
    assert found.summary.endswith(": 11 texts; a text ends with </s> and begins with <s> (the tokenizer)")
    assert found.num_tokens == pytest.approx(500 * 1000, rel=0.01)


def test_a_check_of_thousands_of_files_reads_a_thousand_and_counts_the_tokens_of_all(tmp_path):
    for number in range(2500):
        (tmp_path / f"{number}.txt").write_text("x" * 98)
    found = check_data(DataConfig(source=str(tmp_path)), SPEC)
    assert found.summary.partition(";")[0].endswith(": 1,000 texts")
    assert found.num_tokens == 2500 * 100


def test_a_check_names_what_is_left_out_of_the_validation_data_too(tmp_path):
    source = write_records(tmp_path / "a.jsonl", RECORDS)
    (tmp_path / "held").mkdir()
    write_records(tmp_path / "held" / "b.jsonl", RECORDS[:3])
    (tmp_path / "held" / "c.csv").write_text("x")
    notes = check_data(DataConfig(source=str(source), validation=str(tmp_path / "held")), SPEC).notes
    assert notes == (f"{tmp_path}/held: left out 1 file of an unknown kind (c.csv)",)
