"""Labels and masks beside token ids: what counts in the loss is what transformers' loss would count."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig
from llama_core.data.bad_lines import UnusableRecordError
from llama_core.data.datasets import load_datasets, validation_batches
from llama_core.data.formats import FieldNames, FormatCounts, read_record
from llama_core.errors import DataError
from llama_core.models.batch import IGNORE_INDEX

SPEC = replace(model_spec("tiny_llama3_50m"), vocab_size=300)
IDS = [10, 11, 12, 13, 14, 15]


def targets_of(folder, records, name="a.jsonl", **settings):
    """The tokens that count, of each document, from the batches of a run on some records; and the run's notes."""
    path = folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(source=str(path), cache_dir=str(folder / "cache"), validation_fraction=0, **settings)
    datasets = load_datasets(data, SPEC, seq_len=8)
    (rows,) = datasets.train.sources
    counted = []
    for batch in validation_batches(rows, 1, len(rows)):
        documents = (batch.positions_BS[0] == 0).cumsum(0)
        for number in range(1, int(documents[-1]) + 1):
            targets = batch.targets_BS[0][documents == number]
            counted.append(targets[targets != IGNORE_INDEX].tolist())
    return sorted(found for found in counted if found), datasets.statistics


MASKED = {
    "labels": {"labels": [-100, -100, 12, 13, -100, 15]},
    "loss_mask": {"loss_mask": [0, 0, 1, 1, 0, 1]},
    "completion_mask": {"completion_mask": [False, False, True, True, False, True]},
    "assistant_masks": {"assistant_masks": [1, 0, 1, 1, 0, 1]},
    "labels and a mask": {"labels": [-100, 11, 12, 13, 14, 15], "loss_mask": [1, 0, 1, 1, 0, 1]},
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("fields", MASKED)
def test_only_tokens_that_labels_and_masks_leave_count(tmp_path, fields, name):
    counted, statistics = targets_of(tmp_path, [{"input_ids": IDS} | MASKED[fields]] * 2, name)
    assert counted == [[12, 13, 15]] * 2
    assert statistics.num_targets == 6
    assert not any("not used" in note for note in statistics.notes)


@given(mask=st.lists(st.booleans(), min_size=2, max_size=12).filter(lambda mask: any(mask[1:])))
def test_what_counts_is_what_transformers_computes_a_loss_of(mask):
    torch = pytest.importorskip("torch")
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    ids = torch.arange(10, 10 + len(mask))
    labels = torch.where(torch.tensor(mask), ids, -100)
    logits = torch.zeros(1, len(mask), 40, requires_grad=True)
    loss_utils.ForCausalLMLoss(logits, labels[None], 40).backward()
    theirs = (logits.grad[0].abs().sum(-1) > 0).tolist()[:-1]  # of each token that has a next one
    tokens = read_record({"input_ids": ids.tolist(), "labels": labels.tolist()}, FieldNames(), FormatCounts())
    ours = [True] * (len(mask) - 1) if tokens.ignored is None else (~tokens.ignored[1:]).tolist()
    assert ours == theirs


def test_labels_that_leave_all_tokens_are_read_like_ids_without_any(tmp_path):
    plain = [{"input_ids": [n, *IDS]} for n in range(20, 40)]
    both = [record | {"labels": record["input_ids"], "attention_mask": [1] * 7} for record in plain]
    folders = [tmp_path / "plain", tmp_path / "both"]
    for folder in folders:
        folder.mkdir()
    one, other = (targets_of(folder, records)[0] for folder, records in zip(folders, (plain, both), strict=True))
    assert one == other


@pytest.mark.parametrize("padding", [(0, 2), (2, 0), (1, 1)])
def test_padding_at_either_end_is_cut_off(padding):
    before, after = padding
    record = {
        "input_ids": [0] * before + IDS + [0] * after,
        "attention_mask": [0] * before + [1] * 6 + [0] * after,
        "labels": [-100] * (before + 2) + IDS[2:] + [-100] * after,
    }
    tokens = read_record(record, FieldNames(), FormatCounts())
    assert tokens.ids.tolist() == IDS
    assert np.flatnonzero(~tokens.ignored).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"labels": [11, 12, 13, 14, 15, 16]}, "'labels' has 11 for token 1, which is 10; make each label the token"),
        ({"labels": [-100, 11]}, "'labels' is not one number for each of the 6 token ids"),
        ({"loss_mask": [[1], [0, 1]]}, "'loss_mask' is not one number for each of the 6 token ids"),
        ({"completion_mask": [0.5] * 6}, "'completion_mask' is not one number for each of the 6 token ids"),
    ],
)
def test_labels_and_masks_that_do_not_fit_are_refused(tmp_path, fields, problem):
    with pytest.raises(DataError) as refused:
        targets_of(tmp_path, [{"input_ids": IDS} | fields])
    assert str(refused.value).startswith(f"{tmp_path}/a.jsonl:1: {problem}")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"attention_mask": [1, 1, 0, 1, 1, 1]}, "'attention_mask' is 0 between other tokens"),
        ({"attention_mask": [1, 1, 2, 2, 3, 3]}, "'attention_mask' is 2 between other tokens"),
        ({"attention_mask": [0] * 6}, "'attention_mask' is 0 everywhere"),
        ({"labels": [10, -100, -100, -100, -100, -100]}, "no token counts by its 'labels'"),
        ({"loss_mask": [0] * 6}, "no token counts by its 'loss_mask'"),
    ],
)
def test_documents_that_cannot_be_trained_on_as_they_say_are_left_out(fields, problem):
    with pytest.raises(UnusableRecordError) as left_out:
        read_record({"input_ids": IDS} | fields, FieldNames(), FormatCounts())
    assert problem in str(left_out.value)


def test_other_names_of_labels_can_be_given(tmp_path):
    records = [{"tokens": IDS, "targets": [-100, -100, 12, 13, -100, 15]}]
    counted, _ = targets_of(tmp_path, records, fields={"input_ids": "tokens", "labels": "targets"})
    assert counted == [[12, 13, 15]]
