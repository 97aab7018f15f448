from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from corpora import byte_cache, texts_in, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig, RunConfig
from llama_core.config.settings import MIN_SHARE
from llama_core.data.check import check_data
from llama_core.data.datasets import BatchStream, load_datasets
from llama_core.data.mixture import Blend, Mixture, shuffled
from llama_core.data.packing import PackedDataset
from llama_core.data.selection import everything
from llama_core.errors import DataError

SEQ_LEN = 6
keys = st.integers(0, 2**64 - 1)
seeds = st.integers(0, 2**63 - 1)
weights = st.lists(st.floats(0.001, 100), min_size=1, max_size=6)
few_weights = st.lists(st.integers(1, 50), min_size=1, max_size=4)


def dataset(num_rows, first_byte="a"):
    """Return rows that are all different: each begins with another byte."""
    texts = [chr(ord(first_byte) + row) * (SEQ_LEN - 2) for row in range(num_rows)]
    return PackedDataset(everything(byte_cache(texts)), SEQ_LEN)


def mixture(sizes, shares, dataset_of=dataset):
    names = [f"source-{number}" for number in range(len(sizes))]
    return Mixture(
        {name: dataset_of(size) for name, size in zip(names, sizes, strict=True)},
        dict(zip(names, shares, strict=True)),
    )


def takes(length, key):
    return shuffled(np.arange(length), length, np.full(length, key, np.uint64))


@given(length=st.integers(1, 300), key=keys)
def test_every_length_has_a_permutation_of_its_own(length, key):
    assert sorted(takes(length, key).tolist()) == list(range(length))


@given(length=st.integers(1, 2**40), key=keys, data=st.data())
def test_a_permutation_takes_each_place_alone_as_among_others(length, key, data):
    places = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5, unique=True)))
    together = shuffled(places, length, np.full(len(places), key, np.uint64))
    alone = [
        int(shuffled(places[index : index + 1], length, np.array([key], np.uint64))[0]) for index in range(len(places))
    ]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)
    assert 0 <= min(alone) <= max(alone) < length


@pytest.mark.parametrize("length", [2, 3, 4])
def test_every_permutation_of_a_few_rows_occurs_about_as_often(length):
    num_keys = 1000 * length
    counts = Counter(tuple(takes(length, key).tolist()) for key in range(num_keys))
    expected = num_keys / np.prod(np.arange(1, length + 1))
    assert len(counts) == np.prod(np.arange(1, length + 1))
    assert all(abs(count - expected) < 0.5 * expected for count in counts.values())


def test_neighbouring_rows_end_up_apart():
    length = 10_000
    distances = np.abs(np.diff(takes(length, 1)))
    assert abs(distances.mean() - length / 3) < length / 30  # the mean distance of two numbers drawn at random


@given(shares=weights, num_blocks=st.integers(0, 2**25))
def test_after_whole_blocks_every_source_has_had_its_share_to_less_than_a_row(shares, num_blocks):
    blend = Blend.of(shares)
    num_rows = num_blocks * blend.block
    counts = blend.counts(num_rows)
    assert sum(counts) == num_rows
    for weight, count in zip(shares, counts, strict=True):
        exact = num_rows * Fraction(weight) / sum(map(Fraction, shares))
        assert abs(count - exact) < 1 + Fraction(num_rows, 2**40)  # a share is a multiple of 2**-40


@given(shares=weights, num_rows=st.integers(0, 5000))
def test_within_a_block_every_source_is_near_its_share_at_any_row(shares, num_rows):
    counts = Blend.of(shares).counts(num_rows)
    assert sum(counts) == num_rows
    for weight, count in zip(shares, counts, strict=True):
        assert abs(count - num_rows * weight / sum(shares)) < (len(shares) + 3) / 2


@given(shares=weights, first=st.integers(0, 2**32))
def test_the_rows_of_a_source_are_numbered_without_a_gap(shares, first):
    blend = Blend.of(shares)
    rows = np.arange(first, first + 3000)
    sources, numbers = blend.places(rows)
    for source, begin in enumerate(blend.counts(first)):
        own = numbers[sources == source]
        assert own.tolist() == list(range(begin, begin + len(own)))
    assert np.bincount(sources, minlength=len(shares)).tolist() == [
        after - before for before, after in zip(blend.counts(first), blend.counts(first + 3000), strict=True)
    ]


def test_a_source_with_the_least_share_never_goes_back_a_row():
    blend = Blend.of([1 - MIN_SHARE, MIN_SHARE])
    counts = [blend.counts(block * blend.block)[1] for block in range(50)]
    assert counts == list(range(50))


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=seeds, data=st.data())
def test_no_row_comes_twice_in_an_epoch_of_its_source(sizes, seed, data):
    shares = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    rows = mixture(sizes, shares)
    read = rows.order(seed)(np.arange(500)).tolist()
    begin = 0
    for size in sizes:
        own = [row for row in read if begin <= row < begin + size]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(begin, begin + size))
        begin += size


