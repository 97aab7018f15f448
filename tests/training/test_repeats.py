"""Steps that are bad at first: whether a device or the data are blamed, and how the run goes on."""

import math
import platform

import pytest
from distributed import run_ranks
from test_replicas import new_run
from test_trainer import BATCH_SIZE, Counting, assert_equal, losses, trainer
from tiers import wide

from llama_core.errors import NonFiniteError, WrongDeviceError
from llama_core.models.layers import local_part
from llama_core.parallel.ranks import own_rank
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_metrics
from llama_core.records.rollbacks import read_rollbacks
from llama_core.training.parts.repeats import _odd_ones

STEPS, SAVES, WRONG_AT = 10, 4, 6
ALONE = ParallelPlan(microbatch_size=BATCH_SIZE)
ZERO3 = ParallelPlan(dp_shard=2, zero_stage=3, microbatch_size=BATCH_SIZE)
DP2 = ParallelPlan(dp_replicate=2, microbatch_size=BATCH_SIZE)
DP4 = ParallelPlan(dp_shard=4, zero_stage=1, microbatch_size=BATCH_SIZE)
TP_DP = ParallelPlan(tp=2, dp_shard=2, zero_stage=2, microbatch_size=BATCH_SIZE)
DEEPSPEED = ParallelPlan(zero_backend="deepspeed", zero_stage=2, dp_shard=2, microbatch_size=BATCH_SIZE)


def train(path, plan, rank=0, wrong=(), factor=math.nan, **settings):
    """Train on a rank, one of which multiplies activations or gradients by ``factor`` in some of its forwards.

    Args:
        path: the run's.
        plan: how it is divided.
        rank: the one that computes wrongly.
        wrong: its forwards, counted from the first step, of which each of the run has one.
        factor: what it multiplies by.
        settings: of the training.
    """
    settings = {"steps": STEPS, "checkpoint_every": SAVES} | settings
    one = trainer(RunDirectory(path), plan=plan, batches=Counting(), **settings)
    forwards = 0

    def multiply(module, inputs, output):
        nonlocal forwards
        forwards += 1
        return output * factor if forwards in wrong else output

    if own_rank() == rank:
        one.engine.model.layers["1"].register_forward_hook(multiply)
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
    ],
)
def test_a_step_that_is_not_finite_once_is_taken_again_and_the_run_ends_as_if_it_had_not_been(
    tmp_path, plan, rank, suspected
):
    clean, broken = (new_run(tmp_path / name) for name in ("clean", "broken"))
    expected = run_ranks(plan.world_size, train, clean.path, plan)
    found = run_ranks(plan.world_size, train, broken.path, plan, rank, {WRONG_AT})
    assert not clean.rollbacks.exists()
    (taken_again,) = read_rollbacks(broken)
    assert (taken_again.step, taken_again.bad_step, taken_again.data) == (WRONG_AT - 1, WRONG_AT, None)
    assert [suspect.rank for suspect in taken_again.suspects] == suspected
    assert taken_again.reason.startswith("loss nan and gradient norm nan, but ")
    assert not any(read_metrics(broken)["skipped"].to_pylist())
    assert losses(broken) == losses(clean)
    assert_equal(found, expected)


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


@pytest.mark.parametrize("factor", [math.nan, 40.0], ids=["no loss", "another loss"])
@pytest.mark.parametrize("plan", [DP2, wide(DP4), wide(TP_DP)])
def test_a_device_that_stays_wrong_is_named_by_the_loss_of_data_that_others_compute_as_well(tmp_path, plan, factor):
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
    named = [suspect.rank for suspect in first.suspects]
    assert last in named and len(named) < max(plan.world_size, 3)


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
