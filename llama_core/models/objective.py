"""What a model is trained for, as a function of the head and the batch."""

from importlib import import_module
from typing import Protocol, runtime_checkable

from torch import Tensor

from llama_core.config.settings import TrainingConfig
from llama_core.models.batch import Batch
from llama_core.models.head import HeadInputs
from llama_core.objectives.registry import OBJECTIVES


class Objective(Protocol):
    """A loss that is a sum, so that microbatches and ranks add up to the same as one batch."""

    def loss(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return the loss summed over what counts in ``batch``: a scalar in fp32, or in fp64 if the tensors are.

        Ranks that divide the vocabulary call it together and all return the same.
        """

    def count(self, batch: Batch) -> Tensor:
        """Return how much counts, by which the sum over all ranks is divided: an int64 scalar on the batch's device.

        It must not wait for the device. Sums of integers are exact in any order, so all ranks divide by the same.
        """


@runtime_checkable
class PreparingObjective(Objective, Protocol):
    """An objective whose loss depends on something that is measured over the whole step, before its first backward.

    Before a step or an evaluation, the engine runs a forward over other rows, ``Batch.before``, that keeps nothing.
    """

    num_prepared: int
    """How many values of each row are measured."""

    def rows_before(self, batch: Batch) -> Batch:
        """Return the other rows of a batch in host memory: as many, as long, and nothing but those decides them."""

    def of_rows_before(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return what is measured of such rows, [B, num_prepared]; ranks that cut rows return their parts of a sum."""

    def prepare(self, sums: Tensor) -> None:
        """Take the sums over all rows of all ranks, fp64 [num_prepared]. It must not wait for the device."""


@runtime_checkable
class ReferringObjective(Objective, Protocol):
    """An objective that reads what a forward over all rows before the run has made of them (``Reference``)."""

    def num_referred(self, seq_len: int) -> int:
        """Return how many values of a row of ``seq_len`` tokens the forward measures."""

    def of_reference(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return them for each row, [B, num_referred]; ranks that cut rows return their parts of a sum.

        A token's place in its row, which ranks may have cut, is the value ``PLACE`` of the batch. What a data set keeps
        of them is for its ``references_in`` to say.
        """


@runtime_checkable
class PredictingObjective(Objective, Protocol):
    """An objective that modules of multi-token prediction add to: its loss of later tokens is theirs."""

    mtp_weight: float
    """How much the mean of their losses counts beside its own."""


def build_objective(training: TrainingConfig) -> Objective:
    """Return the objective that ``training`` names."""
    objective: Objective = import_module(OBJECTIVES.named(training.objective).module).build(training)
    return objective
