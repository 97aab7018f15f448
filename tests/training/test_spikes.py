"""What a run does about a bad step: a poisoned batch, in runs that are otherwise real."""

import pytest
import torch
from distributed import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from test_trainer import BATCH_SIZE, SPEC, Counting, assert_equal, batch, losses, trainer, weights
from tiers import nightly

from llama_core.config.run import TrainingConfig
from llama_core.errors import LossSpikeError, NonFiniteError
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.goodput import read_goodput
from llama_core.records.metrics import read_metrics
from llama_core.records.rollbacks import Rollback, data_skips, read_rollbacks
from llama_core.training.parts.spikes import Spikes

EVERY, BAD, STEPS = 4, 11, 14
SPIKES = {"steps": STEPS, "checkpoint_every": EVERY, "learning_rate": 1e-2, "spike_window": 5}


class Texts(Counting):
    """Batches of few tokens, which the model soon knows; a poisoned one has a token that it has never seen."""

    def __init__(self, poisoned=(), left_out=range(0)):
        super().__init__()
        self.poisoned, self.left_out = poisoned, left_out

    def next_batch(self):
        self.taken += 1
        while self.taken in self.left_out:
            self.taken += 1
        made = batch(self.taken)
        made.tokens_BS.remainder_(8)
        made.targets_BS.copy_(made.tokens_BS)
        if self.taken in self.poisoned:
            made.targets_BS.fill_(SPEC.vocab_size - 1)
        return made


