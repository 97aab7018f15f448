"""Profile optimizer steps: a trace of every operator, a snapshot of CUDA's memory, and the time by kind of work."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.profiles import ProfileRecord, trace_file, write_profile
from llama_core.records.step_parts import (
    ATTENTION,
    COLLECTIVES,
    HEAD,
    OPTIMIZER,
    OTHER_TRANSFERS,
    PRODUCTS,
    SEND,
    TRANSFERS,
)

Interval = tuple[float, float]
"""Begin and end."""

_TRANSFERS = {
    "all_gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce_scatter": re.compile(r"reduce_?scatter|post_backward_reduce", re.IGNORECASE),
    "all_reduce": re.compile(r"all_?reduce", re.IGNORECASE),
    "all_to_all": re.compile(r"all_?to_?all", re.IGNORECASE),
    "broadcast": re.compile(r"(c10d|nccl|gloo).*broadcast", re.IGNORECASE),
    "send": re.compile(r"SendRecv|c10d::(send|recv)|(nccl|gloo):(send|recv)"),
}
"""Transfers between ranks by the name of their operator or kernel."""
_WHOLE = {
    **{COLLECTIVES[kind]: pattern for kind, pattern in _TRANSFERS.items()},
    OTHER_TRANSFERS: re.compile(r"nccl|gloo|c10d|wait_tensor"),
    ATTENTION: re.compile(r"attention|attn|flash|fmha"),
    HEAD: re.compile(r"CrossEntrop|_LinearLoss|softmax_of|parts_of_rows"),
    OPTIMIZER: re.compile(r"Optimizer|adam|multi_tensor", re.IGNORECASE),
}
"""Kinds of work that everything inside of an operator belongs to, by the operator's name."""
_SINGLE = {
    PRODUCTS: re.compile(r"\b(add|baddb|b)?mm_?\b|gemm|cutlass|cublas|nvjet|xmma|scaled_mm|grouped_product"),
    "copies and casts": re.compile(r"copy|memcpy|memset|\bcat\b|fill|zero", re.IGNORECASE),
}
"""The same for a single operator or kernel."""
OTHER = "norms, activations and other"

MAX_EVENTS = 200_000
"""Events of a memory snapshot, so that a browser can show it."""


@contextmanager
def profiled(run: RunDirectory, plan: ParallelPlan, rank: int, device: torch.device) -> Iterator[None]:
    """Profile what happens inside on the first rank of every pipeline position, into the run's ``trace`` folder.

    ``rank-00000.json.gz`` has every operator and kernel, for https://ui.perfetto.dev; ``rank-00000.json`` is the
    ``ProfileRecord``; and on CUDA ``rank-00000.pickle`` has the allocations, for https://pytorch.org/memory_viz, also
    if memory runs out.
    """
    if any(plan.coordinate(rank, axis) for axis in ("tp", "cp", "dp_shard", "dp_replicate")):
        yield
        return
    run.trace.mkdir(exist_ok=True)
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    if on_cuda:
        torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
    try:
        with profile(activities=activities) as profiler:
            yield
            if on_cuda:
                torch.cuda.synchronize(device)
    finally:
        if on_cuda:
            torch.cuda.memory._dump_snapshot(str(trace_file(run, rank, ".pickle")))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
    profiler.export_chrome_trace(str(trace_file(run, rank, ".json.gz")))
    write_profile(run, summarize(rank, profiler.events()))


def summarize(rank: int, events: Iterable[Any]) -> ProfileRecord:
    """Return the time by kind of work, from the events of torch's profiler.

    If there are kernels on a device, their time counts; otherwise each CPU operator's own time counts, without the
    operators that it calls.
    """
    events = list(events)
    kernels = [event for event in events if is_kernel(event)]
    seconds: Counter[str] = Counter()
    operators = [event for event in events if event.device_type == DeviceType.CPU]
    for event in operators:
        if not kernels:
            seconds[kind_of(event.name, event)] += event.self_cpu_time_total / 1e6
        elif not event.is_user_annotation:  # the "kernel" of an annotation is all the time that it spans
            for kernel in event.kernels:
                seconds[kind_of(kernel.name, event)] += kernel.duration / 1e6
    if not kernels:
        return ProfileRecord(rank, dict(seconds))
    intervals: dict[str, list[Interval]] = defaultdict(list)
    for kernel in kernels:
        kind = _transfer_of(kernel.name)
        intervals[kind].append((kernel.time_range.start / 1e6, kernel.time_range.end / 1e6))
    computing = union(intervals.pop("", []))
    exposed = _exposed(computing, intervals)
    _divide_sends(exposed, seconds)
    everything = union([*computing, *chain.from_iterable(intervals.values())])
    span = everything[-1][1] - everything[0][0]
    return ProfileRecord(
        rank,
        dict(seconds),
        span_seconds=span,
        idle_seconds=span - length(everything),
        exposed_seconds=length(everything) - length(computing),
        exposed=exposed,
    )


def _transfer_of(name: str) -> str:
    """Return the kind of transfer of a kernel; empty if it computes."""
    return next((kind for kind in TRANSFERS if _WHOLE[kind].search(name)), "")


def _divide_sends(exposed: dict[str, float], seconds: Mapping[str, float]) -> None:
    """Give an all-to-all its share of the exposed time of sends: NCCL has one kernel for both."""
    exchange = COLLECTIVES["all_to_all"]
    exchanging = seconds.get(exchange, 0.0)
    if SEND in exposed and exchanging:
        share = exchanging / (exchanging + seconds.get(SEND, 0.0))
        exposed[exchange] = exposed.get(exchange, 0.0) + share * exposed[SEND]
        exposed[SEND] *= 1 - share


def _exposed(computing: Sequence[Interval], transfers: Mapping[str, Sequence[Interval]]) -> dict[str, float]:
    """Return the time in which only transfers ran, by kind; time that two kinds share counts for the first.

    Args:
        computing: when kernels computed.
        transfers: when each kind of transfer ran.
    """
    exposed: dict[str, float] = {}
    covered = list(computing)
    for kind, intervals in transfers.items():
        more = union([*covered, *intervals])
        exposed[kind] = length(more) - length(covered)
        covered = more
    return exposed


def is_kernel(event: Any) -> bool:
    """Return whether an event of torch's profiler is work of a device: a kernel, a copy or a memset."""
    on_device = event.device_type == DeviceType.CUDA and event.time_range.elapsed_us() > 0
    return on_device and not event.is_user_annotation  # annotations on the device's lane also span its idle time


def kind_of(name: str, event: Any) -> str:
    """Return the kind of work of an operator or kernel ``name`` that runs inside of ``event``."""
    around = [name]
    while event is not None:
        around.append(event.name)
        event = event.cpu_parent
    for kind, pattern in _WHOLE.items():
        if any(map(pattern.search, around)):
            return kind
    return next((kind for kind, pattern in _SINGLE.items() if any(map(pattern.search, around[:2]))), OTHER)


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return disjoint intervals that cover the same, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of intervals that do not overlap."""
    return sum(end - begin for begin, end in disjoint)
