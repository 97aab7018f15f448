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
        begin_again: gives the device the work of a step again which has updated no weight.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        *,
        engine: Engine,
        device: torch.device,
        begin_again: Callable[[StepUnderWay], StepUnderWay],
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._device = device
        self._begin_again = begin_again
        self._mended: BadStep | None = None

    def read(self, begun: StepUnderWay, *, was_held: bool) -> tuple[StepUnderWay, StepValues]:
        """Return a step and its results, as it was taken last; all ranks call it together.

        Args:
            begun: the step; those after it have updated no weight if it has not.
            was_held: whether it has updated no weight only because the step before it had not.
        """
        values = begun.values.read()
        if was_held:
            begun, values = self._taken_again(begun, values)
        if _is_sound(values, begun):
            return begun, values
        again, second = self._taken_again(begun, values)
        if _is_sound(second, again):
            self._blame(begun, values, again, second)
        return again, second

    def _taken_again(self, begun: StepUnderWay, first: StepValues) -> tuple[StepUnderWay, StepValues]:
        """Take a step again; return it and its results, with what the parts have reported the first time."""
        again = self._begin_again(begun)
        return again, replace(again.values.read(), reported=first.reported, of_ranks=first.of_ranks)

    def _blame(self, begun: StepUnderWay, first: StepValues, again: StepUnderWay, second: StepValues) -> None:
        """Suspect the ranks that had another loss at first, of a step that was bad only then."""
        differs = of_every_rank(int(not _is_close(float(begun.own_loss), float(again.own_loss))))
        replicas = {self._plan.dp_rank(rank) for rank, changed in enumerate(differs) if changed}
        suspects = self._ranks_of(replicas)
        if len(suspects) == self._plan.world_size > 1:
            suspects = ()  # nobody stands out
        reason = f"loss {first.loss:.4g} and gradient norm {first.grad_norm:.4g}, but {second.loss:.4g} and "
        reason += f"{second.grad_norm:.4g} when it was taken again on the same data"
        if suspects:
            reason += f"; {named(suspects)} had another loss"
        self._mended = BadStep(begun.step, reason, is_finite=True, data=None, suspects=suspects)

    def after_step(self, step: FinishedStep) -> None:
        """Blame a device, in place of the data of a bad step, if it computes another loss of them than others do."""
        step.mended = self._mended
        self._mended = None
        if step.bad is None or step.bad.suspects or self._plan.dp == 1:
            return
        worst = self._worst_replica(float(step.own_loss))
        losses = self._losses_of(step.microbatches, worst)
        suspects = self._ranks_of(_odd_ones(losses))
        if suspects:
            of_one = ", ".join(f"{loss:.4g}" for loss in losses[0][:MAX_NAMED])
            reason = f"{step.bad.reason}; {named(suspects)} computed another loss of the same data ({of_one})"
            step.bad = replace(step.bad, reason=reason, is_finite=True, data=None, suspects=suspects)

    def _worst_replica(self, own: float) -> int:
        """Return the replica whose share of the step had the largest loss, or one that was not finite.

        Args:
            own: this rank's part of that loss.
        """
        losses = of_every_rank(own if math.isfinite(own) else math.inf)
        return self._plan.dp_rank(max(range(len(losses)), key=lambda rank: losses[rank]))

    def _losses_of(self, microbatches: Sequence[Batch], replica: int) -> list[Sequence[float]]:
        """Return the loss of each row of one replica's share, as each of all replicas computes it."""
        first = next(rank for rank in range(self._plan.world_size) if self._plan.dp_rank(rank) == replica)
        shared = from_rank(first, [batch.to("cpu") for batch in microbatches])
        with evaluating(self._engine):
            rows, _ = self._engine.evaluate([batch.to(self._device) for batch in shared])
        for measure in self._engine.model.measures:
            measure.take_measured()  # which is of no step
        copies = self._plan.dp
        return [rows[start : start + copies] for start in range(0, len(rows), copies)]

    def _ranks_of(self, replicas: set[int]) -> tuple[Suspect, ...]:
        """Return the ranks of some replicas."""
        ranks = [rank for rank in range(self._plan.world_size) if self._plan.dp_rank(rank) in replicas]
        places = on_first_rank(own_place(self._device)) if ranks else []
        return from_first_rank(tuple(Suspect(rank, *places[rank]) for rank in ranks) if is_first_rank() else ())


def _is_sound(values: StepValues, begun: StepUnderWay) -> bool:
    """Return whether a step was finite, or only its loss scale was too large."""
    return values.updated or values.overflowed(begun.loss_scale)


def _is_close(loss: float, usual: float) -> bool:
    """Return whether a loss is another one up to rounding, which a NaN never is."""
    return abs(loss - usual) <= TOLERANCE * abs(usual)


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
        odd |= {replica for replica, loss in enumerate(of_row) if not _is_close(loss, usual)}
    return odd
