"""The traits of an optimizer that planning needs. Each states its own, so no other code asks for its name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

WEIGHT_BYTES = 4
"""Bytes of a trained weight, and of its gradient in the update: both are fp32, whatever the activations are."""
BF16_BYTES = 2
"""Bytes of a number in bf16."""

RATE = "rate"
"""What a group of parameters in torch's optimizer calls its learning rate over that of the run; without it, 1."""


UPDATED_BY = "updated_by"
"""What a group of parameters calls the name of the optimizer that updates it, if a run has several."""

NAMES = "names"
"""What a group of parameters calls their names, for a builder that asks for them by ``with_bf16_moments``; it takes
them out."""

LAYERS = "layers."
"""What the name of a parameter inside a layer begins with."""


class Trained(NamedTuple):
    """Numbers of trained parameters, which need not be whole: a rank's share of some, for one."""

    matrices: float
    """Those of the matrices inside layers, adapters' included: all weights there with rows and columns."""
    others: float
    """Those of the embedding and the head, and of every vector."""


class State(NamedTuple):
    """A tensor that an optimizer keeps from step to step for each trained weight, of the weight's shape."""

    name: str
    """Its key in the ``state`` of torch's optimizer."""
    num_bytes: int = WEIGHT_BYTES
    """Bytes per parameter."""


@dataclass(frozen=True)
class OptimizerType:
    """A rule that updates weights from their gradients, with its traits. Bytes are per trained parameter."""

    name: str
    """Value of ``training.optimizer``."""
    module: str
    """The module whose ``build`` makes it; a string, so that planning needs no torch."""
    states: tuple[State, ...]
    """What it keeps from step to step: held beside the weights, offloaded together, and saved in checkpoints."""
    read_bytes: int
    """Bytes that the update reads: the gradient, the weight, and the states that it needs."""
    written_bytes: int
    """Bytes that the update writes."""
    gathered_bytes: int = 0
    """Bytes that the update gathers from the ranks that shard a weight; 0 if it needs no other rank's part."""
    flops: Callable[[int, int], float] | None = None
    """FLOPs for a matrix with so many rows and columns, if it is computed whole, on one of the ranks that divide it or
    hold copies of it (``parallel.whole_matrices``); None if every rank updates its part alone."""
    others: "OptimizerType | None" = None
    """What updates all but the matrices inside layers; None if this one does."""
    keys: tuple[str, ...] = ()
    """The settings of ``training`` that it takes, beside the learning rate."""
    rates: tuple[tuple[str, float], ...] = ()
    """Learning rates over that of the run, by glob pattern of a parameter's name; the first pattern that fits counts,
    and what none fits has the run's."""
    scales: bool = False
    """Whether ``config.parametrization`` holds for it: an element's update is as large as the learning rate, whatever
    the size of its gradient."""
    with_bf16_moments: "OptimizerType | None" = None
    """The same rule with AdamW's moments in bf16, for ``training.moments``; None if it takes no such setting."""
    fused: "OptimizerType | None" = None
    """The same rule in one kernel of our own, which only CUDA has; None if there is none."""
    workspace_itemsize: int = 0
    """Bytes per element that an update holds meanwhile."""
    workspace_elements: int = 0
    """Most elements that are updated together."""
    runs_in_deepspeed: bool = False
    """Whether it can update DeepSpeed's partitions, which are flat: a rule for each element alone, without shapes."""

    def updates(self, name: str, num_dims: int) -> "OptimizerType":
        """Return the one that updates a parameter: this one, or ``others``."""
        is_matrix = name.startswith(LAYERS) and num_dims > 1 and not name.endswith(".bias")  # experts have one each
        return self if is_matrix or self.others is None else self.others

    @property
    def kinds(self) -> tuple["OptimizerType", ...]:
        """This one, and ``others`` if it has that."""
        return (self,) if self.others is None else (self, self.others)

    def with_moments(self, dtype: str) -> "OptimizerType":
        """Return the same rule with AdamW's moments in a dtype: a value of ``training.moments``."""
        return self.with_bf16_moments if dtype == "bf16" and self.with_bf16_moments is not None else self

    def on(self, *, cuda: bool) -> "OptimizerType":
        """Return the same rule as a device computes it."""
        own = self.fused if cuda and self.fused is not None else self
        return own if own.others is None else replace(own, others=own.others.on(cuda=cuda))

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        return sum(state.num_bytes for state in self.states)

    def workspace_bytes(self, largest: int) -> int:
        """Return the most bytes that updates hold meanwhile, given the elements of the largest weight."""
        return self.workspace_itemsize * min(self.workspace_elements, largest)

    @property
    def moved_bytes(self) -> int:
        """Bytes that the update reads and writes."""
        return self.read_bytes + self.written_bytes

    def states_of(self, trained: Trained) -> float:
        """Return the bytes of all states of some parameters."""
        return self.state_bytes * trained.matrices + self.kinds[-1].state_bytes * trained.others

    def saved_for(self, trained: Trained) -> float:
        """Return the bytes of some parameters in a checkpoint: the weights and all states."""
        return WEIGHT_BYTES * sum(trained) + self.states_of(trained)

    def moved_for(self, trained: Trained) -> float:
        """Return the bytes that an update of some parameters reads and writes."""
        return self.moved_bytes * trained.matrices + self.kinds[-1].moved_bytes * trained.others

    def rate(self, name: str) -> float:
        """Return the learning rate of the parameter called ``name``, over that of the run."""
        return next((rate for pattern, rate in self.rates if fnmatchcase(name, pattern)), 1.0)
