"""Conversations get the tokens that transformers gives them, and exactly the assistant's text counts in the loss."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from chat_templates import (
    CHATML,
    DATED,
    FORGETFUL,
    PLAIN_CHATML,
    PUBLIC_LLAMA2,
    PUBLIC_LLAMA3,
    PUBLIC_MISTRAL,
)
from corpora import chat_of, conversations, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from trained_tokenizers import byte_level, sentence_piece

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig
from llama_core.data.bad_lines import UnusableRecordError
from llama_core.data.chat import ChatFormat, chat_format, encode
from llama_core.data.check import check_data
from llama_core.data.files.source_file import SourceFile
from llama_core.data.templates.chat_template import BUILT_IN, ChatTemplate
from llama_core.data.tokenizer import ByteTokenizer, TemplateSource, load_tokenizer
from llama_core.errors import DataError

LLAMA3_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TODAY = date(2026, 1, 31)
ASKED = {"role": "user", "content": " 2 + 2? "}
ANSWERED = {"role": "assistant", "content": "4\n"}


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return byte_level(tmp_path_factory.mktemp("llama3"), [*LLAMA3_TOKENS, "<|im_start|>", "<|im_end|>"], config)


@pytest.fixture(scope="module")
def llama3_tokenizer(llama3):
    return load_tokenizer(str(llama3))


@pytest.fixture(scope="module")
def llama2(tmp_path_factory):
    return sentence_piece(tmp_path_factory.mktemp("llama2"), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    special_tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return byte_level(tmp_path_factory.mktemp("qwen"), special_tokens, {"eos_token": "<|im_end|>"})


@pytest.fixture(
    scope="module",
    params=[
        *("public llama3", "llama3", "public llama2", "llama2", "dated", "marked chatml"),
        *("public mistral", "mistral", "public chatml", "chatml"),
    ],
)
def pair(request, llama2, llama3, qwen):
    """Our tokenizer and format, and transformers' tokenizer with the template they must match."""
    folder, ours, theirs = {
        "public llama3": (llama3, PUBLIC_LLAMA3, PUBLIC_LLAMA3),
        "llama3": (llama3, "llama3", PUBLIC_LLAMA3),
        "public llama2": (llama2, PUBLIC_LLAMA2, PUBLIC_LLAMA2),
        "llama2": (llama2, "llama2", PUBLIC_LLAMA2),
        "dated": (llama3, DATED, DATED),
        "marked chatml": (llama3, CHATML, CHATML),
        "public mistral": (llama2, PUBLIC_MISTRAL, PUBLIC_MISTRAL),
        "mistral": (llama2, "mistral", PUBLIC_MISTRAL),
        "public chatml": (qwen, PLAIN_CHATML, PLAIN_CHATML),
        "chatml": (qwen, "chatml", PLAIN_CHATML),
    }[request.param]
    tokenizer = load_tokenizer(str(folder))
    reference = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    reference.chat_template = theirs
    return tokenizer, format_of(ours, tokenizer, today=date.today()), reference


def format_of(template, tokenizer=None, *, loss_on="assistant", today=TODAY):
    source = BUILT_IN.get(template, TemplateSource(template, "a template"))
    named = (tokenizer or ByteTokenizer()).named_tokens
    return ChatFormat(ChatTemplate(source, named, today), loss_on)


def counted(chat, messages, tokenizer=None):
    """The text that counts in the loss."""
    tokenizer = tokenizer or ByteTokenizer()
    [(ids, ignored)] = encode(tokenizer, [chat.document(messages, "a.jsonl:1")])
    return tokenizer.decode(ids[~ignored].tolist())


def check(tmp_path, records, **settings):
    source = write_jsonl(tmp_path / "chats.jsonl", records)
    return check_data(DataConfig(source=str(source), **settings), model_spec("tiny_llama3_50m"))