@given(shares=few_weights, seed=seeds, first=st.integers(0, 2**33))
def test_any_row_can_be_asked_for_alone(shares, seed, first):
    order = mixture([7] * len(shares), shares).order(seed)
    together = order(np.arange(first, first + 20)).tolist()
    assert [int(order(np.array([first + place]))[0]) for place in range(20)] == together


@given(shares=few_weights, seed=seeds, ranks=st.sampled_from([1, 2, 3, 6]))
def test_any_number_of_ranks_reads_the_same_rows(shares, seed, ranks):
    rows = mixture([5] * len(shares), shares)
    alone = BatchStream(rows, 6, seed)
    streams = [BatchStream(rows, 6, seed, rank, ranks) for rank in range(ranks)]
    for _ in range(3):
        parts = [stream.next_batch().tokens_BS for stream in streams]
        assert torch.equal(torch.cat(parts), alone.next_batch().tokens_BS)


def test_every_row_of_every_source_is_found():
    parts = {"b": dataset(3, "x"), "a": dataset(2)}
    rows = Mixture(parts, {"a": 1, "b": 1})
    found = [rows.row(index)[0].tolist() for index in range(len(rows))]
    expected = [parts[name].row(index)[0].tolist() for name in ("a", "b") for index in range(len(parts[name]))]
    assert found == expected


def test_epochs_and_seeds_have_orders_of_their_own():
    rows = mixture([50], [1])
    first, second = rows.order(0)(np.arange(100)).reshape(2, 50).tolist()
    other = rows.order(1)(np.arange(50)).tolist()
    assert first != second
    assert first != other


def test_a_source_keeps_its_order_whatever_it_is_mixed_with():
    alone = Mixture({"a": dataset(30)}, {"a": 1}).order(3)(np.arange(60))
    mixed = Mixture({"a": dataset(30), "b": dataset(8)}, {"a": 2, "b": 1}).order(3)(np.arange(90))
    assert mixed[mixed < 30].tolist() == alone.tolist()


@pytest.mark.parametrize("other", [mixture([5, 5], [3, 1]), mixture([5, 6], [2, 1])], ids=["weights", "documents"])
def test_another_mixture_refuses_the_position(other):
    state = BatchStream(mixture([5, 5], [2, 1]), 4, 0).state_dict()
    with pytest.raises(DataError, match="the checkpoint was made on other data"):
        BatchStream(other, 4, 0).load_state_dict(state)


def test_weights_count_by_their_ratios():
    assert Blend.of([60, 30, 10]) == Blend.of([6, 3, 1])
    assert mixture([5, 5], [1, 2]).digest == mixture([5, 5], [10, 20]).digest


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=3), num_rows=st.integers(0, 300))
def test_the_rows_read_of_a_source_are_those_that_its_order_gives(sizes, num_rows):
    rows = mixture(sizes, range(1, len(sizes) + 1))
    read = rows.order(0)(np.arange(num_rows))
    begin = 0
    for size, count in zip(sizes, rows.rows_read(num_rows).values(), strict=True):
        assert count == np.count_nonzero((begin <= read) & (read < begin + size))
        begin += size


def documents(word, count=60):
    return [f"{word} number {number}, of its own words" for number in range(count)]


WIKI = documents("wiki")
CODE = documents("code")


def config(folder, *, wiki=WIKI, code=CODE, limits=None, **settings):
    """Return the data of a mixture of wiki and code, three to one, with some ``max_epochs``."""
    write_jsonl(folder / "wiki.jsonl", wiki)
    write_jsonl(folder / "code.jsonl", code)
    weights = {"wiki": 3.0, "code": 1.0}
    sources = {
        name: {"path": str(folder / f"{name}.jsonl"), "weight": weight, "max_epochs": (limits or {}).get(name)}
        for name, weight in weights.items()
    }
    return DataConfig.model_validate({"sources": sources, "cache_dir": str(folder / "cache")} | settings)


def load(data, **settings):
    return load_datasets(data, model_spec("tiny_llama3_50m"), seq_len=16, **settings)


def texts_of(rows):
    return set(texts_in(rows.selection))


def test_a_part_of_every_source_is_held_out_under_its_name(tmp_path):
    datasets = load(config(tmp_path, validation_fraction=0.2))
    assert set(datasets.validation) == {"wiki", "code"}
    trained = dict(zip(datasets.train.names, map(texts_of, datasets.train.sources), strict=True))
    for name, rows in datasets.validation.items():
        assert texts_of(rows)
        assert all(text.startswith(name) for text in texts_of(rows) | trained[name])
        assert not texts_of(rows) & trained[name]


def test_a_text_of_two_sources_is_not_held_out_of_one_and_trained_on_in_the_other(tmp_path):
    two = ["the first of two", "the second of two"]  # one of them is held out, by chance or as the only one
    datasets = load(config(tmp_path, code=two * 5, wiki=documents("wiki") + two, validation_fraction=0.001))
    held_out = set.union(*map(texts_of, datasets.validation.values()))
    assert held_out
    assert not held_out & set.union(*map(texts_of, datasets.train.sources))


