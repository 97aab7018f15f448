"""The time of a step: a bar for what was predicted, measured and profiled, and a sentence for what was not."""

import html
import re
from dataclasses import replace

import pytest
from synthetic_run import BENCHMARK, step_record, write_run

from llama_core.records.files import read_json, write_json
from llama_core.records.measurements import ExpectedStep
from llama_core.records.profiles import ProfileRecord, write_profile
from training_reports.breakdown import step_breakdown
from training_reports.contents import RunContents
from training_reports.page import write_report

PARTS = {
    "matrix products": 6.0,
    "attention": 1.0,
    "head and loss": 2.0,
    "pipeline bubble": 0.25,
    "all-reduce": 0.5,
    "optimizer": 0.25,
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
    write_json(run.expected, ExpectedStep(10.0, 2e11, "from operations", PARTS, "operations"))
    predicted = bars(run)["predicted"]
    assert predicted == {"computing": 9.0, "communication": 0.5, "pipeline bubble": 0.25, "optimizer": 0.25}
    assert "Predicted before the run, from operations: 10.0 s for 0.2 TFLOP." in notes(run)


def test_the_bar_of_a_step_predicted_as_a_whole_is_one(run):
    write_json(run.expected, ExpectedStep(seconds=4.0, flops=2e11, told_by="from a guess"))
    assert bars(run)["predicted"] == {"computing": 4.0}


def table(page):
    """Return the cells of the table of a step's parts on a page, by part."""
    section = page.partition("<h2>Step by part: predicted and measured</h2>")[2].partition("</section>")[0]
    found = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', section, re.DOTALL)
    return {name: re.findall(r"<td>(.*?)</td>", cells) for name, cells in found}


def test_the_page_has_the_parts_of_the_prediction_and_names_the_one_that_explains_most(run):
    write_json(run.expected, ExpectedStep(10.0, 2e11, "from operations", PARTS, "operations"))
    write_json(run.benchmark, replace(BENCHMARK, step_seconds=(15.0,) * 4))
    seconds = {kind: 4 * seconds for kind, seconds in PARTS.items()} | {"attention": 24.0}
    del seconds["pipeline bubble"]
    write_profile(run, ProfileRecord(0, seconds))
    page = write_report(run).read_text()
    rows = table(page)
    for part in ("matrix products", "attention", "head and loss", "optimizer"):
        assert rows[part][0] == f"{read_json(run.expected)['parts'][part]:.3g} s"
    assert rows["whole step"][:2] == ["10 s", "15 s"]
    assert "attention explains most of the difference of +5 s: 6 s, predicted 1 s (+5 s)." in html.unescape(page)
    assert "<code>training-infra calibrate</code>" in page
    disturbed = replace(BENCHMARK, step_seconds=(15.0,) * 4, num_threads=1, waiting_threads=0.9)
    write_json(run.benchmark, disturbed)
    page = write_report(run).read_text()
    assert "In the timed steps, threads waited for a core" in page
    assert "<code>training-infra calibrate</code>" not in page


def test_a_page_without_a_prediction_says_so_and_has_no_table(run):
    page = write_report(run).read_text()
    assert table(page) == {}
    assert "No expected time yet: expected.json has not been written." in page


def test_a_damaged_prediction_is_no_prediction(run):
    run.expected.write_text('{"schema_version": 1, "seconds": -1}')
    page = write_report(run).read_text()
    assert table(page) == {}
    assert "expected.json is damaged" in page


def test_a_run_of_several_ranks_without_a_profile_says_how_to_measure_communication(run):
    assert "training-infra profile" not in notes(run)
    write_json(run.plan, {"dp_replicate": 2})
    assert f"training-infra profile {run.path}" in notes(run)
    write_profile(run, ProfileRecord(0, {"all-reduce": 1.0, "matrix products": 2.0}))
    assert "training-infra profile" not in notes(run)


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (
            ProfileRecord(
                0, {"all-reduce": 2.0, "other communication": 3.0, "matrix products": 20.0, "optimizer": 10.0}
            ),
            {"communication": 1.0, "computing": 4.0, "optimizer": 2.0},
        ),
        (
            ProfileRecord(0, {"all-gather": 9.0, "matrix products": 20.0, "optimizer": 5.0}, 40.0, 10.0, 5.0),
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
