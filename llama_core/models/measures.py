"""What a model measures of a step beside its loss."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Measures(Protocol):
    """Something in a model that measures, such as its routers or an objective.

    It keeps sums, because the sums over microbatches and over ranks add up to those of the step. What it makes of them
    goes by name into the record of the step, and from there to all that shows records.
    """

    num_sums: int
    """How many sums it keeps."""

    @property
    def names(self) -> Sequence[str]:
        """What it records, so that every record of a run has the same names."""

    def take_measured(self) -> Tensor | None:
        """Return the sums since the last call, [num_sums] on the device, and forget them; None if there are none.

        It must not wait for the device. Tensor-parallel ranks, which compute the same, each return all of a sum,
        and only routers may return parts.
        """

    def of_step(self, sums: Sequence[float]) -> Mapping[str, float]:
        """Return what is recorded, by name, from the sums over all ranks; names without a value are left out."""