def test_llama_3_has_the_published_format():
    """The example of models/llama3_3/prompt_format.md in github.com/meta-llama/llama-models."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Answer who are you in the form of jeopardy?"},
        {"role": "assistant", "content": 'Here\'s my response\n\n"What is a helpful assistant?"'},
    ]
    prompt = (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnswer who are you in the form of jeopardy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    response = 'Here\'s my response\n\n"What is a helpful assistant?"<|eot_id|>'
    chat = chat_of("llama3")
    assert chat.template.render(messages[:2], add_generation_prompt=True) == prompt
    assert chat.document(messages, "").text == prompt + response
    assert counted(chat, messages) == response


def test_llama_2_has_the_published_format():
    """The encoding by ``chat_completion`` in llama/generation.py of github.com/meta-llama/llama, with BOS and EOS."""
    messages = [{"role": "system", "content": "Be brief."}, ASKED, ANSWERED, {"role": "user", "content": "Sure?"}]
    chat = chat_of("llama2")
    assert chat.document(messages, "").text == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n 2 + 2? [/INST] 4 </s><s>[INST] Sure? [/INST]"
    )
    assert counted(chat, messages) == " 4 </s>"


def test_mistral_has_the_published_format():
    """The format of tokenizer V1 in docs.mistral.ai/cookbook/concept-deep-dive-tokenization-templates."""
    messages = [{"role": "system", "content": "Be brief."}, ASKED, ANSWERED, {"role": "user", "content": "Sure?"}]
    chat = chat_of("mistral")
    assert chat.document(messages, "").text == ("<s> [INST] Be brief.\n\n 2 + 2?  [/INST] 4\n</s> [INST] Sure? [/INST]")
    assert counted(chat, messages) == " 4\n</s>"


def test_chatml_has_the_published_format():
    messages = [{"role": "system", "content": "Be brief."}, ASKED, ANSWERED]
    chat = chat_of("chatml")
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n 2 + 2? <|im_end|>\n<|im_start|>assistant\n"
    assert chat.template.render(messages[:2], add_generation_prompt=True) == prompt
    assert chat.document(messages, "").text == f"{prompt}4\n<|im_end|>\n"
    assert counted(chat, messages) == "4\n<|im_end|>"
    assert chat.template.end_of_turn == "<|im_end|>"


def test_llama_4_has_the_published_format():
    """Of Meta's prompt_format.md: a system prompt, a question and what begins the answer."""
    messages = [{"role": "system", "content": " Be brief. "}, ASKED, ANSWERED, {"role": "user", "content": "Sure? "}]
    chat = chat_of("llama4")
    asked = (
        "<|begin_of_text|><|header_start|>system<|header_end|>\n\nBe brief.<|eot|>"
        f"<|header_start|>user<|header_end|>\n\n{ASKED['content']}<|eot|><|header_start|>assistant<|header_end|>\n\n"
    )
    assert chat.template.render(messages[:2], add_generation_prompt=True) == asked
    answer = f"{ANSWERED['content']}<|eot|>"
    followed = f"{asked}{answer}<|header_start|>user<|header_end|>\n\nSure? <|eot|>"
    assert chat.document(messages, "").text == followed
    assert counted(chat, messages) == answer
    assert chat.template.end_of_turn == "<|eot|>"


def test_gemma_has_the_published_format():
    """The example of ai.google.dev/gemma/docs/core/prompt-structure, with a system prompt and BOS."""
    messages = [{"role": "system", "content": "Be brief."}, ASKED, ANSWERED, {"role": "user", "content": "Sure?"}]
    chat = chat_of("gemma")
    asked = "<s><start_of_turn>user\nBe brief.\n\n2 + 2?<end_of_turn>\n<start_of_turn>model\n"
    assert chat.template.render(messages[:2], add_generation_prompt=True) == asked
    assert chat.document(messages, "").text == f"{asked}4<end_of_turn>\n<start_of_turn>user\nSure?<end_of_turn>\n"
    assert counted(chat, messages) == "4<end_of_turn>"
    assert chat.template.end_of_turn == "<end_of_turn>"


