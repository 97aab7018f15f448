"""Files whose inner sizes lie, or that are cut short while they are read: one line, and no other memory in tokens."""

import json
import struct

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from llama_core.config.models import model_spec
from llama_core.config.settings import DataConfig
from llama_core.data.check import check_data
from llama_core.data.files.source_file import SourceFile
from llama_core.data.files.stored_ids import StoredIds
from llama_core.errors import DataError

TEXTS = ["eight by", "tes each", "of 4 and", "no more.."]
OFFSETS = {
    "int32": np.array([0, 8, 16, 24, 33], np.int32),
    "list": np.array([0, 3, 5], np.int32),
    "index": np.array([0, 1, 2, 3], np.int32),
}


def write_arrow(path, array, name):
    batch = pa.RecordBatch.from_arrays([array], names=[name])
    with pa.OSFile(str(path), "wb") as file, ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)


def patched(path, before, place, value):
    """Replace one number of an array that is in a file."""
    content = path.read_bytes()
    assert content.count(before.tobytes()) == 1
    after = before.copy()
    after[place] = value
    path.write_bytes(content.replace(before.tobytes(), after.tobytes()))


def refusal(path, **settings):
    with pytest.raises(DataError) as refused:
        check_data(DataConfig(source=str(path), tokenizer="bytes", **settings), model_spec("tiny_llama3_50m"))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("place", [1, 3, 4])
@pytest.mark.parametrize("value", [2**30, -(2**30), 100])
def test_offsets_of_text_that_lead_elsewhere_are_refused(tmp_path, place, value):
    path = tmp_path / "lie.arrow"
    write_arrow(path, pa.array(TEXTS), "text")
    patched(path, OFFSETS["int32"], place, value)
    assert refusal(path).startswith(f"{path} is not a readable Arrow file: ")


@pytest.mark.parametrize("value", [2**28, -5, 6])
def test_offsets_of_lists_that_lead_elsewhere_are_refused(tmp_path, value):
    path = tmp_path / "lie.arrow"
    write_arrow(path, pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.int32())), "input_ids")
    patched(path, OFFSETS["list"], 2, value)
    assert refusal(path).startswith(f"{path} is not a readable Arrow file: ")


@pytest.mark.parametrize("value", [2**28, -1, 4])
def test_indices_of_a_dictionary_that_lead_elsewhere_are_refused(tmp_path, value):
    path = tmp_path / "lie.arrow"
    write_arrow(path, pa.array(TEXTS).dictionary_encode(), "text")
    patched(path, OFFSETS["index"], 2, value)
    assert refusal(path).startswith(f"{path} is not a readable Arrow file: ")


@pytest.mark.parametrize("ids", [[[1, 2], [3]], [[1], 2], [1, [2]], [{"a": 1}], ["a"], [None], [1.5], [2**70], [True]])
def test_ids_that_are_no_row_of_numbers_are_one_line(tmp_path, ids):
    path = tmp_path / "ragged.jsonl"
    path.write_text(json.dumps({"input_ids": ids}))
    assert f"{path}:1: wrong type ('input_ids' is not a list of token ids)" in refusal(path)


def megatron(path, lengths, offsets, tokens):
    """Write ids of two bytes, and an index with a document for each sequence."""
    np.asarray(tokens, "<u2").tofile(path)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(lengths) + 1)
    bounds = np.arange(len(lengths) + 1, dtype="<i8")
    content = (header, np.asarray(lengths, "<i4").tobytes(), np.asarray(offsets, "<i8").tobytes(), bounds.tobytes())
    path.with_suffix(".idx").write_bytes(b"".join(content))
    return path


def test_an_index_with_overlapping_documents_is_refused(tmp_path):
    assert "documents of a.idx overlap" in refusal(megatron(tmp_path / "a.bin", [50] * 40, [0] * 40, range(1, 51)))
    assert "documents of b.idx overlap" in refusal(megatron(tmp_path / "b.bin", [9, 9], [0, 16], range(1, 51)))


@pytest.mark.parametrize("ends", [[1, 2**63, 5], [2**64 - 1, 5], [3, 2, 5]])
def test_an_index_of_datatrove_whose_numbers_wrap_is_refused(tmp_path, ends):
    path = tmp_path / "a.ds"
    np.arange(1, 6, dtype="<u2").tofile(path)
    np.asarray(ends, "<u8").tofile(tmp_path / "a.ds.index")
    assert "copy both again" in refusal(path)


def test_ids_are_read_and_not_mapped_so_that_a_file_cut_short_is_an_error(tmp_path):
    path = tmp_path / "ids"
    np.arange(5000, dtype="<u2").tofile(path)
    with StoredIds(SourceFile(path, 10_000, 0, 0), np.dtype("<u2")) as ids:
        assert len(ids) == 5000
        assert ids[10:13].tolist() == [10, 11, 12]
        assert ids[4990:6000].tolist() == list(range(4990, 5000))
        assert ids[7:3].tolist() == []
        path.write_bytes(b"\0\0")
        with pytest.raises(DataError, match=r"ids was cut short while it was read; copy it again"):
            ids[4000:4100]


def test_an_index_of_more_bytes_than_its_documents_take_is_refused_unread(tmp_path):
    path = tmp_path / "a.ds"
    np.arange(1, 6, dtype="<u2").tofile(path)
    with (tmp_path / "a.ds.index").open("wb") as index:
        index.truncate(40 * 2**30)
    assert "a.ds.index has 42,949,672,960 bytes, more than the documents of a.ds take; copy both again" in refusal(path)


def test_a_document_of_ids_is_no_larger_than_one_of_text(tmp_path):
    path = tmp_path / "a.ds"
    with path.open("wb") as ids:
        ids.truncate(600 * 2**20)
    np.array([300 * 2**20], "<u8").tofile(tmp_path / "a.ds.index")
    assert "a document has more than the 256.00 MiB that a document may have; split it" in refusal(path)
