"""A rank of a run on preferences is killed with `kill -9`."""

import json

import pytest
from faulty_run import PHASES, Fault, FaultyRun, Phase, where

pytestmark = pytest.mark.xdist_group("references")

IN_THE_PASS = {
    "reference: between two batches": Phase("llama_core.parallel.apply", "ParallelModel.measure_rows", after=True),
    "reference: before its record": Phase(
        "llama_core.records.files", "write_json", argument="reference.json", ranks=(0,)
    ),
}
"""Moments before the first step: a run that goes on has no reference, or no record of it, and computes it again."""
MOMENTS = {
    **{phase: (phase, 0, "from the start") for phase in IN_THE_PASS},
    "forward, before the first checkpoint": ("forward", 1, "from the start"),
    "forward": ("forward", 5, "from step"),
}
CELLS = [
    pytest.param(*MOMENTS[moment], marks=pytest.mark.fault("`kill -9` of rank 0", phase=moment), id=moment)
    for moment in MOMENTS
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of pairs of answers, of which every row holds one or two."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    records = [{"chosen": f"Twice {n} is {2 * n}", "rejected": f"Twice {n} is not known"} for n in range(60)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run_on(pairs, folder, token_cache):
    return FaultyRun(folder, pairs, "training.objective=dpo", token_cache=token_cache)


@pytest.fixture(scope="module")
def undisturbed_on_pairs(tmp_path_factory, pairs, token_cache):
    """A finished run on them without a fault."""
    run = run_on(pairs, tmp_path_factory.mktemp("undisturbed-on-pairs"), token_cache)
    assert run.train().status == "finished", run.outcome
    return run


@pytest.mark.parametrize(("phase", "step", "goes_on"), CELLS)
def test_a_run_on_preferences_that_is_killed_goes_on_with_the_reference_of_its_beginning(
    phase, step, goes_on, undisturbed_on_pairs, pairs, tmp_path, token_cache, promise, monkeypatch
):
    for name, one in IN_THE_PASS.items():
        monkeypatch.setitem(PHASES, name, one)
    run = run_on(pairs, tmp_path, token_cache)
    outcome = run.train(Fault(phase, {"signal": "SIGKILL"}, 0, step=step))
    assert outcome.status == "crashed"
    assert "rank 0 was killed by signal 9" in outcome.reason
    assert run.run.reference.exists() == (phase == "forward")
    diagnosis = run.resume()
    assert where(diagnosis).startswith(goes_on)
    run.equals(undisturbed_on_pairs)
    assert run.run.reference_values.read_bytes() == undisturbed_on_pairs.run.reference_values.read_bytes()
    promise(f"{outcome.status}; {where(diagnosis)}; equal")
