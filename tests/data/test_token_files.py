"""Documents that are token ids already: every file that holds some gives the documents of the same texts."""

import json
import re
import struct
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import write_jsonl
from pyarrow import feather

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig
from llama_core.data import undivided
from llama_core.data.check import check_data
from llama_core.data.datasets import load_datasets
from llama_core.data.tokenizer import load_tokenizer
from llama_core.errors import DataError

TEXTS = [f"text number {number}, " * (1 + number % 4) for number in range(40)]
SPEC = replace(model_spec("tiny_llama3_50m"), vocab_size=300)
END = load_tokenizer("bytes").eos_id
DOCUMENTS = [ids.tolist() for ids in load_tokenizer("bytes").encode_documents(TEXTS)]


def documents_of(folder, source, **settings):
    data = DataConfig(source=str(source), cache_dir=str(folder / "cache"), validation_fraction=0, **settings)
    (rows,) = load_datasets(data, SPEC, seq_len=16).train.sources
    documents = []
    for part in rows.selection.parts:
        offsets = part.shard.offsets
        documents += [part.shard.tokens[begin:end].tolist() for begin, end in pairwise(offsets)]
    return documents


def write_lines(folder):
    path = folder / "ids.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in DOCUMENTS))
    return path


def write_parquet(folder):
    pq.write_table(pa.table({"input_ids": pa.array(DOCUMENTS, pa.list_(pa.int32()))}), folder / "ids.parquet")
    return folder / "ids.parquet"


def write_large_parquet(folder):
    pq.write_table(pa.table({"input_ids": pa.array(DOCUMENTS, pa.large_list(pa.int64()))}), folder / "ids.parquet")
    return folder / "ids.parquet"


def write_dataset(folder):
    """Write what ``Dataset.save_to_disk`` of the datasets library writes."""
    saved = folder / "saved"
    saved.mkdir()
    for number, half in enumerate((DOCUMENTS[:20], DOCUMENTS[20:])):
        table = pa.table({"input_ids": pa.array(half, pa.list_(pa.int32()))})
        path = saved / f"data-0000{number}-of-00002.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text('{"_data_files": []}')
    return saved


def write_feather(folder):
    table = pa.table({"input_ids": pa.array(DOCUMENTS, pa.list_(pa.int32()))})
    feather.write_feather(table, str(folder / "ids.arrow"), compression="uncompressed")
    return folder / "ids.arrow"


def write_datatrove(folder, dtype="<u2"):
    made = folder / "made"
    made.mkdir()
    np.concatenate(DOCUMENTS).astype(dtype).tofile(made / "000_tokens.ds")
    np.cumsum([len(ids) for ids in DOCUMENTS]).astype("<u8").tofile(made / "000_tokens.ds.index")
    (made / "000_tokens.ds.metadata").write_text("tokenizer.json|2\n100\n0.1M")
    return made


def write_wide_datatrove(folder):
    return write_datatrove(folder, "<u4")


def write_megatron(folder, code=8, dtype="<u2", sentences=1):
    """Write an index of documents that are one sequence each, or several."""
    pieces = [piece for ids in DOCUMENTS for piece in np.array_split(np.array(ids), sentences)]
    path = folder / "corpus_text_document.bin"
    np.concatenate(pieces).astype(dtype).tofile(path)
    lengths = [len(piece) for piece in pieces]
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * np.dtype(dtype).itemsize
    bounds = np.arange(0, len(pieces) + 1, sentences)
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(pieces), len(bounds))
        + np.array(lengths, "<i4").tobytes()
        + offsets.astype("<i8").tobytes()
        + bounds.astype("<i8").tobytes()
    )
    return path


def write_wide_megatron(folder):
    return write_megatron(folder, 4, "<i4")


def write_megatron_of_sentences(folder):
    return write_megatron(folder, sentences=3)


def write_ids(path, header=b"", dtype="<u2", ids=None):
    """Write ids one document after another, with empty documents between them, as they come in other people's files."""
    stream = np.concatenate([[END, *ids, END] for ids in DOCUMENTS]) if ids is None else np.array(ids)
    path.write_bytes(header + stream.astype(dtype).tobytes())
    return path


def llmc_header(magic, version, num_tokens):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, num_tokens
    return header.tobytes()


NUM_STREAMED = sum(map(len, DOCUMENTS)) + 2 * len(DOCUMENTS)


def write_olmo(folder):
    return write_ids(folder / "part-0.npy")


def write_numpy(folder):
    np.save(folder / "part-0.npy", np.concatenate(DOCUMENTS))
    return folder / "part-0.npy"


def write_nanogpt(folder):
    return write_ids(folder / "train.bin")


def write_llmc(folder):
    made = folder / "made"
    made.mkdir()
    write_ids(made / "fineweb_train_000001.bin", llmc_header(20240520, 1, NUM_STREAMED))
    return made


