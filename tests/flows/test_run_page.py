"""The artifact of a run on its flow run's page, without a server."""

import re
import signal
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_record import record

from llama_core.errors import CancelledError, StoppedError, TrainingFailedError
from llama_core.records.directory import RunDirectory
from tasks import run_page
from tasks.announce import unless_the_server_is_away
from tasks.endings import ended_by
from tasks.run_page import RENEWAL_SECONDS, Renewal, artifact_key


def test_steps_are_shown_at_most_every_few_seconds(monkeypatch):
    shown, now = [], 0.0
    monkeypatch.setattr(run_page.time, "monotonic", lambda: now)
    renewal = Renewal(SimpleNamespace(show_step=shown.append))
    for step in range(1, 101):
        now += RENEWAL_SECONDS / 10
        renewal(record(step, total_steps=100))
    assert [one.step for one in shown] == list(range(1, 101, 10))


@given(name=st.text(min_size=1))
def test_every_run_has_a_key_that_prefect_takes(name):
    key = artifact_key(SimpleNamespace(name=name))
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", key)


def test_the_key_of_a_run_is_its_name(tmp_path):
    assert artifact_key(RunDirectory(tmp_path / "tiny_llama3_50m-20261121-3f9c")) == "tiny-llama3-50m-20261121-3f9c"


def test_a_run_that_somebody_stopped_is_cancelled_and_has_not_failed():
    ends = {error: ended_by(error("why")).name for error in (CancelledError, StoppedError, TrainingFailedError)}
    assert ends == {CancelledError: "Cancelled", StoppedError: "Cancelled", TrainingFailedError: "Failed"}


def test_an_interrupt_waits_for_an_artifact_and_a_second_one_does_not():
    done = []
    with pytest.raises(KeyboardInterrupt), unless_the_server_is_away():
        signal.raise_signal(signal.SIGINT)
        done.append("once")
        raise httpx.ConnectError("the server is away")
    with pytest.raises(KeyboardInterrupt), unless_the_server_is_away():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("twice")
    assert done == ["once"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
