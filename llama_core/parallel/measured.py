"""What an objective measures of a step beside the loss, summed over all ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from llama_core.models.llama import Llama
from llama_core.models.objective import MeasuringObjective
from llama_core.planning.plan import ParallelPlan


@torch.no_grad()
def measured_totals(model: Llama, plan: ParallelPlan) -> Tensor | None:
    """Return the sums of a step, over all ranks; None if the objective measures nothing.

    All ranks must call it together, after the step.
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
