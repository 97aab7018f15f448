"""A rank is killed with `kill -9`."""

import pytest
from faulty_run import PHASES, Fault, FaultyRun, where

FIRST_MOMENT_OF_SUPERVISOR = 2
IN_A_RANK = list(PHASES)[FIRST_MOMENT_OF_SUPERVISOR:]
AFTER_THE_OUTCOME = "shut-down"

CELLS = [
    pytest.param(
        phase, rank, marks=pytest.mark.fault(f"`kill -9` of rank {rank}", phase=phase), id=f"{phase}, rank {rank}"
    )
    for phase in IN_A_RANK
    for rank in PHASES[phase].ranks
]


@pytest.mark.parametrize(("phase", "rank"), CELLS)
def test_a_run_whose_rank_is_killed_goes_on_as_if_undisturbed(
    phase, rank, undisturbed, tmp_path, texts, token_cache, promise
):
    run = FaultyRun(tmp_path, texts, token_cache=None if phase == "tokenising" else token_cache)
    if phase == "tokenising":
        run.forget_tokens()
    outcome = run.train(Fault(phase, {"signal": "SIGKILL"}, rank))
    if phase == AFTER_THE_OUTCOME:
        assert outcome.status == "finished"
    else:
        assert outcome.status == "crashed"
        assert f"rank {rank} was killed by signal 9" in outcome.reason
    diagnosis = run.resume()
    run.equals(undisturbed)
    promise(f"{outcome.status}; {where(diagnosis)}; equal")
