"""JSON arrays are read value by value, with the errors and limits that lines have."""

import json
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llama_core.data.corpus import Document, Tally, read_documents
from llama_core.data.file_kinds import json_values
from llama_core.data.file_kinds.json_values import json_records
from llama_core.data.find import find_files
from llama_core.data.formats import FieldNames
from llama_core.errors import DataError
from llama_core.units import MIB

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('aé漢🦙\\"\n[]{},: \ud800'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"'), inner, max_size=3),
    max_leaves=8,
)


def values_in(path):
    (file,) = find_files(str(path)).files
    return [record.read() for record in json_records(file, FieldNames(), None)]


def read(path, max_bad_lines=100):
    tally = Tally()
    files = find_files(str(path)).files
    documents = read_documents(files, FieldNames(), tally, render=Document, max_bad_lines=max_bad_lines)
    return [document.text for document in documents], tally.bad_lines


@given(st.lists(values), st.sampled_from([None, 0, 2]), st.booleans(), st.sampled_from([1, 2, 3, 7, MIB]))
@example([0.5], None, False, 1)  # a block ends after the point
@example([1e-9], None, False, 1)
def test_any_array_is_read_as_json_reads_it_wherever_the_blocks_end(array, indent, ascii_only, block):
    text = json.dumps(array, indent=indent, ensure_ascii=ascii_only)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "MIB", block)
        path = Path(folder, "a.json")
        path.write_bytes(text.encode(errors="replace"))
        assert values_in(path) == json.loads(path.read_bytes())


@given(st.lists(st.dictionaries(st.text(), values), min_size=1), st.sampled_from(["\n", " ", "\r\n\r\n"]))
def test_values_one_after_another_need_no_array(objects, between):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.json")
        path.write_text(between.join(map(json.dumps, objects)))
        assert values_in(path) == objects


def test_a_large_array_is_never_held_as_a_whole(tmp_path):
    with (tmp_path / "a.json").open("w") as file:
        file.write("[")
        for number in range(40_000):
            file.write(json.dumps({"text": f"{number} " * 100}) + ",\n")
        file.write('{"text": "the last"}]')
    size = (tmp_path / "a.json").stat().st_size
    (file,) = find_files(str(tmp_path / "a.json")).files
    tracemalloc.start()
    number = sum(1 for _ in json_records(file, FieldNames(), None))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert number == 40_001
    assert peak < 8 * MIB < size / 2


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            '[\n{"text": "a"},\n{"text" "b"}\n]',
            ":3 (record 2): invalid JSON (Expecting ':' delimiter on line 3); correct",
        ),
        ('[{"text": "a"},\n\n{"text":\n\n "b}]', ":3 (record 2): invalid JSON (the file ends within it); correct it"),
        ('[{"text": "a"}\n{"text": "b"}]', ":1 (record 1): invalid JSON (no comma after it, on line 2); correct it"),
        ('[{"text": "a"},]', ":1 (record 2): invalid JSON (Expecting value on line 1); correct it"),
        ('[{"text": "a"},', ":1 (record 2): invalid JSON (the file ends within it); correct it"),
        ('[{"text": "a"}', ":1 (record 1): invalid JSON (the file ends before its array); correct it"),
        ('[{"text": "a"}]\n[]', ":2: something follows the array; keep one array in a file"),
        ("[" * 100_000, ":1 (record 1): invalid JSON (maximum recursion depth exceeded"),
        (f"[{'9' * 5000}]", ":1 (record 1): invalid JSON (a number has too many digits)"),
        ('[{"text": "\udcff"}]', ": invalid UTF-8 (invalid start byte) after line 1; save it as UTF-8"),
    ],
)
def test_an_array_that_is_not_valid_json_is_one_line_with_its_place(tmp_path, content, problem):
    file = tmp_path / "a.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError) as refused:
        read(file)
    assert str(refused.value).startswith(f"{file}{problem}")


def test_a_record_of_an_array_that_cannot_be_used_is_left_out_with_its_line_and_number(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"},\n\n7, {"text": "b"}, {"text": ""}, []]')
    documents, bad_lines = read(tmp_path)
    assert documents == ["a", "b"]
    assert [str(example).removeprefix(f"{tmp_path}/") for example in bad_lines.examples] == [
        "a.json:3 (record 2): wrong type (a record is an object, not a number)",
        "a.json:3 (record 4): empty ('text' is blank)",
        "a.json:3 (record 5): wrong type (a record is an object, not a list)",
    ]


def test_a_bad_line_among_lines_of_json_is_left_out_whatever_the_file_is_called(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "a"}\n{"text": "b\n{"text": "c"}\n\n{"text": "d"')
    documents, bad_lines = read(tmp_path)
    assert documents == ["a", "c"]
    assert [str(example).removeprefix(f"{tmp_path}/") for example in bad_lines.examples] == [
        "a.json:2: invalid JSON (Invalid control character on line 2)",
        "a.json:5: invalid JSON (the file ends within it)",
    ]


def test_an_empty_file_holds_nothing(tmp_path):
    for content in ("", " \n", "[]", " [ ]\n"):
        (tmp_path / "a.json").write_text(content)
        assert values_in(tmp_path / "a.json") == []


def test_a_position_grows_with_the_values_and_ends_at_the_files_size(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 1000}] * 5000))
    (file,) = find_files(str(tmp_path)).files
    positions = [record.position for record in json_records(file, FieldNames(), None)]
    assert positions == sorted(positions)
    assert positions[2500] == pytest.approx(file.num_bytes / 2, rel=0.01)
    assert positions[-1] == pytest.approx(file.num_bytes, rel=0.01)


def test_a_number_of_too_many_digits_is_told_without_a_setting_of_python(tmp_path):
    (tmp_path / "a.jsonl").write_text("1" * 5000)
    with pytest.raises(DataError, match=r"invalid JSON \(a number has too many digits\)"):
        read(tmp_path / "a.jsonl", max_bad_lines=0)
