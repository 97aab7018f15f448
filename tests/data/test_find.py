"""Which files are read, which are left out, and that the latter are named."""

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pytest
from corpora import write_jsonl

from llama_core.data import find
from llama_core.data.corpus import Document, Tally, read_documents
from llama_core.data.file_kinds import json_values
from llama_core.data.file_kinds import kinds as file_kinds
from llama_core.data.file_kinds.kinds import KINDS, index_of
from llama_core.data.files import source_file
from llama_core.data.files.source_file import COMPRESSIONS
from llama_core.data.find import find_files
from llama_core.data.formats import FieldNames
from llama_core.errors import DataError
from llama_core.units import MIB

OTHER_USER = 65534


def put(*names):
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text('{"text": "x"}\n')


def found(*paths):
    return [str(file.path) for file in find_files(*paths).files]


def notes(*paths):
    return list(find_files(*paths).notes())


def test_in_a_folder_every_known_kind_is_taken_and_the_others_are_counted_and_named(here):
    put("in/a.jsonl", "in/b.json.gz", "in/plain.txt", "in/deep/c.parquet", "in/x.csv", "in/y.parquet.gz", "in/z")
    assert found("in") == ["in/a.jsonl", "in/b.json.gz", "in/deep/c.parquet", "in/plain.txt"]
    assert notes("in") == [
        "1 file of plain text: a file is a document",
        "left out 3 files of an unknown kind (x.csv, y.parquet.gz, z)",
    ]


def test_many_files_that_are_left_out_are_counted_and_the_first_named(here):
    put("in/a.jsonl", *(f"in/{number}.csv" for number in range(9)))
    assert notes("in") == ["left out 9 files of an unknown kind (0.csv, 1.csv, 2.csv, 3.csv, 4.csv, ...)"]


def test_a_folder_of_one_known_kind_needs_no_note(here):
    put("in/a.jsonl", "in/b.jsonl.zst", "in/.hidden.csv", "in/.git/c.csv")
    assert found("in") == ["in/a.jsonl", "in/b.jsonl.zst"]
    assert notes("in") == []


def test_texts_about_the_data_are_left_out_unless_they_are_named(here):
    put("in/a.jsonl", "in/README.md", "in/b/LICENSE.txt", "in/dataset_infos.json", "in/readable.md")
    assert found("in") == ["in/a.jsonl", "in/readable.md"]
    assert notes("in")[1] == "left out 3 files about the others (README.md, LICENSE.txt, dataset_infos.json)"
    assert found("in/README.md", "in") == ["in/README.md", "in/a.jsonl", "in/readable.md"]


def test_several_paths_are_one_source_in_their_order(here):
    put("wiki/b.jsonl", "wiki/a.jsonl", "code.json", "notes.md")
    assert found("wiki", "notes.md", "code.json") == ["wiki/a.jsonl", "wiki/b.jsonl", "notes.md", "code.json"]


def test_a_file_that_several_paths_lead_to_is_taken_once_and_named(here):
    put("wiki/a.jsonl", "wiki/b.jsonl")
    assert found("wiki/b.jsonl", "wiki", "wiki/*.jsonl") == ["wiki/b.jsonl", "wiki/a.jsonl"]
    assert notes("wiki/b.jsonl", "wiki", "wiki/*.jsonl") == [
        "3 files of several paths, taken once: b.jsonl, a.jsonl, b.jsonl"
    ]


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("in/*.jsonl", ["in/a.jsonl", "in/b.jsonl"]),
        ("in/[ac]*.json*", ["in/a.jsonl", "in/c.json"]),
        ("in/?.md", ["in/d.md"]),
        ("**/*.jsonl", ["in/a.jsonl", "in/b.jsonl", "in/more/a.jsonl"]),
        ("in/*", ["in/a.jsonl", "in/b.jsonl", "in/c.json", "in/d.md", "in/more/a.jsonl"]),
        ("i*/mo*", ["in/more/a.jsonl"]),
        ("in/**", ["in/a.jsonl", "in/b.jsonl", "in/c.json", "in/d.md", "in/more/a.jsonl"]),
    ],
)
def test_wildcards_match_files_and_folders(here, pattern, files):
    put(
        "in/a.jsonl",
        "in/b.jsonl",
        "in/c.json",
        "in/d.md",
        "in/more/a.jsonl",
        "in/.jsonl",
        "in/.git/x.jsonl",
        "in/x.csv",
    )
    assert found(pattern) == files
    assert found(str(here / pattern)) == [str(here / file) for file in files]


def test_what_a_wildcard_matches_and_cannot_be_read_is_named(here):
    put("in/a.jsonl", "in/b.csv", "in/README.md")
    assert notes("in/*") == ["left out 1 file about the others (README.md), 1 file of an unknown kind (b.csv)"]


