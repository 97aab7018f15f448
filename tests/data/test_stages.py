"""Stages of a mixture, and runs that go on with other data: where each source is read, by laws."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from corpora import byte_cache
from distributed import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from parity import UNTIED, native_engine
from tiers import cases

from llama_core.config.run import RunConfig
from llama_core.config.stages import TrainingStage, part_name
from llama_core.data.datasets import BatchStream
from llama_core.data.mixture import Blend, Mixture, StagedBlend
from llama_core.data.packing import PackedDataset
from llama_core.data.selection import everything
from llama_core.errors import ConfigError, DataError
from llama_core.parallel.ranks import own_rank
from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import train_step

SEQ_LEN = 6
BATCH_SIZE = 4
THREE_DOMAINS = {"wiki": 60, "code": 30, "math": 10}


def dataset(num_rows, first_byte="a"):
    """Return rows that are all different: each begins with another byte."""
    texts = [chr(ord(first_byte) + row) * (SEQ_LEN - 2) for row in range(num_rows)]
    return PackedDataset(everything(byte_cache(texts)), SEQ_LEN)


def stage(first_row, **weights):
    return TrainingStage(2, 0, 0, first_row // BATCH_SIZE, first_row, weights, BATCH_SIZE)


def mixture(sizes, weights, *stages):
    return Mixture({name: dataset(size) for name, size in sizes.items()}, weights, stages)


def rows_of(stream, num_batches, rows):
    """Return the rows that a stream reads next, by source, as numbers within the source."""
    places = np.arange(stream.rows_consumed, stream.rows_consumed + num_batches * stream.batch_size)
    read = stream._order(places)
    for _ in range(num_batches):
        stream.next_batch()
    return by_source(read, rows)


def by_source(read, rows):
    begins = dict(zip(rows.names, [0, *rows.ends], strict=False))
    return {
        name: [row - begins[name] for row in read.tolist() if begins[name] <= row < begins[name] + rows.lengths[name]]
        for name in rows.names
    }


def in_its_own_order(name, size, number, seed=0):
    """Return the first rows of a source that is read alone."""
    return Mixture({name: dataset(size)}, {name: 1}).order(seed)(np.arange(number)).tolist()


def joined(*parts):
    return {name: [row for part in parts for row in part.get(name, [])] for part in parts for name in part}


@st.composite
def staged(draw):
    num_sources = draw(st.integers(1, 4))
    shares = st.lists(st.integers(0, 20), min_size=num_sources, max_size=num_sources).filter(any)
    lengths = draw(st.lists(st.integers(1, 5000), min_size=0, max_size=3))
    first_rows = tuple(np.cumsum([0, *lengths]).tolist())
    weights = [draw(shares) for _ in first_rows]
    blend = StagedBlend(first_rows, tuple(map(Blend.of, weights)), (0,) * num_sources)
    return blend, weights


@given(staged(), st.integers(0, 2**20))
def test_within_a_stage_every_source_has_its_share_after_whole_blocks(case, num_blocks):
    blend, weights = case
    begin = blend.first_rows[-1]
    num_rows = num_blocks * blend.blends[-1].block
    for weight, before, after in zip(weights[-1], blend.counts(begin), blend.counts(begin + num_rows), strict=True):
        exact = num_rows * Fraction(weight, sum(weights[-1]))
        assert abs(after - before - exact) < 1 + Fraction(num_rows, 2**40)


@given(staged(), st.integers(0, 12_000))
def test_at_any_row_every_source_is_near_the_sum_of_its_shares_in_the_stages_so_far(case, row):
    blend, weights = case
    ends = [*blend.first_rows[1:], max(row, blend.first_rows[-1])]
    counts = blend.counts(row)
    assert sum(counts) == row
    for source, count in enumerate(counts):
        exact = 0
        for begin, end, shares in zip(blend.first_rows, ends, weights, strict=True):
            exact += max(0, min(row, end) - begin) * shares[source] / sum(shares)
        assert abs(count - exact) < len(weights) * (len(counts) + 3) / 2


@given(staged(), st.integers(0, 12_000))
def test_the_rows_of_a_source_are_numbered_without_a_gap_over_the_stages(case, first):
    blend, _ = case
    sources, numbers = blend.places(np.arange(first, first + 3000))
    for source, begin in enumerate(blend.counts(first)):
        own = numbers[sources == source]
        assert own.tolist() == list(range(begin, begin + len(own)))


@given(st.data(), st.integers(0, 2**40))
def test_a_source_goes_on_in_its_own_order_over_the_stages(data, seed):
    sizes = {"a": 9, "b": 5}
    draw = st.fixed_dictionaries({name: st.integers(0, 5) for name in sizes}).filter(lambda one: any(one.values()))
    rows = mixture(sizes, data.draw(draw), stage(40, **data.draw(draw)), stage(100, **data.draw(draw)))
    read = by_source(rows.order(seed)(np.arange(200)), rows)
    for name, size in sizes.items():
        assert read[name] == in_its_own_order(name, size, len(read[name]), seed)


def test_a_source_that_a_stage_brings_in_is_not_read_before_and_begins_with_its_first_row():
    rows = mixture({"a": 9, "b": 9}, {"a": 1, "b": 0}, stage(40, a=0, b=1))
    order = rows.order(0)
    assert not by_source(order(np.arange(40)), rows)["b"]
    later = by_source(order(np.arange(40, 50)), rows)
    assert not later["a"]
    assert later["b"] == in_its_own_order("b", 9, 10)


@given(num_batches=st.integers(0, 30), ranks=st.sampled_from([1, 2, 4]))
def test_a_position_is_the_same_under_any_number_of_ranks_over_the_stages(num_batches, ranks):
    rows = mixture({"a": 7, "b": 4}, {"a": 3, "b": 1}, stage(48, a=1, b=3))
    alone = BatchStream(rows, BATCH_SIZE, 0)
    for _ in range(num_batches):
        alone.next_batch()
    streams = [BatchStream(rows, BATCH_SIZE, 0, rank, ranks) for rank in range(ranks)]
    for stream in streams:
        stream.load_state_dict(alone.state_dict())
        assert stream.state_dict() == alone.state_dict()
    together = torch.cat([stream.next_batch().tokens_BS for stream in streams])
    assert torch.equal(together, alone.next_batch().tokens_BS)


def followed(stream, rows, batch_size=BATCH_SIZE):
    """Return a stream of other data at the position of one."""
    state = stream.state_dict()
    other = BatchStream(rows, batch_size, 0, may_follow=[state["dataset"]])
    other.load_state_dict(state)
    return other


def resumed(stream, rows):
    """Return a stream of the same data at the position of one."""
    other = BatchStream(rows, BATCH_SIZE, 0)
    other.load_state_dict(stream.state_dict())
    return other


@given(batches=st.tuples(*[st.integers(0, 40)] * 4), shares=st.tuples(*[st.integers(1, 9)] * 5))
def test_with_other_weights_and_one_more_source_each_source_goes_on_where_it_was(batches, shares):
    first = mixture({"a": 9, "b": 5}, {"a": shares[0], "b": shares[1]})
    other = mixture({"a": 9, "b": 5, "c": 4}, {"a": shares[2], "b": shares[3], "c": shares[4]})
    before = BatchStream(first, BATCH_SIZE, 0)
    read = [rows_of(before, batches[0], first)]
    after = followed(before, other)
    read.append(rows_of(after, batches[1], other))
    after = resumed(after, other)  # a checkpoint that was made since the change
    read.append(rows_of(after, batches[2], other))
    again = followed(after, first)
    read.append(rows_of(again, batches[3], first))
    in_all = joined(*read)
    for name, size in {"a": 9, "b": 5, "c": 4}.items():
        assert in_all[name] == in_its_own_order(name, size, len(in_all[name]))
    assert sum(map(len, in_all.values())) == sum(batches) * BATCH_SIZE


@given(num_batches=st.integers(1, 50))
def test_stages_after_a_change_begin_where_the_configuration_says(num_batches):
    first = mixture({"a": 9, "b": 5}, {"a": 1, "b": 1})
    other = mixture({"a": 9, "b": 5}, {"a": 1, "b": 0}, stage(80, a=0, b=1))
    stream = BatchStream(first, BATCH_SIZE, 0)
    rows_of(stream, num_batches, first)
    read = rows_of(followed(stream, other), 60, other)
    left = max(0, 80 - BATCH_SIZE * num_batches)
    assert (len(read["a"]), len(read["b"])) == (left, 60 * BATCH_SIZE - left)


def test_a_change_says_what_becomes_of_each_source():
    first = mixture({"a": 9, "b": 5, "gone": 3}, {"a": 2, "b": 1, "gone": 1})
    stream = BatchStream(first, BATCH_SIZE, 0)
    read = rows_of(stream, 10, first)
    other = Mixture({"a": dataset(9), "b": dataset(6, "x"), "c": dataset(4)}, {"a": 1, "b": 1, "c": 1})
    after = followed(stream, other)
    assert after.change.kept == {"a": len(read["a"])}
    assert str(replace(after.change, step=10)) == (
        f"the data changed after step 10: a goes on after {len(read['a'])} sequences; c is new; b begins anew, because "
        "its documents are others; gone is no longer read"
    )
    assert rows_of(after, 1, other)["b"][0] == in_its_own_order("b", 6, 1)[0]


def test_other_data_are_refused_with_the_flag_that_allows_them():
    state = BatchStream(mixture({"a": 9, "b": 5}, {"a": 1, "b": 1}), BATCH_SIZE, 0).state_dict()
    other = BatchStream(mixture({"a": 9, "b": 5}, {"a": 2, "b": 1}), BATCH_SIZE, 0, may_follow=["other data"])
    with pytest.raises(DataError, match="--resume --allow-data-change"):
        other.load_state_dict(state)


def three_domains(seq_len):
    texts = {"wiki": 90, "code": 50, "math": 40}
    caches = {name: byte_cache([f"{name} {number} " * 4 for number in range(size)]) for name, size in texts.items()}
    return {name: PackedDataset(everything(cache), seq_len) for name, cache in caches.items()}


def longer(rows, seq_len):
    return {part_name(name, seq_len): part for name, part in rows.items()}


def losses_under(plan):
    """Return the losses of a rank that trains on three domains: first 60/30/10, then 10/30/60, then in longer rows.

    A microbatch of the plan has rows of the last stage; one of the first two stages has twice as many.
    """
    rows = three_domains(16) | longer(three_domains(32), 32)
    later = {"wiki": 10, "code": 30, "math": 60}
    stages = [TrainingStage(2, 0, 0, 3, 24, later, 8), TrainingStage(3, 0, 0, 6, 48, later, 4, other_len=32)]
    stream = BatchStream(Mixture(rows, THREE_DOMAINS, stages), 8, 0, plan.dp_rank(own_rank()), plan.dp)
    spec = replace(UNTIED, num_layers=2, vocab_size=512)
    engine = native_engine(plan, spec, torch.float64, weight_dtype=torch.float64)
    losses = []
    for step in range(9):
        batch = stream.next_batch()
        assert batch.tokens_BS.shape[1] == (16 if step < 6 else 32)
        microbatches = batch.split(plan.rows_per_forward * 32 // batch.tokens_BS.shape[1])
        losses.append(float(train_step(engine, microbatches, learning_rate=1e-3, max_grad_norm=1.0).loss))
    return losses


PLANS = {
    "dp 4": ParallelPlan(dp_replicate=4),
    "tp 2 x dp 2": ParallelPlan(tp=2, dp_replicate=2, num_microbatches=2),
    "pp 2 x cp 2": ParallelPlan(pp=2, cp=2, num_microbatches=4),
}


@pytest.mark.wide
@pytest.mark.parametrize("plan", cases(PLANS, narrow={"tp 2 x dp 2"}))
def test_three_domains_in_three_stages_have_the_same_losses_on_one_rank_and_on_four(plan):
    alone = losses_under(ParallelPlan(num_microbatches=4))
    assert len(set(alone)) == len(alone)
    for losses in run_ranks(4, losses_under, plan):
        assert losses == pytest.approx(alone, rel=1e-10)


DATA = {"sources": {"wiki": {"path": "wiki", "weight": 60}, "code": {"path": "code", "weight": 40}}}


def config(*stages, **data):
    training = {"steps": 100, "batch_size": 4, "seq_len": 256}
    return RunConfig.from_mapping({"data": DATA | {"stages": list(stages)} | data, "training": training})


def test_a_stage_begins_after_the_step_that_its_tokens_are_in():
    exact, within = config(
        {"from_tokens": 1024 * 10, "weights": {"code": 60}}, {"from_tokens": 20_000.0, "weights": {"wiki": 0}}
    ).stages
    assert (exact.num_steps, exact.first_row, exact.rounding) == (10, 40, "")
    assert exact.weights == {"wiki": 60, "code": 60}
    assert (within.num_steps, within.first_row) == (20, 80)
    assert within.rounding == (
        "data.stages: from_tokens=20,000 is within step 20; stage 3 begins after that step, at 20,480 tokens"
    )
    assert str(within) == "after step 20 (20.48K tokens): code 100 %"


def test_the_longest_sequences_are_what_a_plan_divides_and_a_step_keeps_its_tokens():
    longer = config({"from_tokens": 10_240, "seq_len": 1024}, {"from_tokens": 20_480, "weights": {"code": 1}})
    assert (longer.first_batch_size, longer.first_seq_len) == (4, 256)
    assert (longer.batch_size, longer.seq_len) == (1, 1024)
    first, second = longer.stages
    assert (first.first_row, first.batch_size, first.other_len) == (40, 1, 1024)
    assert (second.first_row, second.batch_size, second.other_len) == (50, 4, None)
    assert longer.num_sequences == 50 + 80 * 4
    assert str(first) == "after step 10 (10.24K tokens): sequences of 1,024 tokens, code 40 %, wiki 60 %"


def test_the_default_batch_is_whole_passes_of_the_longest_sequences():
    data = DATA | {"stages": [{"from_tokens": 9, "seq_len": 1024}]}
    parallel = {"gpus": 2, "tp": 1, "pp": 1, "cp": 1, "microbatch_size": 3}
    training = {"steps": 10, "seq_len": 256}
    run = RunConfig.from_mapping({"data": data, "training": training, "parallel": parallel})
    assert (run.first_batch_size, run.batch_size) == (24, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["training.batch_size=6", "data.stages=[{from_tokens: 9, seq_len: 512}, {from_tokens: 9000, seq_len: 768}]"],
         "sequences of 512 tokens and of 768 cannot fill the same forwards; the longest must be a multiple of every"),
        (["data.stages=[{from_tokens: 9, seq_len: 512}]", "parallel.zero_backend=deepspeed"],
         "DeepSpeed is told the size of a microbatch once; use parallel.zero_backend=native"),
        (["data.stages=[{from_tokens: 9, seq_len: 1024}]", "parallel.gpus=2", "parallel.tp=1", "parallel.pp=1",
          "parallel.cp=1", "launch.device=cpu"],
         "training.batch_size=4 makes 1 of the longest sequences, which is not a multiple of 2 ("),
    ],
)  # fmt: skip
def test_lengths_that_do_not_divide_a_step_are_reported_in_one_line(changes, message):
    with pytest.raises(ConfigError) as refused:
        config().with_overrides(*changes)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rows_of_another_length_have_epochs_of_their_own():
    rows = three_domains(16) | longer(three_domains(32), 32)
    stages = [TrainingStage(2, 0, 0, 10, 80, THREE_DOMAINS, 4, 32), TrainingStage(3, 0, 0, 30, 160, THREE_DOMAINS, 8)]
    together = Mixture(rows, THREE_DOMAINS, stages)
    read = by_source(together.order(0)(np.arange(400)), together)
    for name, part in rows.items():
        alone = Mixture({name: part}, {name: 1}).order(0)(np.arange(len(read[name])))
        assert read[name] == alone.tolist()
    assert sum(len(read[part_name(name, 32)]) for name in THREE_DOMAINS) == 80


def test_a_change_of_lengths_goes_on_after_the_same_tokens():
    rows = three_domains(16)
    before = BatchStream(Mixture(rows, THREE_DOMAINS), 8, 0)
    for _ in range(10):
        before.next_batch()
    stages = [TrainingStage(2, 0, 0, 5, 40, THREE_DOMAINS, 4, 32), TrainingStage(3, 0, 0, 12, 68, THREE_DOMAINS, 8)]
    after = followed(before, Mixture(rows | longer(three_domains(32), 32), THREE_DOMAINS, stages), batch_size=8)
    assert after.change.kept == before._order.rows_read(80)
    shapes = [tuple(after.next_batch().tokens_BS.shape) for _ in range(3)]
    assert shapes == [(4, 32), (4, 32), (8, 16)]


def test_stages_are_part_of_what_a_run_trains():
    staged = config({"from_tokens": 1024, "weights": {"code": 60}})
    assert staged.fingerprint() != config().fingerprint()
    assert RunConfig.from_mapping(staged.model_dump()) == staged


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"from_tokens": 9, "weights": {"cod": 1}}], "data.stages.0.weights.cod=1.0: cod is not one of code, wiki"),
        ([{"from_tokens": 9, "weights": {"code": 0, "wiki": 0}}], "all weights are 0 (code, wiki); raise one of them"),
        ([{"from_tokens": 9, "weights": {"code": 1e-9}}], "data.stages.0.weights.code=1e-09 is less than a millionth"),
        ([{"from_tokens": 9, "weights": {"code": -1}}], "data.stages.0.weights.code=-1"),
        ([{"from_tokens": 9}], "data.stages.0.from_tokens=9 is a stage with neither weights nor seq_len"),
        ([{"from_tokens": 9, "seq_len": 768}], "data.stages.0.seq_len=768 does not divide the 1,024 tokens of a step"),
        ([{"from_tokens": 9, "seq_len": 2**20}], "data.stages.0.seq_len=1048576 is above the context of tiny_llama3"),
        ([{"from_tokens": 0, "weights": {"code": 1}}], "data.stages.0.from_tokens=0"),
        (
            [{"from_tokens": 9000, "weights": {"code": 1}}, {"from_tokens": 8000, "weights": {"code": 2}}],
            "data.stages.1.from_tokens=8000 is not above that of the stage before it (9,000)",
        ),
        (
            [{"from_tokens": 100, "weights": {"code": 1}}, {"from_tokens": 1024, "weights": {"code": 2}}],
            "data.stages.1.from_tokens=1024: this stage and the one before it both begin after step 1; leave one out",
        ),
    ],
)
def test_a_wrong_stage_is_reported_in_one_line(stages, message):
    with pytest.raises(ConfigError) as refused:
        config(*stages)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_stages_need_a_mixture():
    with pytest.raises(ConfigError, match=r"data\.stages needs a mixture"):
        config({"from_tokens": 9, "weights": {"code": 1}}, sources={}, source="sample")


def test_a_source_may_come_in_only_with_a_stage():
    late = {"sources": DATA["sources"] | {"math": {"path": "math", "weight": 0}}}
    config({"from_tokens": 9, "weights": {"math": 1}}, **late)
    with pytest.raises(ConfigError, match=r"data\.sources\.math\.weight=0(\.0)? without a stage that reads math"):
        config({"from_tokens": 9, "weights": {"code": 1}}, **late)
