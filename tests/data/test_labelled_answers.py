"""Labelled answers: how records become documents, what counts in them, and how rows hold and number them."""

import numpy as np
import pytest
from corpora import chat_of
from test_pairs import NUMBERS, SPEC, _bare, answered, asked, chosen, load, rejected, say, write

from llama_core.config.run import DataConfig
from llama_core.data.check import check_data
from llama_core.data.datasets import load_datasets, validation_batches
from llama_core.data.records.labelled_answers import PackedLabelledAnswers
from llama_core.data.tokenizer import ByteTokenizer
from llama_core.errors import DataError
from llama_core.models.batch import IGNORE_INDEX
from llama_core.models.kto import mismatched
from llama_core.models.preferences import answers_of_row
from llama_core.objectives.next_token import NEXT_TOKEN
from llama_core.objectives.preferences import DPO, KTO


def is_good(n):
    return n % 3 == 0


def answer(n):
    return chosen(n) if is_good(n) else rejected(n)


def labelled(n):
    return {"prompt": asked(n), "completion": answer(n), "label": is_good(n)}


FORMS = {
    "texts": labelled,
    "messages": lambda n: labelled(n) | {"prompt": say(asked(n)), "completion": say(answer(n), first="assistant")},
    "a text after messages": lambda n: labelled(n) | {"prompt": say(asked(n))},
}


def batch_of(datasets):
    (rows,) = datasets.train.sources
    (batch,) = validation_batches(rows, len(rows), len(rows))
    return batch


def answers_in(batch):
    """Every answer as (text of its document, its counted text, whether it is good), from the batch."""
    decode = ByteTokenizer().decode
    found = []
    for tokens, targets, positions, numbers in zip(
        batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.per_token["answer"].abs().long(), strict=True
    ):
        documents = (positions == 0).cumsum(0)
        for number in set(numbers.tolist()) - {0}:
            counts = numbers == number
            own = documents == documents[counts][0]
            assert (targets[own & ~counts] == IGNORE_INDEX).all()
            text = decode([*tokens[own].tolist(), int(targets[own][-1])])
            found.append((_bare(text), _bare(decode(targets[counts].tolist())), number % 2 == 1))
    return sorted(found)


def expected_answer(prompt, answer, good):
    document = chat_of("llama2").document(say(prompt, answer), "nowhere:1")
    ((begin, end),) = document.turns.counted
    return _bare(document.text), _bare(document.text[begin:end]), good


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_rendered_with_its_prompt_and_its_number_says_its_label(tmp_path, form):
    datasets = load(tmp_path, write(tmp_path / "a.jsonl", map(FORMS[form], NUMBERS)), objective=KTO)
    expected = sorted(expected_answer(asked(n), answer(n), is_good(n)) for n in NUMBERS)
    assert answers_in(batch_of(datasets)) == expected
    assert any("30 labelled answers" in note for note in datasets.statistics.notes)


def test_a_pair_is_a_good_answer_and_a_bad_one(tmp_path):
    records = [*map(answered, range(5)), *map(labelled, range(5, 9))]
    datasets = load(tmp_path, write(tmp_path / "a.jsonl", records), objective=KTO)
    expected = [expected_answer(asked(n), chosen(n), True) for n in range(5)]
    expected += [expected_answer(asked(n), rejected(n), False) for n in range(5)]
    expected += [expected_answer(asked(n), answer(n), is_good(n)) for n in range(5, 9)]
    assert answers_in(batch_of(datasets)) == sorted(expected)


def test_the_answers_of_a_pair_are_not_taken_for_mismatches(tmp_path):
    batch = batch_of(load(tmp_path, write(tmp_path / "a.jsonl", map(answered, range(12))), objective=KTO))
    moved = mismatched(batch)
    assert len(answers_in(moved)) == len(answers_in(batch)) == 24
    pairs = {expected_answer(asked(n), answer(n), True)[0] for n in range(12) for answer in (chosen, rejected)}
    assert pairs.isdisjoint(text for text, *_ in answers_in(moved))


def test_every_answer_has_its_reference_and_that_of_its_mismatch_at_its_first_token(tmp_path):
    (rows,) = load(tmp_path, write(tmp_path / "a.jsonl", map(labelled, NUMBERS)), objective=KTO).train.sources
    assert isinstance(rows, PackedLabelledAnswers)
    assert len(rows) < rows.num_pairs == 30
    given = np.arange(60, dtype=np.float32).reshape(-1, 2) + 1
    rows.set_references(given)
    seen = []
    for index in range(len(rows)):
        *_, answers, references, mismatches = rows.row(index)
        firsts = answers < 0
        assert (references[~firsts] == 0).all()
        by_number = np.zeros((answers_of_row(rows.seq_len), 2), np.float32)
        by_number[-answers[firsts].astype(int)] = np.stack([references[firsts], mismatches[firsts]], axis=1)
        seen.append(rows.references_in(by_number, index))
    np.testing.assert_array_equal(np.concatenate(seen), given)