def test_an_existing_file_is_no_pattern(here):
    put("a[1].jsonl", "a1.jsonl")
    assert found("a[1].jsonl") == ["a[1].jsonl"]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no*.jsonl", r"data source 'no\*\.jsonl' matches no \.jsonl, .* or \.npy file \(\.jsonl, .* also with"),
        ("*.csv", r"data source '\*\.csv' matches no .*; left out 1 file of an unknown kind \(x\.csv\)$"),
        ("a**.jsonl", r"data source 'a\*\*\.jsonl' is not a pattern: Invalid pattern"),
        ("x.csv", r"data source 'x\.csv' is of an unknown kind; use a \.jsonl, \.ndjson, \.json, \.parquet, \.txt,"),
        (
            "nowhere",
            r"data source 'nowhere' does not exist; use 'sample', or the path of a \.jsonl, .*, or of a folder",
        ),
        ("empty", r"folder 'empty' holds no \.jsonl, .* \(\.jsonl, .* also with \.gz or \.zst\)$"),
    ],
)
def test_a_path_that_leads_to_nothing_is_one_line(here, path, problem):
    put("a.jsonl", "x.csv")
    Path("empty").mkdir()
    with pytest.raises(DataError, match=problem):
        find_files("a.jsonl", path)


def test_a_text_that_is_a_link_out_of_its_folder_is_left_out(here):
    put("private.txt", "in/own.txt", "elsewhere/records.jsonl")
    for name, target in {
        "in/stolen.txt": "../private.txt",
        "in/alias.md": "own.txt",
        "in/records.jsonl": "../elsewhere/records.jsonl",
    }.items():
        Path(name).symlink_to(target)
    assert found("in") == ["in/alias.md", "in/own.txt", "in/records.jsonl"]
    assert notes("in")[1] == "left out 1 file behind a link out of the folder (stolen.txt)"
    assert found("in/*.txt") == ["in/own.txt"]
    assert found("in/*") == ["in/alias.md", "in/own.txt", "in/records.jsonl"]
    assert found("in/stolen.txt") == ["in/stolen.txt"]


@pytest.mark.parametrize("name", ["a.npy", "a.bin", "a.ds"])
def test_ids_behind_a_link_out_of_their_folder_are_left_out(here, name):
    """Any file is the ids of bytes, if an index says so."""
    put("private.txt", "in/own.jsonl", "in/a.idx", "in/a.ds.index")
    Path("in", name).symlink_to("../private.txt")
    assert found("in") == ["in/own.jsonl"]
    assert f"1 file behind a link out of the folder ({name})" in notes("in")[0]


