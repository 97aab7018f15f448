"""What an objective measures of a step or an evaluation beside the loss, summed over all ranks."""

from collections.abc import Callable, Mapping
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor

from llama_core.models.llama import Llama
from llama_core.models.objective import MeasuringObjective
from llama_core.parallel.expert import routing_statistics, routing_totals
from llama_core.planning.plan import ParallelPlan
from llama_core.records.measurements import StepRecord

_FIELDS = frozenset(field.name for field in fields(StepRecord))


@torch.no_grad()
def measured_totals(model: Llama, plan: ParallelPlan) -> Tensor | None:
    """Return the sums of a step or an evaluation, over all ranks; None if the objective measures nothing.

    All ranks must call it together, after each step and each evaluation: it forgets the sums.
    """
    objective = model.objective
    if not isinstance(objective, MeasuringObjective):
        return None
    own = objective.take_measured()
    parameter = next(model.parameters())
    if own is None:  # the head is on another rank
        own = torch.zeros(objective.num_sums, device=parameter.device)
    total = own.double()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= plan.tp  # these ranks compute the same
    return total


def measured_on_the_way(model: Llama, plan: ParallelPlan) -> Callable[[], dict[str, float]]:
    """Send what a step has measured to host memory; return what gives the fields of its record, once it is there.

    All ranks must call it together, after each step.
    """
    routing = _to_host(routing_totals(model, plan))
    measured = _to_host(measured_totals(model, plan))
    return lambda: {**routing_statistics(routing, model.spec), **measured_fields(model, measured)}


def _to_host(total: Tensor | None) -> Tensor | None:
    return None if total is None else total.to("cpu", non_blocking=True)


def held_out_fields(model: Llama, total: Tensor | None) -> Mapping[str, float]:
    """Return the fields of a step's record that tell the same of the held-out rows, those with a name of their own.

    Args:
        model: the model, or this rank's part.
        total: the result of ``measured_totals`` after an evaluation.
    """
    held_out = {f"eval_{name}": value for name, value in measured_fields(model, total).items()}
    return {name: value for name, value in held_out.items() if name in _FIELDS}


def measured_fields(model: Llama, total: Tensor | None) -> Mapping[str, float]:
    """Return the fields of a step's record; empty if there are none.

    Args:
        model: the model, or this rank's part.
        total: the result of ``measured_totals``, in host memory.
    """
    objective = model.objective
    if total is None or not isinstance(objective, MeasuringObjective):
        return {}
    return objective.of_step(total.tolist())
