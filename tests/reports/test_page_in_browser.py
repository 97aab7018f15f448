"""The report as a browser shows it, without a network."""

import pytest
from browser import Browser, drawn_figures
from synthetic_run import step_records, write_run
from synthetic_sweep import GRID_200, write_history, write_loss_sweep, write_planned_sweep, write_sweep

from training_reports.compare import write_comparison
from training_reports.page import write_report
from training_reports.run_comparison import compare_runs
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
        "Memory by step": (3, 3 * 40),
    }


def test_a_sweep_is_drawn_with_a_bar_for_each_element_and_each_kind_of_peak(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", 5, failed=0)
    drawn = drawn_figures(write_sweep_report(sweep), tmp_path / "profile")
    assert {title: (figure["trace"], figure["point"]) for title, figure in drawn.items()} == {
        "Throughput by element": (1, 5),
        "Throughput against memory": (1, 5),
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
        "Held-out loss by learning rate": (1, 3),
        "Held-out loss": (3, 3 * 2),
        "Training loss": (4, 0),
    }


one_browser = pytest.mark.xdist_group("sweep in a browser")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write_sweep_report(write_planned_sweep(tmp_path_factory.mktemp("sweeps") / "large", GRID_200))


def column(tab, place):
    """Return the texts of a column of the table, without the rows that are filtered out."""
    rows = "[...document.querySelectorAll('.elements tbody tr')].filter((row) => !row.hidden)"
    return tab.evaluate(f"{rows}.map((row) => row.cells[{place}].textContent)")


def orders(tab):
    """Return the sorted columns of the table, with their order."""
    headers = "[...document.querySelectorAll('.elements th[aria-sort]')]"
    return dict(tab.evaluate(f"{headers}.map((one) => [one.textContent, one.ariaSort])"))


@one_browser
def test_a_click_on_a_header_sorts_the_elements_and_unknown_values_stay_last(browser, large):
    with browser.open(large) as tab:
        assert orders(tab) == {"Tokens/s": "descending"}
        rates = column(tab, 2)
        timed = [rate for rate in rates if rate != "—"]
        assert len(rates) == 200
        assert len(timed) == 162
        tab.click(".elements th:nth-child(3) button")
        assert orders(tab) == {"Tokens/s": "ascending"}
        assert column(tab, 2) == timed[::-1] + ["—"] * 38
        tab.evaluate("document.querySelector('.elements th:nth-child(1) button').focus()")
        tab.press("Enter", 13, "\r")
        assert orders(tab) == {"Element": "ascending"}
        assert column(tab, 0)[0] == "gpus 1, tp 1, microbatch size 1, recompute full, compile off"
        assert column(tab, 0)[-1] == "gpus 16, tp 2, microbatch size 16, recompute none, compile on"


@one_browser
def test_typed_settings_and_a_state_leave_only_the_rows_that_have_them(browser, large):
    with browser.open(large, width=390, height=844, phone=True) as tab:
        tab.evaluate("document.querySelector('.choose input').focus()")
        tab.type("TP 2, recompute full")
        shown = column(tab, 0)
        assert len(shown) == 50
        assert all("tp 2" in name and "recompute full" in name for name in shown)
        tab.evaluate(
            "(() => { const one = document.querySelector('.choose select'); one.value = 'skipped';"
            " one.dispatchEvent(new Event('change')); })()"
        )
        assert set(column(tab, 1)) == {"skipped"}
        assert tab.evaluate("document.querySelector('.choose output').textContent") == "10 of 200 elements"


CUT = """
[
  // what scrolls sideways without saying so
  ...[...document.querySelectorAll("body *")]
    .filter((one) => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== "visible")
    .filter((one) => !(one.previousElementSibling?.matches(".scrolls") && one.previousElementSibling.checkVisibility()))
    .map((one) => one.className),
  // what a figure writes beyond its edge
  ...[...document.querySelectorAll(".plot")].flatMap((plot) => {
    const edge = plot.getBoundingClientRect();
    return [...plot.querySelectorAll("svg text")]
      .filter((text) => text.textContent.trim() && text.checkVisibility())
      .map((text) => [text.textContent, text.getBoundingClientRect()])
      .filter(([_, box]) => box.left < edge.left - 1 || box.right > edge.right + 1)
      .map(([text]) => text);
  }),
]
"""
"""What is cut off in a page, as far as a reader would notice: names of classes and texts of figures."""


@pytest.fixture(scope="module")
def by_model(tmp_path_factory):
    """The page of a sweep over models and learning rates in which one element diverged."""
    models = ("tiny_llama3_50m", "tiny_llama3_150m")
    losses = (2.6, 2.4, 2.9, 2.8, 2.5, 2.3)
    return write_sweep_report(
        write_loss_sweep(tmp_path_factory.mktemp("sweeps") / "models", losses, models=models, last_loss=90)
    )


@one_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
@pytest.mark.parametrize("which", ["large", "by_model"])
def test_the_page_of_a_sweep_is_drawn_no_wider_than_its_window_and_nothing_in_it_is_cut(
    browser, request, which, width, dark
):
    with browser.open(request.getfixturevalue(which), width=width, height=844, phone=width < 500, dark=dark) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.evaluate("[...document.querySelectorAll('.plot')].every((one) => one.querySelector('.main-svg'))")
        assert tab.evaluate(CUT) == []


@one_browser
def test_the_table_of_a_small_sweep_fits_a_wide_window(browser, by_model):
    with browser.open(by_model) as tab:
        assert tab.evaluate(
            "(({scrollWidth, clientWidth}) => scrollWidth <= clientWidth)(document.querySelector('.tall'))"
        )
