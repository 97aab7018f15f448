"""What a model measures of a step or an evaluation beside the loss, summed over all ranks."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llama_core.models.llama import Llama
from llama_core.models.measures import Measures
from llama_core.models.moe import Routers
from llama_core.planning.plan import ParallelPlan


@torch.no_grad()
def measured_totals(model: Llama, plan: ParallelPlan) -> Tensor | None:
    """Return the sums of a step or an evaluation over all ranks, fp64, one after another; None if there are none.

    All ranks must call it together, after each step and each evaluation: it forgets the sums.
    """
    if not model.measures:
        return None
    device = next(model.parameters()).device
    total = torch.cat([_own(measure, device) for measure in model.measures])
    if dist.is_initialized():
        dist.all_reduce(total)
        sizes = [measure.num_sums for measure in model.measures]
        for measure, sums in zip(model.measures, torch.split(total, sizes), strict=True):
            # tensor-parallel ranks compute the same, but if they have whole experts, each routes other tokens
            sums.div_(plan.tp_of_experts if isinstance(measure, Routers) else plan.tp)
    return total


class MeasuredValues(NamedTuple):
    """What the sums of a step or an evaluation say."""

    values: dict[str, float | None]
    """By name; None where they say nothing."""
    expert_shares: dict[str, tuple[float, ...]]
    """Which share of a layer's routed tokens each of its experts got, by the layer's number; empty without experts."""


def measured(model: Llama, total: Tensor | None) -> MeasuredValues:
    """Return what the sums say.

    Args:
        model: the model, or this rank's part.
        total: the result of ``measured_totals``, in host memory.
    """
    found: dict[str, float | None] = {name: None for measure in model.measures for name in measure.names}
    shares: dict[str, tuple[float, ...]] = {}
    sums: list[float] = [] if total is None else total.tolist()
    for measure in model.measures if sums else ():
        own = sums[: measure.num_sums]
        found |= measure.of_step(own)
        if isinstance(measure, Routers):
            shares = measure.expert_shares(own)
        del sums[: measure.num_sums]
    return MeasuredValues(found, shares)


def _own(measure: Measures, device: torch.device) -> Tensor:
    own = measure.take_measured()
    if own is None:  # nothing was measured, or it is measured on another rank
        return torch.zeros(measure.num_sums, dtype=torch.float64, device=device)
    return own.double()
