"""Conversations with tools get transformers' tokens, and the assistant's calls and answers count, but nothing else."""

import json
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import chat_of
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather
from tool_templates import HERMES, LLAMA31, MISTRAL3, OURS, PUBLISHED, QWEN3, QWEN25
from trained_tokenizers import byte_level

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig
from llama_core.data.bad_lines import UnusableRecordError
from llama_core.data.chat import ChatFormat, chat_format, encode
from llama_core.data.check import check_data
from llama_core.data.corpus import Tally, read_documents
from llama_core.data.find import find_files
from llama_core.data.formats import FieldNames, FormatCounts, read_record
from llama_core.data.templates.chat_template import BUILT_IN, ChatTemplate
from llama_core.data.tokenizer import ByteTokenizer, TemplateSource, load_tokenizer
from llama_core.errors import DataError

MARKERS = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>"]
MARKERS += ["[INST]", "[/INST]", "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<think>", "</think>"]


SPEC = replace(model_spec("tiny_llama3_50m"), vocab_size=300)


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Tells <{name}>", "parameters": parameters}}


TOOLS = [tool("weather", city={"type": "string", "description": "Where"}), tool("hour", zone={"type": "string"})]
TOOLS[1]["function"]["parameters"]["properties"]["zone"]["description"] = "Which é"
ASKED = {"role": "user", "content": "Is it cold in Bern?"}
IDENTITY = "abcDEF123"


def call(name="weather", arguments=None, identity=IDENTITY):
    arguments = {"city": "Bern"} if arguments is None else arguments
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls, **more):
    return {"role": "assistant", "content": "", "tool_calls": list(calls or [call()])} | more


def result(content="-3", identity=IDENTITY, name="weather"):
    return {"role": "tool", "tool_call_id": identity, "name": name, "content": content}


CALLED = [ASKED, calling(), result(), {"role": "assistant", "content": "Yes, -3."}]


@dataclass(frozen=True)
class Format:
    """A template, with our tokenizer and transformers'."""

    chat: ChatFormat
    tokenizer: object
    reference: object


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    folder = byte_level(tmp_path_factory.mktemp("tools"), MARKERS, names)
    reference = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    return load_tokenizer(str(folder)), reference


@pytest.fixture(scope="module", params=[*PUBLISHED, "ours"])
def paired(request, tokenizers):
    ours, reference = tokenizers
    source = {**PUBLISHED, "ours": OURS}[request.param]
    template = ChatTemplate(TemplateSource(source, request.param), ours.named_tokens, date.today())
    several = source not in (LLAMA31, MISTRAL3)  # one takes no two calls at once, the other one question with tools
    return Format(ChatFormat(template, "assistant"), ours, reference), source, several


@cache
def format_of(source, *, with_tools=None, loss_on="assistant"):
    template = ChatTemplate(TemplateSource(source, "mine", with_tools), ByteTokenizer.named_tokens, date(2026, 1, 31))
    return ChatFormat(template, loss_on)


def counted(chat, messages, tools=TOOLS):
    """The text that counts in the loss, from the tokens that do."""
    [(ids, ignored)] = encode(ByteTokenizer(), [chat.document(messages, "a.jsonl:1", tools)])
    return ByteTokenizer().decode(ids[~ignored].tolist())


texts = st.text("abc é漢\n ", max_size=6).map(lambda text: f"{text}x")
values = st.one_of(texts, st.integers(-9, 9), st.booleans(), st.lists(texts, max_size=2), st.none())


