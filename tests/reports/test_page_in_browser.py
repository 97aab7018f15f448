"""The report as a browser shows it, without a network."""

import pytest
from browser import drawn_figures
from synthetic_run import step_records, write_run
from synthetic_sweep import write_history, write_loss_sweep, write_sweep

from training_reports.compare import write_comparison
from training_reports.compare_rows import compare_runs
from training_reports.page import write_report
from training_reports.sweep import write_report as write_sweep_report

pytestmark = pytest.mark.browser


def test_every_figure_is_drawn_with_all_its_lines_points_and_bars(run, tmp_path):
    drawn = drawn_figures(write_report(run), tmp_path / "profile")
    assert all(figure["main-svg"] >= 1 for figure in drawn.values())
    assert {title: (figure["trace"], figure["point"]) for title, figure in drawn.items()} == {
        "Loss": (3, 39 + 4 + 1),  # one step of 40 was skipped with a NaN loss
        "Peak memory: estimated, rehearsed, measured": (7, 2 * 6 + 1),
        "Time of a step: predicted and measured": (5, 5),
        "Throughput": (1, 40),
        "Where the time of a step goes": (5, 0),
        "Learning rate and gradient norm": (2, 40 + 39),
        "Memory by step": (2, 2 * 40),
    }


def test_a_sweep_is_drawn_with_a_bar_for_each_element_and_each_kind_of_peak(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", 5, failed=0)
    drawn = drawn_figures(write_sweep_report(sweep), tmp_path / "profile")
    assert {title: (figure["trace"], figure["point"]) for title, figure in drawn.items()} == {
        "Throughput by element": (1, 5),
        "Peak memory by element": (3, 3 * 5),
    }
    assert drawn["Throughput by element"]["errorbar"] == 5


def test_runs_are_compared_with_a_line_and_a_bar_for_each(run, tmp_path):
    other = write_run(tmp_path / "other", records=step_records(30))
    page = write_comparison(tmp_path / "comparison.html", compare_runs([run.path, other.path]))
    drawn = drawn_figures(page, tmp_path / "profile")
    assert {title: (figure["trace"], figure["point"]) for title, figure in drawn.items()} == {
        "Training loss by tokens": (2, 0),
        "Training loss by time": (2, 0),
        "Held-out loss by tokens": (2, 4 + 3),
        "Throughput": (1, 2),
        "Peak memory": (3, 3 * 2),
    }


def test_the_history_of_a_sweep_is_drawn_with_a_line_for_each_element(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", 4)
    write_history(sweep)
    drawn = drawn_figures(write_sweep_report(sweep), tmp_path / "profile")["Throughput since the first result"]
    assert (drawn["trace"], drawn["point"]) == (4, 3 * 10 + 3)


def test_a_sweep_of_losses_is_drawn_with_a_line_for_each_element(tmp_path):
    sweep = write_loss_sweep(tmp_path / "sweep")
    drawn = drawn_figures(write_sweep_report(sweep), tmp_path / "profile")
    assert {title: (figure["trace"], figure["point"]) for title, figure in drawn.items()} == {
        "Training loss": (4, 0),
        "Held-out loss": (3, 3 * 2),
        "Peak memory by element": (3, 3 * 4),
    }
