"""Text from a run, whatever it is, is text on every page."""

import html
import json
import re
from dataclasses import replace

import plotly.graph_objects as go
import pytest
import yaml
from browser import Browser
from synthetic_run import FAILED, write_run
from synthetic_sweep import write_history, write_sweep
from test_scores import ACCURACY

from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import write_scores
from llama_core.records.profiles import ProfileRecord, write_profile
from llama_core.sweep.comparison import Comparison, ComparisonRow
from llama_core.sweep.grid import SweepConfig
from training_reports import sweep as sweep_page
from training_reports.compare import write_comparison
from training_reports.layout import figure_json
from training_reports.page import write_report
from training_reports.prediction import write_prediction
from training_reports.run_comparison import compare_runs

ATTACK = "<img src=x onerror=alert(1)><script>alert(1)"
LINK = '<a href="https://evil.example" target="_top">click'
"""Plotly would make a link of it, with which a page leads elsewhere whoever clicks on a name."""
TYPED = {"status", "launcher", "submitted_at", "ended_at", "peak_phase", "job_id", "name", "objective", "fingerprint"}


def attacked(value, key=""):
    """Return a JSON value whose texts and keys end with an attack, except those that have a type of their own."""
    if isinstance(value, str):
        return value if key in TYPED else value + ATTACK
    if isinstance(value, dict):
        return {name: attacked(inner, name) for name, inner in value.items()}
    return [attacked(inner, key) for inner in value] if isinstance(value, list) else value


def attack_run(run):
    for path in run.path.glob("*.json"):
        path.write_text(json.dumps(attacked(json.loads(path.read_text()))))
    config = yaml.safe_load(run.config.read_text())
    config["model"] = config.get("model", "") + ATTACK
    config.setdefault("data", {})["source"] = f"texts{ATTACK}.jsonl"
    run.config.write_text(yaml.safe_dump(config))
    for log in run.logs.glob("rank-*.log"):
        log.write_text(f"{log.read_text()}\n{ATTACK}\n")


def assert_escaped(page, *, at_least=1):
    text = page.read_text()
    assert re.findall(r"\\u003c(?!/?(?:b|br|extra)>).{9}", text) == []
    assert "<img src=x" not in text and "<script>alert(1)" not in text
    assert text.count(html.escape(ATTACK, quote=False)) >= at_least


def test_the_page_of_a_run_with_its_profile(tmp_path):
    run = write_run(tmp_path / f"a {ATTACK}", outcome=FAILED)
    run.trace.mkdir()
    write_profile(run, ProfileRecord(0, {f"matmul{ATTACK}": 1.0}))
    (run.trace / f"rank-0{ATTACK}.pickle").write_bytes(b"")
    attack_run(run)
    assert_escaped(write_report(run), at_least=20)


def test_the_page_of_a_sweep(tmp_path):
    sweep = write_sweep(tmp_path / "sweep")
    record = json.loads(sweep.record.read_text())
    for element in record["elements"]:
        element["skipped"] = attacked(element["skipped"]) if element["skipped"] else ""
        if not element["skipped"]:
            attack_run(sweep.run(element["name"])) if sweep.run(element["name"]).config.exists() else None
    sweep.record.write_text(json.dumps(record))
    assert_escaped(sweep_page.write_report(sweep), at_least=2)


def test_the_page_of_a_comparison(tmp_path):
    runs = [write_run(tmp_path / f"{name}{ATTACK}") for name in ("a", "b")]
    for run, source in zip(runs, ("x", "y"), strict=True):
        config = yaml.safe_load(run.config.read_text())
        config["data"]["source"] = f"{source}{ATTACK}.jsonl"
        run.config.write_text(yaml.safe_dump(config))
    assert_escaped(write_comparison(tmp_path / "page.html", compare_runs([run.path for run in runs])), at_least=2)


def test_the_page_of_a_predicted_sweep(tmp_path):
    config = SweepConfig.from_mapping(
        {"name": "x", "base": {"data": {"source": ATTACK}}, "grid": {"parallel.tp": [1, 2]}}
    )
    texts = {"name": ATTACK, "device": ATTACK, "plan": ATTACK, "reason": ATTACK, "settings": {}, "how": "predicted"}
    numbers = {"tokens_per_second": 1.0, "step_seconds": 1.0, "memory_bytes": 1}
    rows = (ComparisonRow(status="finished", **texts, **numbers), ComparisonRow(status=ATTACK, **texts))
    page = write_prediction(tmp_path / f"{ATTACK}.html", config, Comparison(rows, None))
    assert_escaped(page, at_least=4)


def test_no_text_of_a_figure_becomes_a_tag_that_is_not_ours():
    figure = go.Figure(layout={"title": {"text": LINK}})
    figure.add_scatter(
        y=[1], name=f"<b>ours</b><br>{ATTACK}", customdata=[[LINK, 3]], hovertemplate=f"{LINK}<extra></extra>"
    )
    shown = json.loads(figure_json(figure))
    (line,) = shown["data"]
    assert line["name"] == "<b>ours</b><br>" + ATTACK.replace("<", "&lt;")
    assert line["hovertemplate"] == LINK.replace("<", "&lt;") + "<extra></extra>"
    assert line["customdata"] == [[LINK.replace("<", "&lt;"), 3]]
    assert shown["layout"]["title"]["text"] == LINK.replace("<", "&lt;")
    assert "<" not in figure_json(figure)


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """The pages of a run, a sweep and a comparison in whose records every text is a link."""
    monkeypatch.setattr("test_pages_escape.ATTACK", LINK)
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    for run in runs:
        attack_run(run)
        score = replace(ACCURACY, task=f"arc{LINK}", metric=f"acc{LINK}", settings=LINK, version=LINK)
        for step in (10, 20):
            write_scores(run, [replace(score, step=step, tokens=100 * step)])
    sweep = write_sweep(tmp_path / "sweep")
    write_history(sweep)
    for config in sweep.path.glob("runs/*/config.yaml"):
        attack_run(RunDirectory(config.parent))
    return [
        write_report(runs[0]),
        sweep_page.write_report(sweep),
        write_comparison(tmp_path / "page.html", compare_runs([run.path for run in runs])),
    ]


@pytest.mark.browser
def test_no_page_has_a_link_that_its_records_ask_for(hostile, tmp_path):
    browser = Browser(tmp_path / "profile")
    try:
        for page in hostile:
            assert "evil.example" in page.read_text()
            with browser.open(page) as tab:
                assert tab.evaluate("document.querySelectorAll('.main-svg').length") > 0
                links = "[...document.querySelectorAll('a')].map((one) => one.href.baseVal ?? one.href)"
                assert [link for link in tab.evaluate(links) if not link.startswith("file://")] == []
                assert tab.evaluate("document.querySelectorAll('svg a, img, iframe, object, form[action]').length") == 0
    finally:
        browser.close()
