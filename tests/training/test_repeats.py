"""Steps that are bad at first: whether a device or the data are blamed, and how the run goes on."""

import math
import platform
import re

import pytest
import torch
from distributed import run_ranks
from test_replicas import new_run
from test_trainer import BATCH_SIZE, Counting, assert_equal, batch, losses, trainer, weights
from tiers import wide

from llama_core.errors import NonFiniteError, WrongDeviceError
from llama_core.models.layers import local_part
from llama_core.models.next_token import NextToken
from llama_core.parallel.ranks import own_rank
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_metrics
from llama_core.records.rollbacks import read_rollbacks
from llama_core.training.optimizer import LossScale
from llama_core.training.parts.repeats import _odd_ones

STEPS, SAVES, WRONG_AT = 10, 4, 6
ALONE = ParallelPlan(microbatch_size=BATCH_SIZE)
ZERO3 = ParallelPlan(dp_shard=2, zero_stage=3, microbatch_size=BATCH_SIZE)
DP2 = ParallelPlan(dp_replicate=2, microbatch_size=BATCH_SIZE)
DP4 = ParallelPlan(dp_shard=4, zero_stage=1, microbatch_size=BATCH_SIZE)
TP_DP = ParallelPlan(tp=2, dp_shard=2, zero_stage=2, microbatch_size=BATCH_SIZE)
ACCUMULATED = ParallelPlan(microbatch_size=BATCH_SIZE // 2, num_microbatches=2)
ZERO_BUBBLE = ParallelPlan(pp=2, schedule="zb_h1", microbatch_size=BATCH_SIZE // 4, num_microbatches=4)
CP = ParallelPlan(cp=2, microbatch_size=BATCH_SIZE)
DEEPSPEED = ParallelPlan(zero_backend="deepspeed", zero_stage=2, dp_shard=2, microbatch_size=BATCH_SIZE)


def faulty(path, plan, rank=0, wrong=(), factor=math.nan, batches=None, **settings):
    """Return the trainer of a rank, one of which multiplies activations by ``factor`` in some of its forwards.

    Args:
        path: the run's.
        plan: how it is divided.
        rank: the one that computes wrongly.
        wrong: its forwards, counted from the first step, of which each of the run has one per microbatch.
        factor: what it multiplies by.
        batches: the data.
        settings: of the training.
    """
    settings = {"steps": STEPS, "checkpoint_every": SAVES} | settings
    one = trainer(RunDirectory(path), plan=plan, batches=batches or Counting(), **settings)
    forwards = 0

    def multiply(module, inputs, output):
        nonlocal forwards
        forwards += 1
        return output * factor if forwards in wrong else output

    if wrong and own_rank() == rank:
        one.engine.model.norm.register_forward_hook(multiply)  # a norm after it would undo a factor
    return one


def train(*arguments, **settings):
    """Train on a rank; return its part of each parameter."""
    one = faulty(*arguments, **settings)
    one.fit()
    return [local_part(parameter).detach().numpy().copy() for _, parameter, _ in one.engine.replicated()]


def ending(*arguments, **settings):
    """Train on a rank until a device has been wrong too often; return the error."""
    with pytest.raises(WrongDeviceError) as caught:
        train(*arguments, **settings)
    return str(caught.value), caught.value.hosts


@pytest.mark.parametrize(
    ("plan", "rank", "suspected"),
    [
        (ALONE, 0, [0]),
        (ZERO3, 1, [1]),
        wide(DP2, 0, [0]),
        wide(TP_DP, 3, [2, 3]),
        wide(DEEPSPEED, 1, [1]),
        (ACCUMULATED, 0, [0]),
        wide(ZERO_BUBBLE, 1, []),  # the ranks of one replica have one loss
        wide(CP, 1, []),
    ],
)
def test_a_step_that_is_not_finite_once_is_taken_again_and_the_run_ends_as_if_it_had_not_been(
    tmp_path, plan, rank, suspected
):
    clean, broken = (new_run(tmp_path / name) for name in ("clean", "broken"))
    expected = run_ranks(plan.world_size, train, clean.path, plan)
    found = run_ranks(plan.world_size, train, broken.path, plan, rank, {WRONG_AT * plan.num_microbatches})
    assert not clean.rollbacks.exists()
    (taken_again,) = read_rollbacks(broken)
    assert (taken_again.step, taken_again.bad_step, taken_again.data) == (WRONG_AT - 1, WRONG_AT, None)
    assert [suspect.rank for suspect in taken_again.suspects] == suspected
    # DeepSpeed calls every norm that is not finite infinite
    assert re.match("loss nan and gradient norm (nan|inf), but ", taken_again.reason)
    assert not any(read_metrics(broken)["skipped"].to_pylist())
    assert losses(broken) == losses(clean)
    assert_equal(found, expected)


@pytest.mark.parametrize(
    "trained",
    [
        {"strategy": "lora", "lora": {"lora_dropout": 0.2}},
        {"strategy": "moe", "moe": {"num_experts": 4, "balance_bias": True}},
        {"optimizer": "muon", "moments": "bf16"},
    ],
    ids=["dropout", "balance biases", "random rounding"],
)
def test_what_a_step_draws_counts_and_rounds_is_the_same_when_it_is_taken_again(tmp_path, trained):
    ends = []
    for wrong in ((), {WRONG_AT}):
        run = new_run(tmp_path / f"{len(wrong)} wrong")
        one = faulty(run.path, ALONE, wrong=wrong, **trained)
        one.fit()
        states = [list(kept.values()) for kept in one.engine.optimizer.state.values()]
        ends.append((losses(run), weights(one), states))
    assert len(read_rollbacks(run)) == 1
    assert_equal(ends[1], ends[0])


@pytest.mark.parametrize("plan", [ALONE, wide(ZERO3)])
def test_a_step_that_is_under_way_when_the_one_before_is_taken_again_is_as_well(tmp_path, plan):
    clean, broken = (new_run(tmp_path / name) for name in ("clean", "broken"))
    expected = run_ranks(plan.world_size, train_ahead, clean.path, plan, ())
    found = run_ranks(plan.world_size, train_ahead, broken.path, plan, {WRONG_AT})
    assert [taken_again.bad_step for taken_again in read_rollbacks(broken)] == [WRONG_AT]
    assert losses(broken) == losses(clean)
    assert_equal(found, expected)


def train_ahead(path, plan, wrong):
    one = faulty(path, plan, wrong=wrong)
    one.runs_ahead = True
    one.fit()
    return [local_part(parameter).detach().numpy().copy() for _, parameter, _ in one.engine.replicated()]


class BadBatch(Counting):
    """Batches, of which that of one step consists of zeros."""

    def next_batch(self):
        taken = super().next_batch()
        return taken.each_token(torch.zeros_like) if self.taken == WRONG_AT else taken


def poisoned(module, inputs, output):
    """Make no number of the embedding of a batch of zeros."""
    return output if inputs[0].any() else output * math.nan


@pytest.mark.parametrize("on_bad_step", ["skip", "rollback"])
def test_the_step_after_bad_data_is_trained_on_once_whether_it_was_under_way_or_not(tmp_path, on_bad_step):
    ends = []
    for runs_ahead in (False, True):
        run = new_run(tmp_path / str(runs_ahead))
        one = faulty(run.path, ALONE, batches=BadBatch(), on_bad_step=on_bad_step)
        one.engine.model.tok_embeddings.register_forward_hook(poisoned)
        one.runs_ahead = runs_ahead
        one.fit()
        assert any(read_metrics(run)["skipped"].to_pylist()) == (on_bad_step == "skip")
        ends.append((losses(run), weights(one)))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0, equal_nan=True)


def test_a_step_without_a_loss_that_overflows_when_it_is_taken_again_is_an_overflow(tmp_path):
    ends = []
    for wrong in ((), {1}):
        run = new_run(tmp_path / f"{len(wrong)} wrong")
        one = faulty(run.path, ALONE, wrong=wrong, steps=4)
        one.loss_scale = LossScale(2.0**65, growth_interval=100)
        one.fit()
        kept = read_metrics(run).select(["loss", "grad_norm", "loss_scale", "skipped"]).to_pylist()
        ends.append((kept, one.check.num_sound_steps))
    assert kept[0]["skipped"] and not kept[-1]["skipped"]
    assert ends[1] == ends[0]


@pytest.mark.wide
def test_a_bit_that_flips_when_a_step_is_taken_again_is_found_after_it(tmp_path):
    run = new_run(tmp_path / "run")
    for reason in run_ranks(2, flip_when_taken_again, run.path):
        assert reason.startswith(f"step {WRONG_AT}: ") and "differ in norm.weight" in reason


def flip_when_taken_again(path):
    one = faulty(path, DP2, 0, {WRONG_AT}, replica_check_every=WRONG_AT)
    begin_again = one.repeats._begin_again

    def begin_again_and_flip(begun):
        again = begin_again(begun)
        if own_rank() == 1:
            one.engine.model.norm.weight.detach()[0] += 1
        return again

    one.repeats._begin_again = begin_again_and_flip
    with pytest.raises(WrongDeviceError) as caught:
        one.fit()
    return str(caught.value)


class CountingRows(NextToken):
    """Measures how many rows it has seen."""

    num_sums, names, seen = 1, ("rows",), None

    def loss(self, head, batch):
        self.seen = torch.full((1,), len(batch.tokens_BS))
        return super().loss(head, batch)

    def take_measured(self):
        seen, self.seen = self.seen, None
        return seen

    def of_step(self, sums):
        return {"rows": sums[0]}


def test_rows_that_all_replicas_compute_are_not_measured_as_those_of_a_step(tmp_path):
    one = faulty(new_run(tmp_path / "run").path, ALONE)
    one.engine.model.objective = CountingRows()
    assert one.repeats._losses_of([batch(1)], 0)
    assert one.engine.model.objective.take_measured() is None


def test_a_gradient_that_is_not_finite_once_is_repeated_without_a_suspect(tmp_path):
    clean, broken = (new_run(tmp_path / name) for name in ("clean", "broken"))
    train(clean.path, ALONE)
    one = trainer(broken, steps=STEPS, batches=Counting(), checkpoint_every=SAVES)
    bad = iter([1.0] * (WRONG_AT - 1) + [math.nan])
    one.engine.model.norm.weight.register_hook(lambda gradient: gradient * next(bad, 1.0))
    one.fit()
    (taken_again,) = read_rollbacks(broken)
    assert (taken_again.bad_step, taken_again.suspects) == (WRONG_AT, ())
    assert losses(broken) == losses(clean)


def test_a_device_that_is_wrong_in_two_steps_ends_the_run(tmp_path):
    run = new_run(tmp_path / "run")
    # the sixth forward belongs to the sixth step, which is taken again in the seventh
    for reason, hosts in run_ranks(2, ending, run.path, ZERO3, 1, {WRONG_AT, WRONG_AT + 2}):
        assert reason.startswith(f"step {WRONG_AT + 1}: loss nan")
        assert f"rank 1 on {platform.node()}" in reason and reason.endswith(f"wrong in step {WRONG_AT}")
        assert hosts == (platform.node(),)


@pytest.mark.parametrize(
    ("plan", "factor", "suspected"),
    [
        (DP2, math.nan, [1]),
        (DP2, 40.0, [0, 1]),  # of two that differ, either may be wrong
        wide(DP4, math.nan, [3]),
        wide(DP4, 40.0, [3]),
        wide(TP_DP, math.nan, [2, 3]),
        wide(TP_DP, 40.0, [0, 1, 2, 3]),
    ],
)
def test_a_device_that_stays_wrong_is_named_by_the_loss_of_data_that_others_compute_as_well(
    tmp_path, plan, factor, suspected
):
    run = new_run(tmp_path / "run")
    settings = {"on_bad_step": "rollback", "loss_spike_threshold": 8.0, "spike_window": 3, "replica_check_every": 0}
    last = plan.world_size - 1
    wrong = range(WRONG_AT, 1000)
    for reason, _ in run_ranks(plan.world_size, ending_with, run.path, plan, last, wrong, factor, settings):
        assert reason.startswith(f"step {SAVES + 1}: ") or reason.startswith(f"step {WRONG_AT}: ")
        assert " computed another loss of the same data" in reason
        assert reason.endswith(f"may also have been wrong in step {WRONG_AT}")
    first = read_rollbacks(run)[0]
    assert (first.step, first.bad_step, first.data) == (SAVES, WRONG_AT, None)
    assert [suspect.rank for suspect in first.suspects] == suspected


def ending_with(path, plan, rank, wrong, factor, settings):
    return ending(path, plan, rank, wrong, factor, **settings)


def test_data_that_give_no_finite_loss_anywhere_are_left_out(tmp_path):
    run = new_run(tmp_path / "run")
    for reason in run_ranks(2, train_on_bad_data, run.path):
        assert reason.startswith(f"step {WRONG_AT}: loss nan") and "max_rollbacks=0" in reason


def train_on_bad_data(path):
    settings = {"on_bad_step": "rollback", "max_rollbacks": 0}
    one = trainer(RunDirectory(path), plan=DP2, batches=Counting(), steps=STEPS, checkpoint_every=SAVES, **settings)
    one.engine.model.layers["1"].register_forward_hook(
        lambda module, inputs, output: output * (math.nan if one.batches.state_dict()["taken"] >= WRONG_AT else 1)
    )
    with pytest.raises(NonFiniteError) as caught:
        one.fit()
    return str(caught.value)


def test_the_replicas_with_another_loss_of_a_row_than_most_are_odd():
    assert _odd_ones([[2.0, 2.001, 2.0], [1.0, 1.0, 1.001]]) == set()
    assert _odd_ones([[2.0, 2.0, 2.0], [1.0, 1.2, 1.0]]) == {1}
    assert _odd_ones([[math.nan, 2.0, 2.0]]) == {0}
    assert _odd_ones([[math.nan, math.inf, math.nan]]) == set()
    assert _odd_ones([[2.0, 3.0]]) == {0, 1}