def new_run(path):
    run = RunDirectory(path)
    run.create()
    return run


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path / "run")


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The losses and weights of a run that never saw the batches after the checkpoint, up to the poisoned one."""
    run = new_run(tmp_path_factory.mktemp("clean") / "run")
    one = trainer(run, batches=Texts(left_out=range(9, BAD + 1)), **SPIKES)
    one.fit()
    return losses(run), weights(one)


@pytest.mark.parametrize("runs_ahead", [True, nightly(False)])
def test_after_a_rollback_a_run_equals_one_that_never_saw_the_window(run, clean, runs_ahead):
    one = trainer(run, batches=Texts([BAD]), on_bad_step="rollback", num_workers=int(runs_ahead), **SPIKES)
    one.runs_ahead = runs_ahead
    one.fit()
    (rollback,) = read_rollbacks(run)
    assert (rollback.step, rollback.bad_step, rollback.data) == (8, BAD, {"taken": BAD})
    assert "median absolute deviations above the median" in rollback.reason
    assert read_metrics(run).column("step").to_pylist() == list(range(1, STEPS + 1))
    assert losses(run) == clean[0]
    assert_equal(weights(one), clean[1])
    assert read_goodput(run).total["recomputed"] > 0


def test_a_run_killed_after_a_rollback_leaves_the_same_data_out_again(run, clean):
    class Dying(Texts):
        def next_batch(self):
            if self.taken == BAD + 2:
                raise MemoryError
            return super().next_batch()

    with pytest.raises(MemoryError):
        trainer(run, batches=Dying([BAD]), on_bad_step="rollback", **SPIKES).fit()
    resumed = trainer(run, batches=Texts([BAD]), on_bad_step="rollback", **SPIKES)
    assert resumed.step == 8
    resumed.fit()
    assert len(read_rollbacks(run)) == 1
    assert losses(run) == clean[0]
    assert_equal(weights(resumed), clean[1])


def test_a_spike_is_counted_and_trained_on_if_bad_steps_are_skipped(run):
    trainer(run, batches=Texts([BAD]), **SPIKES).fit()
    assert [row["step"] for row in read_metrics(run).to_pylist() if row["spike"]] == [BAD]
    assert not run.rollbacks.exists()


def test_a_spike_stops_a_run_with_the_commands_that_go_on_and_no_checkpoint_of_it(run, clean):
    with pytest.raises(LossSpikeError, match=rf"step {BAD}: loss .*; training\.on_bad_step=stop") as caught:
        trainer(run, batches=Texts([BAD]), on_bad_step="stop", **SPIKES).fit()
    command = f"training-infra train --run-dir {run.path} --resume --set training.on_bad_step=rollback"
    assert command in caught.value.next_action
    gone_on = trainer(run, batches=Texts([BAD]), on_bad_step="rollback", **SPIKES)
    assert gone_on.step == 8
    gone_on.fit()
    assert losses(run) == clean[0]


def without_gradient(run, bad, **settings):
    """A trainer of texts; with the batches of ``bad``, the gradient of the final norm is NaN."""
    batches = Texts()
    one = trainer(run, batches=batches, **SPIKES | settings)
    weight = one.engine.model.norm.weight
    weight.register_hook(lambda gradient: gradient * (torch.nan if batches.taken in bad else 1.0))
    return one


@pytest.mark.nightly
def test_a_gradient_that_is_not_finite_is_rolled_back_like_a_spike(run, clean):
    one = without_gradient(run, [BAD], on_bad_step="rollback")
    one.fit()
    assert losses(run) == clean[0]
    assert_equal(weights(one), clean[1])


def test_rollbacks_are_bounded_and_need_a_checkpoint(run, tmp_path):
    with pytest.raises(NonFiniteError, match=r"step 5: .* all 2 rollbacks are used up; training\.max_rollbacks=2"):
        without_gradient(run, range(6, 100), on_bad_step="rollback", max_rollbacks=2).fit()
    assert [rollback.step for rollback in read_rollbacks(run)] == [4, 4]
    with pytest.raises(NonFiniteError, match=r"step 2: .* there is no checkpoint yet to return to"):
        without_gradient(new_run(tmp_path / "early"), [2], on_bad_step="rollback").fit()


def on_a_rank(path):
    run = RunDirectory(path)
    plan = ParallelPlan(dp_shard=2, zero_stage=2, microbatch_size=BATCH_SIZE)
    one = trainer(run, plan=plan, batches=Texts([BAD]), on_bad_step="rollback", **SPIKES)
    one.fit()
    return one.step, one.batches.state_dict(), one.bad_steps.rollbacks[0].bad_step


@pytest.mark.nightly
def test_two_ranks_roll_back_together(run, clean):
    """Both have the batches of one process, so that the losses differ only by the order of sums."""
    assert run_ranks(2, on_a_rank, run.path) == 2 * [(STEPS, {"taken": STEPS + 3}, BAD)]
    assert losses(run) == pytest.approx(clean[0], rel=1e-4)


@given(st.lists(st.floats(1.0, 2.0), min_size=8, max_size=8), st.floats(1.0, 2.0), st.integers(1, 3))
def test_a_few_spikes_do_not_hide_the_next_one(usual, low, num_spikes):
    spikes = Spikes(TrainingConfig(spike_window=8, loss_spike_threshold=100.0))
    for loss in usual:
        assert not spikes.find(loss, 1.0)
    assert not spikes.find(low, 1.0) or max(usual) < 1.03 * low
    for _ in range(num_spikes):
        assert spikes.find(1e4, 1.0)


def test_the_gradient_norm_has_spikes_only_if_asked_for():
    for threshold, found in ((None, False), (5.0, True)):
        spikes = Spikes(TrainingConfig(spike_window=2, grad_norm_spike_threshold=threshold))
        assert not any(spikes.find(1.0, 1.0) for _ in range(2))
        assert ("grad_norm" in spikes.find(1.0, 2.0)) is found


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=6))
def test_a_rollback_keeps_only_the_skips_before_it(steps):
    rollbacks = [Rollback(step, step + more, "", {"taken": n}, 0.0) for n, (step, more) in enumerate(steps)]
    skips = data_skips(rollbacks)
    positions = [skips[step]["taken"] for step in sorted(skips)]
    assert positions == sorted(positions)  # data are never taken twice
    assert not rollbacks or skips[rollbacks[-1].step] == rollbacks[-1].data
