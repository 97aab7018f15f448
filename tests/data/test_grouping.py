from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llama_core.data.files.source_file import SourceFile
from llama_core.data.shards.grouping import ALONE_BYTES, grouped
from llama_core.units import MIB

SMALL = ALONE_BYTES - 1
files = st.dictionaries(st.integers(0, 400), st.integers(0, SMALL), min_size=1, max_size=60)
sizes = st.integers(0, 2 * ALONE_BYTES)


def source(sizes):
    return [SourceFile(Path(f"/data/{number:03}.jsonl"), size, 0, 0) for number, size in sizes.items()]


@given(files, st.randoms())
def test_every_file_is_in_one_group_whatever_order_they_are_given_in(sizes, random):
    given_files = source(sizes)
    random.shuffle(given_files)
    groups = grouped(given_files)
    assert groups == grouped(source(sizes))
    assert sorted(file.path for group in groups for file in group) == sorted(file.path for file in given_files)


@given(files, st.integers(0, 400), st.integers(ALONE_BYTES, 10 * ALONE_BYTES))
def test_a_large_file_is_a_group_of_its_own_and_changes_no_other(sizes, number, num_bytes):
    before = {key: size for key, size in sizes.items() if key != number}
    (large,) = source({number: num_bytes})
    assert grouped([*source(before), large]).count((large,)) == 1
    assert {*grouped([*source(before), large])} - {(large,)} == {*grouped(source(before))}


@given(files, st.integers(0, 400), st.integers(0, SMALL))
def test_a_small_file_changes_one_group_at_most(sizes, number, num_bytes):
    before = {*grouped(source({key: size for key, size in sizes.items() if key != number}))}
    after = {*grouped(source(sizes | {number: num_bytes}))}
    assert len(before - after) <= 1
    assert len(after - before) <= 2


def test_small_files_share_groups_of_some_ten_megabytes():
    groups = grouped(source(dict.fromkeys(range(20_000), MIB)))
    assert 20_000 / 64 * 0.8 < len(groups) < 20_000 / 64 * 1.25


def test_files_that_move_together_keep_their_groups():
    sizes = dict.fromkeys(range(100), 3 * MIB)
    there = [[file.path.name for file in group] for group in grouped(source(sizes))]
    moved = [SourceFile(Path("/other") / file.path.name, file.num_bytes, 1, 1) for file in source(sizes)]
    assert [[file.path.name for file in group] for group in grouped(moved)] == there