@given(messages=conversations())
def test_the_tokens_match_transformers(pair, messages):
    tokenizer, chat, reference = pair
    [(ids, _)] = encode(tokenizer, [chat.document(messages, "")])
    assert ids.tolist() == reference.apply_chat_template(messages, return_dict=True)["input_ids"]


@given(messages=conversations())
def test_the_mask_of_a_template_that_marks_the_assistant_matches_transformers(
    llama3_tokenizer, reference_of_chatml, messages
):
    [(_, ignored)] = encode(llama3_tokenizer, [format_of(CHATML, llama3_tokenizer).document(messages, "")])
    theirs = reference_of_chatml.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert (~ignored).astype(int).tolist() == theirs["assistant_masks"]


@pytest.fixture(scope="module")
def reference_of_chatml(llama3):
    reference = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(llama3)
    reference.chat_template = CHATML
    return reference


@given(messages=conversations())
def test_exactly_the_assistants_text_and_its_end_of_turn_count(messages):
    said = [message["content"].strip() for message in messages if message["role"] == "assistant"]
    assert counted(chat_of("llama3"), messages) == "".join(f"{text}<|eot_id|>" for text in said)
    assert counted(chat_of("llama2"), messages) == "".join(f" {text} </s>" for text in said)


DIVIDED = {
    "llama3": ChatTemplate(TemplateSource(PUBLIC_LLAMA3, ""), {"bos_token": "<|begin_of_text|>"}, TODAY),
    "llama2": ChatTemplate(TemplateSource(PUBLIC_LLAMA2, ""), ByteTokenizer.named_tokens, TODAY),
    "mistral": ChatTemplate(TemplateSource(PUBLIC_MISTRAL, ""), ByteTokenizer.named_tokens, TODAY),
}


@given(messages=conversations())
def test_a_template_without_marks_counts_the_same_text_as_one_with_them(messages):
    """The public templates mark nothing; rendering turn by turn divides them."""
    for ours, divided in DIVIDED.items():
        assert divided.render_with_spans(messages) == chat_of(ours).template.render_with_spans(messages)


@given(messages=conversations())
def test_every_token_counts_with_loss_on_all(messages):
    chat = chat_of(loss_on="all")
    assert counted(chat, messages) == chat.document(messages, "").text


@given(text=st.text("aé漢🦙", min_size=1))
def test_every_byte_knows_its_character(text):
    [tokens] = ByteTokenizer().encode_rendered([text])
    spelt = [text[begin:end].encode() for begin, end in zip(tokens.begins, tokens.ends, strict=True)]
    assert all(byte in spelling for byte, spelling in zip(tokens.ids.tolist(), spelt, strict=True))
    assert sorted(set(tokens.begins.tolist())) == list(range(len(text)))


