import threading
from contextlib import nullcontext
from itertools import count
from threading import Event as Signal
from types import SimpleNamespace

import pytest
import torch

from llama_core.training import measure
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
    def watching(self):
        return nullcontext()

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
        watched=nullcontext(),
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


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_threads_without_a_core_are_counted_over_the_timed_steps(device, tmp_path, monkeypatch):
    monkeypatch.setattr("llama_core.machine.shared_cores._THREADS", tmp_path)
    for thread, waited in (("1", 5_000), ("2", 0)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"9 {waited} 3\n")
    options = {
        "warmup_steps": 0,
        "num_steps": 3,
        "tokens_per_step": 10,
        "device_label": "one",
        "watched": nullcontext(),
        "mfu": lambda rate: None,
    }

    def step():
        old = int((tmp_path / "2" / "schedstat").read_text().split()[1])
        (tmp_path / "2" / "schedstat").write_text(f"9 {old + 7 * 10**8} 3\n")

    record = time_steps(step, device=device, **options)
    assert record.waiting_threads == pytest.approx(3 * 0.7 / 7)  # the clock has ticked seven times
    assert record.num_threads == torch.get_num_threads()
    monkeypatch.setattr("llama_core.machine.shared_cores._THREADS", tmp_path / "nowhere")
    assert time_steps(step, device=device, **options).waiting_threads is None


def test_on_a_cpu_what_is_freed_is_not_alive_but_was_the_peak(monkeypatch):
    """A thread that watches sees it even if nobody asks meanwhile, and ends with the block."""
    read, was_read = MemoryMeter.allocated, Signal()

    def allocated(meter):
        alive = read(meter)
        was_read.set()
        return alive

    monkeypatch.setattr(MemoryMeter, "allocated", allocated)
    meter = MemoryMeter(torch.device("cpu"))
    size = 2**26
    before = meter.allocated()
    with meter.watching():
        held = torch.ones(size, dtype=torch.uint8)
        for _ in range(2):  # the first reading may have begun before
            was_read.clear()
            assert was_read.wait(60)
        del held
    assert "memory" not in [thread.name for thread in threading.enumerate()]
    slack = size // 8
    assert meter.allocated() < before + slack
    assert before + size - slack < meter.peak() < before + size + slack
    assert meter.reserved() >= size
    meter.reset_peak()
    assert meter.peak() < before + slack


def test_a_reading_that_takes_long_happens_less_often(monkeypatch):
    """One of 25 ms, as in a heap with many free pieces, and one of 10 microseconds."""
    times = iter([0.0, 0.025, 1.0, 1.00001])
    waited = []

    def wait(seconds):
        waited.append(seconds)
        return len(waited) == 2

    monkeypatch.setattr(measure, "time", SimpleNamespace(thread_time=times.__next__))
    measure._watch(SimpleNamespace(allocated=lambda: 0), wait)
    assert waited == pytest.approx([0.025 / measure.SHARE_OF_SAMPLES, 1 / measure.SAMPLES_PER_SECOND])
