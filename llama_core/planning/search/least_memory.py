"""The plans of least memory: does anything fit? If not, by how much does it miss, and what would fit?"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from llama_core.config import nf4
from llama_core.config.hardware import DeviceSpec, fewest_nodes, gpu_names, gpu_spec
from llama_core.config.parameter_counts import num_frozen_parameters, trained_parameters
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, DoesNotFitError, PlanError
from llama_core.planning.memory.verdict import FILL_LIMIT
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.operations import FP32_BYTES, itemsize_of
from llama_core.planning.search.candidates import Candidates, ExpertRanks, Shape, Sharding, Variant
from llama_core.planning.search.fitting import Fitting
from llama_core.schedules.registry import schedule_type
from llama_core.units import GB, format_bytes

_HALVES_MORE = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of devices to try if nothing fits, in halves of the requested number."""
MAX_DEVICES = 1024
"""Most devices that ``least_devices`` tries."""
MIN_SEQ_LEN = 512
"""Shortest sequence to try, in tokens."""


class NothingFitsError(DoesNotFitError):
    """No plan fits the memory of the device: follow the message, or force the plan of least memory.

    Args:
        message: by how much the plan of least memory misses, and what would fit.
        plan: the plan of least memory.
    """

    def __init__(self, message: str, plan: ParallelPlan) -> None:
        super().__init__(message)
        self.plan = plan


def least_memory_plan(
    candidates: Candidates, fitting: Fitting, keep: Callable[[Variant], bool] = lambda variant: True
) -> ParallelPlan:
    """Return the first of the plans of least memory that fits, or the one that misses the limit by least.

    The miss is measured by ``Fitting.glance``.

    Args:
        candidates: the plans the request allows.
        fitting: the memory limit.
        keep: which variants to look at.

    Raises:
        PlanError: if none of them is a valid plan.
    """
    plans = []
    problems = []
    for variant in _variants_of_least_memory(candidates, keep):
        try:
            plan = candidates.plan(variant)
        except PlanError as error:
            problems.append(error)
            continue
        if candidates.adapts_to(variant):
            plan = replace(plan, recompute="full")
        if fitting.may_fit(plan) and fitting.fits(plan):
            return plan
        plans.append(plan)
    if not plans:
        raise problems[0] if problems else PlanError("no division of the devices is a valid plan")
    return min(plans, key=fitting.glance)


class Least(NamedTuple):
    """The fewest devices a run fits on."""

    gpus: int
    peak_bytes: int
    """Peak of the fullest one."""
    plan: ParallelPlan


def least_devices(config: RunConfig, device: DeviceSpec) -> Least | None:
    """Return the smallest power of two of devices that ``config`` fits on, with the plan of least memory.

    None if it does not fit on ``MAX_DEVICES``.
    """
    gpus = 1
    while _held_between_steps(config) > gpus * FILL_LIMIT * device.usable_bytes:
        gpus *= 2
    while gpus <= MAX_DEVICES:
        nodes = fewest_nodes(gpus, device)
        more = _changed(config, parallel={"gpus": gpus}, launch={"nodes": nodes})
        fitting = Fitting(more, device.usable_bytes)
        with suppress(PlanError):  # this number cannot divide the batch or the model
            plan = least_memory_plan(Candidates(more, device), fitting)
            if fitting.fits(plan):
                return Least(gpus, fitting.peak_bytes(plan), plan)
        gpus *= 2
    return None


def _variants_of_least_memory(candidates: Candidates, keep: Callable[[Variant], bool]) -> Iterator[Variant]:
    """Yield the smallest variant of every shape and division of the states, the highest ZeRO stage first."""
    smallest: dict[tuple[Shape, Sharding, ExpertRanks], Variant] = {}
    most_offload = candidates.offloads()[-1]
    for variant in filter(keep, candidates.variants(most_offload)):
        key = variant.shape, variant.sharding, variant.experts
        if key not in smallest or _held(candidates, variant) < _held(candidates, smallest[key]):
            smallest[key] = variant
    yield from sorted(smallest.values(), key=lambda variant: -variant.sharding.zero_stage)


class _Held(NamedTuple):
    """What decides, in this order, how much memory a variant takes."""

    microbatch_size: int
    replicas: int
    """Copies of a stage."""
    in_flight: float
    """Microbatches of which a rank holds the activations."""
    defers_gradients: bool


def _held(candidates: Candidates, variant: Variant) -> _Held:
    """Return a sort key for memory."""
    order = variant.order
    kind = schedule_type(order.schedule)
    count = candidates.num_microbatches(variant.shape, variant.microbatch_size)
    in_flight = kind.in_flight(variant.shape.pp, count, order.num_chunks)
    return _Held(variant.microbatch_size, kind.replicas, in_flight, kind.splits_backward)


def nothing_fits(
    candidates: Candidates,
    fitting: Fitting,
    device: DeviceSpec | None,
) -> NothingFitsError:
    """Return the error that says by how much the plan of least memory misses, and the computed remedies."""
    config = candidates.config
    gpus = candidates.asked.gpus
    smallest = least_memory_plan(candidates, fitting)
    usable = round((fitting.limit or 0) / FILL_LIMIT)
    label = device.label if device else "devices"
    trained = config.spec.num_trainable_parameters
    frozen = _frozen_bytes(config)
    terms = f"{_bytes_between_steps(config):.3g} bytes x {trained / GB:.2f}e9 parameters"
    if frozen:
        terms = f"({terms} + {frozen / GB:.1f} GB of frozen weights)"
    per_device = _held_between_steps(config) / gpus / GB
    excess = fitting.peak_bytes(smallest) - (fitting.limit or 0)
    message = (
        f"{config.spec.name} does not fit on parallel.gpus={gpus} x {label}: "
        f"weights, gradients and moments take {terms} / {gpus} = {per_device:.1f} GB per device "
        f"before activations, and {usable / GB:.1f} GB are usable; "
        f"the plan of least memory ({smallest.summary()}) exceeds {FILL_LIMIT:.0%} of that by "
        f"{format_bytes(excess)}"
    )
    found = "no change that was tried would fit"
    remedies = list(_remedies(config, device, usable))
    if remedies:
        found = f"these would fit: {'; '.join(remedies)}"
    return NothingFitsError(f"{message}; {found}", smallest)