@st.composite
def conversations(draw, several):
    """Questions that the assistant answers after some calls: several at once, and several questions, if allowed.

    Before the last question it has no thoughts.
    """
    messages = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    num_questions = draw(st.integers(1, 2 if several else 1))
    for question in range(1, 1 + num_questions):
        messages.append({"role": "user", "content": draw(texts)})
        for _ in range(draw(st.integers(0, 2))):
            calls = [
                call(
                    draw(st.sampled_from(["weather", "hour"])), draw(st.dictionaries(texts, values)), f"abcDEF12{index}"
                )
                for index in range(draw(st.integers(1, 2 if several else 1)))
            ]
            thought = {"reasoning_content": draw(texts)} if question == num_questions and draw(st.booleans()) else {}
            messages.append(calling(*calls, **thought))
            messages += [result(draw(texts), one["id"], one["function"]["name"]) for one in calls]
        messages.append({"role": "assistant", "content": draw(texts)})
    return messages


@given(data=st.data())
def test_the_tokens_are_those_of_transformers(paired, data):
    form, source, several = paired
    messages = data.draw(conversations(several))
    tools = data.draw(st.sampled_from([TOOLS, TOOLS[:1]] if source is HERMES else [TOOLS, []]))
    [(ids, _)] = encode(form.tokenizer, [form.chat.document(messages, "", tools)])
    theirs = form.reference.apply_chat_template(messages, tools=tools or None, chat_template=source, return_dict=True)
    assert ids.tolist() == theirs["input_ids"]


