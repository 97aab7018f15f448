"""The traits of an optimizer that planning needs. Each states its own, so no other code asks for its name."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

WEIGHT_BYTES = 4
"""Bytes of a trained weight, and of its gradient in the update: both are fp32, whatever the activations are."""

RATE = "rate"
"""What a group of parameters in torch's optimizer calls its learning rate over that of the run; without it, 1."""


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
    built_in: str
    """The module whose ``build`` makes it; a string, so that planning needs no torch."""
    states: tuple[State, ...]
    """What it keeps from step to step: held beside the weights, offloaded together, and saved in checkpoints."""
    read_bytes: int
    """Bytes that the update reads: the gradient, the weight, and the states that it needs."""
    written_bytes: int
    """Bytes that the update writes."""
    gathered_bytes: int = 0
    """Bytes that the update gathers from the ranks that shard a weight; 0 if it needs no other rank's part."""
    keys: tuple[str, ...] = ()
    """The settings of ``training`` that it takes, beside the learning rate."""
    rates: tuple[tuple[str, float], ...] = ()
    """Learning rates over that of the run, by glob pattern of a parameter's name; the first pattern that fits counts,
    and what none fits has the run's."""
    runs_in_deepspeed: bool = False
    """Whether it can update DeepSpeed's partitions, which are flat: a rule for each element alone, without shapes."""

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        return sum(state.num_bytes for state in self.states)

    @property
    def saved_bytes(self) -> int:
        """Bytes in a checkpoint: the weight and all states."""
        return WEIGHT_BYTES + self.state_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that the update reads and writes."""
        return self.read_bytes + self.written_bytes

    def rate(self, name: str) -> float:
        """Return the learning rate of the parameter called ``name``, over that of the run."""
        return next((rate for pattern, rate in self.rates if fnmatchcase(name, pattern)), 1.0)
