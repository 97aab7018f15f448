"""A step that the device has been given, and what becomes known of it: nothing here waits before it must."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llama_core.models.batch import Batch
from llama_core.models.llama import Llama
from llama_core.parallel.measured import MeasuredValues, measured, measured_totals
from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import StepResult
from llama_core.training.measure import StepClock
from llama_core.training.reports import Reports

SLOWEST_SECONDS = "slowest_seconds"
"""The name under which a step tells all ranks how long the step read before it took on the slowest."""


@dataclass(frozen=True)
class StepValues:
    """The results of a step, which are the same on every rank."""

    loss: float
    grad_norm: float
    """Before clipping."""
    updated: bool
    """Whether the weights were updated."""
    reported: Mapping[str, float]
    """What the parts of the loop have reported, reduced over the ranks, by name."""
    of_ranks: Mapping[str, Sequence[float]]
    """The same of every rank, in order, where it is not reduced; without those that were not reported for this step."""
    measured: MeasuredValues
    """What the model and the objective have measured beside the loss."""

    def overflowed(self, loss_scale: float) -> bool:
        """Return whether no weight was updated only because the loss was multiplied by ``loss_scale``."""
        return not self.updated and math.isfinite(self.loss) and loss_scale > 1.0


class ValuesUnderWay:
    """The results of a step on their way to host memory, where they are once the device has done the step.

    All ranks must make it together, after each step.

    Args:
        result: the results on the device.
        reports: what this rank's parts have reported.
        model: this rank's part of the model.
        plan: how it is divided.
        device: this rank's device.
    """

    def __init__(
        self, result: StepResult, reports: Reports, model: Llama, plan: ParallelPlan, device: torch.device
    ) -> None:
        self._reports = reports
        self._model = model
        reported, self._of_ranks = reports.send(device)
        shared = torch.stack([value.to(reported) for value in (result.loss, result.grad_norm, result.updated)])
        self._values = torch.cat((shared, reported)).to("cpu", non_blocking=True)
        totals = measured_totals(model, plan)
        self._totals = None if totals is None else totals.to("cpu", non_blocking=True)

    def read(self) -> StepValues:
        """Return the results, once the device has done the step."""
        loss, grad_norm, updated, *reported = self._values.tolist()
        return StepValues(
            loss,
            grad_norm,
            bool(updated),
            reported=self._reports.received(reported),
            of_ranks=self._reports.of_ranks(reported, self._of_ranks),
            measured=measured(self._model, self._totals),
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
    values: ValuesUnderWay
    microbatches: Sequence[Batch]
    """This rank's share of its data, on its device."""
    updated: torch.Tensor
    """Whether the weights were updated, a boolean scalar on the device."""
    own_loss: torch.Tensor
    """The sum of the losses that this rank has computed, a scalar on the device."""
    position: Mapping[str, Any]
    """The position in the data after this step's."""
