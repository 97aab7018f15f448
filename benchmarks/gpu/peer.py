"""Steps of this engine and of torchtitan's model of the same shape, alternating in one process."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.steps import Steps

NUM_MODELS = 2
"""Models that are on the device at once: ours, for both kinds of rows, and the peer's."""


def peer_1b(bench: Bench) -> Iterator[Row]:
    """Yield steps of 1B: ours with documents, ours over rows of one document, and torchtitan's."""
    yield from _turns(bench, "1B")


def peer_3b(bench: Bench) -> Iterator[Row]:
    """Yield the same of 3B."""
    yield from _turns(bench, "3B")


def _turns(bench: Bench, shape: str) -> Iterator[Row]:
    ours = Steps(bench, shape, compile=bench.size(True, False), recompute="selective", times=NUM_MODELS)
    causal = [replace(batch, positions_BS=None, documents=None) for batch in ours.batches]
    takes: dict[str, Callable[[], None]] = {"ours, documents": ours.take, "ours, causal": partial(ours.take, causal)}
    row = {"model": shape, "rounds": bench.size(8, 1)}
    try:
        from benchmarks.gpu.titan import TitanSteps

        takes["torchtitan, causal"] = TitanSteps(bench.device, ours.config.spec, ours.config.seq_len, causal).take
    except ImportError as error:
        yield row | {"whose": "torchtitan, causal", "error": f"torchtitan 0.2.2 is not there: {error}"}
    times: dict[str, list[float]] = {name: [] for name in takes}
    for _ in range(row["rounds"]):
        for name, take in takes.items():
            times[name].append(bench.milliseconds(take, 1))
    for name, of_one in times.items():
        yield row | {"whose": name} | ours.speed(statistics.median(of_one))
    for name, of_one in times.items():
        if name != "ours, documents":
            ratios = sorted(theirs / own for theirs, own in zip(of_one, times["ours, documents"], strict=True))
            middle = statistics.median(ratios)
            yield row | {"time of": name, "over ours, documents": middle, "least": ratios[0], "most": ratios[-1]}
