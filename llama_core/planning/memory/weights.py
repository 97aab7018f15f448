"""The parameters of a pipeline stage on a rank, and the rank's share of them between steps."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Self

from llama_core.planning.fully_shard import Unit
from llama_core.planning.program.operations import Program
from llama_core.planning.program.passes import Passes
from llama_core.planning.work import Stage, Work


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a stage, by the units of ``fully_shard``."""

    layers: tuple[int, ...]
    head: int
    """Of the final norm and a head of its own."""
    root: int
    """Of an embedding that is also the head, and of the final norm beside it."""
    embedding: int

    @cached_property
    def in_layers(self) -> int:
        """Parameters of all layers."""
        return sum(self.layers)

    @cached_property
    def tables(self) -> int:
        """Parameters outside the layers."""
        return self.head + self.root + self.embedding

    @cached_property
    def total(self) -> int:
        """All of them."""
        return self.in_layers + self.tables

    @classmethod
    def of(cls, units: Iterable[Unit[Passes]], count: Callable[[Program], int]) -> Self:
        """Return the counts of some units, given the number of a program's parameters that count."""
        layers: list[int] = []
        others = {"embedding": 0, "head": 0, "root": 0}
        for unit in units:
            num_parameters = sum(count(part.program) for part in unit.parts)
            if unit.role == "layer":
                layers.append(num_parameters)
            else:
                others[unit.role] = num_parameters
        return cls(tuple(layers), **others)


class StageWeights:
    """One stage's parameters on a rank.

    Args:
        stage: the stage.
        work: the model, the plan and the sequences.
    """

    def __init__(self, stage: Stage, work: Work) -> None:
        plan = work.plan
        self.stage = stage
        self.num_layers = len(stage.layers)
        self.is_sharded = plan.uses_fully_shard
        self.held = Counts.of(stage.units, lambda program: program.num_held)
        """Parameters the rank computes with."""
        self.trained = Counts.of(stage.units, lambda program: program.num_trained)
        """Those of them that get gradients."""
        self.accumulated = {
            "none": 0,
            "tables": self.trained.tables,
            "all": self.trained.total,
        }
        """Those that have gradients when a stage has come so far."""
        self.num_frozen_shards = plan.num_shards
        """Ranks that share a frozen parameter."""
        self.num_expert_shards = plan.num_expert_shards
        """Those that share one of experts."""
        travel_apart = self.is_sharded and plan.ep > 1 and plan.num_shards > 1
        self.experts = tuple(layer.program.num_of_experts if travel_apart else 0 for layer in stage.layers)
        """Parameters of experts in each layer, if ``fully_shard`` gathers and reduces them apart from others."""
        self._num_again = (plan.fewer_expert_shards - 1) * sum(self.experts)
        """The parameters of experts, once for each time that a rank has more of them than of others."""
        self.num_shards: int | Fraction = plan.num_shards
        """Ranks that share a trained parameter; an average if experts are sharded over fewer ranks than the rest."""
        if self._num_again:
            # a parameter that fewer ranks share counts as that many more
            total = self.trained.total
            self.num_shards *= Fraction(total, total + self._num_again)

    def shard(self, count: int, experts: int) -> Fraction:
        """Return a rank's share of trained parameters, of which some are of experts that travel apart."""
        return Fraction(count - experts, self.num_frozen_shards) + Fraction(experts, self.num_expert_shards)

    @property
    def num_copied(self) -> int:
        """Parameters with a lasting copy in the dtype of activations."""
        return sum(layer.program.num_copied for layer in self.stage.layers)

    @property
    def undivided_bytes(self) -> int:
        """Bytes beside the parameters that no rank divides."""
        return sum(layer.program.undivided_bytes for layer in self.stage.layers)

    @property
    def updated(self) -> Fraction:
        """Parameters that the rank updates."""
        return Fraction(self.trained.total) / self.num_shards

    @property
    def updated_in_matrices(self) -> Fraction:
        """Elements of the trained matrices inside layers that a rank updates."""
        in_matrices = self.stage.num_trained_in_matrices + self._num_again
        return Fraction(in_matrices, self.num_frozen_shards)

    @property
    def frozen(self) -> Fraction:
        """The rank's share of the parameters that get no gradients."""
        return Fraction(self.held.total - self.trained.total) / self.num_frozen_shards
