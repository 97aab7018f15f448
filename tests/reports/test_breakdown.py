"""The time of a step: a bar for what was predicted, measured and profiled, and a sentence for what was not."""

from dataclasses import replace

import pytest
from synthetic_run import BENCHMARK, step_record, write_run

from llama_core.records.files import write_json
from llama_core.records.measurements import ExpectedStep
from llama_core.records.profiles import ProfileRecord, write_profile
from training_reports.breakdown import step_breakdown
from training_reports.contents import RunContents

STEP = {
    "step_seconds": 3.0,
    "compute_seconds": 2.0,
    "bubble_seconds": 0.25,
    "tp_seconds": 0.5,
    "optimizer_seconds": 0.25,
}


def bars(run):
    """Return the lengths of the parts of every bar."""
    (panel,) = step_breakdown(RunContents.read(run))
    found = {}
    for trace in panel.figure.data:
        for label, length in zip(trace.y, trace.x, strict=True):
            found.setdefault(label.split("<br>")[0], {})[trace.name] = length
    return found


def notes(run):
    return " ".join(note for panel in step_breakdown(RunContents.read(run)) for note in panel.notes)


def test_the_measured_bar_is_the_mean_step_without_the_first(run):
    measured = bars(run)["measured"]
    seconds = [step_record(step).step_seconds for step in range(2, 41)]
    assert sum(measured.values()) == pytest.approx(sum(seconds) / 39)
    assert measured["backward"] == pytest.approx(0.6 * sum(measured.values()))
    assert "mean of 39 steps, without the first" in notes(run)


def test_a_prediction_has_a_bar_of_its_own_with_all_its_time(run):
    assert list(bars(run)) == ["measured"]
    assert "No expected time yet" in notes(run)
    write_json(run.choice, {"step": STEP})
    predicted = bars(run)["predicted"]
    assert predicted == {"computing": 2.0, "communication": 0.5, "pipeline bubble": 0.25, "optimizer": 0.25}
    assert sum(predicted.values()) == STEP["step_seconds"]
    assert "No prediction" not in notes(run)


def test_the_bar_of_a_cpu_is_the_expected_time(run):
    write_json(run.expected, ExpectedStep(seconds=4.0, flops=2e11, told_by="from a guess"))
    assert bars(run)["predicted"] == {"computing": 4.0}
    assert "Predicted before the run, from a guess: 4.0 s for 0.2 TFLOP." in notes(run)
    parts = {"compute": 3.0, "bubble": 0.0, "tp": 0.25, "dp": 0.25, "optimizer": 0.5}
    write_json(run.expected, ExpectedStep(seconds=4.0, flops=2e11, told_by="from operations", parts=parts))
    assert bars(run)["predicted"] == {"computing": 3.0, "communication": 0.5, "optimizer": 0.5}


def test_a_run_of_several_ranks_without_a_profile_says_how_to_measure_communication(run):
    assert "training-infra profile" not in notes(run)
    write_json(run.plan, {"dp_replicate": 2})
    assert f"training-infra profile {run.path}" in notes(run)
    write_profile(run, ProfileRecord(0, {"communication": 1.0, "matrix products": 2.0}))
    assert "training-infra profile" not in notes(run)


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (
            ProfileRecord(0, {"communication": 5.0, "matrix products": 20.0, "optimizer": 10.0}),
            {"communication": 1.0, "computing": 4.0, "optimizer": 2.0},
        ),
        (
            ProfileRecord(0, {"communication": 9.0, "matrix products": 20.0, "optimizer": 5.0}, 40.0, 10.0, 5.0),
            {"communication": 1.0, "computing": 4.0, "optimizer": 1.0, "idle": 2.0},
        ),
    ],
)
def test_a_profile_is_shown_per_step_and_counts_only_exposed_communication_on_a_gpu(run, profile, expected):
    write_json(run.benchmark, replace(BENCHMARK, step_seconds=(1.0,) * 5))
    write_profile(run, profile)
    assert bars(run)["profiled"] == pytest.approx(expected)


def test_a_run_that_only_timed_steps_shows_its_profile(tmp_path):
    run = write_run(tmp_path / "profile", records=[step_record(1)])
    for part in run.metrics.glob("part-*"):
        part.unlink()
    assert list(step_breakdown(RunContents.read(run))) == []
    for rank in range(2):
        write_profile(run, ProfileRecord(rank, {"matrix products": 2.0}))
    assert list(bars(run)) == ["profiled, rank 0", "profiled, rank 1"]
