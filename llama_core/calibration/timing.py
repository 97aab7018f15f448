"""Times operations: forward and backward, until enough is known."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from llama_core.calibration.operations import Prepared, prepare
from llama_core.config.measured_rates import Sizes

MIN_REPEATS = 5
MIN_SECONDS = 0.03
MAX_SECONDS = 0.5
"""A measurement repeats an operation until both minima are reached, but no longer than this."""
SAMPLE_SECONDS = 1e-3
"""On CUDA, shorter operations are timed several at a time, so that their launches do not count where they overlap."""
MAX_IN_SAMPLE = 16
"""Most operations in one: the results of all of them are held."""


@dataclass(frozen=True)
class Timed:
    """Seconds of an operation."""

    seconds: float
    """As ``typical``."""
    spread: float
    """The difference of the quartiles over the median."""


@dataclass
class Measurements:
    """The times that were measured, and why others were not."""

    found: dict[tuple[str, Sizes], Timed] = field(default_factory=dict)
    failed: dict[tuple[str, Sizes], str] = field(default_factory=dict)
    """What the device refused, with its reason in a line. Only what no other rank waits for may fail."""


class Timer(Protocol):
    """Takes the time on a device."""

    warmup: int
    """Runs that set up kernels, and do not count."""

    def mark(self) -> Any:
        """Note that all that was asked of the device before now was asked before what follows."""

    def between(self, begin: Any, end: Any) -> float:
        """Return the seconds that the device took between two marks; waits for it."""

    def in_sample(self, seconds: float) -> int:
        """Return how many runs, each of so many seconds, are timed together."""


class CpuTimer:
    """The clock of the processor, which computes while it is asked."""

    warmup = 1

    def mark(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def between(self, begin: float, end: float) -> float:
        """Return the seconds between two times."""
        return end - begin

    def in_sample(self, seconds: float) -> int:
        """Return one."""
        return 1


class CudaTimer:
    """Events on the device's own stream: the time between them has nothing of the processor that asks for it."""

    warmup = 3

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Record an event."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two events, once the second one has happened."""
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000

    def in_sample(self, seconds: float) -> int:
        """Return as many runs as fill a sample, so that the device always has the next kernel in its queue."""
        return max(1, min(MAX_IN_SAMPLE, int(SAMPLE_SECONDS / max(seconds, 1e-9))))


def timer_of(device: torch.device) -> Timer:
    """Return the timer of a device."""
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def measure(
    queries: Iterable[tuple[str, Sizes]], device: torch.device, goes_on: Callable[[], bool] = lambda: True
) -> Measurements:
    """Return the time of every kind and sizes; the two passes of one operation are timed together.

    Args:
        queries: kinds and sizes, those first that are needed most.
        device: where they are computed.
        goes_on: called before each is timed: ranks wait for each other in it. Once it is false, the rest is left out.
    """
    pending = dict.fromkeys(queries)
    answer = Measurements()
    while pending:
        kind, sizes = next(iter(pending))
        if not goes_on():
            break
        del pending[kind, sizes]
        try:
            timed = time_passes(prepare(kind, sizes, device), device)
        except RuntimeError as error:  # no kernel for it, or out of memory
            if device.type == "cpu" or kind.startswith("link "):
                raise
            answer.failed[kind, sizes] = str(error).strip().partition("\n")[0]
            if kind.endswith((" forward", " backward")):
                pending.pop((_other_pass(kind), sizes), None)
            continue
        names = [kind]
        if len(timed) > 1:
            names = [" ".join((*kind.split()[:-1], name)) for name in ("forward", "backward")]
        for name, one in zip(names, timed, strict=True):
            answer.found[name, sizes] = one
            pending.pop((name, sizes), None)
    return answer


def _other_pass(kind: str) -> str:
    """Return the name of the pass that is timed with another one."""
    stem, _, way = kind.rpartition(" ")
    return f"{stem} {'backward' if way == 'forward' else 'forward'}"


def time_passes(prepared: Prepared, device: torch.device, timer: Timer | None = None) -> list[Timed]:
    """Return the time of a forward and, if it has gradients, of its backward.

    Args:
        prepared: the operation.
        device: where it is computed.
        timer: takes the time; by default the device's.
    """
    timer = timer or timer_of(device)
    forwards: list[float] = []
    backwards: list[float] = []
    gradient = None
    number = 1
    began = time.perf_counter()
    while not _is_enough(prepared, timer, forwards, time.perf_counter() - began):
        mark = timer.mark()
        results = [prepared.run() for _ in range(number)]
        after = timer.mark()
        if prepared.inputs:
            if gradient is None:
                gradient = torch.ones_like(results[0])
            before = timer.mark()
            for result in results:
                torch.autograd.grad(result, prepared.inputs, gradient)
            backwards.append(timer.between(before, timer.mark()) / number)
        forwards.append(timer.between(mark, after) / number)
        del results
        if len(forwards) == timer.warmup and prepared.repeats is None:
            # ranks that send to each other take as many runs as each other, whatever their own clock says
            number = timer.in_sample(forwards[-1])
    return [_timed(seconds[timer.warmup :]) for seconds in (forwards, backwards) if seconds]


def _is_enough(prepared: Prepared, timer: Timer, forwards: list[float], spent: float) -> bool:
    counted = len(forwards) - timer.warmup
    if prepared.repeats is not None:
        return counted >= prepared.repeats - 1
    return (counted >= MIN_REPEATS and spent > MIN_SECONDS) or (counted > 1 and spent > MAX_SECONDS)


def _timed(seconds: list[float]) -> Timed:
    ordered = sorted(seconds)
    spread = (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / statistics.median(ordered)
    return Timed(typical(seconds), spread)


def typical(seconds: Sequence[float]) -> float:
    """Return the median of the faster half: what disturbs a machine only ever makes it slower."""
    return statistics.median(sorted(seconds)[: len(seconds) // 2 + 1])