def test_mismatched_rows_hold_every_answer_after_the_prompt_before_its_own(tmp_path):
    batch = batch_of(load(tmp_path, write(tmp_path / "a.jsonl", map(labelled, NUMBERS)), objective=KTO))
    before = answers_in(batch)
    moved = answers_in(mismatched(batch))
    assert sorted(counted for _, counted, _ in moved) == sorted(counted for _, counted, _ in before)
    assert {text for text, *_ in moved}.isdisjoint(text for text, *_ in before)
    prompts = [text.removesuffix(counted) for text, counted, _ in before]
    assert sorted(text.removesuffix(counted) for text, counted, _ in moved) == sorted(prompts)


def test_there_are_numbers_for_as_many_answers_as_a_row_can_hold(tmp_path):
    """Prompts and answers of one letter: the second letter is only a target, so each needs one place of a row."""
    template = tmp_path / "bare.jinja"
    template.write_text("{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}")
    records = [{"prompt": "ab"[n % 2], "completion": "cdefghijklmnop"[n % 14], "label": False} for n in range(14)]
    source = write(tmp_path / "a.jsonl", records)
    data = DataConfig(
        source=str(source), cache_dir=str(tmp_path / "cache"), validation_fraction=0, chat_template=str(template)
    )
    batch = batch_of(load_datasets(data, SPEC, seq_len=8, objective=KTO))
    assert int(batch.per_token["answer"].abs().max()) == 8 < answers_of_row(8)
    counted = [(letter, is_good) for _, letter, is_good in answers_in(batch)]
    assert sorted(counted) == sorted((record["completion"], False) for record in records)


BAD = {
    "a label that is a text": (labelled(0) | {"label": "yes"}, "wrong type ('label' is a string, not true or false)"),
    "a label that is a number": (labelled(0) | {"label": 1}, "wrong type ('label' is a number, not true or false)"),
    "no label": (
        {"prompt": "?", "completion": "yes"},
        "missing field (no 'prompt' and 'completion' and 'label' among 'prompt', 'completion', which make a labelled "
        "answer; to train on pairs of prompt and completion, leave out --objective (training.objective=next_token))",
    ),
    "a null": (labelled(0) | {"label": None}, "wrong type ('label' is null)"),
    "an empty answer": (
        labelled(0) | {"completion": " "},
        "empty (no answer is left of 'completion' beside the prompt)",
    ),
    "an answer of the user": (
        labelled(0) | {"completion": say("yes")},
        "empty (no answer is left of 'completion' beside the prompt)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_record_that_is_no_labelled_answer_is_told_with_its_line(tmp_path, name):
    record, problem = BAD[name]
    source = write(tmp_path / "a.jsonl", [*map(labelled, NUMBERS), record])
    with pytest.raises(DataError) as refused:
        load(tmp_path, source, objective=KTO, max_bad_lines=0)
    assert f"{source}:31: {problem}" in str(refused.value)
    left_out = load(tmp_path, source, objective=KTO, max_bad_lines=1)
    assert left_out.statistics.num_documents == 30


def test_other_objectives_say_what_labelled_answers_are(tmp_path):
    source = write(tmp_path / "a.jsonl", map(labelled, NUMBERS))
    with pytest.raises(
        DataError, match="these answers have labels: train on good and bad answers with --objective kto"
    ):
        load(tmp_path, source, objective=DPO)
    notes = load(tmp_path, source, objective=NEXT_TOKEN).statistics.notes
    assert any("30 records also hold 'label', which is not used; train on good and bad" in note for note in notes)


def test_the_sample_has_no_labelled_answers():
    with pytest.raises(DataError, match=r"labelled answers, and the sample holds texts.*'completion' and 'label'"):
        check_data(DataConfig(), SPEC, reads="labelled answers")


def test_a_check_before_the_job_reads_the_same_answers(tmp_path):
    source = write(tmp_path / "a.jsonl", map(labelled, NUMBERS))
    data = DataConfig(source=str(source), cache_dir=str(tmp_path / "cache"), chat_template="llama2")
    checked = check_data(data, SPEC, reads="labelled answers")
    assert checked.num_tokens == load(tmp_path, source, objective=KTO).statistics.num_tokens
