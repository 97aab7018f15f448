"""The overheads against their floors: a cheap row for real, and the table."""

import json

import pytest

from benchmarks import overheads


def test_a_cheap_row_is_measured_and_its_table_put_on_a_page(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- overheads -->\nold\n<!-- end of overheads -->\nafter\n")
    assert overheads.main(["--out", str(tmp_path), "--only", "import*", "--page", str(page)]) == 0
    (row,) = json.loads((tmp_path / "overheads.json").read_text())["rows"]
    assert row["ours"] > 0
    assert row["floor"] > 0
    table = (tmp_path / "overheads.md").read_text()
    assert "| import training_infra, without torch |" in table
    assert page.read_text() == f"before\n<!-- overheads -->\n{table}<!-- end of overheads -->\nafter\n"
    assert table in capsys.readouterr().out


def test_a_row_that_fails_says_why_and_counts_as_a_failure(tmp_path, monkeypatch):
    missing = overheads.Overhead("missing", lambda: {}, "", "-")
    monkeypatch.setattr(overheads, "OVERHEADS", [missing])  # the process that measures does not know it
    assert overheads.main(["--out", str(tmp_path)]) == 1
    assert "failed: StopIteration" in (tmp_path / "overheads.md").read_text()


def test_patterns_that_select_nothing_are_refused(tmp_path, capsys):
    assert overheads.main(["--out", str(tmp_path), "--only", "lunch*"]) == 2
    assert capsys.readouterr().err.startswith("error: --only lunch* selects no overhead; one is like 'training-infra")


@pytest.mark.nightly
def test_a_short_run_tells_the_time_of_its_machinery_from_that_of_its_steps():
    figures, steps = overheads._machinery()
    assert set(figures) == {"records", "checkpoints", "data"}
    assert 0 < figures["records"] < steps


@pytest.mark.nightly
def test_the_report_of_a_long_run_is_measured_against_reading_its_metrics():
    figures = overheads.report()
    assert figures.keys() == {"ours", "floor"}
