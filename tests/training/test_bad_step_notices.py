"""People are told of bad steps, by a real program, in runs with a poisoned batch."""

import json
import sys
from types import SimpleNamespace

import pytest
from test_spikes import BAD, SPIKES, Texts
from test_trainer import trainer

from llama_core.config.notify import NotifyConfig
from llama_core.notifications import finish_notices
from llama_core.records.directory import RunDirectory
from llama_core.training.parts import notices
from llama_core.training.parts.notices import BadStepNotices
from llama_core.training.parts.part import RunProgress
from llama_core.training.parts.spikes import BadStep


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "mine")
    run.create()
    return run


@pytest.fixture
def asked(tmp_path):
    """Whom to tell: a program that adds what it gets to a file."""
    script = f"import sys; open({str(tmp_path / 'told')!r}, 'a').write(sys.stdin.read() + chr(10))"
    return NotifyConfig(command=(sys.executable, "-c", script))


def told(tmp_path):
    finish_notices()
    lines = (tmp_path / "told").read_text().splitlines() if (tmp_path / "told").exists() else []
    return [json.loads(line) for line in lines]


def with_notices(one, asked):
    """Let a trainer tell; its configuration is a test's own."""
    (there,) = [place for place, part in enumerate(one.parts) if isinstance(part, BadStepNotices)]
    part = BadStepNotices(one.run, asked, one.progress)
    one.parts = (*one.parts[:there], part, *one.parts[there + 1 :])
    return one


def test_a_spike_that_is_trained_on_is_told_while_the_run_goes_on(run, asked, tmp_path):
    with_notices(trainer(run, batches=Texts([BAD]), **SPIKES), asked).fit()
    (notice,) = told(tmp_path)
    assert (notice["event"], notice["run"], notice["step"]) == ("spike", "mine", BAD)
    assert "median absolute deviations above the median" in notice["cause"]


def test_a_rollback_is_told_with_where_the_run_goes_on(run, asked, tmp_path):
    with_notices(trainer(run, batches=Texts([BAD]), on_bad_step="rollback", **SPIKES), asked).fit()
    (notice,) = told(tmp_path)
    assert (notice["event"], notice["step"]) == ("spike", BAD)
    assert notice["cause"].endswith("; returned to step 8")


def test_many_bad_steps_are_few_notices_that_count_them(run, asked, tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(notices, "time", SimpleNamespace(monotonic=lambda: now))
    part = BadStepNotices(run, asked, RunProgress(step=8))
    for step in (11, 12, 13):
        part.went_back(BadStep(step, "loss nan", is_finite=False, data={}))
    now += notices.PAUSE_SECONDS
    part.went_back(BadStep(14, "loss nan", is_finite=False, data={}))
    assert {notice["step"]: notice["cause"] for notice in told(tmp_path)} == {
        11: "loss nan; returned to step 8",
        14: "loss nan; returned to step 8; 2 more bad steps since the last notice",
    }
