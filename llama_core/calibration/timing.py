"""Times operations: forward and backward, until enough is known."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from llama_core.calibration.operations import Prepared, prepare
from llama_core.config.measured_rates import Sizes

MIN_REPEATS = 5
MIN_SECONDS = 0.03
MAX_SECONDS = 0.5
"""A measurement repeats an operation until both minima are reached, but no longer than this."""


@dataclass(frozen=True)
class Timed:
    """Seconds of an operation."""

    seconds: float
    """As ``typical``."""
    spread: float
    """The difference of the quartiles over the median."""


def measure(
    queries: Iterable[tuple[str, Sizes]], device: torch.device, begin: Callable[[], object] = lambda: None
) -> dict[tuple[str, Sizes], Timed]:
    """Return the time of every kind and sizes; the two passes of one operation are timed together.

    Args:
        queries: kinds and sizes.
        device: where they are computed.
        begin: called before each is timed: ranks wait for each other in it.
    """
    pending = dict.fromkeys(queries)
    found: dict[tuple[str, Sizes], Timed] = {}
    while pending:
        kind, sizes = next(iter(pending))
        prepared = prepare(kind, sizes, device)
        begin()
        if prepared.inputs:
            stem = kind.split()[:-1]
            timed = time_passes(prepared, device)
            for name, one in zip(("forward", "backward"), timed, strict=False):
                key = " ".join((*stem, name)), sizes
                found[key] = one
                pending.pop(key, None)
            pending.pop((kind, sizes), None)
        else:
            found[kind, sizes] = time_passes(prepared, device)[0]
            del pending[kind, sizes]
    return found


def time_passes(prepared: Prepared, device: torch.device) -> list[Timed]:
    """Return the time of a forward and, if it has gradients, of its backward."""
    clock = clock_of(device)
    forwards: list[float] = []
    backwards: list[float] = []
    gradient = None
    began = time.perf_counter()
    while True:
        mark = clock()
        out = prepared.run()
        after = clock()
        forwards.append(after - mark)
        if prepared.inputs:
            if gradient is None:
                gradient = torch.ones_like(out)
            mark = clock()
            torch.autograd.grad(out, prepared.inputs, gradient)
            backwards.append(clock() - mark)
        del out
        spent = time.perf_counter() - began
        if prepared.repeats is not None:
            if len(forwards) < prepared.repeats:
                continue
            break
        enough = len(forwards) > MIN_REPEATS and spent > MIN_SECONDS  # the first one sets up the kernels
        if enough or (spent > MAX_SECONDS and len(forwards) > 2):
            break
    return [_timed(seconds[1:]) for seconds in (forwards, backwards) if seconds]


def _timed(seconds: list[float]) -> Timed:
    ordered = sorted(seconds)
    spread = (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / statistics.median(ordered)
    return Timed(typical(seconds), spread)


def typical(seconds: Sequence[float]) -> float:
    """Return the median of the faster half: what disturbs a machine only ever makes it slower."""
    return statistics.median(sorted(seconds)[: len(seconds) // 2 + 1])


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return what tells the time, in seconds, at which a device has done all that it was given."""
    if device.type != "cuda":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised
