"""Measure the memory held by this process or device, and the time of optimizer steps."""

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal

import psutil
import torch

from llama_core.config.hardware import recognise_gpu
from llama_core.config.models import ModelSpec
from llama_core.config.settings import Precision
from llama_core.machine.shared_cores import core_wait_seconds
from llama_core.models.attention import attend, document_mask
from llama_core.planning.memory.profile import Phase
from llama_core.planning.program.operations import BACKWARD_PRODUCTS
from llama_core.planning.time.step_time import model_flops_utilisation
from llama_core.records.measurements import BenchmarkRecord
from llama_core.records.timelines import LaneRecord
from llama_core.schedules.actions import Action
from llama_core.units import MIB

SAMPLES_PER_SECOND = 100
"""How often a ``MemoryMeter`` on the CPU looks at what is alive; a reading takes some microseconds.

In a heap with many free pieces it takes milliseconds, in which no other thread can allocate, so it happens less often.
"""
SHARE_OF_SAMPLES = 0.02
"""Most of the time that is spent on looking."""
PRODUCT_SIDE = 1024
"""Rows and columns of the matrices that ``product_rate`` multiplies."""
COPIED_BYTES = 64 * MIB
"""More than the caches of a CPU hold."""
ATTENDED_TOKENS = 512
ATTENDED_ROW = 2048
ATTENDED_HEADS = 4
ATTENDED_SIZE = 64
"""Of what ``attention_rate`` attends to: tokens of all rows, most tokens of one row, heads, and their size."""
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class _Heap(ctypes.Structure):
    """The counts of the C library's allocator: ``struct mallinfo2`` of glibc 2.33 and newer."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    )  # fmt: skip


class MemoryMeter:
    """The memory that is alive, and the memory taken from the device or the machine for it.

    On CUDA both are counts of torch's allocator. On the CPU, what is alive is what the C library has handed out and not
    got back, tensors among it; its peak is the largest reading, so it is read again and again while ``watching``. What
    is taken is the process's resident set, whose peak the kernel records (``VmHWM``) and ``reset_peak`` resets. Where
    the C library does not tell, what is taken counts as alive.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._heap = None if device.type == "cuda" else _heap_reader()
        self._peak_alive = self._peak_resident = 0
        self._resettable = False
        self.reset_peak()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the peaks of the block: on the CPU, a thread reads what is alive ``SAMPLES_PER_SECOND`` times a second.

        It does so less often where that would take more than ``SHARE_OF_SAMPLES`` of the time.
        """
        if self._heap is None:
            yield
            return
        ended = Event()
        thread = Thread(target=_watch, args=(self, ended.wait), name="memory", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def reset_peak(self) -> None:
        """Forget the peaks so far."""
        self._peak_alive = self._peak_resident = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif _CLEAR_REFS.exists():
            try:
                _CLEAR_REFS.write_text("5")
                self._resettable = True
            except OSError:  # some containers forbid it; the largest reading is used instead
                self._resettable = False

    def allocated(self) -> int:
        """Return the bytes alive now."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        alive = self.resident() if self._heap is None else self._heap()
        self._peak_alive = max(self._peak_alive, alive)
        return alive

    def peak(self) -> int:
        """Return the most bytes alive since the last ``reset_peak``."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        self.allocated()
        return self._peak_alive if self._heap is not None else self.reserved()

    def reserved(self) -> int:
        """Return the most bytes taken since the last ``reset_peak``."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        if self._resettable:
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        self.resident()
        return self._peak_resident

    def resident(self) -> int:
        """Return the process's resident set now; 0 on CUDA, whose device memory is none of it."""
        if self.device.type == "cuda":
            return 0
        held: int = psutil.Process().memory_info().rss
        self._peak_resident = max(self._peak_resident, held)
        return held


