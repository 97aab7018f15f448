"""Batches of somebody's own code: what they may look like, and what their labels mean."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llama_core.data.loaders import as_batch
from llama_core.errors import DataError

VOCABULARY = 50
ROWS = arrays.arrays(np.int64, st.tuples(st.integers(1, 3), st.integers(3, 9)), elements=st.integers(0, 49))


def masked(labels_BS, seed):
    keep_BS = np.random.default_rng(seed).random(labels_BS.shape) < 0.7
    return np.where(keep_BS, labels_BS, -100)


@given(rows=ROWS, seed=st.integers(0, 99))
def test_labels_of_hugging_face_are_shifted_here_whatever_is_masked(rows, seed):
    labels_BS = masked(rows, seed)
    assume((labels_BS[:, 1:] != -100).any())
    batch = as_batch({"input_ids": rows, "labels": labels_BS}, VOCABULARY)
    assert batch.tokens_BS.tolist() == rows[:, :-1].tolist()
    assert batch.targets_BS.tolist() == labels_BS[:, 1:].tolist()


@given(rows=ROWS, seed=st.integers(0, 99))
def test_labels_that_are_shifted_already_are_refused_and_taken_as_a_pair(rows, seed):
    inputs_BS, targets_BS = rows[:, :-1], masked(rows[:, 1:], seed)
    is_learnt_BS = targets_BS[:, :-1] != -100
    assume((targets_BS[:, :-1] != inputs_BS[:, :-1])[is_learnt_BS].any())
    with pytest.raises(DataError, match=r"shifted by one already, .*; give the pair \(input_ids, labels\)"):
        as_batch({"input_ids": inputs_BS, "labels": targets_BS}, VOCABULARY)
    assert as_batch((inputs_BS, targets_BS), VOCABULARY).targets_BS.tolist() == targets_BS.tolist()


def test_labels_of_other_tokens_are_shifted_like_those_of_hugging_face():
    ids = torch.arange(8).unsqueeze(0)
    batch = as_batch({"input_ids": ids, "labels": ids + 10}, VOCABULARY)
    assert batch.targets_BS.tolist() == [[11, 12, 13, 14, 15, 16, 17]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "uint64"])
def test_tokens_of_every_integer_type_are_taken_also_from_a_read_only_file(tmp_path, dtype):
    ids = np.arange(18, dtype=dtype)
    ids.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype, "r").reshape(2, 9)
    for item in (mapped, {"input_ids": mapped}, torch.from_numpy(ids.reshape(2, 9))):
        assert as_batch(item, VOCABULARY).tokens_BS.tolist() == ids.reshape(2, 9)[:, :-1].tolist()


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        ({"input_ids": [[1, 2, 3], [1, 2]]}, "the rows of a batch differ in length; pad them"),
        ({"input_ids": [["a", "b"]]}, "tokens must be integers, not <U1"),
        ({"input_ids": None}, "tokens must be integers, not object"),
        ({"input_ids": np.zeros((2, 9))}, "tokens must be integers, not torch.float64"),
        ({"input_ids": [[1, 2]], "labels": [1, 2]}, r"tokens \[1, 2\] and labels \[2\]; both must be"),
        ({"input_ids": [[1, 2]], "attention_mask": [1]}, r"tokens \[1, 2\] and attention_mask \[1\]; both must be"),
    ],
)
def test_what_is_no_batch_of_tokens_is_refused_in_one_line(item, complaint):
    with pytest.raises(DataError, match=complaint) as refused:
        as_batch(item, VOCABULARY)
    assert "\n" not in str(refused.value)