def test_a_token_that_partly_counts_counts(llama3_tokenizer):
    """As in transformers: the answer's first token may hold the end of the header."""
    chat = format_of(
        "{% for m in messages %}{{ m.role }} {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert counted(chat, [{"role": "assistant", "content": "world"}], llama3_tokenizer) == " world"


def test_templates_without_a_generation_prompt_count_the_whole_assistant_turn():
    chat = format_of("{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}")
    assert counted(chat, [ASKED, ANSWERED]) == "assistant: 4\n\n"


@pytest.mark.parametrize(
    ("messages", "report"),
    [
        ("hello", '\'messages\' is a string, not a list of {"role": ..., "content": ...} objects'),
        ({"role": "user"}, "'messages' is an object, not a list"),
        ([ASKED, "4"], "message 2 is a string, not an object with 'role' and 'content'"),
        ([{"from": "human", "value": "?"}], "message 1 has no 'role', only 'from', 'value'; give it 'role' and"),
        ([{"role": "user", "content": ["?"]}], 'part 1 of message 1 is a string, not {"type": "text", "text": ...}'),
        ([{"role": "human", "content": "?"}], "message 1 has the unknown role 'human'; use one of system, "),
        ([{"role": "user"}], "message 1 has no 'content', only 'role'; give it 'role' and 'content'"),
        ([{"role": "user", "content": 7}], "message 1 has a number as its 'content'; make it a string"),
        ([{"role": None, "content": "?"}], "message 1 has null as its 'role'; make it a string"),
        ([ANSWERED, {"role": "tool", "content": "!"}], 'chat template "Llama 3\'s format" refuses it: the roles are'),
    ],
)
def test_a_malformed_conversation_is_refused_with_its_line(tmp_path, messages, report):
    records = [{"text": "a text"}, {"messages": [ASKED, ANSWERED]}, {"messages": messages, "text": "the same"}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(DataError) as refused:
        check_data(DataConfig(source=str(tmp_path / "chats.jsonl")), model_spec("tiny_llama3_50m"))
    assert str(refused.value).startswith(f"{tmp_path}/chats.jsonl:3: {report}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("template", "report"),
    [
        (PUBLIC_LLAMA2, "refuses it: Conversation roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "refuses it: 'dict object' has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "refuses it: TypeError: can only concatenate str"),
        ("{{ messages.__class__.__mro__ }}", "refuses it: access to attribute '__class__' of 'list' object is unsafe."),
        ("{{ messages.append(1) }}", "refuses it: "),
        (FORGETFUL, "refuses it: it renders message 2 differently inside the conversation than at its end"),
        ("{{ messages[0].content }}", "renders no assistant text; set another data.chat_template"),
        ("{% if %}{{ messages }}", "is not valid Jinja: line 1: Expected an expression"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "has no Jinja that uses messages"),
        ("the messages are {{ secret }}", "has no Jinja that uses messages"),
    ],
)
def test_an_unusable_template_is_refused(tmp_path, template, report):
    (tmp_path / "mine.jinja").write_text(template)
    with pytest.raises(DataError, match=r"chat template '.*/mine\.jinja'") as refused:
        check(tmp_path, [[ASKED, ANSWERED, ANSWERED]], chat_template=str(tmp_path / "mine.jinja"))
    assert report in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_template_that_cannot_be_divided_can_train_on_every_token(tmp_path):
    chat = format_of(FORGETFUL, loss_on="all")
    assert counted(chat, [ASKED, ANSWERED, ASKED]) == "user:  2 + 2? \nassistant: 4\n\nuser:  2 + 2?  (end)"


def test_a_template_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot read chat template 'none\.jinja': No such file .*; name a Jinja file"):
        check(tmp_path, ["a text"], chat_template="none.jinja")


def test_a_file_without_an_assistant_turn_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(
        DataError,
        match=r"no document to train on: unusable lines \(2 no assistant turn\).*jsonl:1, 2: .*data\.loss_on=all",
    ):
        check(tmp_path, [[ASKED], [ASKED, ASKED]])


def test_messages_without_content_are_dropped_and_counted():
    empty = [{"role": role, "content": " \n"} for role in ("system", "assistant")]
    document = chat_of().document([empty[0], ASKED, ANSWERED, ASKED, empty[1]], "")
    assert document.text == chat_of().document([ASKED, ANSWERED, ASKED], "").text
    assert (document.turns.num_empty_turns, document.turns.num_assistant_turns) == (2, 1)
    assert not document.turns.has_system


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no message has any content"),
        ([{"role": "user", "content": ""}], "no message has any content"),
        ([ASKED, {"role": "assistant", "content": None}], "message 2 has null for its text"),
        ([ASKED, {"role": "assistant", "content": ""}], "none of it would count in the loss"),
        ([{"role": "user", "content": ""}, ANSWERED], "refuses it without its empty turns"),
        ([ASKED, {"role": "assistant", "content": "\ud800"}], "lone surrogate at character"),
    ],
)
def test_a_conversation_with_nothing_to_learn_is_left_out(messages, reason):
    with pytest.raises(UnusableRecordError, match=reason):
        chat_of("llama2").document(messages, "")