def _heap_reader() -> Callable[[], int] | None:
    """Return a function that counts the bytes alive in the C library's heap; None if they are not counted there."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return None
    read.restype = _Heap

    def alive() -> int:
        heap = read()
        return int(heap.uordblks + heap.hblkhd)

    before = alive()
    probe = torch.empty(MIB, dtype=torch.uint8)  # another allocator may serve torch, such as a preloaded one
    return alive if alive() - before >= probe.nbytes else None


def _watch(meter: MemoryMeter, wait: Callable[[float], bool]) -> None:
    """Read a meter until ``wait``, which takes seconds, says that it is enough."""
    enough = False
    while not enough:
        began = time.thread_time()  # without the time in which other threads run
        meter.allocated()
        taken = time.thread_time() - began
        enough = wait(max(1 / SAMPLES_PER_SECOND, taken / SHARE_OF_SAMPLES))


class StepClock:
    """Splits a step into phases: by the host's clock on the CPU, by CUDA events where the host runs ahead of a GPU.

    The time before the first phase counts as data: on a GPU that is only the time in which it had nothing to do.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, Any]] = []
        self.enter("data")

    def enter(self, phase: Phase | Literal["data", "end"]) -> None:
        """Begin a phase."""
        self._marks.append((phase, mark(self.device)))

    def stop(self) -> None:
        """End the step."""
        self.enter("end")

    def seconds(self) -> dict[str, float]:
        """Return the time of each phase, once the device has done the step."""
        if self.device.type == "cuda":
            self._marks[-1][1].synchronize()
        seconds = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
        for (phase, since), (_, until) in pairwise(self._marks):
            seconds[phase] += seconds_between(since, until)
        return seconds


class ActionClock:
    """When the actions of a pipeline begin and end on this rank, in seconds since the clock was made.

    Ranks that make theirs together, such as after a barrier, share an origin up to the time of a message.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._origin = mark(device)
        self._marks: dict[Literal["begins", "ends"], dict[Action, Any]] = {"begins": {}, "ends": {}}

    def mark(self, action: Action, edge: Literal["begins", "ends"]) -> None:
        """Take the time of an edge of ``action``."""
        self._marks[edge][action] = mark(self.device)

    def lane(self) -> LaneRecord:
        """Return the times of all actions, once the device has done them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begins = self._marks["begins"]
        ends = self._marks["ends"]
        return LaneRecord(
            actions=tuple(map(str, begins)),
            begins=tuple(seconds_between(self._origin, mark) for mark in begins.values()),
            ends=tuple(seconds_between(self._origin, ends[action]) for action in begins),
        )


def mark(device: torch.device) -> Any:
    """Return a mark of this moment: on CUDA, of the moment when the device has done all work given to it so far."""
    if device.type != "cuda":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record()
    return mark


def seconds_between(since: Any, until: Any) -> float:
    """Return the time between two marks that the device has reached."""
    return float(until - since if isinstance(since, float) else 1e-3 * since.elapsed_time(until))


def time_steps(
    step: Callable[[], object],
    *,
    between: Callable[[], None] = lambda: None,
    watched: AbstractContextManager[None],
    warmup_steps: int,
    num_steps: int,
    tokens_per_step: int,
    device: torch.device,
    device_label: str,
    mfu: Callable[[float], float | None],
) -> BenchmarkRecord:
    """Run ``step`` ``warmup_steps + num_steps`` times and report the time of the last ``num_steps``.

    Args:
        step: runs one whole optimizer step.
        between: called before every step, outside of its time.
        watched: entered for the timed steps.
        warmup_steps: untimed steps before the timed ones.
        num_steps: steps that are timed, at least one.
        tokens_per_step: tokens of one step over all devices.
        device: the device that computes; a GPU gets the next step while it works on this one, as in training.
        device_label: the device's name for the record.
        mfu: converts tokens per second into model FLOPs utilisation; returns None if the device's peak is unknown.
    """
    for _ in range(warmup_steps):
        between()
        step()
    meter = MemoryMeter(device)
    clocks = []
    waited = core_wait_seconds()
    began = time.perf_counter()
    with watched, meter.watching():
        for _ in range(num_steps):
            between()
            clock = StepClock(device)
            step()
            clock.stop()
            clocks.append(clock)
    seconds = [sum(clock.seconds().values()) for clock in clocks]
    elapsed = time.perf_counter() - began
    waited_since = core_wait_seconds()
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if num_steps > 1 else (median,) * 3
    return BenchmarkRecord(
        device=device_label,
        warmup_steps=warmup_steps,
        step_seconds=tuple(seconds),
        median_seconds=median,
        spread_seconds=high - low,
        tokens_per_step=tokens_per_step,
        tokens_per_second=tokens_per_step / median,
        mfu=mfu(tokens_per_step / median),
        memory_peak_bytes=meter.peak(),
        memory_reserved_bytes=meter.reserved(),
        num_threads=torch.get_num_threads() if device.type == "cpu" else 0,
        waiting_threads=None if waited is None or waited_since is None else max(0.0, waited_since - waited) / elapsed,
    )