SAID = {
    "Llama 3.1": '{"name": "weather", "parameters": {"city": "Bern"}}<|eot_id|>Yes, -3.<|eot_id|>',
    "Qwen2.5": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>\n'
    "Yes, -3.<|im_end|>\n",
    "Qwen3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>\n'
    "<think>\n\n</think>\n\nYes, -3.<|im_end|>\n",
    "Mistral v0.3": ' [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}, "id": "abcDEF123"}] </s>'
    " Yes, -3. </s>",
    "Hermes 2 Pro": '<tool_call>\n{ "arguments": {"city": "Bern"}, "name": "weather"}\n</tool_call> <|im_end|>\n'
    "Yes, -3.<|im_end|>\n",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_calls_and_answers_of_the_assistant_count_and_nothing_else(name):
    assert counted(format_of(PUBLISHED[name]), CALLED) == SAID[name]


@given(messages=conversations(True))
def test_a_turn_that_changes_when_something_follows_it_is_found_inside_the_conversation(messages):
    """Qwen3 gives the last turn an empty thought if it has none."""
    expected = ""
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            thought = message.get("reasoning_content", "")
            if thought or place == len(messages) - 1:
                expected += "<think>\n" + thought.strip("\n") + "\n</think>\n\n"
                expected += message["content"].lstrip("\n")
            else:
                expected += message["content"]
            expected += "\n".join(
                f'<tool_call>\n{{"name": "{one["function"]["name"]}", "arguments": '
                f"{json.dumps(one['function']['arguments'], ensure_ascii=False)}}}\n</tool_call>"
                for one in message.get("tool_calls", ())
            )
            expected += "<|im_end|>\n"
    assert counted(format_of(QWEN3), messages) == expected


AGAIN = [*CALLED, {"role": "user", "content": "Sure?"}, CALLED[-1]]
THOUGHTFUL = [ASKED, calling(reasoning_content="Which city?"), *AGAIN[2:]]


@pytest.mark.parametrize(("source", "messages", "place"), [(MISTRAL3, AGAIN, 2), (QWEN3, THOUGHTFUL, 4)])
def test_a_turn_whose_prompt_is_another_inside_the_conversation_is_refused_with_the_remedy(source, messages, place):
    """Mistral tells of the tools before the last question alone, and Qwen3 drops the thoughts before it."""
    with pytest.raises(DataError, match=rf"^a:1: .*renders message {place} differently.*\{{% generation %\}}"):
        format_of(source).document(messages, "a:1", TOOLS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_arguments_as_json_text_give_the_tokens_of_the_object(name):
    chat = format_of(PUBLISHED[name])
    as_text = [ASKED, calling(call(arguments='{"city": "Bern"}')), *CALLED[2:]]
    assert chat.document(as_text, "", TOOLS).text == chat.document(CALLED, "", TOOLS).text
    assert chat.document(as_text, "", TOOLS).turns.messages == chat.document(CALLED, "", TOOLS).turns.messages


def test_the_example_of_the_documentation_is_trained_on_as_it_says():
    documentation = Path(__file__).parents[2] / "docs" / "finetuning.md"
    example = documentation.read_text().partition('```json\n{\n  "tools"')[2].partition("```")[0]
    record = json.loads('{"tools"' + example)
    assert counted(format_of(LLAMA31), record["messages"], record["tools"]) == (
        '{"name": "temperature", "parameters": {"city": "Bern"}}<|eot_id|>Yes: it is -3 degrees.<|eot_id|>'
    )


def test_a_template_that_writes_text_as_it_is_gets_the_records_own_text():
    assert '{"city":"Bern"}' in counted(format_of(QWEN3), [ASKED, calling(call(arguments='{"city":"Bern"}'))])


def test_a_template_that_takes_nothing_but_text_gets_objects_as_json():
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    source += "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    assert (
        counted(format_of(source), [ASKED, calling(call(arguments={"city": "é"}))]) == 'assistant:weather{"city": "é"}'
    )


def test_arguments_that_are_missing_are_none_at_all():
    missing = {"type": "function", "function": {"name": "hour"}}
    assert counted(format_of(LLAMA31), [ASKED, calling(missing)]) == '{"name": "hour", "parameters": {}}<|eot_id|>'


def test_a_call_may_lack_content_whatever_the_template_makes_of_it():
    empty = counted(format_of(QWEN3), CALLED)
    for content in ({"content": None}, {}):
        bare = {key: value for key, value in calling().items() if key != "content"}
        assert counted(format_of(QWEN3), [ASKED, bare | content, *CALLED[2:]]) == empty


def test_a_thought_is_found_by_each_of_its_names():
    for name in ("reasoning_content", "thinking", "reasoning"):
        thought = {"role": "assistant", "content": "Yes.", name: "Snow."}
        assert counted(format_of(QWEN3), [ASKED, thought], ()) == "<think>\nSnow.\n</think>\n\nYes.<|im_end|>\n"


def test_an_empty_result_is_kept():
    assert (
        "<tool_response>\n\n</tool_response>"
        in format_of(QWEN25).document([*CALLED[:2], result(""), CALLED[-1]], "", TOOLS).text
    )


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
@pytest.mark.parametrize("kind", ["messages", "conversations", "prompt"])
def test_every_format_of_conversations_takes_tools(tmp_path, kind, tools):
    (tmp_path / "qwen.jinja").write_text(QWEN25)
    written = json.dumps(call()["function"])
    record = {
        "messages": {"messages": CALLED},
        "conversations": {
            "conversations": [
                {"from": "human", "value": ASKED["content"]},
                {"from": "function_call", "value": written},
                {"from": "observation", "value": "-3"},
                {"from": "gpt", "value": "Yes, -3."},
            ]
        },
        "prompt": {"prompt": CALLED[:1], "completion": CALLED[1:]},
    }[kind]
    (tmp_path / "chats.jsonl").write_text(json.dumps(record | {"tools": tools}))
    found = check(tmp_path / "chats.jsonl", chat_template=str(tmp_path / "qwen.jinja"))
    assert ", 2 assistant turns, 1 with tools, 1 tool calls)" in found.summary
    assert found.num_tokens == len(format_of(QWEN25).document(CALLED, "", TOOLS).text.encode())


def test_parquet_takes_arguments_and_tools_as_json_text(tmp_path):
    (tmp_path / "qwen.jinja").write_text(QWEN25)
    messages = [ASKED, calling(call(arguments='{"city": "Bern"}')), calling(call("hour", '{"zone": "é"}'))]
    records = [
        {"messages": messages, "tools": json.dumps(TOOLS)},
        {"messages": CALLED[:1] + CALLED[-1:], "tools": None},
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "chats.parquet")
    found = check(tmp_path / "chats.parquet", chat_template=str(tmp_path / "qwen.jinja"))
    texts = [format_of(QWEN25).document(one["messages"], "", TOOLS if one["tools"] else ()).text for one in records]
    assert found.num_tokens == sum(len(text.encode()) for text in texts)


def check(source, **settings):
    return check_data(DataConfig(source=str(source), **settings), model_spec("tiny_llama3_50m"))


NAMELESS = {"id": "1", "type": "function", "function": {"arguments": "{}"}}


@pytest.mark.parametrize(
    ("record", "report"),
    [
        ({"messages": [ASKED, calling(NAMELESS)]}, "call 1 of message 2 has nothing as the function's 'name'; name"),
        ({"messages": [ASKED, calling(call(" "))]}, "call 1 of message 2 has a blank string as the function's 'name'"),
        ({"messages": [ASKED, calling("weather")]}, "call 1 of message 2 is a string, not {"),
        ({"messages": [ASKED, calling({"function": []})]}, "call 1 of message 2 is a list, not {"),
        ({"messages": [ASKED, {**calling(), "tool_calls": "x"}]}, "message 2 has a string as its 'tool_calls'; make"),
        ({"messages": [{**ASKED, "tool_calls": [call()]}]}, "message 1 calls tools as 'user'; only 'assistant' may"),
        (
            {"messages": [ASKED, calling(call(arguments="city=Bern"))]},
            "call 1 of message 2 of 'weather' has 'arguments' that are not JSON (Expecting value",
        ),
        ({"messages": [ASKED, calling(call(arguments="[1]"))]}, "call 1 of message 2 of 'weather' has a list as its"),
        ({"messages": [ASKED, calling(call(arguments=7))]}, "call 1 of message 2 of 'weather' has a number as its"),
        ({"messages": [ASKED, result(), CALLED[-1]]}, "message 2 is the result of a tool, but no call"),
        ({"messages": [*CALLED[:3], result("again")]}, "message 4 is the result of a tool, but no call"),
        ({"messages": [*CALLED, result()]}, "message 5 is the result of a tool, but no call"),
        (
            {"messages": [*CALLED[:2], result(identity="abcDEF999")]},
            "message 3 answers the call 'abcDEF999', which no message before it makes; the last ones are 'abcDEF123'",
        ),
        ({"messages": [ASKED, calling(call(identity=7))]}, "call 1 of message 2 has a number as its 'id'; make it"),
        ({"messages": [*CALLED[:2], result(identity=[])]}, "message 3 has a list as its 'tool_call_id'; make it a"),
        ({"messages": CALLED, "tools": TOOLS[0]}, "'tools' is an object; make it a list of JSON schemas"),
        ({"messages": CALLED, "tools": json.dumps(TOOLS[0])}, "'tools' is the JSON text of an object; make it a list"),
        ({"messages": CALLED, "tools": "[weather]"}, "'tools' is text that is not JSON (Expecting value"),
        ({"messages": CALLED, "tools": ["weather"]}, "tool 1 of 'tools' is a string, not a JSON schema"),
    ],
)
def test_a_malformed_call_result_or_tool_is_refused_with_its_line(tmp_path, record, report):
    (tmp_path / "qwen.jinja").write_text(QWEN25)
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a text"}}\n{json.dumps(record)}\n')
    with pytest.raises(DataError) as refused:
        check(tmp_path / "a.jsonl", chat_template=str(tmp_path / "qwen.jinja"))
    assert str(refused.value).startswith(f"{tmp_path}/a.jsonl:2: {report}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    ("messages", "tools", "missing"),
    [(CALLED[:2], [], "calls of tools"), (CALLED, TOOLS, "calls of tools"), ([ASKED, CALLED[-1]], TOOLS, "tools")],
)
def test_the_built_in_formats_have_no_tools_and_say_so(name, messages, tools, missing):
    with pytest.raises(DataError, match=rf"^a:1: chat template .* has no {missing}; set data\.chat_template to one"):
        chat_of(name).document(messages, "a:1", tools)


DROPS = "{% for m in messages %}{{ m.role ~ ': ' ~ (m.content or '') ~ '\n' }}{% endfor %}"
KEEPS_CALLS = "{% for m in messages if m.role != 'tool' %}{{ m.role ~ (m.tool_calls or m.content) }}\n{% endfor %}"


def test_a_template_that_drops_calls_or_results_is_refused():
    with pytest.raises(DataError, match=r"^a:1: chat template 'mine' has no calls of tools; set data\.chat_template"):
        format_of(DROPS).document(CALLED, "a:1", TOOLS)
    with pytest.raises(DataError, match=r"^a:1: chat template 'mine' has no results of tools; set"):
        format_of(KEEPS_CALLS).document(CALLED, "a:1", TOOLS)


def test_a_template_that_ignores_tools_is_reported_once(tmp_path):
    (tmp_path / "drops.jinja").write_text(DROPS)
    record = json.dumps({"messages": [ASKED, CALLED[-1]], "tools": TOOLS})
    (tmp_path / "a.jsonl").write_text(f"{record}\n" * 3)
    notes = check(tmp_path / "a.jsonl", chat_template=str(tmp_path / "drops.jinja")).notes
    assert [note for note in notes if "tools" in note] == [
        f"chat template '{tmp_path}/drops.jinja' ignores tools: 3 conversations have some, which are not in their text"
    ]


def test_empty_tools_and_calls_are_none(tmp_path):
    plain = [ASKED, CALLED[-1]]
    records = [
        {"messages": [ASKED, {**CALLED[-1], "tool_calls": []}], "tools": tools} for tools in ([], "", "[]", None)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = check(tmp_path / "a.jsonl", chat_template="llama3")
    assert found.num_tokens == 4 * len(chat_of().document(plain, "").text.encode())


def test_a_call_that_is_written_into_the_content_may_have_a_result():
    written = {"role": "assistant", "content": "<tool_call>{}</tool_call>"}
    assert counted(format_of(QWEN25), [ASKED, written, result(), CALLED[-1]], ()) == (
        "<tool_call>{}</tool_call><|im_end|>\nYes, -3.<|im_end|>\n"
    )


@pytest.mark.parametrize("is_saved_by_transformers", [True, False])
def test_a_tokenizers_template_for_tools_is_taken_for_conversations_with_tools(tmp_path, is_saved_by_transformers):
    folder = byte_level(tmp_path, MARKERS, {"eos_token": "<|eot_id|>"})
    templates = {"default": "{% for m in messages %}plain {{ m.content }}{% endfor %}", "tool_use": OURS}
    reference = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    reference.chat_template = templates
    if is_saved_by_transformers:
        reference.save_pretrained(folder)
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(folder))
    chat = chat_format(DataConfig(tokenizer=str(folder)), tokenizer, model_spec("tiny_llama3_50m"), files=())
    for messages, tools in ((CALLED, TOOLS), ([ASKED, CALLED[-1]], [])):
        [(ids, _)] = encode(tokenizer, [chat.document(messages, "", tools)])
        theirs = reference.apply_chat_template(messages, tools=tools or None, return_dict=True)
        assert ids.tolist() == theirs["input_ids"]
    with pytest.raises(DataError, match="has no calls of tools"):
        chat.document(CALLED, "", [])


def test_the_fingerprint_knows_the_template_for_tools():
    assert len({format_of(DROPS, with_tools=source).fingerprint for source in (None, OURS, DROPS)}) == 3


@pytest.mark.parametrize("deep", ["tools", "arguments"])
def test_values_nested_too_deeply_are_left_out(deep):
    value = {}
    for _ in range(2000):
        value = {"a": value}
    arguments = value if deep == "arguments" else {}
    with pytest.raises(UnusableRecordError, match="nested too deeply"):
        format_of(OURS).document([ASKED, calling(call(arguments=arguments))], "", [value] if deep == "tools" else [])


@pytest.mark.parametrize(
    "source", ["{{ tools[0].__class__.__mro__ }}", "{{ tools.append(1) }}", "{{ tools[0].clear() }}"]
)
def test_tools_are_in_the_sandbox_too(source):
    with pytest.raises(DataError, match=r"^a:1: chat template 'mine' refuses it: "):
        format_of(source).document([ASKED, CALLED[-1]], "a:1", TOOLS)


FILLED = [
    [ASKED, calling(call("weather", {"city": "Bern"})), result(), {"role": "assistant", "content": "Yes."}],
    [
        ASKED,
        calling(call("hour", {"zone": "UTC", "at": {"day": 1}})),
        result("7"),
        {"role": "assistant", "content": "7."},
    ],
    [
        ASKED,
        calling(call("hour", {"zone": "UTC", "at": {"night": 2}})),
        result("8"),
        {"role": "assistant", "content": "8."},
    ],
]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_null_that_a_table_gives_to_arguments_and_schemas_is_neither_told_nor_trained_on(tmp_path, name, form):
    (tmp_path / "template.jinja").write_text(PUBLISHED[name])
    records = [{"messages": messages, "tools": TOOLS} for messages in FILLED]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = pa.Table.from_pylist(records)
    path = tmp_path / f"table.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        feather.write_feather(table, str(path), compression="uncompressed")
    assert "null" not in (tmp_path / "lines.jsonl").read_text()
    assert table.column("messages")[0].as_py()[1]["tool_calls"][0]["function"]["arguments"]["zone"] is None
    (of_lines, _), (of_table, tally) = (read(tmp_path, file) for file in ("lines.jsonl", path.name))
    assert of_table == of_lines
    assert tally.formats.num_nulls == 12


def read(folder, name):
    data = DataConfig(source=str(folder / name), chat_template=str(folder / "template.jinja"))
    files = find_files(data.source).files
    chat = chat_format(data, ByteTokenizer(), SPEC, files)
    tally = Tally()
    documents = read_documents(files, FieldNames(), tally, render=chat.document, max_bad_lines=0)
    return [(document.text, document.turns.counted) for document in documents], tally


def test_the_null_of_a_table_is_counted_in_a_note_and_that_of_json_is_what_somebody_wrote(tmp_path):
    (tmp_path / "template.jinja").write_text(QWEN25)
    records = [{"messages": [ASKED, calling(call(arguments={"city": city})), result()]} for city in ("Bern", None)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "table.parquet")
    settings = {"chat_template": str(tmp_path / "template.jinja"), "cache_dir": str(tmp_path / "cache")}
    [note] = check_data(DataConfig(source=str(tmp_path / "table.parquet"), **settings), SPEC).notes
    assert "1 null in calls of tools or in their schemas left out" in note
    [note] = check_data(DataConfig(source=str(tmp_path / "lines.jsonl"), **settings), SPEC).notes
    assert "1 null in calls of tools or in their schemas are trained on as they are" in note
    assert '{"city": null}' in read(tmp_path, "lines.jsonl")[0][1][0]


WITH_NULL = calling(call(arguments={"city": None}))


@pytest.mark.parametrize(
    ("reads", "record"),
    [
        ("documents", {"messages": [ASKED, WITH_NULL]}),
        ("pairs", {"chosen": [ASKED, WITH_NULL], "rejected": [ASKED, CALLED[-1]]}),
        (
            "pairs",
            {
                "prompt": [ASKED, WITH_NULL, result()],
                "chosen": [CALLED[-1]],
                "rejected": [{"role": "assistant", "content": "No."}],
            },
        ),
        ("labelled answers", {"prompt": [ASKED], "completion": [WITH_NULL], "label": True}),
    ],
)
def test_null_in_the_calls_of_json_is_counted_whatever_its_records_are(reads, record):
    counts = FormatCounts()
    read_record(record, FieldNames(reads=reads), counts)
    assert counts.num_kept_nulls == 1
