"""The report as a browser shows it, with no network to ask."""

import os
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser

import pytest

from reports.page import write_report

pytestmark = pytest.mark.browser


@pytest.fixture
def chromium():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        missing = pytest.fail if "CI" in os.environ else pytest.skip
        missing("no Chromium on this machine (Debian package 'chromium')")
    return found


@pytest.fixture
def drawn(chromium, run, tmp_path):
    """What Chromium drew into each figure of the report."""
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=10000",
        "--dump-dom",
        write_report(run).as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    return Drawn(dom).figures


class Drawn(HTMLParser):
    """Counts, by the title of the figure, of what Plotly has drawn."""

    def __init__(self, dom):
        super().__init__()
        self.figures = {}
        self.feed(dom)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        classes = (values.get("class") or "").split()
        if "plot" in classes:
            self.figures[values["aria-label"].split(".")[0]] = Counter()
        elif self.figures:
            kinds = {"main-svg", "point", "trace", "xtitle", "ytitle", "y2title"}
            self.figures[list(self.figures)[-1]].update(kinds.intersection(classes))


def test_every_figure_is_drawn_with_all_its_lines_points_and_bars(drawn):
    assert all(figure["main-svg"] >= 1 for figure in drawn.values())
    assert {title: (figure["trace"], figure["point"]) for title, figure in drawn.items()} == {
        "Loss": (3, 39 + 4 + 1),  # one step of 40 was skipped with a loss that is no number
        "Peak memory: estimated, rehearsed, measured": (7, 2 * 6 + 1),
        "Throughput": (1, 40),
        "Where the time of a step goes": (4, 0),
        "Learning rate and gradient norm": (2, 40 + 39),
        "Memory by step": (2, 2 * 40),
    }