def write_wide_llmc(folder):
    return write_ids(folder / "fineweb_train_000001.bin", llmc_header(20240801, 7, NUM_STREAMED), "<u4")


WRITERS = [
    write_lines,
    write_parquet,
    write_large_parquet,
    write_dataset,
    write_feather,
    write_datatrove,
    write_wide_datatrove,
    write_megatron,
    write_wide_megatron,
    write_megatron_of_sentences,
    write_olmo,
    write_numpy,
    write_nanogpt,
    write_llmc,
    write_wide_llmc,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_documents_of_ids_are_those_of_the_texts(write, tmp_path):
    source = write(tmp_path)
    (tmp_path / "texts").mkdir()
    expected = documents_of(tmp_path, write_jsonl(tmp_path / "texts" / "reference.jsonl", TEXTS))
    assert sorted(documents_of(tmp_path, source)) == sorted(expected) == sorted(DOCUMENTS)


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_what_they_are_is_announced_and_the_first_are_checked(write, tmp_path):
    data = DataConfig(source=str(write(tmp_path)), cache_dir=str(tmp_path / "cache"))
    note = check_data(data, SPEC).notes[-1]
    assert "recognised by their fields: 40 documents of token ids ('input_ids'; where given, 'labels'," in note
    assert check_data(data, SPEC).num_tokens == pytest.approx(sum(map(len, DOCUMENTS)), rel=0.1)


def refused(folder, source):
    with pytest.raises(DataError) as caught:
        documents_of(folder, source)
    return str(caught.value)


def test_ids_of_another_tokenizer_are_refused_with_the_place(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [1, 50256, 3]}\n')
    told = refused(tmp_path, path)
    assert told == (
        f"{path}:2: token 50256 is none of the 258 of tokenizer 'bytes'; another one has made these ids: name that as "
        "data.tokenizer"
    )


def test_records_that_hold_no_ids_are_left_out_and_counted(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text(
        '{"input_ids": [1, 2, 3, 4]}\n{"input_ids": "abc"}\n{"input_ids": [1.5]}\n{"input_ids": [7]}\n' * 30
    )
    data = DataConfig(source=str(path), cache_dir=str(tmp_path / "cache"), validation_fraction=0, max_bad_lines=90)
    assert load_datasets(data, SPEC, seq_len=8).statistics.bad_lines == {"wrong type": 60, "empty": 30}


def test_an_index_that_overruns_its_file_is_refused(tmp_path):
    path = write_datatrove(tmp_path) / "000_tokens.ds"
    path.write_bytes(path.read_bytes()[:-2])
    assert refused(tmp_path, path).startswith(
        f"{path} has {path.stat().st_size:,} bytes, but by 000_tokens.ds.index its last"
    )


@pytest.mark.parametrize("damage", ["cut", "other", "empty", "short", "beyond", "falling"])
def test_an_index_of_megatron_that_is_damaged_is_refused(damage, tmp_path):
    path = write_megatron(tmp_path)
    index = path.with_suffix(".idx")
    match damage:
        case "cut":
            index.write_bytes(index.read_bytes()[:-4])
            expected = f"{path}: {index.name} has other bytes than its 40 sequences take; copy it again"
        case "other":
            index.write_bytes(b"something else")
            expected = f"{path}: {index.name} is no index of Megatron's (MMIDIDX, version 1, integers)"
        case "empty":
            index.write_bytes(b"")
            expected = f"{path}: {index.name} is no index of Megatron's (MMIDIDX, version 1, integers)"
        case "beyond" | "falling":
            bound = 41 if damage == "beyond" else 1
            index.write_bytes(index.read_bytes()[:-8] + np.array([bound], "<i8").tobytes())
            expected = f"{path}: the documents of {index.name} do not follow each other; copy it again"
        case "short":
            path.write_bytes(path.read_bytes()[:-2])
            expected = f"{path} has {path.stat().st_size:,} bytes, but by {index.name} a document ends after token "
    assert refused(tmp_path, path).startswith(expected)


def test_a_file_without_its_index_is_refused_if_named_and_left_out_if_found(tmp_path):
    path = write_datatrove(tmp_path) / "000_tokens.ds"
    index = path.with_name("000_tokens.ds.index")
    index.unlink()
    assert refused(tmp_path, path) == (
        f"data source {str(path)!r} is of tokens without an index beside it: {index} does not exist"
    )
    write_nanogpt(tmp_path)
    write_lines(tmp_path)
    data = DataConfig(source=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    assert (
        "left out 2 files of tokens without an index beside it (000_tokens.ds, train.bin)"
        in check_data(data, SPEC).notes[0]
    )


@pytest.mark.parametrize("searched", [1, 7, 2**20])
def test_documents_do_not_depend_on_the_pieces_that_are_searched(searched, tmp_path, monkeypatch):
    monkeypatch.setattr(undivided, "_SEARCHED_TOKENS", searched)
    assert sorted(documents_of(tmp_path, write_olmo(tmp_path))) == sorted(DOCUMENTS)


def test_a_last_document_without_an_end_ends_with_its_file(tmp_path):
    path = write_ids(tmp_path / "train.bin", ids=[5, 6, END, END, *range(20)])
    assert sorted(documents_of(tmp_path, path)) == [[*range(20)], [5, 6, END]]


def test_wide_ids_are_read_as_the_setting_says_and_refused_without_it(tmp_path):
    path = write_ids(tmp_path / "part-0.npy", dtype="<u4")
    assert refused(tmp_path, path) == (
        f"{path}: every second of the {2 * NUM_STREAMED:,} ids from 0 on is 0, so they seem to be uint32 and not "
        "uint16; set data.token_dtype=uint32"
    )
    assert sorted(documents_of(tmp_path, path, token_dtype="uint32")) == sorted(DOCUMENTS)


def test_the_type_of_ids_is_a_part_of_what_a_shard_is_known_by(tmp_path):
    path = write_ids(tmp_path / "part-0.npy", ids=[5, 0] * 20 + [END, 0])
    assert documents_of(tmp_path, path) == [[5, 0] * 20 + [END]]
    assert documents_of(tmp_path, path, token_dtype="uint32") == [[5] * 20 + [END]]


HINT = "name the one that made these ids as data.tokenizer"
UNREADABLE = {
    "unknown": (
        [5, 6, END, 50256],
        b"",
        f"{{path}}: token 3, 50256, is none of the 258 of tokenizer 'bytes'; {HINT}, or set data.token_dtype=uint32, "
        "if the file holds that and not uint16",
    ),
    "unknown under a header": (
        [5, 6, END, 50256],
        llmc_header(20240520, 1, 4),
        f"{{path}}: token 3, 50256, is none of the 258 of tokenizer 'bytes'; {HINT}",
    ),
    "cut": (
        [5, 6],
        b"x",
        "{path} has 5 bytes, which are no whole numbers of 2; copy it again, or set data.token_dtype=uint32 if it "
        "holds such ids",
    ),
    "cut under a header": (
        [5, 6, END],
        llmc_header(20240520, 1, 4),
        "{path} has 1,030 bytes, but 1,032 by its header of llm.c, which gives 4 tokens; copy it again",
    ),
}


@pytest.mark.parametrize(("ids", "header", "told"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_does_not_hold_whole_ids_of_the_tokenizer_is_refused(ids, header, told, tmp_path):
    path = write_ids(tmp_path / "train.bin", header, ids=ids)
    assert refused(tmp_path, path) == told.format(path=path)


@pytest.mark.parametrize("array", [np.ones(9), np.ones((3, 3), int), np.array([{}], object)], ids=str)
def test_an_array_that_is_no_row_of_ids_is_refused(array, tmp_path):
    np.save(tmp_path / "a.npy", array)
    assert refused(tmp_path, tmp_path / "a.npy").startswith(f"{tmp_path / 'a.npy'} is ")


@pytest.mark.parametrize(
    "header",
    [
        *("{'descr': (", "'''", "-" * 9000 + "1", "  x\n y", "(" * 60_000),
        *(
            f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}}}"
            for shape in ("(5,)", "(True,)", f"({10**30},)")
        ),
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    ],
)
def test_a_header_that_numpy_cannot_read_is_refused_in_our_own_words(tmp_path, header):
    length = len(header).to_bytes(2, "little")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + length + header.encode())
    told = refused(tmp_path, tmp_path / "a.npy")
    assert re.match(
        f"{tmp_path / 'a.npy'} (is not a readable array of NumPy|has .* ids by|is an array of object)", told
    )
    assert "allow_pickle" not in told


def test_a_document_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(undivided, "MAX_BYTES_OF_RECORD", 99)
    path = write_ids(tmp_path / "train.bin", ids=[5, END] + [6] * 99)
    assert refused(tmp_path, path).startswith(
        f"{path}: no end of text (token {END} of tokenizer 'bytes') in the 99 B after token 2; name the tokenizer that"
    )


def test_another_index_makes_other_documents(tmp_path):
    """The bytes of the index belong to those of the file: an old shard is not taken."""
    source = write_datatrove(tmp_path)
    index = source / "000_tokens.ds.index"
    ends = np.fromfile(index, "<u8")
    assert sorted(map(len, documents_of(tmp_path, source))) == sorted(np.diff(ends, prepend=0).tolist())
    ends[0] += 1
    ends.tofile(index)
    assert sorted(map(len, documents_of(tmp_path, source))) == sorted(np.diff(ends, prepend=0).tolist())
