from datetime import date
from itertools import pairwise

import numpy as np
import pytest
from corpora import byte_cache, chosen, conversations, texts
from hypothesis import assume, given
from hypothesis import strategies as st

from llama_core.data.chat import ChatFormat
from llama_core.data.packing import PackedConversations, PackedDataset, best_fit
from llama_core.data.selection import everything
from llama_core.data.templates.chat_template import ChatTemplate
from llama_core.data.tokenizer import TemplateSource
from llama_core.models import loss
from llama_core.models.batch import IGNORE_INDEX

BOS, EOS = 256, 257
seq_lens = st.integers(2, 20)
shards = st.integers(1, 4)


def pack(documents, seq_len, num_shards=1):
    return PackedDataset(everything(byte_cache(documents, num_shards=num_shards)), seq_len)


def columns(dataset):
    """Tokens, targets and positions of all rows of a single shard, joined and without the padding."""
    joined = [np.concatenate(column) for column in zip(*map(dataset.row, range(len(dataset))), strict=True)]
    return [column[: dataset.num_tokens] for column in joined]


@given(documents=texts, seq_len=seq_lens, num_shards=shards)
def test_joined_rows_hold_every_document_once_in_order(documents, seq_len, num_shards):
    dataset = pack(documents, seq_len, num_shards)
    tokens = np.concatenate([dataset.row(row)[0] for row in range(len(dataset))]).tolist()
    bounds = [*(index for index, token in enumerate(tokens) if token == BOS), len(tokens)]
    found = [bytes(token for token in tokens[a:b] if token < 256).decode() for a, b in pairwise(bounds)]
    assert found == documents


@given(documents=texts, seq_len=seq_lens)
def test_a_target_is_the_next_token_unless_that_begins_a_document(documents, seq_len):
    dataset = pack(documents, seq_len)
    tokens, targets, _ = columns(dataset)
    following = np.append(tokens[1:], BOS)[: len(tokens)]
    last_eos_left_out = len(tokens) < dataset.num_tokens
    following[-1] = EOS if last_eos_left_out else BOS
    assert targets.tolist() == np.where(following == BOS, IGNORE_INDEX, following).tolist()


@given(documents=texts, seq_len=seq_lens, num_shards=shards)
def test_every_token_but_the_first_of_each_document_is_a_target_once(documents, seq_len, num_shards):
    dataset = pack(documents, seq_len, num_shards)
    targets = np.concatenate([dataset.row(row)[1] for row in range(len(dataset))])
    kept = targets[targets != IGNORE_INDEX]
    expected = [token for text in documents for token in (*text.encode(), EOS)]
    assert sorted(kept.tolist()) == sorted(expected)


@given(documents=texts, seq_len=seq_lens)
def test_positions_restart_exactly_where_a_row_or_a_document_begins(documents, seq_len):
    dataset = pack(documents, seq_len)
    tokens, _, positions = columns(dataset)
    row_begins = np.arange(len(tokens)) % seq_len == 0
    restarts = positions == 0
    assert restarts.tolist() == ((tokens == BOS) | row_begins).tolist()
    assert (np.diff(positions)[~restarts[1:]] == 1).all()


@given(documents=texts, seq_len=seq_lens, num_shards=shards)
def test_every_token_but_the_last_of_a_shard_is_an_input_once(documents, seq_len, num_shards):
    dataset = pack(documents, seq_len, num_shards)
    found = np.concatenate([dataset.row(row)[0] for row in range(len(dataset))])
    tokens = [token for text in documents for token in (BOS, *text.encode())]
    assert sorted(found[found != EOS].tolist()) == sorted(tokens)


@given(documents=texts, seq_len=seq_lens, data=st.data())
def test_rows_are_those_of_the_chosen_documents_alone(documents, seq_len, data):
    numbers = sorted(data.draw(st.sets(st.sampled_from(range(len(documents))), min_size=1)))
    some = PackedDataset(chosen(byte_cache(documents), numbers), seq_len)
    alone = pack([documents[number] for number in numbers], seq_len)
    assert len(some) == len(alone)
    for row in range(len(alone)):
        for one, other in zip(some.row(row), alone.row(row), strict=True):
            assert one.tolist() == other.tolist()


@given(documents=texts, seq_len=seq_lens, num_shards=shards)
def test_every_row_has_a_target(documents, seq_len, num_shards):
    dataset = pack(documents, seq_len, num_shards)
    assert all((dataset.row(row)[1] != IGNORE_INDEX).any() for row in range(len(dataset)))


def test_padding_is_separate_and_never_a_target():
    tokens, targets, positions = pack(["ab"], 7).row(0)
    assert tokens.tolist() == [BOS, 97, 98, EOS, EOS, EOS, EOS]
    assert targets.tolist() == [97, 98, EOS, *[IGNORE_INDEX] * 4]
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_a_row_that_does_not_exist_is_an_index_error():
    with pytest.raises(IndexError, match="row 1 of a dataset of 1 rows"):
        pack(["ab"], 7).row(1)


@pytest.mark.parametrize("other", [pack(["cd", "ab", "ef"], 5), pack(["ab", "cd", "ef"], 4), pack(["ab"], 5)])
def test_datasets_with_other_rows_have_other_digests(other):
    assert other.digest != pack(["ab", "cd", "ef"], 5).digest


def test_padding_is_ignored_by_the_models_loss():
    assert loss.IGNORE_INDEX == IGNORE_INDEX


