"""SIGTERM, SIGINT and SIGUSR2, once and twenty times in a row."""

import pytest
from faulty_run import STEPS, Fault, FaultyRun, where

STORMS = [(name, count) for name in ("SIGTERM", "SIGINT", "SIGUSR2") for count in (1, 20)]
TARGETS = {"one supervisor": (0, "supervisor"), "every rank": (None, "self")}
STARTING = {
    **dict.fromkeys(TARGETS, ("start of the rank", "start-up, before the ranks meet")),
    "one supervisor itself": ("start of the supervisor", "supervisor, handlers of submitit"),
}


def named(name, count, target):
    """Return the name of a fault."""
    return f"{count} x {name} to {target.removesuffix(' itself')}"


def storm(name, count, target, phase, **when):
    rank, to = TARGETS.get(target, (0, "self"))
    # in the second, the supervisor passes the signals on
    return Fault(phase, {"signal": name, "count": count, "to": to, "sleep": 1}, rank, **when)


def marked(target, phase):
    marks = [pytest.mark.fault(named(name, count, target), phase=phase) for name, count in STORMS]
    return pytest.param(target, phase, marks=marks, id=f"{target}, {phase}")


@pytest.mark.parametrize(
    ("target", "phase"), [marked(target, phase) for target, phases in STARTING.items() for phase in phases]
)
def test_a_run_that_gets_signals_while_it_starts_ends_by_request_each_time(
    target, phase, undisturbed, tmp_path, texts, token_cache, promise
):
    """Six starts of one run end so; then it goes on as if undisturbed."""
    run = FaultyRun(tmp_path, texts, token_cache=token_cache)
    for name, count in STORMS:
        outcome = run.train(storm(name, count, target, phase))
        by_request = {"cancelled", "preempted"} if name == "SIGUSR2" else {"cancelled"}
        assert outcome.status in by_request, (name, count, outcome)
        promise(f"{outcome.status} after step {outcome.step}; equal", named(name, count, target))
    run.resume()
    run.equals(undisturbed)


@pytest.mark.parametrize(("target", "phase"), [marked(target, "forward") for target in TARGETS])
def test_a_run_that_gets_signals_in_a_step_stops_after_it_with_a_checkpoint(
    target, phase, undisturbed, tmp_path, texts, token_cache, promise
):
    """Each start of one run takes a step; Ctrl-C twice loses the step."""
    run = FaultyRun(tmp_path, texts, token_cache=token_cache)
    step = 0
    for name, count in STORMS:
        outcome = run.train(storm(name, count, target, phase, step=step + 1))
        assert outcome.status == "cancelled", (name, count, outcome)
        if (name, count) == ("SIGINT", 20):
            text = "cancelled at once"
        else:
            step += 1
            assert outcome.reason == f"rank 0: stopped after step {step} of {STEPS}", (name, count)
            text = "cancelled after the step, with a checkpoint"
        promise(f"{text}; equal", named(name, count, target))
    diagnosis = run.resume()
    assert where(diagnosis) == f"from step {step}"
    run.equals(undisturbed)


@pytest.mark.parametrize(
    ("name", "count", "target"),
    [
        pytest.param(name, count, target, marks=pytest.mark.fault(named(name, count, target), phase="shut-down"))
        for target in TARGETS
        for name, count in STORMS
    ],
)
def test_a_run_that_gets_signals_when_it_is_done_stays_finished(
    name, count, target, undisturbed, tmp_path, texts, token_cache, promise
):
    run = FaultyRun(tmp_path, texts, token_cache=token_cache)
    outcome = run.train(storm(name, count, target, "shut-down"))
    assert outcome.status == "finished"
    assert [rank_exit.exit_code for rank_exit in run.rank_exits()] == [0, 0]  # Slurm starts no job again that ends so
    assert where(run.resume()) == "nothing to do"
    run.equals(undisturbed)
    promise("finished; equal")
