"""SIGTERM, SIGINT and SIGUSR2, once and twenty times in a row."""

import pytest
from faulty_run import Fault, FaultyRun, where

PHASES_OF_SIGNALS = ("start of the rank", "start-up, before the ranks meet", "forward", "shut-down")
OF_SUPERVISORS = ("start of the supervisor", "supervisor, handlers of submitit")
TARGETS = {"one supervisor": (0, "supervisor"), "every rank": (None, "self")}


def cell(name, count, target, phase):
    times = "one" if count == 1 else f"{count}"
    mark = pytest.mark.fault(f"{times} {name} to {target}", phase=phase)
    return pytest.param(name, count, target, phase, marks=mark, id=f"{count} {name} to {target}, {phase}")


CELLS = [
    *(
        cell(name, count, target, phase)
        for target in TARGETS
        for name in ("SIGTERM", "SIGINT", "SIGUSR2")
        for count in (1, 20)
        for phase in PHASES_OF_SIGNALS
    ),
    *(
        cell(name, count, "one supervisor", phase)
        for name in ("SIGTERM", "SIGINT", "SIGUSR2")
        for count in (1, 20)
        for phase in OF_SUPERVISORS
    ),
]


@pytest.mark.parametrize(("name", "count", "target", "phase"), CELLS)
def test_a_run_that_gets_signals_stops_by_request_and_goes_on_as_if_undisturbed(
    name, count, target, phase, undisturbed, tmp_path, texts, token_cache, promise
):
    run = FaultyRun(tmp_path, texts, token_cache=token_cache)
    rank, to = TARGETS[target]
    action = {"signal": name, "count": count, "to": "self" if phase in OF_SUPERVISORS else to}
    outcome = run.train(Fault(phase, action, rank))
    if phase == "shut-down":
        assert outcome.status == "finished"
    else:
        assert outcome.status in ({"cancelled", "preempted"} if name == "SIGUSR2" else {"cancelled"})
    if phase == "forward" and (name, count) != ("SIGINT", 20):  # Ctrl-C twice stops at once
        assert outcome.reason.startswith("stopped after step 5 of ")
    diagnosis = run.resume()
    run.equals(undisturbed)
    promise(f"{outcome.status}; {where(diagnosis)}; equal")
