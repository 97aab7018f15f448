"""What the time of a plan asks of a machine: the operations whose times it adds up."""

from dataclasses import dataclass, field, replace

from llama_core.config.hardware import DeviceSpec
from llama_core.config.measured_rates import MeasuredRates, Sizes
from llama_core.config.models import ModelSpec
from llama_core.planning.time.compute import StageCompute
from llama_core.planning.time.kernels import NO_TIME, Pass
from llama_core.planning.time.parts import StepParts
from llama_core.planning.work import Work

MAX_LAYERS = 2
"""Layers that are timed whole: one with experts or a window, and one without."""


def shortened(spec: ModelSpec) -> ModelSpec:
    """Return an architecture with only the layers that are timed whole."""
    return spec.with_few_layers(min(MAX_LAYERS, spec.num_layers))


@dataclass(frozen=True)
class _Recorder(MeasuredRates):
    """Answers every question with a short time, and keeps the questions."""

    asked: dict[tuple[str, Sizes], None] = field(default_factory=dict)

    def seconds(self, kind: str, sizes: Sizes) -> float:
        """Note the question, and return a time."""
        self.asked[kind, sizes] = None
        return 1e-6


def asked_of_machine(work: Work, device: DeviceSpec, *, alone: bool = False) -> list[tuple[str, Sizes]]:
    """Return the kinds and sizes of operations that the time of a step asks for, in a fixed order.

    Args:
        work: the model, the plan and the sequences.
        device: the device.
        alone: only what a rank computes, without messages to others.
    """
    recorder = _Recorder()
    measured = replace(device, measured={1: recorder})
    if alone:
        undivided_passes(work, measured)
    else:
        StepParts(work, measured).seconds()
    return list(recorder.asked)


def undivided_passes(work: Work, device: DeviceSpec) -> tuple[Pass, Pass]:
    """Return the time of all layers of a model, and of its ends, as the sums of their operations."""
    compute = StageCompute(work, device)
    layers = NO_TIME
    for passes in work.layers:
        layers = layers.plus(compute.sum_of_operations(passes))
    ends = NO_TIME
    for passes in (work.embedding, work.final_norm, work.head):
        ends = ends.plus(compute.sum_of_operations(passes))
    return layers, ends
