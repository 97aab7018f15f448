import gzip
import hashlib
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import write_jsonl, write_texts
from hypothesis import given
from hypothesis import strategies as st

from llama_core.data.corpus import Document, Tally, read_documents
from llama_core.data.find import find_files
from llama_core.data.formats import FieldNames
from llama_core.errors import DataError
from llama_core.units import MIB

NOBODY = 65534


def read(source, *, text_field="text", max_bad_lines=100):
    tally = Tally()
    files = find_files(str(source)).files
    documents = read_documents(files, FieldNames(text_field), tally, render=Document, max_bad_lines=max_bad_lines)
    return [document.text for document in documents], tally.bad_lines


@contextmanager
def as_nobody():
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1))
def test_every_form_holds_the_same_documents(documents):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    with tempfile.TemporaryDirectory() as folder:
        plain, packed, columns = (Path(folder, name) for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"))
        plain.write_bytes(lines)
        packed.write_bytes(gzip.compress(lines))
        pq.write_table(pa.table({"text": documents}), columns)
        assert read(plain)[0] == read(packed)[0] == read(columns)[0] == documents


def test_a_folder_is_read_in_order_of_paths_with_its_subfolders(tmp_path):
    (tmp_path / "b").mkdir()
    write_jsonl(tmp_path / "b" / "1.jsonl", ["second"])
    write_jsonl(tmp_path / "c.jsonl", ["third"])
    write_jsonl(tmp_path / "a.jsonl", ["first"])
    assert read(tmp_path)[0] == ["first", "second", "third"]


def test_hidden_and_other_files_in_a_folder_are_skipped(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["kept"])
    write_jsonl(tmp_path / ".partial.jsonl", ["hidden"])
    (tmp_path / ".git").mkdir()
    write_jsonl(tmp_path / ".git" / "b.jsonl", ["hidden"])
    (tmp_path / "README.md").write_text("not data")
    assert read(tmp_path)[0] == ["kept"]


def test_the_text_may_be_in_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x", "text": "y"}\n')
    assert read(tmp_path, text_field="content")[0] == ["x"]


def test_a_byte_order_mark_is_ignored(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n')
    assert read(tmp_path)[0] == ["x"]


@pytest.mark.parametrize(
    ("line", "report"),
    [
        (b"{oops", "invalid JSON (Expecting property name enclosed in double quotes at column 2)"),
        (b"[" * 100_000, "invalid JSON (maximum recursion depth exceeded"),
        (
            b'{"body": "x", "id": 1}',
            "missing field (no 'text' and no conversation among 'body', 'id'; set data.text_field to one of body, or",
        ),
        (b"{}", "missing field (no 'text' and no conversation among no fields; none of them holds text"),
        (b'{"text": ""}', "empty ('text' is blank)"),
        (b'{"text": " \\n\\t"}', "empty ('text' is blank)"),
        (b"", "empty (the line is blank)"),
        (b'{"text": 7}', "wrong type ('text' is a number, not a string)"),
        (b'{"text": null}', "wrong type ('text' is null)"),
        (b'["text"]', "wrong type (a record is an object, not a list)"),
        (b'{"text": "\xff"}', "invalid UTF-8 (invalid start byte at byte 11)"),
        (b'{"text": "\\ud800"}', "invalid UTF-8 (lone surrogate at character 1)"),
    ],
)
def test_a_bad_line_is_left_out_and_reported_with_its_place(tmp_path, line, report):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    documents, bad_lines = read(file)
    assert documents == ["before", "after"]
    assert bad_lines.counts == {report.partition(" (")[0]: 1}
    assert str(bad_lines.examples[0]).startswith(f"{file}:2: {report}")


def test_bad_parquet_rows_are_left_out_one_by_one(tmp_path):
    column = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.array([0, 2, 3, 4], pa.int32()).buffers()[1], pa.py_buffer(b"ok\xffx")]
    )
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": pa.array([None, "", "fine"])}), tmp_path / "b.parquet")
    documents, bad_lines = read(tmp_path)
    assert documents == ["ok", "x", "fine"]
    assert bad_lines.counts == {"invalid UTF-8": 1, "wrong type": 1, "empty": 1}
    assert str(bad_lines.examples[1]) == f"{tmp_path}/b.parquet:1: wrong type ('text' is null)"


MESSAGES = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