def test_ids_whose_index_is_behind_a_link_out_of_the_folder_are_left_out(here):
    put("elsewhere.idx", "in/own.jsonl", "in/a.bin")
    Path("in/a.idx").symlink_to("../elsewhere.idx")
    assert found("in") == ["in/own.jsonl"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root, to give a file away")
def test_records_behind_somebody_elses_link_are_left_out_unless_they_are_theirs(here):
    put("mine.jsonl", "theirs.jsonl", "in/own.jsonl")
    for name in ("mine", "theirs"):
        Path(f"in/{name}.jsonl").symlink_to(f"../{name}.jsonl")
        os.lchown(f"in/{name}.jsonl", OTHER_USER, -1)
    os.chown("theirs.jsonl", OTHER_USER, -1)
    assert found("in") == ["in/own.jsonl", "in/theirs.jsonl"]
    assert notes("in") == ["left out 1 file behind a link out of the folder (mine.jsonl)"]


@pytest.mark.parametrize("name", ["a.txt", "a.npy", "a.jsonl", "a.parquet", "a.json"])
def test_a_file_that_becomes_a_link_after_it_was_found_is_not_read(here, name):
    put(f"in/{name}", f"private/{name}")
    (file,) = find_files("in").files
    Path("in", name).unlink()
    Path("in", name).symlink_to(f"../private/{name}")
    with pytest.raises(OSError, match="it is a link"), file.open():
        pass


@pytest.mark.parametrize("name", ["a.txt", "a.bin"])
def test_a_file_that_becomes_a_link_while_others_are_looked_at_is_not_read(here, monkeypatch, name):
    """Whoever made the folder sees when others of its files are opened."""
    put(f"in/{name}", "in/a.idx", "in/z.bin", f"private/{name}")

    def swapped(path):
        Path("in", name).unlink(missing_ok=True)
        Path("in", name).symlink_to(f"../private/{name}")
        return False

    monkeypatch.setattr(find, "has_llmc_header", swapped)
    with pytest.raises((DataError, OSError)):
        [file.open() for file in find_files("in").files]


def test_a_link_to_itself_is_one_line(here):
    put("in/a.jsonl")
    Path("in/b.jsonl").symlink_to("b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl"):
        find_files("in")


def test_the_links_of_hugging_faces_cache_are_its_own_files(here):
    put("hub/datasets--x/blobs/123", "hub/datasets--x/snapshots/456/data/other.jsonl")
    Path("hub/datasets--x/snapshots/456/data/a.txt").symlink_to("../../../blobs/123")
    assert found("hub/datasets--x/snapshots/456")[0] == "hub/datasets--x/snapshots/456/data/a.txt"


def test_links_to_a_data_set_in_hugging_faces_cache_are_followed_and_those_to_a_model_are_not(here):
    put("hub/datasets--x/snapshots/456/a.txt", "hub/models--x/snapshots/456/b.txt")
    Path("in").mkdir()
    Path("in/a.txt").symlink_to("../hub/datasets--x/snapshots/456/a.txt")
    Path("in/b.txt").symlink_to("../hub/models--x/snapshots/456/b.txt")
    assert found("in") == ["in/a.txt"]


def test_a_folder_that_is_a_link_is_not_walked_into(here):
    put("in/a.jsonl", "out/b.jsonl")
    Path("in/more").symlink_to("../out")
    Path("in/loop").symlink_to(".")
    assert found("in") == found("in/**/*.jsonl") == ["in/a.jsonl"]


def test_texts_below_a_linked_folder_that_a_wildcard_matches_are_left_out(here):
    put("in/a.txt", "private/b.txt")
    Path("in/more").symlink_to("../private")
    Path("there").symlink_to("in")
    assert found("in/*") == ["in/a.txt"]
    assert notes("in/*")[1] == "left out 1 file behind a link out of the folder (b.txt)"
    assert found("there") == found("there/*.txt") == ["there/a.txt"]


@pytest.mark.parametrize("name", [suffix for kind in KINDS for suffix in kind.suffixes])
def test_a_pipe_is_refused_whatever_its_name(here, name):
    os.mkfifo(f"a{name}")
    index = index_of(Path(f"a{name}"))
    if index is not None:
        index.touch()
    with pytest.raises(DataError, match="not a regular file"):
        find_files(".")


LIMITED = {".jsonl": "the line", ".json": "the value that begins there", ".txt": "the text"}


@pytest.mark.parametrize("suffix", LIMITED)
@pytest.mark.parametrize("compression", [None, *COMPRESSIONS], ids=lambda one: one.name if one else "plain")
def test_a_few_compressed_bytes_do_not_become_any_amount_of_memory(here, monkeypatch, suffix, compression):
    for module in (source_file, file_kinds, json_values):
        monkeypatch.setattr(module, "MAX_BYTES_OF_RECORD", 4 * MIB)
    content = b'{"text": "' + b"x" * 64 * MIB + b'"}'
    path = here / f"a{suffix}{compression.suffix if compression else ''}"
    path.write_bytes(packed(content, compression))
    documents = read_documents(find_files(str(path)).files, FieldNames(), Tally(), render=Document, max_bad_lines=9)
    with pytest.raises(DataError, match=rf"{path}.*: {LIMITED[suffix]} has more than the 4.00 MiB .*; split it"):
        list(documents)


def packed(content, compression):
    pack = {None: bytes, ".gz": gzip.compress, ".zst": lambda plain: pa.compress(plain, codec="zstd", asbytes=True)}
    return pack[compression.suffix if compression else None](content)


@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda content: b"x" * 100 + content])
@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.json.zst", "a.txt.zst", "a.json.gz", "a.txt.gz"])
def test_a_damaged_stream_is_refused_by_its_name(here, name, damage):
    lines = write_jsonl(here / "lines", [f"text number {number * number}" for number in range(500)]).read_bytes()
    compression = next(one for one in COMPRESSIONS if name.endswith(one.suffix))
    Path(name).write_bytes(damage(packed(lines, compression)))
    documents = read_documents(find_files(name).files, FieldNames(), Tally(), render=Document, max_bad_lines=9)
    with pytest.raises(DataError, match=rf"^{name}: the {compression.name} stream is damaged.*compress it again$"):
        list(documents)


def test_a_zstd_window_that_takes_gigabytes_is_refused(here):
    Path("a.jsonl.zst").write_bytes(bytes.fromhex("28b52ffd00a8010000"))  # a window of 2 GiB
    with pytest.raises(DataError, match=r"made with a window above 128 MiB \(--long\) .*requires too much memory"):
        list(read_documents(find_files(".").files, FieldNames(), Tally(), render=Document, max_bad_lines=9))


def test_a_text_file_that_is_no_utf8_or_blank_is_a_bad_line(here):
    Path("a.txt").write_text("caf\xe9", encoding="latin-1")
    Path("b.txt").write_text(" \n")
    Path("c.txt").write_bytes("﻿fine".encode())
    tally = Tally()
    read = list(read_documents(find_files(".").files, FieldNames(), tally, render=Document, max_bad_lines=9))
    assert [document.text for document in read] == ["fine"]
    assert list(map(str, tally.bad_lines.examples)) == [
        "a.txt: invalid UTF-8 (unexpected end of data at byte 4)",
        "b.txt: empty (the file is blank)",
    ]
