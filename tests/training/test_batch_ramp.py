"""Batch ramps: steps of more sequences later in the run, under every schedule, and what planning makes of them."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from corpora import byte_cache
from distributed import run_ranks
from parity import UNTIED, native_engine
from test_trainer import assert_equal, losses, trainer, weights
from tiers import cases

from llama_core.config.run import RunConfig
from llama_core.config.settings import UNNAMED
from llama_core.data.datasets import BatchStream
from llama_core.data.mixture import Mixture
from llama_core.data.packing import PackedDataset
from llama_core.data.selection import everything
from llama_core.errors import ConfigError, PlanError, StoppedError
from llama_core.parallel.ranks import own_rank
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.auto import choose_plan
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_metrics
from llama_core.training.engine import train_step

SEQ_LEN = 16
RAMP = [{"from_tokens": 3 * 8 * SEQ_LEN, "batch_size": 16}, {"from_tokens": 1000, "batch_size": 32}]
"""After 3 steps of 8 sequences, and then after 3 of 16: 1,000 tokens are within the third."""
SIZES = [8, 8, 8, 16, 16, 16, 32, 32]


def config(ramp=RAMP, parallel=None, data=None, **training):
    sizes = {"batch_size": 8, "seq_len": SEQ_LEN, "steps": len(SIZES)} | training
    return RunConfig.from_mapping(
        {"training": sizes | {"batch_ramp": ramp}, "parallel": parallel or {}, "data": data or {}}
    )


def stream(stages, rank=0, world_size=1, kind=BatchStream):
    texts = [f"document {number} " * 3 for number in range(40)]
    rows = PackedDataset(everything(byte_cache(texts)), SEQ_LEN)
    return kind(Mixture({UNNAMED: rows}, {UNNAMED: 1.0}, stages), 8, 0, rank, world_size)


def test_a_step_of_the_ramp_begins_after_the_step_that_its_tokens_are_in():
    run = config()
    assert [(stage.num_steps, stage.num_tokens, stage.first_row) for stage in run.stages] == [
        (3, 3 * 8 * SEQ_LEN, 24),
        (6, (3 * 8 + 3 * 16) * SEQ_LEN, 72),
    ]
    assert str(run.stages[0]) == "after step 3 (384 tokens): 16 sequences a step"
    assert run.stages[1].rounding == (
        "training.batch_ramp: from_tokens=1,000 is within step 6; stage 3 begins after that step, at 1,152 tokens"
    )
    assert (run.num_sequences, run.num_tokens) == (sum(SIZES), sum(SIZES) * SEQ_LEN)
    assert (run.first_batch_size, run.batch_size) == (8, 32)
    assert config(keep_every_tokens=500, checkpoint_every=1).most_checkpoints == 2 + run.num_tokens // 500 + 1
    batches = stream(run.stages)
    assert [len(batches.next_batch().tokens_BS) for _ in SIZES] == SIZES


def test_the_ramp_and_the_stages_of_the_data_go_each_their_own_way():
    sources = {"wiki": {"path": "wiki", "weight": 1}, "code": {"path": "code", "weight": 1}}
    data = {"sources": sources, "stages": [{"from_tokens": 700, "seq_len": 64, "weights": {"code": 3}}]}
    first, second, third = config(data=data).stages
    assert (first.batch_size, first.other_len, dict(first.weights)) == (16, None, {"wiki": 1, "code": 1})
    assert (second.batch_size, second.other_len, dict(second.weights)) == (4, 64, {"wiki": 1, "code": 3})
    assert (third.batch_size, third.other_len, dict(third.weights)) == (8, 64, {"wiki": 1, "code": 3})
    assert [stage.num_steps for stage in (first, second, third)] == [3, 5, 6]


def losses_under(plan):
    """Return the losses of a rank over the whole ramp."""
    batches = stream(config().stages, plan.dp_rank(own_rank()), plan.dp)
    spec = replace(UNTIED, num_layers=4, vocab_size=512)
    engine = native_engine(plan, spec, torch.float64, weight_dtype=torch.float64)
    return [
        float(train_step(engine, microbatches, learning_rate=1e-3, max_grad_norm=1.0).loss)
        for microbatches in (batches.next_batch().split(plan.rows_per_forward) for _ in SIZES)
    ]


PLANS = {
    "zero 2 x dp 4": ParallelPlan(dp_shard=4, zero_stage=2, num_microbatches=8),
    "tp 2 x pp 2": ParallelPlan(tp=2, pp=2, microbatch_size=4, num_microbatches=8),
    "pp 2 x dp 2, interleaved": ParallelPlan(
        pp=2, dp_replicate=2, schedule="interleaved", num_chunks=2, microbatch_size=2, num_microbatches=8
    ),
    "pp 2, zbv": ParallelPlan(pp=2, schedule="zbv", num_microbatches=32),
    "pp 4, chimera": ParallelPlan(pp=4, schedule="chimera", microbatch_size=2, num_microbatches=16),
    "pp 4, chimera in halves": ParallelPlan(pp=4, schedule="chimera_halving", microbatch_size=2, num_microbatches=16),
}


@pytest.fixture(scope="module")
def alone():
    found = losses_under(ParallelPlan(num_microbatches=32))
    assert len(set(found)) == len(found)
    return found


@pytest.mark.parametrize("plan", cases(PLANS, narrow={"pp 2, zbv"}))
def test_a_ramp_has_the_losses_of_one_rank_under_every_schedule(plan, alone):
    for found in run_ranks(plan.world_size, losses_under, plan):
        assert found == pytest.approx(alone, rel=1e-10)


class FewWords(BatchStream):
    """Rows whose tokens a model of 128 words knows."""

    def next_batch(self):
        batch = super().next_batch()
        for ids in (batch.tokens_BS, batch.targets_BS):
            ids.clamp_(max=127)
        return batch


def test_a_run_stopped_within_the_ramp_goes_on_bit_for_bit(tmp_path):
    settings = {"steps": len(SIZES), "batch_size": 8, "batch_ramp": RAMP, "checkpoint_every": 4}

    def trained(name, stops_after=None):
        run = RunDirectory(tmp_path / name)
        run.create()
        taken = iter(range(stops_after or 0))

        def fit(**choices):
            batches = stream(config().stages, kind=FewWords)
            one = trainer(run, plan=ParallelPlan(), batches=batches, **settings, **choices)
            one.fit()
            return one

        if stops_after:
            with pytest.raises(StoppedError):
                fit(should_stop=lambda: next(taken, None) is None)
        return run, fit()

    undisturbed, whole = trained("undisturbed")
    stopped, resumed = trained("stopped", stops_after=4)
    assert losses(stopped) == losses(undisturbed)
    assert_equal(weights(resumed), weights(whole))
    tokens = [0, *read_metrics(stopped).column("tokens").to_pylist()]
    assert [(after - before) // SEQ_LEN for before, after in pairwise(tokens)] == SIZES


def test_a_plan_is_for_the_largest_step_and_its_passes_divide_every_step():
    plan = choose_plan(config([{"from_tokens": 999, "batch_size": 20}], {"gpus": 2}), None)
    assert plan.batch_size == 20
    assert 8 % (plan.dp * plan.microbatch_size) == 0
    pipeline = {"gpus": 4, "pp": 4, "tp": 1, "cp": 1, "schedule": "interleaved", "num_chunks": 2, "microbatch_size": 1}
    deep = {"num_layers": 8}
    base = {"architecture": deep, "parallel": pipeline}
    training = {"batch_size": 8, "seq_len": SEQ_LEN, "steps": 9}
    ramp = [{"from_tokens": 999, "batch_size": 12}]
    fits = RunConfig.from_mapping(base | {"training": training | {"batch_ramp": ramp}})
    assert choose_plan(fits, None).num_microbatches == 12
    uneven = RunConfig.from_mapping(base | {"training": training | {"batch_ramp": [{**ramp[0], "batch_size": 10}]}})
    with pytest.raises(PlanError, match=r"num_microbatches=10 is not a multiple of the 4 ranks"):
        choose_plan(uneven, None)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"ramp": [{"from_tokens": 0, "batch_size": 16}]}, "training.batch_ramp.0.from_tokens=0"),
        ({"ramp": [{"from_tokens": 9, "batch_size": 0}]}, "training.batch_ramp.0.batch_size=0"),
        (
            {"ramp": list(reversed(RAMP))},
            "training.batch_ramp.1.from_tokens=384 is not above that of the stage before it (1,000)",
        ),
        (
            {"ramp": [{"from_tokens": 9, "batch_size": 16}, {"from_tokens": 99, "batch_size": 32}]},
            "training.batch_ramp.1.from_tokens=99: this stage and the one before it both begin after step 1",
        ),
        ({"steps": None}, "training.batch_ramp: steps become longer, so their number has to be known"),
        (
            {"ramp": [{"from_tokens": 999, "batch_size": 18}], "parallel": {"gpus": 4, "tp": 1, "pp": 1, "cp": 1}},
            "training.batch_ramp.0.batch_size=18 is not a multiple of 4 (4 data-parallel ranks); use 20",
        ),
        ({"parallel": {"num_microbatches": 4}}, "parallel.num_microbatches=4 is for one batch size"),
        (
            {"parallel": {"gpus": 2, "zero_backend": "deepspeed", "zero_stage": 2}},
            "training.batch_ramp: DeepSpeed is told the number of microbatches once",
        ),
        ({"data": {"source": "dataloader"}}, "training.batch_ramp: your dataloader decides the size of a batch"),
    ],
)
def test_a_wrong_ramp_is_reported_in_one_line(choices, message):
    with pytest.raises(ConfigError) as refused:
        config(**choices)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
