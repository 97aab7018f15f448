"""The parts of a training step: the time that the profiler finds for each, and the time that the planner predicts."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench, Row
from llama_core.attention import DocumentAttention
from llama_core.config.hardware import DeviceSpec
from llama_core.config.parameter_counts import trained_parameters
from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.compute import StageCompute
from llama_core.planning.work import Work
from llama_core.training.profile import is_kernel, kind_of, summarize

PRODUCTS = "products and head"
ATTENTION = "attention"
POINTWISE = "pointwise"
CASTS = "casts and copies"
ENDS = "loss, table and adapters"
ADAMW = "norm and AdamW"
WHOLE = "a step"
PARTS = (PRODUCTS, ATTENTION, POINTWISE, CASTS, ENDS, ADAMW)

_PART_OF_KIND = {
    "matrix products": PRODUCTS,
    "attention": ATTENTION,
    "head and loss": ENDS,
    "optimizer": ADAMW,
}
"""The part of a kind of work that is one; see ``kind_of``."""
_TABLE = re.compile(r"embedding|scatter_add|index_(add|put|select)")
_FUSED = re.compile(r"triton_[a-z]+_fused_(\w+)_\d+")
_MOVES_ONLY = re.compile(
    r"(?:_?(?:to_copy|copy|clone|t|transpose|permute|view|unsafe_view|reshape|expand|slice|select|detach|alias)(?=_|$))+"
)
"""Names of a fused kernel's operators if all of them move or cast numbers."""

PROFILED_STEPS = 2
MAX_KERNELS = 25


@dataclass(frozen=True)
class Profile:
    """Some optimizer steps as torch's profiler recorded them."""

    events: list[Any]
    num_steps: int
    device: str
    """``cuda``, or ``cpu``, whose operators count in place of kernels."""

    def work(self) -> Iterator[tuple[str, Any, float]]:
        """Yield the name of each kernel, or of each operator of a CPU, the operator around it, and its seconds."""
        for event in self.events:
            if event.device_type != DeviceType.CPU:
                continue
            if self.device == "cpu":
                yield event.name, event, event.self_cpu_time_total / 1e6
            elif not event.is_user_annotation:  # the "kernel" of an annotation is all the time that it spans
                for kernel in event.kernels:
                    yield kernel.name, event, kernel.duration / 1e6

    def busy_seconds(self) -> float:
        """Return the time in which a kernel ran; of a CPU, that in which an operator did."""
        record = summarize(0, self.events)
        if record.span_seconds is None or record.idle_seconds is None:
            return sum(record.seconds.values())
        return record.span_seconds - record.idle_seconds


def profiled(bench: Bench, take_step: Callable[[], object]) -> Profile:
    """Profile some steps, and keep their trace with the logs."""
    activities = [ProfilerActivity.CPU] if bench.is_tiny else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            take_step()
        bench.synchronize()
    profiler.export_chrome_trace(str(bench.folder / "trace.json.gz"))  # for https://ui.perfetto.dev
    return Profile(list(profiler.events()), PROFILED_STEPS, bench.device.type)


def part_of(name: str, event: Any) -> str:
    """Return the part of a step that a kernel, or an operator of a CPU, belongs to.

    Args:
        name: its name.
        event: the operator around it.
    """
    if kind_of(name, None) == "matrix products":
        return PRODUCTS  # also inside the loss, which multiplies by the head
    kind = kind_of(name, event)
    if kind in _PART_OF_KIND:
        return _PART_OF_KIND[kind]
    if any(map(_TABLE.search, _names_around(name, event))):
        return ENDS
    fused = _FUSED.fullmatch(name)
    if fused is not None:
        return CASTS if _MOVES_ONLY.fullmatch(fused[1]) else POINTWISE
    return CASTS if kind == "copies and casts" else POINTWISE


def _names_around(name: str, event: Any) -> Iterator[str]:
    yield name
    while event is not None:
        yield event.name
        event = event.cpu_parent


def measured_ms(recorded: Profile, step_ms: float) -> dict[str, float]:
    """Return the milliseconds of each part of a step, of what is none, and of the whole step.

    Args:
        recorded: the profiled steps.
        step_ms: a step's time without the profiler.
    """
    seconds: dict[str, float] = defaultdict(float)
    for name, event, spent in recorded.work():
        seconds[part_of(name, event)] += spent
    of_step = {part: 1e3 * seconds[part] / recorded.num_steps for part in PARTS}
    of_kernels = 1e3 * sum(spent for _, spent in _kernels(recorded)) / recorded.num_steps
    of_step["kernels outside any operator"] = max(0.0, of_kernels - sum(of_step.values()))
    of_step["no kernel runs"] = max(0.0, step_ms - 1e3 * recorded.busy_seconds() / recorded.num_steps)
    of_step[WHOLE] = step_ms
    return of_step


