"""A small copy of a plan, which has all its axes and few ranks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llama_core.errors import PlanError
from llama_core.planning.plan import ParallelPlan
from llama_core.units import divisors

CUTS = (("dp_replicate", 2), ("dp_shard", 2), ("pp", 2), ("tp", 2), ("cp", 2), ("dp_replicate", 1))
"""Which axes of a plan are cut, in this order, and to how many ranks."""


def shrunk(plan: ParallelPlan, max_ranks: int, cuts: Sequence[tuple[str, int]] = CUTS) -> ParallelPlan:
    """Return ``plan`` with at most ``max_ranks`` ranks, few and small microbatches, and no setting that rounds.

    Args:
        plan: the plan.
        max_ranks: most ranks.
        cuts: axes to cut, one after the other while there are too many ranks, each with the ranks to leave.

    Raises:
        PlanError: if that is not enough.
    """
    small = replace(
        plan,
        num_microbatches=min(plan.num_microbatches, 2 * plan.pp),
        microbatch_size=min(plan.microbatch_size, 2),
        gradient_compression="none",
        compile=False,
    )
    for axis, size in cuts:
        if small.world_size > max_ranks and getattr(small, axis) > size:
            small = _cut(small, axis, size)
    if small.world_size > max_ranks:
        raise PlanError(f"a small copy of this plan needs {small.world_size} processes, more than {max_ranks}")
    return small


def _cut(plan: ParallelPlan, axis: str, size: int) -> ParallelPlan:
    """Return ``plan`` with ``size`` ranks on an axis, and what follows from that."""
    cut: dict[str, Any] = {axis: size}
    if axis == "pp":  # the stages change; an interleaved pipeline needs as many microbatches for each of its ranks
        num_microbatches = min(plan.num_microbatches, 2 * size)
        cut |= {"recomputed_layers": None, "num_microbatches": num_microbatches + -num_microbatches % size}
    ep = plan.ep_over_dp
    if axis.startswith("dp"):
        sizes = {"dp_shard": plan.dp_shard, "dp_replicate": plan.dp_replicate} | cut
        ep = max(ep for ep in divisors(plan.ep_over_dp) if _divides_experts(ep, **sizes))
    if plan.folds_experts:
        ep *= cut.get("tp", plan.tp)
    cut |= {"ep": ep, "ep_nodes": math.gcd(plan.ep_nodes, ep), "expert_tp": 1 if plan.folds_experts else None}
    return replace(plan, **cut)


def _divides_experts(ep: int, dp_shard: int, dp_replicate: int) -> bool:
    """Return whether ``ep`` neighbours among these data-parallel ranks can divide experts."""
    return dp_shard * dp_replicate % ep == 0 and 0 in {dp_shard % ep, ep % dp_shard}
