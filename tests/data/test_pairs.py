"""Pairs of answers: how records become documents, what counts in them, and how rows hold them."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import chat_of

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig, RunConfig
from llama_core.data.check import check_data
from llama_core.data.datasets import load_datasets, validation_batches
from llama_core.data.records.pairs import PackedPairs
from llama_core.data.tokenizer import ByteTokenizer
from llama_core.errors import ConfigError, DataError
from llama_core.models.batch import IGNORE_INDEX
from llama_core.objectives.preferences import DPO, KTO, SIMPO

SPEC = replace(model_spec("tiny_llama3_50m"), vocab_size=300)
SEQ_LEN = 256
NUMBERS = range(30)


def say(*contents, first="user"):
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]


def chosen(n):
    return f"{2 * n}, of course."


def rejected(n):
    return f"I would guess {n}."


def asked(n):
    return f"What is twice {n}?"


def answered(n):
    """A record as lists of messages, which hold the prompt."""
    return {"chosen": say(asked(n), chosen(n)), "rejected": say(asked(n), rejected(n))}


FORMS = {
    "texts after a prompt": lambda n: {"prompt": asked(n), "chosen": chosen(n), "rejected": rejected(n)},
    "messages that hold the prompt": answered,
    "the prompt once more": lambda n: {"prompt": asked(n)} | answered(n),
    "messages after a prompt": lambda n: {
        "prompt": say(asked(n)),
        "chosen": say(chosen(n), first="assistant"),
        "rejected": say(rejected(n), first="assistant"),
    },
    "texts after a question": lambda n: {"question": asked(n), "chosen": chosen(n), "rejected": rejected(n)},
    "texts after an input": lambda n: {"input": asked(n), "chosen": chosen(n), "rejected": rejected(n), "system": ""},
    "an instruction without input": lambda n: {
        "instruction": asked(n),
        "input": "",
        "chosen": say(chosen(n), first="assistant"),
        "rejected": say(rejected(n), first="assistant"),
    },
    "the question once more": lambda n: {"question": asked(n)} | answered(n),
    "texts after messages": lambda n: {"prompt": say(asked(n)), "chosen": chosen(n), "rejected": rejected(n)},
}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(folder, source, *, objective=DPO, seq_len=SEQ_LEN, **settings):
    data = DataConfig(
        source=str(source), cache_dir=str(folder / "cache"), validation_fraction=0, chat_template="llama2", **settings
    )
    return load_datasets(data, SPEC, seq_len=seq_len, objective=objective)


def pairs_in(datasets):
    """Each pair as (text and counted text of the chosen answer, the same of the rejected one), from the batches."""
    (rows,) = datasets.train.sources
    found = []
    for batch in validation_batches(rows, 3, len(rows)):
        numbers_BS = batch.per_token["answer"].abs().long()
        for tokens, targets, positions, numbers in zip(
            batch.tokens_BS, batch.targets_BS, batch.positions_BS, numbers_BS, strict=True
        ):
            documents = (positions == 0).cumsum(0)
            texts = []
            for number in range(1, int(numbers.max()) + 1):
                counts = numbers == number
                own = documents == documents[counts][0]
                assert (targets[counts] != IGNORE_INDEX).all()
                assert (targets[own & ~counts] == IGNORE_INDEX).all()
                text = ByteTokenizer().decode([*tokens[own].tolist(), int(targets[own][-1])])
                texts.append((text, ByteTokenizer().decode(targets[counts].tolist())))
            found += zip(texts[::2], texts[1::2], strict=True)
    return sorted(found)


def expected_pair(n):
    chat = chat_of("llama2")
    documents = [chat.document(say(asked(n), answer), "nowhere:1") for answer in (chosen(n), rejected(n))]
    parts = []
    for document in documents:
        ((begin, end),) = document.turns.counted
        parts.append((document.text, document.text[begin:end]))
    return tuple(parts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_both_answers_are_rendered_with_their_prompt_and_only_they_count(tmp_path, form, kind):
    records = [FORMS[form](n) for n in NUMBERS]
    source = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write(source, records)
    else:
        pq.write_table(pa.Table.from_pylist(records), source)
    datasets = load(tmp_path, source)
    ours = pairs_in(datasets)
    theirs = sorted(expected_pair(n) for n in NUMBERS)
    without_markers = [[tuple(_bare(text) for text in answer) for answer in pair] for pair in theirs]
    assert [[tuple(_bare(text) for text in answer) for answer in pair] for pair in ours] == without_markers
    assert any("30 pairs of answers" in note for note in datasets.statistics.notes)


def _bare(text):
    """A text without BOS and EOS, which the byte tokenizer reads as text and decodes as none."""
    for marker in ByteTokenizer.named_tokens.values():
        text = text.replace(marker, "")
    return text.strip()


def test_only_the_last_answers_count_of_conversations_that_begin_alike(tmp_path):
    before = ("First?", "One.", "Second?")
    records = [{"chosen": say(*before, chosen(n)), "rejected": say(*before, rejected(n))} for n in NUMBERS]
    for pair in pairs_in(load(tmp_path, write(tmp_path / "a.jsonl", records))):
        for text, counted in pair:
            assert "One." in text
            assert "One." not in counted


def test_texts_without_a_prompt_are_plain_and_count_from_where_they_differ(tmp_path):
    records = [{"chosen": f"Ask {n}: say yes", "rejected": f"Ask {n}: say yours"} for n in NUMBERS]
    for (text, counted), (other, other_counted) in pairs_in(load(tmp_path, write(tmp_path / "a.jsonl", records))):
        assert _bare(text).startswith("Ask ")
        assert _bare(other).endswith("say yours")
        assert (_bare(counted), _bare(other_counted)) == ("yes", "yours")


def test_system_prompt_history_and_question_come_before_both_answers(tmp_path):
    record = {
        "system": "Be kind.",
        "history": [["First?", "One."]],
        "question": "Second?",
        "chosen": "Two.",
        "rejected": "No.",
    }
    [pair] = pairs_in(load(tmp_path, write(tmp_path / "a.jsonl", [record])))
    for (text, counted), answer in zip(pair, ("Two.", "No."), strict=True):
        places = [text.index(said) for said in ("Be kind.", "First?", "One.", "Second?", answer)]
        assert places == sorted(places)
        assert _bare(counted) == answer


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"prompt": asked(1), "question": "Another?"}, "'question' (1)"),
        ({"prompt": asked(1), "score_chosen": 9.5, "source": "x"}, "'score_chosen' (1), 'source' (1)"),
        (
            {"prompt": "?", "history": [["a", "b"]]} | {"chosen": say("?", "yes"), "rejected": say("?", "no")},
            "'history' (1)",
        ),
        ({"question": asked(1), "input": "more", "instruction": "less"}, "'input' (1), 'instruction' (1)"),
    ],
)
def test_what_a_pair_has_beside_its_prompt_and_answers_is_named(tmp_path, more, named):
    source = write(tmp_path / "a.jsonl", [{"chosen": "yes", "rejected": "no"} | more])
    assert f"{source}: fields that are not used: {named}" in load(tmp_path, source).statistics.notes


def test_a_prompt_that_is_not_the_conversations_is_named(tmp_path):
    records = [{"prompt": asked(n + 1) if n else asked(n)} | answered(n) for n in NUMBERS]
    source = write(tmp_path / "a.jsonl", records)
    assert f"{source}: fields that are not used: 'prompt' (29)" in load(tmp_path, source).statistics.notes


BAD = {
    "texts without a prompt": (
        {"chosen": "yes", "rejected": "no"},
        "missing field (no 'prompt', and 'chosen' and 'rejected' begin differently)",
    ),
    "a blank prompt": (
        {"prompt": " ", "chosen": "yes", "rejected": "no"},
        "missing field (no 'prompt', and 'chosen' and 'rejected' begin differently)",
    ),
    "only a system prompt": (
        {"prompt": [{"role": "system", "content": "Be brief."}], "chosen": "yes", "rejected": "no"},
        "missing field (no 'prompt', and 'chosen' and 'rejected' begin differently)",
    ),
    "a system prompt beside texts that begin alike": (
        {"system": "Be brief.", "chosen": "Ask: yes", "rejected": "Ask: no"},
        "missing field (no 'prompt' beside 'system')",
    ),
    "a pair without an answer": (
        {"prompt": "?", "chosen": " ", "rejected": "no"},
        "empty (no answer is left of 'chosen' beside the prompt)",
    ),
    "a pair without the other answer": (
        {"prompt": "?", "chosen": "yes", "rejected": ""},
        "empty (no answer is left of 'rejected' beside the prompt)",
    ),
    "a null": ({"prompt": "?", "chosen": "yes", "rejected": None}, "wrong type ('rejected' is null)"),
    "a field that is missing": (
        {"prompt": "?", "chosen": "yes"},
        "missing field (no 'chosen' and 'rejected' among 'prompt', 'chosen', which make a pair of answers; if they "
        "have other names, set data.fields.chosen and data.fields.rejected)",
    ),
    "a text": (
        {"text": "yes"},
        "missing field (no 'chosen' and 'rejected' among 'text', which make a pair of answers; to train on texts, "
        "leave out --objective (training.objective=next_token))",
    ),
    "equal answers": (
        {"prompt": "?", "chosen": "yes", "rejected": "yes"},
        "equal answers (the chosen answer is the rejected one)",
    ),
    "equal answers but for spaces, which the template strips": (
        {"prompt": "?", "chosen": "yes", "rejected": "yes "},
        "equal answers (the chosen answer is the rejected one)",
    ),
    "equal texts": (
        {"chosen": "Ask: yes", "rejected": "Ask: yes"},
        "equal answers (the chosen answer is the rejected one)",
    ),
    "a text that is only the prompt": (
        {"chosen": "Ask: yes", "rejected": "Ask: "},
        "empty (no answer is left of 'rejected' beside the prompt)",
    ),
    "conversations with other prompts": (
        {"chosen": say("one?", "yes"), "rejected": say("two?", "no")},
        "missing field (no 'prompt', and 'chosen' and 'rejected' begin differently)",
    ),
    "conversations that share only a system prompt": (
        {name: [{"role": "system", "content": "Be brief."}, *say(f"{name}?", name)] for name in ("chosen", "rejected")},
        "missing field (no 'prompt', and 'chosen' and 'rejected' begin differently)",
    ),
    "a conversation and a text": (
        {"chosen": say("?", "yes"), "rejected": "no"},
        "missing field (no 'prompt', and 'chosen' and 'rejected' begin differently)",
    ),
    "an answer of the user": (
        {"chosen": [*say("?"), {"role": "user", "content": "yes"}], "rejected": say("?", "no")},
        "empty (no answer is left of 'chosen' beside the prompt)",
    ),
    "equal conversations": (
        {"chosen": say("?", "yes"), "rejected": say("?", "yes")},
        "equal answers (the chosen answer is the rejected one)",
    ),
    "only the prompt": (
        {"chosen": say("?", "yes"), "rejected": say("?")},
        "empty (no answer is left of 'rejected' beside the prompt)",
    ),
    "a number": ({"prompt": "?", "chosen": 3, "rejected": "no"}, "wrong type ('chosen' is a number, not a string)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_record_that_is_no_pair_is_told_with_its_line(tmp_path, name):
    record, problem = BAD[name]
    source = write(tmp_path / "a.jsonl", [*map(answered, NUMBERS), record])
    with pytest.raises(DataError) as refused:
        load(tmp_path, source, max_bad_lines=0)
    assert f"{source}:31: {problem}" in str(refused.value)
    left_out = load(tmp_path, source, max_bad_lines=1)
    assert left_out.statistics.num_documents == 30


def test_the_sample_has_no_pairs():
    for read in (load_datasets, check_data):
        with pytest.raises(DataError, match="reads pairs of answers, and the sample holds texts"):
            read(
                DataConfig(),
                SPEC,
                **({"seq_len": 64, "objective": DPO} if read is load_datasets else {"reads": "pairs"}),
            )


def test_a_check_before_the_job_reads_the_same_pairs(tmp_path):
    source = write(tmp_path / "a.jsonl", map(answered, NUMBERS))
    data = DataConfig(source=str(source), cache_dir=str(tmp_path / "cache"), chat_template="llama2")
    checked = check_data(data, SPEC, reads="pairs")
    assert checked.num_tokens == load(tmp_path, source).statistics.num_tokens
    assert checked.num_held_out_tokens == 0
    apart = check_data(data.model_copy(update={"validation": str(source)}), SPEC, reads="pairs")
    assert apart.num_held_out_tokens == apart.num_tokens == checked.num_tokens


def test_long_pairs_are_truncated_and_those_without_an_answer_left_out_and_both_are_told(tmp_path):
    def record(n, length):
        return {"prompt": f"{n} " + "x" * length, "chosen": f"yes, {n}", "rejected": f"no, not {n}"}

    kinds = [record(n, 20) for n in range(5)] + [record(n, 500) for n in range(3)]
    kinds += [{"prompt": f"{n}?", "chosen": "y" * 400, "rejected": "n"} for n in range(2)]
    datasets = load(tmp_path, write(tmp_path / "a.jsonl", kinds))
    statistics = datasets.statistics
    assert (statistics.num_truncated, statistics.num_left_out) == (5, 3)
    assert any("5 of the pairs to train on are longer than training.seq_len=256" in note for note in statistics.notes)
    assert len(pairs_in(datasets)) == 7


def test_the_data_are_told_in_pairs_and_not_in_the_documents_or_conversations_that_they_are_made_of(tmp_path):
    of_messages = load(tmp_path, write(tmp_path / "a.jsonl", map(answered, NUMBERS))).statistics
    assert of_messages.unit == "pairs"
    assert of_messages.summary().startswith("30 pairs to train on, none held out; 30 pairs (0 multi-turn, ")
    source = write(tmp_path / "b.jsonl", [{"prompt": f"{n}?", "completion": "!", "label": n > 4} for n in range(9)])
    told = load(tmp_path, source, objective=KTO).statistics.summary()
    assert told.startswith("9 labelled answers to train on, none held out; 9 labelled answers (0 multi-turn, ")


def test_every_pair_is_in_one_row_and_its_reference_at_the_first_token_of_each_answer(tmp_path):
    datasets = load(tmp_path, write(tmp_path / "a.jsonl", map(answered, NUMBERS)))
    (rows,) = datasets.train.sources
    assert isinstance(rows, PackedPairs)
    assert len(rows) < rows.num_pairs == 30
    rows.set_references(np.arange(60, dtype=np.float32).reshape(-1, 2) + 1)
    seen = []
    for index in range(len(rows)):
        *_, answers, references = rows.row(index)
        firsts = answers < 0
        assert (references[~firsts] == 0).all()
        assert firsts.sum() == 2 * len(rows.pairs_of(index))
        seen += references[firsts].tolist()
    assert seen == list(range(1, 61))


def test_an_objective_without_a_reference_has_none_in_its_batches(tmp_path):
    source = write(tmp_path / "a.jsonl", map(answered, NUMBERS))
    assert load(tmp_path, source, objective=SIMPO).train.per_token == ("answer",)
    with_reference = load(tmp_path, source)
    assert with_reference.train.per_token == ("answer", "reference")
    num_rows = len(with_reference.train)
    price = f"before the first step, the reference takes a forward over {num_rows} sequences"
    assert price in with_reference.statistics.notes


def test_pairs_need_the_document_mask_and_count_answers_alone():
    with pytest.raises(ConfigError, match=r"data\.document_mask=false: training\.objective=dpo has several answers"):
        RunConfig.from_mapping({"training": {"objective": "dpo"}, "data": {"document_mask": False}})
    with pytest.raises(ConfigError, match=r"data\.loss_on=all has no effect: training\.objective=dpo counts"):
        RunConfig.from_mapping({"training": {"objective": "dpo"}, "data": {"loss_on": "all"}})


def test_answers_may_call_tools_that_are_given_beside_them(tmp_path):
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
        "{% for message in messages %}[{{ message.role }}] "
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments }})"
        "{% endfor %}{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tool = {"type": "function", "function": {"name": "twice", "parameters": {"type": "object", "properties": {}}}}

    def record(n):
        call = {"type": "function", "function": {"name": "twice", "arguments": {"of": n}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"prompt": say(asked(n)), "chosen": [calling], "rejected": rejected(n), "tools": [tool]}

    data = DataConfig(
        source=str(write(tmp_path / "a.jsonl", map(record, NUMBERS))),
        cache_dir=str(tmp_path / "cache"),
        validation_fraction=0,
        chat_template=str(template),
    )
    for (text, counted), (other, other_counted) in pairs_in(load_datasets(data, SPEC, seq_len=256, objective=DPO)):
        assert text.startswith("<twice>[user]")
        assert counted.startswith("twice({")
        assert "twice(" not in other
        assert other_counted.startswith("I would guess")


OTHERS = {
    "texts": {"text": "a text"},
    "conversations": {"messages": say("?", "!")},
    "pairs of prompt and completion": {"prompt": "?", "completion": "!"},
}


@pytest.mark.parametrize("title", OTHERS)
@pytest.mark.parametrize("number", [3, 200])
def test_data_of_another_objective_are_told_with_what_trains_on_them(tmp_path, title, number):
    source = write(tmp_path / "a.jsonl", [OTHERS[title]] * number)
    with pytest.raises(DataError) as refused:
        load(tmp_path, source)
    assert f"to train on {title}, leave out --objective (training.objective=next_token)" in str(refused.value)
    assert "raise the limit" not in str(refused.value)


def test_a_table_of_texts_is_told_the_same(tmp_path):
    pq.write_table(pa.table({"text": ["a text"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"a\.parquet has no 'chosen' and 'rejected' among 'text', 'id', .*leave out --obj"
    ):
        load(tmp_path, tmp_path / "a.parquet")