def chosen(tokenizer, model="tiny_llama3_50m", **settings):
    files = [SourceFile(Path("chats.jsonl"), 1, 1_800_000_000 * 10**9, 0)]
    return chat_format(DataConfig(**settings), tokenizer, model_spec(model), files)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama1_7b", "Llama 2's format"),
        ("llama2_7b", "Llama 2's format"),
        ("code_llama_7b", "Llama 2's format"),
        ("llama3_8b", "Llama 3's format"),
        ("mistral_7b", "Mistral's format"),
        ("qwen2_5_7b", "ChatML"),
        ("qwen3_8b", "ChatML"),
    ],
)
def test_a_family_defaults_to_its_published_format(model, name):
    assert chosen(ByteTokenizer(), model).template.name == name


def test_a_model_of_unknown_family_gets_the_format_whose_markers_its_tokenizer_has(llama2, llama3, qwen):
    files = [SourceFile(Path("chats.jsonl"), 1, 1, 1)]
    spec = replace(model_spec("llama3_8b"), family="llama")
    names = [
        chat_format(DataConfig(), tokenizer, spec, files).template.name
        for tokenizer in (*map(load_tokenizer, map(str, (llama3, llama2, qwen))), ByteTokenizer())
    ]
    assert names == ["Llama 3's format", "Llama 2's format", "ChatML", "Llama 2's format"]


@pytest.fixture
def folder(tmp_path):
    def make(config):
        (tmp_path / "tokenizer").mkdir()
        return byte_level(tmp_path / "tokenizer", ["<s>", "</s>"], config)

    return make


@pytest.mark.parametrize(
    "configured",
    ["of the config", [{"name": "tools", "template": "other"}, {"name": "default", "template": "of the config"}]],
)
def test_the_tokenizers_own_template_wins_over_the_familys(folder, configured):
    there = folder({"chat_template": configured})
    assert chosen(load_tokenizer(str(there))).template.source == "of the config"
    (there / "chat_template.jinja").write_text("of the file")
    assert chosen(load_tokenizer(str(there / "tokenizer.json"))).template.source == "of the file"
    (there / "mine.jinja").write_text("{{ messages }}")
    own = chosen(load_tokenizer(str(there)), chat_template=str(there / "mine.jinja"))
    assert (own.template.source, own.template.name) == ("{{ messages }}", str(there / "mine.jinja"))
    assert chosen(load_tokenizer(str(there)), chat_template="llama2").template.name == "Llama 2's format"


def test_templates_without_a_default_are_listed(folder):
    there = folder({"chat_template": [{"name": "tools", "template": ""}, {"name": "rag", "template": ""}]})
    with pytest.raises(DataError, match=r"has the chat templates tools, rag, and none is the default; name"):
        load_tokenizer(str(there))


def test_a_template_knows_the_named_tokens_of_its_tokenizer(folder):
    there = folder({"pad_token": {"content": "<pad>"}, "chat_template": "{{ bos_token, eos_token, pad_token }}"})
    tokenizer = load_tokenizer(str(there))
    assert chosen(tokenizer).template.render([ASKED]) == "('<s>', '</s>', '<pad>')"


def test_a_template_is_dated_by_the_data_so_tokens_stay_the_same(tmp_path):
    dated = tmp_path / "dated.jinja"
    dated.write_text(DATED)
    assert "Today Date: 15 Jan 2027" in chosen(ByteTokenizer(), chat_template=str(dated)).template.render([ASKED])


def test_the_fingerprint_changes_with_the_tokens_or_the_loss_mask():
    formats = [
        chat_of(),
        chat_of("llama2"),
        chat_of(loss_on="all"),
        format_of(DATED),
        format_of(DATED, today=date(2026, 2, 1)),
        ChatFormat(ChatTemplate(TemplateSource(DATED, ""), {"bos_token": "<bos>"}, TODAY), "assistant"),
    ]
    assert len({chat.fingerprint for chat in formats}) == len(formats)
    assert chat_of().fingerprint == chat_of(today=date(2027, 1, 1)).fingerprint