def _frozen_bytes(config: RunConfig) -> int:
    spec = config.spec
    packed = sum(math.prod(spec.parameter_shapes[name]) for name in spec.packed)
    unpacked = num_frozen_parameters(spec) - packed
    return itemsize_of(config.training.precision) * unpacked + nf4.packed_bytes(packed)


def _bytes_between_steps(config: RunConfig) -> float:
    """Return the bytes of a trained parameter between steps, on average: weight, gradient and states."""
    trained = trained_parameters(config.spec)
    return 2 * FP32_BYTES + config.optimizer.states_of(trained) / sum(trained)


def _held_between_steps(config: RunConfig) -> int:
    """Return the bytes that all devices together hold at least between steps, unless host memory holds a part."""
    trained = _bytes_between_steps(config) * config.spec.num_trainable_parameters
    return round(trained) + _frozen_bytes(config)


def _remedies(config: RunConfig, device: DeviceSpec | None, usable: int) -> Iterator[str]:
    yield from _adapters(config, device, usable)
    yield from _more_devices(config, device, usable)
    if device:
        yield from _larger_device(config, device)
    yield from _offload(config, device, usable)
    yield from _shorter_sequences(config, device, usable)


def _adapters(config: RunConfig, device: DeviceSpec | None, usable: int) -> Iterator[str]:
    is_pretrained = bool(config.training.init_from or config.spec.instruct)
    choices: list[tuple[str, ...]] = []
    if config.strategy == "standard" and is_pretrained:
        choices = [("strategy=lora",), ("strategy=lora", "lora.base=nf4")]
    elif config.spec.lora is not None and not config.spec.packed:
        choices = [("lora.base=nf4",)]
    for choice in choices:
        # not every kind of adapter, nor every model, can have such a base
        with suppress(ConfigError):
            if _fits(config.with_overrides(*choice), device, usable):
                yield " with ".join(choice)
                return


def _more_devices(config: RunConfig, device: DeviceSpec | None, usable: int) -> Iterator[str]:
    devices = config.parallel.gpus
    nodes = config.launch.nodes
    for halves in _HALVES_MORE:
        if devices * halves % 2 or (nodes and nodes > 1 and nodes * halves % 2):
            continue
        gpus = devices * halves // 2
        more_nodes = nodes * halves // 2 if nodes and nodes > 1 else nodes
        more = _changed(config, parallel={"gpus": gpus}, launch={"nodes": more_nodes})
        if _fits(more, device, usable):
            yield f"parallel.gpus={gpus}"
            return


def _larger_device(config: RunConfig, device: DeviceSpec) -> Iterator[str]:
    for other in sorted(map(gpu_spec, gpu_names()), key=lambda other: other.memory_bytes):
        is_larger = other.memory_bytes > device.memory_bytes
        if is_larger and _fits(config, other, other.usable_bytes):
            yield f"launch.gpu_type={other.name} ({other.label})"
            return


def _offload(config: RunConfig, device: DeviceSpec | None, usable: int) -> Iterator[str]:
    inner = config.parallel.inner
    if any(inner.get(axis, 1) > 1 for axis in ("tp", "pp", "cp")):
        return  # DeepSpeed works with data parallelism only
    # all but the fp32 weights
    of_optimizer = _bytes_between_steps(config) - FP32_BYTES
    held_on_host = {
        "optimizer": of_optimizer * config.spec.num_trainable_parameters,
        "parameters": _held_between_steps(config),
    }
    for offload, held in held_on_host.items():
        there = held / config.parallel.gpus
        changes = {
            "zero_backend": "deepspeed",
            "offload": offload,
            "zero_stage": 3,
            "dp_replicate": 1,
        }
        if _fits(_changed(config, parallel=changes), device, usable):
            yield (
                f"parallel.zero_backend=deepspeed with parallel.offload={offload} "
                f"({there / GB:.0f} GB of host memory per device)"
            )
            return


def _shorter_sequences(config: RunConfig, device: DeviceSpec | None, usable: int) -> Iterator[str]:
    seq_len = config.seq_len // 2
    while seq_len >= MIN_SEQ_LEN:
        if _fits(_changed(config, training={"seq_len": seq_len}), device, usable):
            yield f"training.seq_len={seq_len}"
            return
        seq_len //= 2


def _changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """Return ``config`` with some keys changed but not validated; a contradiction later makes every plan invalid."""
    changed: dict[str, Any] = {}
    for name, changes in sections.items():
        changed[name] = getattr(config, name).model_copy(update=changes)
    return config.model_copy(update=changed)


def _fits(config: RunConfig, device: DeviceSpec | None, usable: int) -> bool:
    fitting = Fitting(config, usable)
    is_native = config.parallel.zero_backend == "native"  # which keeps nothing in host memory
    if is_native and _held_between_steps(config) > config.parallel.gpus * FILL_LIMIT * usable:
        return False
    try:
        return fitting.fits(least_memory_plan(Candidates(config, device), fitting))
    except PlanError:
        return False