def test_documents_held_out_by_name_are_left_out_of_every_source(tmp_path):
    path = write_jsonl(tmp_path / "held.jsonl", [documents("wiki")[3], documents("code")[4]])
    datasets = load(config(tmp_path, validation={"both": str(path)}))
    assert list(datasets.validation) == ["both"]
    assert datasets.statistics.num_shared_documents == 2
    assert not texts_of(datasets.validation["both"]) & set.union(*map(texts_of, datasets.train.sources))


def test_the_statistics_of_the_sources_add_up(tmp_path):
    statistics = load(config(tmp_path, validation_fraction=0.2), num_sequences=100).statistics
    for what in ("num_documents", "num_tokens", "num_sequences", "num_validation_documents", "num_validation_tokens"):
        assert sum(getattr(source, what) for source in statistics.sources) == getattr(statistics, what)
    assert {source.name: source.share for source in statistics.sources} == {"code": 0.25, "wiki": 0.75}
    assert statistics.entropies is None
    assert "mixture: code 25 % (" in statistics.summary()


def test_a_source_read_more_often_than_its_limit_is_refused_with_the_epochs_it_would_take(tmp_path):
    data = config(tmp_path, limits={"code": 2})
    (code,) = (source for source in load(data).statistics.sources if source.name == "code")
    load(data, num_sequences=8 * code.num_sequences)
    num_sequences = 12 * code.num_sequences
    expected = (
        rf"data\.sources\.code\.max_epochs=2: 25 % of the run's {num_sequences:,} sequences are 3(\.\d+)? epochs of "
        rf"the {code.num_sequences:,} that it makes; lower its weight or training\.steps, add text to it, or raise"
    )
    with pytest.raises(DataError, match=expected):
        load(data, num_sequences=num_sequences)


def test_the_epochs_of_all_stages_count(tmp_path):
    (code,) = (source for source in load(config(tmp_path)).statistics.sources if source.name == "code")
    few, many = (
        RunConfig.from_mapping(
            {
                "data": config(
                    tmp_path, limits={"code": 2}, stages=[{"from_tokens": 1600, "weights": {"code": weight}}]
                ).model_dump(),
                "training": {"steps": 20 + 3 * code.num_sequences, "batch_size": 5, "seq_len": 16},
            }
        )
        for weight in (0, 30)
    )
    statistics = load(few.data, num_sequences=few.num_sequences, stages=few.stages).statistics
    assert "; after step 20 (1.60K tokens): wiki 100 %" in statistics.summary()
    (code,) = (source for source in statistics.sources if source.name == "code")
    assert code.epochs == 25 / code.num_sequences
    with pytest.raises(DataError, match=r"data\.sources\.code\.max_epochs=2: \d+(\.\d)? % of the run's"):
        load(many.data, num_sequences=many.num_sequences, stages=many.stages)


def test_only_a_source_that_is_read_in_long_sequences_has_to_fill_one(tmp_path):
    def staged(weight):
        stages = [{"from_tokens": 512, "weights": {"code": weight}, "seq_len": 512}]
        data = config(tmp_path, code=documents("code", 5), stages=stages).model_dump()
        return RunConfig.from_mapping({"data": data, "training": {"steps": 3, "batch_size": 32, "seq_len": 16}})

    without, with_code = map(staged, (0, 1))
    datasets = load(without.data, num_sequences=without.num_sequences, stages=without.stages)
    assert datasets.train.names == ("code", "wiki", "wiki@512")
    assert datasets.statistics.num_sequences == sum(source.num_sequences for source in datasets.statistics.sources)
    with pytest.raises(
        DataError, match=r"code\.jsonl' leaves \d+ tokens in 4 documents .*\(in sequences of 512 tokens"
    ):
        load(with_code.data, num_sequences=with_code.num_sequences, stages=with_code.stages)


def test_a_stage_that_is_moved_or_not_reached_is_said(tmp_path):
    stages = [{"from_tokens": tokens, "weights": {"code": 3}} for tokens in (100, 4000)]
    run = RunConfig.from_mapping(
        {
            "data": config(tmp_path, stages=stages).model_dump(),
            "training": {"steps": 10, "batch_size": 5, "seq_len": 16},
        }
    )
    notes = load(run.data, num_sequences=run.num_sequences, stages=run.stages).statistics.notes
    assert "data.stages: from_tokens=100 is within step 2; stage 2 begins after that step, at 160 tokens" in notes
    assert "the run ends before stage 3, which begins after step 50" in notes


def test_a_source_of_less_than_a_row_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"code\.jsonl' leaves 3 tokens in 1 documents to train on"):
        load(config(tmp_path, code=["a"]))


def test_a_check_reads_the_first_records_of_every_source(tmp_path):
    check = check_data(config(tmp_path), model_spec("tiny_llama3_50m"))
    assert "code: the first records of" in check.summary
    assert "wiki: the first records of" in check.summary
    assert check.num_tokens == load(config(tmp_path, validation_fraction=0.0)).statistics.num_tokens
