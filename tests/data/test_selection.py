"""Which documents are held out, against the rule written down once more with masks over all documents."""

from itertools import pairwise

import numpy as np
import pytest
from corpora import chosen, memory_cache, memory_shard
from hypothesis import assume, given
from hypothesis import strategies as st

from llama_core.data import selection
from llama_core.data.selection import everything, hold_out_known, hold_out_lowest
from llama_core.errors import DataError

hash_lists = st.lists(
    st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 5, 2**63, 2**64 - 1])), min_size=1, max_size=12
)
sources = st.lists(hash_lists, min_size=1, max_size=4)
fractions = st.one_of(st.floats(0, 0.99), st.floats(1e-18, 1e-6))


def cache_of(shards):
    """A cache of shards with documents of these hashes, of one token to four each."""
    return memory_cache([memory_shard([1 + one % 4 for one in sorted(hashes)], sorted(hashes)) for hashes in shards])


def hashes_in(chosen):
    return sorted(
        one
        for part in chosen.parts
        for span in part.spans
        for one in part.shard.text_hashes[span.first : span.last].tolist()
    )


def lowest(hashes, fraction):
    """The rule: the documents below the fraction, or else the lowest of several texts."""
    mask = hashes < np.uint64(fraction * 2.0**64)
    if fraction > 0 and not mask.any() and hashes.min() < hashes.max():
        mask = hashes == hashes.min()
    return mask


@given(st.dictionaries(st.sampled_from("abc"), sources, min_size=1), fractions)
def test_the_lowest_hashes_of_each_source_are_held_out_of_all(mixed, fraction):
    splits = hold_out_lowest({name: cache_of(shards) for name, shards in mixed.items()}, fraction)
    hashes = {name: np.array([one for shard in shards for one in shard], np.uint64) for name, shards in mixed.items()}
    known = np.concatenate([own[lowest(own, fraction)] for own in hashes.values()])
    for name, own in hashes.items():
        mask = np.isin(own, known)
        assert hashes_in(splits[name].held_out) == sorted(own[mask].tolist())
        assert hashes_in(splits[name].train) == sorted(own[~mask].tolist())


@given(sources, hash_lists, st.data())
def test_documents_that_others_hold_too_are_held_out(shards, others, data):
    own = [one for shard in shards for one in shard]
    others = others + data.draw(st.lists(st.sampled_from(own)))
    split = hold_out_known({"": cache_of(shards)}, [cache_of([others[::2]]), cache_of([others[1::2]])])[""]
    assert hashes_in(split.held_out) == sorted(one for one in own if one in others)
    assert hashes_in(split.train) == sorted(one for one in own if one not in others)


@given(sources, hash_lists, st.floats(0, 0.99))
def test_a_document_stays_on_its_side_when_others_are_added(shards, more, fraction):
    before = hold_out_lowest({"": cache_of(shards)}, fraction)[""]
    assume(any(one < fraction * 2.0**64 for shard in shards for one in shard))
    after = hold_out_lowest({"": cache_of([*shards, more])}, fraction)[""]
    assert {*hashes_in(before.held_out)} <= {*hashes_in(after.held_out)}
    assert {*hashes_in(before.train)} <= {*hashes_in(after.train)}


@given(sources, fractions)
def test_the_counts_and_tokens_of_both_sides_are_those_of_all(shards, fraction):
    cache = cache_of(shards)
    split = hold_out_lowest({"": cache}, fraction)[""]
    assert split.train.num_documents + split.held_out.num_documents == cache.num_documents
    assert split.train.num_tokens + split.held_out.num_tokens == cache.num_tokens


@given(sources, st.data())
def test_a_part_is_the_stream_of_its_documents(shards, data):
    cache = cache_of(shards)
    taken = sorted(data.draw(st.sets(st.sampled_from(range(cache.num_documents)), min_size=1)))
    for part in chosen(cache, taken).parts:
        documents = [
            range(*part.shard.offsets[number : number + 2]) for span in part.spans for number in range(*span[:2])
        ]
        stream = [token for document in documents for token in document]
        begins = np.cumsum([0, *map(len, documents)])[:-1].tolist()
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(stream))] * 2)))
        assert part.tokens(begin, end).tolist() == stream[begin:end]
        assert part.firsts(begin, end).tolist() == [first for first in begins if begin < first < end]


@pytest.fixture
def kept(tmp_path):
    """A cache with a folder, whose second shard is all in one place of the hashes."""
    shards = [memory_shard([2] * 10, range(0, 2**64, 2**64 // 10 + 1)), memory_shard([3] * 10, range(50, 60))]
    cache = memory_cache(shards)
    object.__setattr__(cache, "directory", tmp_path)
    return cache


def test_shards_are_looked_into_once(kept, monkeypatch):
    first = hold_out_lowest({"": kept}, 0.3)[""]
    monkeypatch.delattr(selection, "_held_out_of")
    second = hold_out_lowest({"": kept}, 0.3)[""]
    for one, other in pairwise((first, second)):
        assert one.train.digest == other.train.digest
        assert one.held_out.digest == other.held_out.digest


@pytest.mark.parametrize("content", ["", "{}", '{"schema_version": 1, "spans": [[[0, 9, 4, 2]], []]}'])
def test_a_damaged_split_is_made_again(kept, content):
    expected = hold_out_lowest({"": kept}, 0.3)[""]
    (file,) = kept.directory.glob("split-*.json")
    file.write_text(content)
    assert hold_out_lowest({"": kept}, 0.3)[""].train.digest == expected.train.digest
    assert file.read_text() != content


def test_another_fraction_or_other_documents_are_another_digest(kept):
    digests = {hold_out_lowest({"": kept}, fraction)[""].train.digest for fraction in (0, 0.3, 0.7)}
    assert len({*digests, everything(kept).digest}) == 3, "nothing is held out of the first"


def test_offsets_that_do_not_ascend_are_one_line():
    shard = memory_shard([2, 2, 2], [1, 2, 2**63])
    shard.arrays["offsets.bin"][2] = 700
    with pytest.raises(DataError, match=r"is damaged .*do not ascend.*; start again"):
        hold_out_lowest({"": memory_cache([shard])}, 0.3)
