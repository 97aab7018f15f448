"""A bad step is taken again before its data are blamed: a device may have computed wrongly."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from llama_core.models.batch import Batch
from llama_core.parallel.ranks import from_first_rank, from_rank, is_first_rank, of_every_rank, on_first_rank
from llama_core.planning.plan import ParallelPlan
from llama_core.records.rollbacks import MAX_NAMED, Suspect, named
from llama_core.training.engine import Engine, evaluating
from llama_core.training.parts.part import FinishedStep, LoopPart
from llama_core.training.parts.spikes import BadStep
from llama_core.training.parts.stragglers import own_place
from llama_core.training.step import StepUnderWay, StepValues

TOLERANCE = 0.01
"""How far devices' losses of the same row may be apart, as a fraction of their median: kernels differ in rounding."""

logger = logging.getLogger(__name__)


class Repeats(LoopPart):
    """Tells a device that computes wrongly from data that are bad.

    A step whose loss or gradient is not finite has updated no weight, so that it can be taken again as it was. If it is
    bad again, and so is a spike, each data-parallel replica of the model computes the loss of the same rows.

    Args:
        plan: how the model is divided.
        engine: holds the weights.
        device: this rank's device.
        take: takes a step again, on this rank's share of its data.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        *,
        engine: Engine,
        device: torch.device,
        take: Callable[[StepUnderWay], StepValues],
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._device = device
        self._take = take
        self._mended: BadStep | None = None

    def again(self, begun: StepUnderWay, first: StepValues) -> StepValues:
        """Return the results of a step that has updated no weight, taken again; all ranks call it together.

        Args:
            begun: the step, the newest.
            first: its results.
        """
        own = float(self._engine.own_loss)
        values = self._take(begun)
        if not values.updated:
            return first
        loss = float(self._engine.own_loss)
        differs = of_every_rank(int(own != loss))
        replicas = {self._plan.dp_rank(rank) for rank, changed in enumerate(differs) if changed}
        suspects = self._ranks_of(replicas)
        reason = f"loss {first.loss:.4g} and gradient norm {first.grad_norm:.4g}, but {values.loss:.4g} and "
        reason += f"{values.grad_norm:.4g} when it was taken again on the same data"
        if suspects:
            reason += f"; {named(suspects)} had another loss"
        self._mended = BadStep(begun.step, reason, is_finite=True, data=None, suspects=suspects)
        return replace(first, loss=values.loss, grad_norm=values.grad_norm, updated=True, measured=values.measured)

    def after_step(self, step: FinishedStep) -> None:
        """Blame a device, in place of the data of a bad step, if it computes another loss of them than others do."""
        step.mended, self._mended = self._mended, None
        if step.bad is None or step.bad.suspects or not step.is_newest or self._plan.dp == 1:
            return
        worst = self._worst_replica()
        losses = self._losses_of(step.microbatches, worst)
        suspects = self._ranks_of(_odd_ones(losses))
        if suspects:
            of_one = ", ".join(f"{loss:.4g}" for loss in losses[0][:MAX_NAMED])
            reason = f"{step.bad.reason}; {named(suspects)} computed another loss of the same data ({of_one})"
            step.bad = replace(step.bad, reason=reason, is_finite=True, data=None, suspects=suspects)

    def _worst_replica(self) -> int:
        """Return the replica whose share of the step had the largest loss, or one that was not finite."""
        own = float(self._engine.own_loss)
        losses = of_every_rank(own if math.isfinite(own) else math.inf)
        return self._plan.dp_rank(max(range(len(losses)), key=lambda rank: losses[rank]))

    def _losses_of(self, microbatches: Sequence[Batch], replica: int) -> list[Sequence[float]]:
        """Return the loss of each row of one replica's share, as each of all replicas computes it."""
        first = next(rank for rank in range(self._plan.world_size) if self._plan.dp_rank(rank) == replica)
        shared = from_rank(first, [batch.to("cpu") for batch in microbatches])
        with evaluating(self._engine):
            rows = self._engine.evaluate([batch.to(self._device) for batch in shared]).losses
        copies = self._plan.dp
        return [rows[start : start + copies] for start in range(0, len(rows), copies)]

    def _ranks_of(self, replicas: set[int]) -> tuple[Suspect, ...]:
        """Return the ranks of some replicas; none if that would be all of several ranks."""
        ranks = [rank for rank in range(self._plan.world_size) if self._plan.dp_rank(rank) in replicas]
        if len(ranks) == self._plan.world_size > 1:
            return ()
        places = on_first_rank(own_place(self._device)) if ranks else []
        return from_first_rank(tuple(Suspect(rank, *places[rank]) for rank in ranks) if is_first_rank() else ())


def _odd_ones(losses: Sequence[Sequence[float]]) -> set[int]:
    """Return the replicas whose loss of a row is another than most replicas': [rows, replicas].

    Where none is finite the data or the weights are at fault. Of two that differ, either may be wrong.
    """
    odd = set()
    for of_row in losses:
        finite = [loss for loss in of_row if math.isfinite(loss)]
        if not finite:
            continue
        usual = median(finite)
        odd |= {
            replica
            for replica, loss in enumerate(of_row)
            if not abs(loss - usual) <= TOLERANCE * abs(usual)  # which a NaN is not either
        }
    return odd
