"""A step that the device has been given, and what becomes known of it: nothing here waits before it must."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llama_core.parallel.ranks import most_over_devices
from llama_core.training.engine import StepResult
from llama_core.training.measure import MemoryMeter, StepClock


@dataclass(frozen=True)
class StepValues:
    """The numbers of a step that every rank learns. They travel in this order, in one transfer from the device."""

    loss: float
    grad_norm: float
    """Before clipping."""
    updated: bool
    """Whether the weights were updated."""
    allocated_bytes: int
    """Memory alive when the device was given the step, on the rank where it is most, as are those below."""
    peak_bytes: int
    """Most memory alive so far."""
    reserved_bytes: int
    """Most memory taken so far."""
    asked_to_stop: bool
    """Whether any rank had been asked to stop."""
    slowest_seconds: float
    """Time of the step read last, on the rank where it took longest."""

    @staticmethod
    def sent(result: StepResult, meter: MemoryMeter, *, asked_to_stop: bool, last_seconds: float) -> Tensor:
        """Return the numbers on their way to host memory, where they are once the device has done the step.

        All ranks must call it together.

        Args:
            result: the results of the step, which are those of all ranks.
            meter: measures this rank's memory.
            asked_to_stop: whether this rank was asked to stop.
            last_seconds: time of the step read last on this rank.
        """
        own = (meter.allocated(), meter.peak(), meter.reserved(), asked_to_stop, last_seconds)
        most = most_over_devices(meter.device, *own)
        shared = torch.stack([value.to(most) for value in (result.loss, result.grad_norm, result.updated)])
        return torch.cat((shared, most)).to("cpu", non_blocking=True)

    @classmethod
    def received(cls, values: Tensor) -> "StepValues":
        """Return what ``sent`` has sent."""
        loss, grad_norm, updated, allocated, peak, reserved, stop, slowest = values.tolist()
        return cls(
            loss,
            grad_norm,
            bool(updated),
            allocated_bytes=int(allocated),
            peak_bytes=int(peak),
            reserved_bytes=int(reserved),
            asked_to_stop=bool(stop),
            slowest_seconds=slowest,
        )


@dataclass(frozen=True, eq=False)
class StepUnderWay:
    """A step that the device has been given and whose results have not been read yet."""

    step: int
    tokens: int
    """Tokens trained on with this step."""
    num_tokens: int
    """Tokens of this step, over all ranks."""
    seq_len: int
    """Tokens of each of its sequences."""
    loss_scale: float
    clock: StepClock
    values: Tensor
    """The result of ``StepValues.sent``."""
    measured: Callable[[], dict[str, float]]
    """Returns what was measured beside the loss, once the device has done the step."""
    position: Mapping[str, Any]
    """The position in the data after this step's."""