def test_a_record_with_messages_is_a_conversation_whatever_else_it_holds(tmp_path):
    records = [
        {"text": "a"},
        {"messages": MESSAGES},
        {"text": "b", "messages": MESSAGES},
        {"text": "c", "messages": None},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    pq.write_table(
        pa.table({name: [record.get(name) for record in records] for name in ("text", "messages")}),
        tmp_path / "b.parquet",
    )
    pq.write_table(pa.table({"messages": [MESSAGES]}), tmp_path / "c.parquet")
    assert read(tmp_path / "a.jsonl")[0] == read(tmp_path / "b.parquet")[0] == ["a", MESSAGES, MESSAGES, "c"]
    assert read(tmp_path / "c.parquet")[0] == [MESSAGES]


def test_a_text_may_be_in_a_field_called_messages(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": "x"}\n')
    assert read(tmp_path, text_field="messages")[0] == ["x"]


def test_bad_lines_are_tolerated_up_to_their_limit(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "x"}\n' + "oops\n" * 8)
    assert read(file, max_bad_lines=8)[1].total == 8
    with pytest.raises(
        DataError,
        match=rf"more than data\.max_bad_lines=7 .*\(8 invalid JSON.*; the first: {file}:2, 3, 4, 5, 6 and 3 more: inv",
    ):
        read(file, max_bad_lines=7)


def test_progress_ends_at_the_bytes_of_all_files(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x" * 3_000_000] * 2)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 9))
    pq.write_table(pa.table({"text": ["x"] * 9}), tmp_path / "c.parquet")
    calls = []
    files = find_files(str(tmp_path)).files
    documents = read_documents(
        files,
        FieldNames(),
        Tally(),
        render=Document,
        max_bad_lines=0,
        on_progress=lambda done, total: calls.append((done, total)),
    )
    assert len(list(documents)) == 20
    total = sum(file.num_bytes for file in files)
    assert calls == sorted(calls)
    assert {size for _, size in calls} == {total}
    assert calls[-1] == (total, total)
    assert 0 < calls[0][0] < total


def test_a_missing_source_is_refused(tmp_path):
    with pytest.raises(DataError, match=rf"data source '{tmp_path}/none' does not exist; use 'sample', or"):
        find_files(str(tmp_path / "none"))


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text\nx\n")
    with pytest.raises(DataError, match=r"a\.csv' is of an unknown kind; use a \.jsonl, .* or \.npy file"):
        find_files(str(tmp_path / "a.csv"))


def test_a_folder_without_data_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "a.csv").write_text("text")
    left_out = r"left out 1 file about the others \(README.md\), 1 file of an unknown kind \(a.csv\)"
    with pytest.raises(DataError, match=rf"folder '{tmp_path}' holds no \.jsonl, .* file .*; {left_out}$"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("cut", [12, 200])
def test_a_truncated_gzip_file_is_refused(tmp_path, cut):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress("".join(f'{{"text": "{n}"}}\n' for n in range(999)).encode())[:cut])
    with pytest.raises(DataError, match=rf"{file}: the gzip stream is damaged or cut short"):
        read(file)


def test_a_file_that_is_not_gzip_is_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl.gz", ["x"])
    with pytest.raises(DataError, match=r"gzip stream is damaged or cut short \(Not a gzipped file"):
        read(tmp_path)


def test_a_file_that_is_not_parquet_is_refused(tmp_path):
    write_jsonl(tmp_path / "a.parquet", ["x"])
    with pytest.raises(DataError, match=r"a\.parquet is not a readable Parquet file: .*magic bytes"):
        read(tmp_path)


def test_a_parquet_file_without_the_column_is_refused_with_its_columns(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError,
        match=r"has no 'text' and no conversation among 'body', 'id'; set data\.text_field to one of body, ",
    ):
        read(tmp_path)


FORMS = ("a.jsonl", "a.jsonl.gz", "a.parquet")


def documents_of(files, content=None):
    return read_documents(files, FieldNames(), Tally(), render=Document, max_bad_lines=1, content=content)


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def append(file):
    with file.open("ab") as opened:
        opened.write(b"\n")


def replace(file):
    copy = file.with_name("copy")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)


@pytest.mark.parametrize("change", [cut, append, replace, Path.touch])
@pytest.mark.parametrize("name", FORMS)
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, name, change):
    file = write_texts(tmp_path / name, [f"{number:0100}" for number in range(1000)])
    os.utime(file, (1, 1))
    documents = documents_of(find_files(str(file)).files)
    next(documents)
    change(file)
    with pytest.raises(DataError, match=rf"^{file} changed while it was read .*; make sure that nothing writes to it"):
        list(documents)


@pytest.mark.parametrize("name", FORMS)
def test_a_file_that_changes_between_the_look_and_the_reading_is_refused(tmp_path, name):
    file = write_texts(tmp_path / name, ["x"])
    files = find_files(str(file)).files
    append(file)
    with pytest.raises(DataError, match="changed while it was read"):
        next(documents_of(files))


def test_a_file_that_ends_early_is_refused_even_if_its_size_and_time_come_back(tmp_path):
    file = write_texts(tmp_path / "a.jsonl", ["x" * (1024 - len('{"text": ""}\n'))] * 2048)
    whole, before = file.read_bytes(), file.stat()

    class Meddler:
        def update(self, block):
            file.write_bytes(whole[:MIB] if block else whole)
            os.utime(file, ns=(before.st_mtime_ns, before.st_mtime_ns))

    with pytest.raises(DataError, match=r"changed while it was read \(2,097,152 bytes before, 1,048,576 read\)"):
        list(documents_of(find_files(str(file)).files, Meddler()))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("name", FORMS)
def test_the_contents_are_digested_while_they_are_read(tmp_path, name):
    file = write_texts(tmp_path / name, ["x", "y"])
    content = hashlib.sha256()
    list(documents_of(find_files(str(file)).files, content))
    assert content.hexdigest() == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root, to become a user without rights")
def test_a_file_without_read_permission_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = write_jsonl(Path(folder, "a.jsonl"), ["x"])
        file.chmod(0o600)
        with as_nobody(), pytest.raises(DataError, match=rf"cannot read {file}: Permission denied"):
            read(file)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root, to become a user without rights")
def test_a_closed_subfolder_is_refused_rather_than_skipped():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        write_jsonl(Path(folder, "a.jsonl"), ["x"])
        Path(folder, "closed").mkdir(mode=0o700)
        with as_nobody(), pytest.raises(DataError, match=rf"cannot read {folder}/closed: Permission denied"):
            find_files(folder)
