"""A run hands values to a thread: it neither waits for a service nor loses values while the service is away."""

from threading import Event, Semaphore

import pytest

from llama_core.trackers import background
from llama_core.trackers.background import BackgroundTracker

SECONDS = 60.0
"""Longer than anything here takes."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(background, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(background, "LONGEST_PAUSE_SECONDS", 0.02)


class Service:
    """A service that is away for some calls, waits, or refuses."""

    def __init__(self, *, away=0, refuses_from=None):
        self.one_at_a_time = None
        self.got = []
        self.files = []
        self.is_closed = False
        self.may_answer = Event()
        self.may_answer.set()
        self.called = Event()
        self.away = away
        self.refuses_from = refuses_from

    def send(self, values):
        self.called.set()
        self.may_answer.wait(SECONDS)
        if self.one_at_a_time is not None:
            self.one_at_a_time.acquire(timeout=SECONDS)
        if self.away:
            self.away -= 1
            raise ConnectionError("nobody answers")
        if self.refuses_from is not None and values[-1].step >= self.refuses_from:
            raise ValueError("no such experiment")
        self.got += values

    def keep(self, file):
        self.files.append((file, len(self.got)))

    def is_away(self, error):
        return isinstance(error, OSError)

    def close(self):
        self.is_closed = True


def steps(service):
    return [values.step for values in service.got]


def write(tracker, numbers):
    for step in numbers:
        tracker.write(step, {"loss": float(step)}, time=100.0 + step)


def test_every_value_arrives_in_order_and_the_service_hears_of_the_end(tmp_path):
    service = Service()
    tracker = BackgroundTracker(service, "Toy")
    write(tracker, range(1, 251))
    tracker.keep(tmp_path)
    tracker.write_scores(20, 640, {"acc": 0.5}, time=7.0)
    tracker.close()
    assert steps(service) == [*range(1, 251), 20]
    assert service.got[0] == (1, {"loss": 1.0}, 101.0)
    assert service.got[-1] == (20, {"acc": 0.5}, 7.0)
    assert service.files == [(tmp_path, 250)]
    assert service.is_closed


def test_what_a_service_misses_while_it_is_away_arrives_when_it_is_back(caplog):
    service = Service(away=4)
    tracker = BackgroundTracker(service, "Toy")
    write(tracker, range(1, 11))
    tracker.close()
    assert steps(service) == list(range(1, 11))
    assert caplog.messages == ["Toy does not answer; its values wait until it does: nobody answers"]


def test_a_step_does_not_wait_for_a_service_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.05)
    service = Service()
    service.may_answer.clear()
    tracker = BackgroundTracker(service, "Toy")
    write(tracker, [1])
    assert service.called.wait(SECONDS)
    write(tracker, range(2, 1001))  # would not return before the service answers
    assert not service.got
    with pytest.raises(TimeoutError, match=r"at the end, or too few, and lacks the values of steps 1 to 1,000"):
        tracker.close()
    service.may_answer.set()


def test_the_end_of_a_run_waits_on_while_a_service_takes_values(monkeypatch):
    monkeypatch.setattr(background, "MAX_SENT", 1)
    service = Service()
    service.one_at_a_time = Semaphore(0)
    tracker = BackgroundTracker(service, "Toy")
    write(tracker, range(1, 7))
    join = tracker._thread.join

    def take_one(seconds):
        assert seconds == background.CLOSE_SECONDS
        service.one_at_a_time.release()
        num_sent = tracker._num_sent
        while tracker._thread.is_alive() and tracker._num_sent == num_sent:
            join(0.01)

    monkeypatch.setattr(tracker._thread, "join", take_one)
    tracker.close()
    assert steps(service) == [1, 2, 3, 4, 5, 6]


def test_a_service_that_is_away_does_not_keep_a_run_from_its_end(monkeypatch):
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.05)
    service = Service(away=10**9)
    tracker = BackgroundTracker(service, "Toy")
    write(tracker, [1, 2])
    with pytest.raises(TimeoutError, match="lacks the values of steps 1 to 2"):
        tracker.close()
    tracker._thread.join(SECONDS)
    assert not tracker._thread.is_alive(), "it tries no more once it has been given up"


def test_a_refusal_is_raised_at_the_next_step_and_ends_the_thread():
    service = Service(refuses_from=1)
    tracker = BackgroundTracker(service, "Toy")
    write(tracker, [1])
    tracker._thread.join(SECONDS)
    with pytest.raises(ValueError, match="no such experiment"):
        write(tracker, [2])
    with pytest.raises(ValueError, match="no such experiment"):
        tracker.close()


def test_the_values_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(background, "MAX_WAITING", 10)
    service = Service()
    service.may_answer.clear()
    tracker = BackgroundTracker(service, "Toy")
    write(tracker, range(1, 11))
    with pytest.raises(TimeoutError, match="it has not answered for 10 steps"):
        write(tracker, [11])
    service.may_answer.set()
    tracker.close()
    assert steps(service) == list(range(1, 11))
