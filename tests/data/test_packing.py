from itertools import pairwise

import numpy as np
import pytest
from corpora import byte_cache, texts
from hypothesis import given
from hypothesis import strategies as st

from llama_core.data.packing import PackedDataset, permutation
from llama_core.models import loss
from llama_core.models.batch import IGNORE_INDEX

BOS, EOS = 256, 257
seq_lens = st.integers(2, 20)
seeds = st.integers(0, 2**40)


def pack(documents, seq_len, seed=0):
    return PackedDataset(byte_cache(documents), np.arange(len(documents)), seq_len, seed=seed)


def columns(dataset):
    """Tokens, targets and positions of all rows, joined and without the padding."""
    joined = [np.concatenate(column) for column in zip(*map(dataset.row, range(len(dataset))), strict=True)]
    return [column[: dataset.num_tokens] for column in joined]


@given(documents=texts, seq_len=seq_lens, seed=seeds)
def test_joined_rows_give_back_every_document_once(documents, seq_len, seed):
    tokens = columns(pack(documents, seq_len, seed))[0].tolist()
    bounds = [*(index for index, token in enumerate(tokens) if token == BOS), len(tokens)]
    found = [bytes(token for token in tokens[a:b] if token < 256).decode() for a, b in pairwise(bounds)]
    assert sorted(found) == sorted(documents)


@given(documents=texts, seq_len=seq_lens)
def test_a_target_is_the_next_token_unless_that_begins_a_document(documents, seq_len):
    dataset = pack(documents, seq_len)
    tokens, targets, _ = columns(dataset)
    following = np.append(tokens[1:], BOS)[: len(tokens)]
    last_eos_left_out = len(tokens) < dataset.num_tokens
    following[-1] = EOS if last_eos_left_out else BOS
    assert targets.tolist() == np.where(following == BOS, IGNORE_INDEX, following).tolist()


@given(documents=texts, seq_len=seq_lens)
def test_every_token_but_the_first_of_each_document_is_a_target_once(documents, seq_len):
    dataset = pack(documents, seq_len)
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


@given(documents=texts, seq_len=seq_lens)
def test_every_row_has_a_target(documents, seq_len):
    dataset = pack(documents, seq_len)
    assert all((dataset.row(row)[1] != IGNORE_INDEX).any() for row in range(len(dataset)))


def test_padding_stands_apart_and_is_no_target():
    tokens, targets, positions = pack(["ab"], 7).row(0)
    assert tokens.tolist() == [BOS, 97, 98, EOS, EOS, EOS, EOS]
    assert targets.tolist() == [97, 98, EOS, *[IGNORE_INDEX] * 4]
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_only_the_chosen_documents_are_packed():
    dataset = PackedDataset(byte_cache(["aa", "bb", "cc"]), np.array([0, 2]), 4, seed=0)
    assert set(columns(dataset)[0].tolist()) == {BOS, 97, 99, EOS}


def test_the_seed_draws_the_order_of_the_documents():
    documents = [chr(97 + n) for n in range(20)]
    orders = {tuple(columns(pack(documents, 8, seed))[0].tolist()) for seed in (0, 1, 1, 2)}
    assert len(orders) == 3


def test_a_row_that_does_not_exist_is_an_index_error():
    with pytest.raises(IndexError, match="row 1 of a dataset of 1 rows"):
        pack(["ab"], 7).row(1)


@pytest.mark.parametrize("other", [pack(["ab", "cd", "ef"], 5, seed=4), pack(["ab", "cd", "ef"], 4), pack(["ab"], 5)])
def test_the_digest_tells_datasets_with_other_rows_apart(other):
    assert other.digest != pack(["ab", "cd", "ef"], 5).digest


@given(length=st.integers(0, 50), seed=seeds, stream=st.integers(0, 9))
def test_a_permutation_visits_each_index_once(length, seed, stream):
    assert sorted(permutation(length, seed, stream)) == list(range(length))


def test_a_permutation_is_the_same_for_ever():
    assert permutation(8, 7, 1, 0).tolist() == [4, 3, 6, 1, 0, 7, 2, 5]


def test_padding_is_ignored_by_the_models_loss():
    assert loss.IGNORE_INDEX == IGNORE_INDEX
