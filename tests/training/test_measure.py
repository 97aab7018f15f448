from itertools import count
from threading import Event as Signal

import pytest
import torch

from llama_core.training.measure import MemoryMeter, StepClock, time_steps


class Event:
    """A CUDA event on a device that takes a second from one to the next."""

    seconds = count()

    def __init__(self, *, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        self.at = next(Event.seconds)

    def synchronize(self):
        assert self.at is not None

    def elapsed_time(self, end):
        return 1000.0 * (end.at - self.at)


@pytest.fixture
def device(request, monkeypatch):
    """The clock ticks once a second, whichever is read."""
    ticks = count()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr("llama_core.training.measure.MemoryMeter", lambda device: Meter())
    return torch.device(request.param)


class Meter:
    def peak(self):
        return 7

    def reserved(self):
        return 8


@pytest.mark.parametrize("device", ["cpu", "cuda"], indirect=True)
def test_the_phases_of_a_step_are_timed_by_the_host_or_the_device(device):
    clock = StepClock(device)
    for phase in ("forward", "backward", "forward", "backward", "optimizer"):
        clock.enter(phase)
    clock.stop()
    assert clock.seconds() == {"data": 1.0, "forward": 2.0, "backward": 2.0, "optimizer": 1.0}


@pytest.mark.parametrize("device", ["cpu", "cuda"], indirect=True)
def test_timed_steps_follow_untimed_ones(device):
    steps = []
    record = time_steps(
        lambda: steps.append(1),
        warmup_steps=2,
        num_steps=3,
        tokens_per_step=10,
        device=device,
        device_label="one",
        mfu=lambda rate: rate / 100,
    )
    assert len(steps) == 5
    assert (record.step_seconds, record.tokens_per_second, record.mfu) == ((1.0,) * 3, 10.0, 0.1)
    assert (record.memory_peak_bytes, record.memory_reserved_bytes) == (7, 8)


def test_on_a_cpu_what_is_freed_is_not_alive_but_was_the_peak(monkeypatch):
    """A thread sees it even if nobody asks meanwhile."""
    read, was_read = MemoryMeter.allocated, Signal()

    def allocated(meter):
        alive = read(meter)
        was_read.set()
        return alive

    monkeypatch.setattr(MemoryMeter, "allocated", allocated)
    meter = MemoryMeter(torch.device("cpu"))
    size = 2**26
    before = meter.allocated()
    held = torch.ones(size, dtype=torch.uint8)
    for _ in range(2):  # the first reading may have begun before
        was_read.clear()
        assert was_read.wait(60)
    del held
    slack = size // 8
    assert meter.allocated() < before + slack
    assert before + size - slack < meter.peak() < before + size + slack
    assert meter.reserved() >= size
    meter.reset_peak()
    assert meter.peak() < before + slack