SHORT = ChatFormat(
    ChatTemplate(
        TemplateSource(
            "{% for m in messages %}{% if m.role == 'assistant' %}"
            "{% generation %}{{ m.content.strip() }}|{% endgeneration %}"
            "{% else %}{{ m.content.strip() }}>{% endif %}{% endfor %}",
            "a short one",
        ),
        {},
        date(2026, 1, 31),
    ),
    "assistant",
)
chats = st.lists(conversations(), min_size=1, max_size=8)
mixed = st.tuples(chats, texts).map(lambda both: [*both[0], *both[1]]).flatmap(st.permutations)


def pack_chats(documents, seq_len, num_shards=1, *, document_mask=True):
    cache = byte_cache(documents, SHORT, num_shards)
    return PackedConversations(everything(cache), seq_len, document_mask=document_mask)


def pieces(dataset):
    """Yield the inputs and targets of every document or piece, split by positions and without padding."""
    for row in map(dataset.row, range(len(dataset))):
        bounds = [*np.flatnonzero(row[2] == 0), len(row[2])]
        for begin, end in pairwise(bounds):
            inputs, targets = row[0][begin:end].tolist(), row[1][begin:end].tolist()
            if set(inputs) != {EOS}:
                yield inputs, targets


def rendered(messages):
    """The bytes of a conversation, and which of them count."""
    text = SHORT.document(messages, "")
    counts = [any(a <= place < b for a, b in text.turns.counted) for place in range(len(text.text))]
    return [(byte, count) for char, count in zip(text.text, counts, strict=True) for byte in char.encode()]


def expected(item, seq_len):
    """Yield the pieces of a document that have a target: a conversation cut to one row, a text cut into rows."""
    tokens = [(BOS, True), *((byte, True) for byte in item.encode()), (EOS, True)] if isinstance(item, str) else None
    tokens = tokens or rendered(item)
    starts = range(0, len(tokens) - 1, seq_len) if isinstance(item, str) else [0]
    for start in starts:
        window = tokens[start : start + seq_len + 1]
        targets = [byte if counts else IGNORE_INDEX for byte, counts in window[1:]]
        if set(targets) != {IGNORE_INDEX}:
            yield [byte for byte, _ in window[:-1]], targets


@given(documents=mixed, seq_len=seq_lens, num_shards=shards)
def test_each_conversation_is_in_one_row_from_its_start_with_its_own_targets(documents, seq_len, num_shards):
    found = sorted(pieces(pack_chats(documents, seq_len, num_shards)))
    assert found == sorted(piece for item in documents for piece in expected(item, seq_len))


@given(documents=mixed, seq_len=seq_lens)
def test_no_conversation_sees_another_even_without_the_document_mask(documents, seq_len):
    masked, alone = (pack_chats(documents, seq_len, document_mask=mask) for mask in (True, False))
    assert sorted(pieces(alone)) == sorted(pieces(masked))
    assert all((alone.row(row)[1] != IGNORE_INDEX).any() for row in range(len(alone)))
    assert len(alone) == len(list(pieces(masked)))


@given(documents=mixed, seq_len=seq_lens)
def test_truncated_and_left_out_conversations_are_counted(documents, seq_len):
    dataset = pack_chats(documents, seq_len)
    long = [len(rendered(item)) > seq_len + 1 for item in documents if not isinstance(item, str)]
    lost = [not list(expected(item, seq_len)) for item in documents if not isinstance(item, str)]
    assert (dataset.num_truncated, dataset.num_left_out) == (sum(long), sum(lost))
    targets = np.concatenate([dataset.row(row)[1] for row in range(len(dataset))]) if len(dataset) else np.empty(0)
    assert dataset.num_targets == (targets != IGNORE_INDEX).sum()


def test_the_rest_of_a_row_is_separate_padding():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokens, targets, positions = pack_chats([messages, messages], 8).row(0)
    assert bytes(tokens[:6].tolist()) == b"a>ba>b"
    assert tokens[6:].tolist() == [EOS, EOS]
    b, end = b"b|"
    assert targets.tolist() == [IGNORE_INDEX, b, end, IGNORE_INDEX, b, end, IGNORE_INDEX, IGNORE_INDEX]
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


@given(lengths=st.lists(st.integers(1, 20), max_size=60), capacity=st.integers(20, 40))
def test_rows_are_never_overfull_and_no_two_fit_into_one(lengths, capacity):
    rows = best_fit(np.array(lengths, np.int64), capacity)
    fill = np.bincount(rows, weights=lengths)
    assert (fill <= capacity).all()
    assert (fill > 0).all()
    assert all(one + other > capacity for one, other in pairwise(sorted(fill)))


def test_conversations_packed_differently_have_another_digest():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    digests = {pack_chats([messages] * 2, 8, document_mask=mask).digest for mask in (True, False)}
    assert len(digests) == 2


def test_texts_alone_are_refused_as_conversations():
    with pytest.raises(ValueError, match="these documents are texts"):
        pack_chats(["a", "b"], 8)


def whole_rows(dataset):
    """Return the rows that are a single document, by their positions."""
    unbroken = np.arange(dataset.seq_len)
    return [row for row in range(len(dataset)) if np.array_equal(dataset.row(row)[2], unbroken)]


@given(documents=texts, seq_len=seq_lens, num_shards=shards)
def test_the_share_of_rows_that_are_one_document_is_that_of_unbroken_positions(documents, seq_len, num_shards):
    dataset = pack(documents, seq_len, num_shards)
    assert dataset.share_of_whole_rows == len(whole_rows(dataset)) / len(dataset)


@given(documents=mixed, seq_len=seq_lens)
def test_the_same_holds_for_rows_of_whole_conversations(documents, seq_len):
    dataset = pack_chats(documents, seq_len)
    assume(len(dataset))
    assert dataset.share_of_whole_rows == len(whole_rows(dataset)) / len(dataset)