def part_rows(
    recorded: Profile,
    config: RunConfig,
    plan: ParallelPlan,
    device: DeviceSpec | None,
    *,
    step_ms: float,
    documents: DocumentAttention,
    visible_share: float,
) -> Iterator[Row]:
    """Yield the milliseconds of each part of a step, measured and predicted, and their ratio.

    Args:
        recorded: the profiled steps.
        config: what they trained.
        plan: how.
        device: the data sheet of the device; None if there is none, and so no prediction.
        step_ms: a step's time without the profiler.
        documents: how attention stayed within documents.
        visible_share: the scores within documents, of those of rows that are one document each.
    """
    measured = measured_ms(recorded, step_ms)
    predicted = {} if device is None else predicted_ms(config, plan, device, documents=documents)
    for milliseconds in (measured, predicted):
        if milliseconds:
            milliseconds["tokens/s"] = 1e3 * plan.batch_size * config.seq_len / milliseconds[WHOLE]
    is_of_cpu = recorded.device == "cpu"
    unknown = "not modelled"
    notes = {ATTENTION: f"predicted for rows of one document; these documents have {visible_share:.0%} of the scores"}
    if device is None:
        unknown = f"none: {'a CPU' if is_of_cpu else 'this device'} is not modelled"
        notes = {}
    for part, found in measured.items():
        expected = predicted.get(part)
        yield {
            "part": part,
            "measured on the CPU" if is_of_cpu else "measured": found,
            "predicted": unknown if expected is None else expected,
            "measured / predicted": "-" if expected is None else found / expected,
            "note": notes.get(part, ""),
        }


def predicted_ms(
    config: RunConfig, plan: ParallelPlan, device: DeviceSpec, *, documents: DocumentAttention
) -> dict[str, float]:
    """Return the milliseconds that the planner predicts for each part of a step on one device, and for all of it.

    The planner adds up layers. What a part costs is what the step gains if that part is free.
    """
    work = replace(Work.of(config, plan), documents=documents)

    def passes(compute: StageCompute) -> float:
        return sum(sum(compute.stage(stage)) for stage in compute.work.stages)

    compute = StageCompute(work, device)
    without_memory = StageCompute(work, replace(device, memory_bandwidth=math.inf))
    # ranks that shard gather their weights in the activations' dtype, and add no gradients
    without_casts = StageCompute(replace(work, plan=replace(plan, dp_shard=2, zero_stage=3)), device)
    all_passes = passes(compute)
    attention = config.spec.num_layers * sum(compute.attention())
    ends = sum(without_casts.head()) + sum(without_casts.embedding()) - sum(without_memory.head())
    casts = all_passes - passes(without_casts)
    products = passes(without_memory) - attention
    seconds = {
        PRODUCTS: products,
        ATTENTION: attention,
        POINTWISE: all_passes - products - attention - casts - ends,
        CASTS: casts,
        ENDS: ends,
    }
    of_step = {part: plan.num_microbatches * spent for part, spent in seconds.items()}
    of_step[ADAMW] = compute.optimizer(trained_parameters(config.spec))
    of_step[WHOLE] = sum(of_step.values())
    return {part: 1e3 * spent for part, spent in of_step.items()}


def kernel_rows(recorded: Profile) -> Iterator[Row]:
    """Yield the kernels that take longest, and for each its share of the time in which one runs."""
    calls: dict[str, list[float]] = defaultdict(list)
    for name, seconds in _kernels(recorded):
        calls[name].append(seconds)
    busy_seconds = recorded.busy_seconds()
    longest = sorted(calls, key=lambda name: -sum(calls[name]))
    for name in longest[:MAX_KERNELS]:
        total = sum(calls[name])
        yield {
            "kernel": name[:100],
            "calls": len(calls[name]) / recorded.num_steps,
            "ms": 1e3 * total / recorded.num_steps,
            "share %": 100 * total / busy_seconds,
        }


def _kernels(recorded: Profile) -> Iterable[tuple[str, float]]:
    if recorded.device == "cpu":
        return ((name, spent) for name, _, spent in recorded.work())
    on_device = (event for event in recorded.events if is_kernel(event))
    return ((event.name, event.time_range.elapsed_us() / 1e6) for event in on_device)
