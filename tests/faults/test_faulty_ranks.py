"""A rank is slow, stuck, or computes what it should not."""

import re

import pytest
from faulty_run import NUM_RANKS, STEPS, Fault, FaultyRun, where

from llama_core.launch.attempts import log_path
from llama_core.records.rollbacks import read_rollbacks


@pytest.mark.fault("a slow rank", phase="forward")
def test_a_run_with_a_slow_rank_is_as_if_undisturbed(undisturbed, tmp_path, texts, token_cache, promise):
    run = FaultyRun(tmp_path, texts, token_cache=token_cache)
    assert run.train(Fault("forward", {"sleep": 0.5}, rank=1, step=3, times=3)).status == "finished"
    run.equals(undisturbed)
    promise("finished; equal")


@pytest.mark.fault("an error in a rank", phase="forward")
def test_a_run_in_which_a_rank_raises_names_the_error_and_goes_on(undisturbed, tmp_path, texts, token_cache, promise):
    run = FaultyRun(tmp_path, texts, token_cache=token_cache)
    outcome = run.train(Fault("forward", {"raise": "a fault"}, rank=1))
    assert (outcome.status, outcome.reason) == ("crashed", "rank 1: RuntimeError: a fault")
    diagnosis = run.resume()
    run.equals(undisturbed)
    promise(f"crashed; {where(diagnosis)}; equal")


STUCK = {"asleep": {"sleep": 1000}, "stopped (SIGSTOP)": {"signal": "SIGSTOP"}}


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(STUCK[how], marks=pytest.mark.fault(f"a stuck rank, {how}", phase="forward"), id=how)
        for how in STUCK
    ],
)
def test_a_run_with_a_stuck_rank_is_a_hang_with_the_stacks_of_all_ranks(
    action, undisturbed, tmp_path, texts, token_cache, promise
):
    run = FaultyRun(tmp_path, texts, "launch.hang_timeout_s=3", token_cache=token_cache)
    # in every step: a stopped rank is woken to write its stacks, and would finish such a short run before it is killed
    outcome = run.train(Fault("forward", action, rank=1, times=STEPS))
    assert outcome.status == "hang"
    for rank in range(NUM_RANKS):
        assert "most recent call first" in log_path(run.run, rank).read_text()
    diagnosis = run.resume()
    run.equals(undisturbed)
    promise(f"hang, with every rank's stack; {where(diagnosis)}; equal")


@pytest.mark.fault("NaN once", phase="forward")
def test_a_loss_that_is_nan_once_is_computed_again(undisturbed, tmp_path, texts, token_cache, promise):
    run = FaultyRun(tmp_path, texts, token_cache=token_cache)
    assert run.train(Fault("forward", {"factor": "nan"}, rank=1, step=3)).status == "finished"
    (taken_again,) = read_rollbacks(run.run)
    assert (taken_again.bad_step, [suspect.rank for suspect in taken_again.suspects]) == (3, [1])
    run.equals(undisturbed)
    promise("named; step 3 taken again; finished; equal")


@pytest.mark.fault("NaN in two steps", phase="forward")
def test_a_rank_whose_loss_is_nan_in_two_steps_ends_the_run(undisturbed, tmp_path, texts, token_cache, promise):
    run = FaultyRun(tmp_path, texts, token_cache=token_cache)
    outcome = run.train(Fault("forward", {"factor": "nan"}, rank=1, step=3, times=2))
    assert outcome.status == "node-failure"
    assert "rank 1 on " in outcome.reason and "may also have been wrong in step 3" in outcome.reason
    diagnosis = run.resume()
    run.equals(undisturbed)
    promise(f"node-failure; {where(diagnosis)}; equal")


@pytest.mark.fault("NaN in a row", phase="forward")
def test_a_loss_that_stays_nan_ends_the_run_before_it_is_in_a_checkpoint(
    undisturbed, tmp_path, texts, token_cache, promise
):
    run = FaultyRun(tmp_path, texts, "training.max_skipped_steps=1", token_cache=token_cache)
    outcome = run.train(Fault("forward", {"factor": "nan", "lasts": True}, rank=1, step=3))
    assert outcome.status == "non-finite"
    assert "for 2 steps in a row, up to step 4" in outcome.reason
    diagnosis = run.resume()
    run.equals(undisturbed)
    promise(f"non-finite; {where(diagnosis)}; equal")


@pytest.mark.fault("a loss spike, with `on_bad_step=rollback`", phase="forward")
def test_a_loss_spike_is_left_out_with_its_data(undisturbed, tmp_path, texts, token_cache, promise):
    settings = ("training.on_bad_step=rollback", "training.spike_window=4", "training.loss_spike_threshold=50")
    run = FaultyRun(tmp_path, texts, *settings, token_cache=token_cache)
    assert run.train(Fault("forward", {"factor": 100}, rank=1, step=5)).status == "finished"
    (rollback,) = read_rollbacks(run.run)
    assert (rollback.step, rollback.bad_step) == (4, 5)
    assert re.match("loss .* is more than 50 median absolute deviations above", rollback.reason)
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[:4] == undisturbed.rows()[:4]
    assert rows[4]["loss"] < 2 * rows[3]["loss"]
    promise("finished; returned to step 4, left out the data of step 5")


@pytest.mark.fault("a flipped bit in a weight of a replica", phase="optimizer step")
def test_a_flipped_bit_of_a_replica_is_found_and_the_steps_since_the_checkpoint_are_taken_again(
    tmp_path, texts, token_cache, promise
):
    sound, faulty = (
        FaultyRun(tmp_path / name, texts, "parallel.zero_stage=0", token_cache=token_cache)
        for name in ("sound", "faulty")
    )
    assert sound.train().status == "finished"
    assert faulty.train(Fault("optimizer step", {"flip": 3}, rank=1)).status == "finished"
    (rollback,) = read_rollbacks(faulty.run)
    assert (rollback.step, rollback.bad_step) == (4, 6)
    assert [suspect.rank for suspect in rollback.suspects] == [0, 1]
    faulty.equals(sound)
    promise("named; returned to step 4; finished; equal")
