"""The scores of checkpoints on a run's page and in comparisons."""

from dataclasses import replace

from synthetic_run import write_run
from test_compare import measures
from test_page import Page

from llama_core.records.evaluations import Score, write_scores
from training_reports.contents import RunContents
from training_reports.evaluations import evaluation_panels
from training_reports.page import write_report

ACCURACY = Score(
    step=10,
    tokens=1000,
    task="arc",
    metric="acc",
    value=0.25,
    standard_error=0.01,
    higher_is_better=True,
    examples=80,
    version="1.0",
    settings="5-shot",
    time="2026-01-01T00:00:00+00:00",
)
LOSS = replace(ACCURACY, task="law", metric="loss", value=2.0, higher_is_better=False, version="", settings="")


def test_each_metric_is_drawn_by_tokens_with_two_standard_errors(run):
    for step, value in ((20, 0.5), (10, 0.25)):
        write_scores(run, [replace(ACCURACY, step=step, tokens=100 * step, value=value)])
    write_scores(run, [replace(LOSS, standard_error=None)])
    accuracy, loss = evaluation_panels(RunContents.read(run).scores)
    (line,) = accuracy.figure.data
    assert (line.x, line.y, line.error_y.array) == ((1000, 2000), (0.25, 0.5), (0.02, 0.02))
    assert accuracy.title == "Evaluated: arc (5-shot), acc"
    assert accuracy.summary == "After step 20 (2.00K tokens): 0.5000 ± 0.0200."
    assert accuracy.notes[0] == "Over 80 examples of version 1.0; higher is better."
    assert loss.notes == ["Over 80 examples; lower is better."]
    assert "Evaluated: law, loss" in Page(write_report(run)).text


def test_a_run_without_scores_has_no_such_panel_and_a_damaged_file_spoils_no_page(run):
    assert "Evaluated" not in Page(write_report(run)).text
    write_scores(run, [LOSS]).write_bytes(b"")
    assert "Evaluated" not in Page(write_report(run)).text


def test_runs_are_compared_by_their_newest_score(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("one", "other")]
    for run, last in zip(runs, (0.5, 0.55), strict=True):
        for step, value in ((10, 0.9), (20, last)):
            write_scores(run, [replace(ACCURACY, step=step, value=value)])
            write_scores(run, [replace(LOSS, step=step, value=value)])
    found = measures([run.path for run in runs])
    accuracy = found["evaluated: arc (5-shot), acc"]
    loss = found["evaluated: law, loss"]
    assert accuracy.values == loss.values == (0.5, 0.55)
    assert (accuracy.winner, loss.winner) == (1, 0)
    write_scores(runs[1], [replace(ACCURACY, step=30, value=0.51)])
    assert measures([run.path for run in runs])["evaluated: arc (5-shot), acc"].winner is None