class FlopsUtilisation:
    """Converts throughput into model FLOPs utilisation (MFU).

    Args:
        spec: the model.
        num_devices: devices that train it.
        precision: of the matrix products, whose rate is measured on a CPU.
        device: this rank's device.
    """

    def __init__(self, spec: ModelSpec, num_devices: int, precision: Precision, device: torch.device) -> None:
        self._spec = spec
        self._num_devices = num_devices
        self._precision = precision
        self._device = device

    def __call__(self, tokens_per_second: float, seq_len: int) -> float | None:
        """Return the MFU at a number of tokens per second on all devices; None if a device's peak is unknown."""
        return model_flops_utilisation(tokens_per_second, self._spec, seq_len, self._num_devices, self._peak_flops)

    @cached_property
    def _peak_flops(self) -> float | None:
        """The device's peak in bf16; on the CPU, the rate of matrix products, measured; None for an unknown GPU."""
        if self._device.type == "cpu":
            return product_rate(self._precision)
        gpu = recognise_gpu(torch.cuda.get_device_name(self._device))
        return gpu.bf16_flops if gpu else None


def product_rate(precision: Precision) -> float:
    """Return the FLOP/s at which this process multiplies matrices on the CPU; measured once for a number of threads."""
    return _product_rate(torch.float32 if precision == "fp32" else torch.bfloat16, torch.get_num_threads())


def attention_rate(precision: Precision, seq_len: int) -> float:
    """Return the FLOP/s of attention on the CPU, forward and backward, over all scores of rows under a mask.

    Args:
        precision: of queries, keys and values.
        seq_len: tokens of a row. Shorter rows have a lower rate; one of ``ATTENDED_ROW`` tells that of longer ones.
    """
    tokens = min(seq_len, ATTENDED_ROW)
    rows = max(1, ATTENDED_TOKENS // tokens)
    shape = (rows, ATTENDED_HEADS, tokens, ATTENDED_SIZE)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    q, k, v = (torch.ones(shape, dtype=dtype).requires_grad_() for _ in range(3))
    mask = document_mask(torch.arange(tokens).expand(rows, -1), dtype)
    gradient = torch.ones(shape, dtype=dtype)
    seconds = _fastest(lambda: torch.autograd.grad(attend(q, k, v, mask), (q, k, v), gradient))
    flops = 4 * rows * ATTENDED_HEADS * tokens**2 * ATTENDED_SIZE
    return (1 + BACKWARD_PRODUCTS["attention"]) * flops / seconds


def copy_rate() -> float:
    """Return the bytes per second that copies on the CPU read and write."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / _fastest(lambda: target.copy_(source))


@cache
def _product_rate(dtype: torch.dtype, num_threads: int) -> float:
    one = torch.ones(PRODUCT_SIDE, PRODUCT_SIDE, dtype=dtype)
    return 2 * PRODUCT_SIDE**3 / _fastest(lambda: one @ one)


def _fastest(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of four runs, of which the first one sets up."""
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best