def test_templates_have_the_functions_of_transformers():
    template = ChatTemplate(
        TemplateSource("{{ [1, 'é<'] | tojson }}{% for _ in messages %}{% break %}{% endfor %}", ""), {}, TODAY
    )
    assert template.render([ASKED]) == '[1, "é<"]'


def test_a_special_token_spelled_in_a_message_is_one_as_in_transformers(llama3_tokenizer):
    tokenizer = llama3_tokenizer
    [(ids, _)] = encode(tokenizer, [chat_of().document([ASKED, {"role": "assistant", "content": "<|eot_id|>"}], "")])
    assert np.count_nonzero(ids == LLAMA3_TOKENS.index("<|eot_id|>")) == 3
    [text] = tokenizer.encode_documents(["<|eot_id|>"])
    assert np.count_nonzero(text == LLAMA3_TOKENS.index("<|eot_id|>")) == 1, "in a text, only its end"


def test_a_note_names_the_markers_that_the_tokenizer_lacks(tmp_path, llama3):
    records = [[ASKED, ANSWERED]]
    assert "<|start_header_id|>, <|end_header_id|>, <|eot_id|> of Llama 3's format as plain text" in "".join(
        check(tmp_path, records).notes
    )
    assert check(tmp_path, records, tokenizer=str(llama3)).notes == ()
    [note] = check(tmp_path, records, chat_template="chatml").notes
    assert "<|im_start|>, <|im_end|> of ChatML as plain text" in note


@pytest.mark.parametrize(
    ("after", "is_told"),
    [
        ("<|im_end|>{% endgeneration %}\n", False),
        ("{% endgeneration %}<|im_end|>\n", True),
        ("{% endgeneration %}\n", False),
        ("</s>{% endgeneration %}", False),
        ("{% endgeneration %} </s>", True),
    ],
)
def test_a_template_whose_turns_end_outside_of_what_counts_is_told(tmp_path, after, is_told):
    turn = "{{ m.role }}: {% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}" + after
    (tmp_path / "template").write_text("{% for m in messages %}" + turn + "{% endif %}{% endfor %}")
    for loss_on in ("assistant", "all"):
        notes = check(tmp_path, [[ASKED, ANSWERED]], chat_template=str(tmp_path / "template"), loss_on=loss_on).notes
        told = [note for note in notes if "the model does not learn to end one" in note]
        assert len(told) == (is_told and loss_on == "assistant")


def test_settings_without_effect_on_texts_are_reported(tmp_path):
    notes = check(tmp_path, ["a text"], chat_template="llama2", loss_on="all").notes
    assert [note.partition(":")[0] for note in notes] == [
        "data.chat_template=llama2 has no effect",
        "data.loss_on=all has no effect",
    ]


@pytest.mark.parametrize("source", ["sample", "texts.jsonl"])
def test_an_instruct_model_on_texts_is_reported_to_train_on_every_token(tmp_path, source):
    write_jsonl(tmp_path / "texts.jsonl", ["a text"])
    source = {"sample": "sample"}.get(source, str(tmp_path / source))
    [note] = check_data(DataConfig(source=source), model_spec("llama3_8b_instruct")).notes
    assert note == (
        f"llama3_8b_instruct is an instruct model, but {source!r} holds no conversations: "
        "every token counts in the loss"
    )


def test_a_check_counts_the_records_it_has_read(tmp_path):
    chats = [[{"role": "system", "content": "!"}, ASKED, ANSWERED], [ASKED, ANSWERED, ASKED, ANSWERED]]
    found = check(tmp_path, [*chats, "a text"])
    assert found.summary.endswith(
        "chats.jsonl': 2 conversations (1 multi-turn, 1 with a system prompt, 3 assistant turns), "
        "template: Llama 3's format; a text ends with </s> and begins with <s> (the tokenizer)"
    )
    assert found.notes[-1] == "1 of the documents are texts, where every token counts in the loss"
