"""The figures that a browser draws on a page, without a network."""

import os
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser

import pytest


def drawn_figures(page, profile):
    """Count what Chromium draws in each figure of a page, by title; ``profile`` is a folder it may use."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        missing = pytest.fail if "CI" in os.environ else pytest.skip
        missing("no Chromium on this machine (Debian package 'chromium')")
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
        f"--user-data-dir={profile}",
        "--virtual-time-budget=10000",
        "--dump-dom",
        page.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    return Drawn(dom).figures


class Drawn(HTMLParser):
    """Counts of the marks that Plotly has drawn, by figure title."""

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
            kinds = {"main-svg", "point", "trace", "xtitle", "ytitle", "y2title", "errorbar"}
            self.figures[list(self.figures)[-1]].update(kinds.intersection(classes))
