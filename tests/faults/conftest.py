"""The table of faults: each test marked ``fault`` is a cell of it, and `make faults` writes it to a page."""

import json
import os
import platform
import sys
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from faulty_run import PHASES, FaultyRun

from benchmarks.pages import rewrite
from llama_core.machine.detect import available_cores

_CELL, _PROMISE = "cell of the table of faults", "promise of a cell"
_cells = []
"""The cells of this session, as dictionaries, in order; under xdist, on the process that collects the reports."""


@pytest.fixture
def promise(request):
    """Say what held, for the cell of a fault, or for all cells of the test."""

    def say(text, fault=""):
        request.node.user_properties.append((_PROMISE, (fault, text)))

    return say


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A file of texts to train on."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n} is {n * n} long; " * 8}) + "\n" for n in range(60)))
    return path


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory):
    """A token cache that most runs share."""
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, texts, token_cache):
    """A finished run without a fault."""
    run = FaultyRun(tmp_path_factory.mktemp("undisturbed"), texts, token_cache=token_cache)
    assert run.train().status == "finished", run.outcome
    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" or report.outcome != "passed":
        title = (item.module.__doc__ or item.module.__name__).splitlines()[0].rstrip(".")
        for marker in reversed(list(item.iter_markers("fault"))):
            cell = {"title": title, "fault": marker.args[0], "phase": marker.kwargs.get("phase", "")}
            report.user_properties.append((_CELL, cell))
    return report


def pytest_runtest_logreport(report):
    found = [value for name, value in report.user_properties if name == _CELL]
    texts = dict(value for name, value in report.user_properties if name == _PROMISE)
    for cell in found:
        if hasattr(report, "wasxfail"):
            text = f"**not as promised**: {report.wasxfail.removeprefix('reason: ')}"
        elif report.outcome == "passed":
            text = texts.get(cell["fault"], texts.get("", "as promised"))
        else:
            text = "not run" if report.outcome == "skipped" else "**failed**"
        _cells.append(cell | {"text": text, "held": report.outcome == "passed", "at": report.location[:2]})


def pytest_sessionfinish(session):
    page = os.environ.get("FAULTS_PAGE")
    if page and _cells and not hasattr(session.config, "workerinput"):
        rewrite(Path(page), "faults", written(_cells))


def written(cells):
    """Return the tables of some cells, a title for each, as Markdown."""
    held = sum(cell["held"] for cell in cells)
    run = sum(cell["text"] != "not run" for cell in cells)
    kept = "all as promised" if held == run else f"{held} as promised"
    paragraphs = [
        f"{datetime.now(UTC):%Y-%m-%d}: {run} faults injected, {kept}. {_machine()}, two ranks on the CPU "
        "(`make faults FAULTS_PAGE=docs/reliability.md`)."
    ]
    tables = defaultdict(list)
    for cell in sorted(cells, key=lambda cell: cell["at"]):
        tables[cell["title"]].append(cell)
    for title, of_table in tables.items():
        paragraphs += [f"**{title}**", _table(of_table)]
    return "\n\n".join(paragraphs)


def _table(cells):
    """Return one table, with a row for each phase and a column for each fault, or the other way round if wider."""
    sides = {key: list(dict.fromkeys(cell[key] for cell in cells)) for key in ("phase", "fault")}
    known = list(PHASES)
    sides["phase"].sort(key=lambda phase: known.index(phase) if phase in known else len(known))
    down, across = sorted(sides, key=lambda key: -len(sides[key]))
    texts = defaultdict(list)
    for cell in cells:
        text = cell["text"].replace("|", "/")
        if text not in texts[cell[down], cell[across]]:
            texts[cell[down], cell[across]].append(text)
    rows = [[down, *sides[across]], ["---"] * (1 + len(sides[across]))]
    rows += [[row, *("; ".join(texts[row, column]) or "" for column in sides[across])] for row in sides[down]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _machine():
    cpu = platform.machine()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    cores = available_cores()
    counted = f"{cores} cores" if cores > 1 else f"{cores} core"
    return f"{counted} of {cpu}, Python {platform.python_version()}, torch {torch.__version__}"
