from contextlib import contextmanager
from threading import Event, current_thread
from threading import enumerate as all_threads

import pytest
import torch
from corpora import byte_cache
from waiting import PATIENCE_SECONDS

from llama_core.data.datasets import BatchStream
from llama_core.data.mixture import Mixture
from llama_core.data.packing import PackedDataset
from llama_core.data.selection import everything
from llama_core.data.supply import STEPS_AHEAD, Supply
from llama_core.errors import DataError
from llama_core.models.batch import Batch

CPU = torch.device("cpu")


class Counting:
    """Batches that name how many came before, and a record of who read them."""

    def __init__(self, broken_at=None):
        self.taken, self.broken_at, self.readers = 0, broken_at, []
        self.third_is_read = Event()

    def next_batch(self):
        self.taken += 1
        self.readers.append(current_thread().name)
        if self.taken == self.broken_at:
            raise DataError(f"row {self.taken} is broken")
        if self.taken == 3:
            self.third_is_read.set()
        return Batch(torch.full((4, 2), self.taken), torch.full((4, 2), self.taken), None)

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def halves(batch):
    return batch.split(2)


@pytest.fixture
def supply():
    """A function that makes a supply, which is stopped at the end."""
    made = []

    def make(source, *, reads_ahead=True):
        made.append(Supply(source, halves, CPU, reads_ahead=reads_ahead))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def number(microbatches):
    assert len(microbatches) == 2
    return int(microbatches[0].tokens_BS[0, 0])


def readers():
    return [thread for thread in all_threads() if thread.name.startswith(("supply", "rows"))]


def stream(num_workers):
    documents = [f"document number {n}, of its own words" for n in range(40)]
    rows = PackedDataset(everything(byte_cache(documents)), seq_len=6)
    return BatchStream(Mixture({"": rows}, {"": 1}), 4, 3, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_reading_ahead_gives_the_same_microbatches_in_the_same_order_with_the_same_positions(supply, num_workers):
    ahead, foreground = supply(stream(num_workers)), supply(stream(0), reads_ahead=False)
    for _ in range(7):
        for ours, theirs in zip(ahead.next_step(), foreground.next_step(), strict=True):
            torch.testing.assert_close(ours.tensors(), theirs.tensors(), rtol=0, atol=0)
        assert ahead.state_dict() == foreground.state_dict()


def test_batches_are_read_in_another_thread_before_they_are_asked_for(supply):
    source = Counting()
    one = supply(source)
    assert number(one.next_step()) == 1
    assert source.third_is_read.wait(PATIENCE_SECONDS)
    assert set(source.readers) == {"supply_0"}


def test_the_position_is_that_of_the_steps_handed_out_whatever_was_read_ahead(supply):
    source = Counting()
    one = supply(source)
    assert one.state_dict() == {"taken": 0}
    one.next_step()
    source.third_is_read.wait(PATIENCE_SECONDS)
    assert one.state_dict() == {"taken": 1}
    other = supply(Counting())
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == {"taken": 1}
    assert number(other.next_step()) == 2


def test_at_most_two_steps_are_read_ahead_and_a_stopped_supply_loses_none(supply):
    source = Counting()
    one = supply(source)
    for step in range(1, 6):
        assert number(one.next_step()) == step
        one.stop()
        assert step <= source.taken <= step + STEPS_AHEAD
        assert not readers()


def test_what_reading_raises_is_raised_at_its_step_and_the_thread_ends(supply):
    one = supply(Counting(broken_at=3))
    assert [number(one.next_step()) for _ in range(2)] == [1, 2]
    with pytest.raises(DataError, match="row 3 is broken"):
        one.next_step()
    assert one.state_dict() == {"taken": 2}
    assert not readers()


def test_a_row_that_cannot_be_read_is_one_error_whichever_thread_reads_it(supply, monkeypatch):
    source = stream(num_workers=3)
    monkeypatch.setattr(source.dataset, "row", lambda index: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        supply(source).next_step()
    assert not readers()


def test_without_reading_ahead_there_is_no_thread(supply):
    source = Counting()
    one = supply(source, reads_ahead=False)
    assert number(one.next_step()) == 1
    assert (source.taken, set(source.readers)) == (1, {"MainThread"})
    assert not readers()


def test_a_gpu_gets_copies_from_pinned_memory_that_its_steps_wait_for(monkeypatch):
    """With torch.cuda and the batches replaced by recorders: only the order of the calls is tested."""
    calls = []

    class Stream:
        def record_event(self):
            calls.append("copied")
            return "copied"

        def wait_event(self, event):
            calls.append(f"wait for {event}")

    copying, computing = Stream(), Stream()

    @contextmanager
    def selected(what):
        calls.append("copying stream" if what is copying else f"device {what}")
        yield

    class Microbatch:
        def pinned(self):
            calls.append("pinned")
            return self

        def to(self, device, *, non_blocking=False):
            calls.append(f"to {device}, non-blocking {non_blocking}")
            return self

        def tensors(self):
            return [self]

        def record_stream(self, stream):
            assert stream is computing
            calls.append("used by the step")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", selected)
    monkeypatch.setattr(torch.cuda, "device", selected)
    one = Supply(Counting(), lambda batch: [Microbatch()], torch.device("cuda:1"), reads_ahead=True)
    one.next_step()
    one.stop()
    copied = ["device cuda:1", "copying stream", "pinned", "to cuda:1, non-blocking True", "copied"]
    assert calls[:5] == copied
    assert [call for call in calls if call not in copied] == ["wait for copied", "used by the step"]
