"""The traits of an objective that planning and reports need. Each states its own: nobody asks for its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Reads = Literal["documents", "pairs", "labelled answers"]
"""What an objective reads of a record: a text or a conversation, two answers to a prompt of which one is better, or an
answer to a prompt that is good or bad."""


@dataclass(frozen=True)
class ObjectiveType:
    """What a model is trained for: a loss that is a sum over what counts, divided by how much counts."""

    name: str
    """Value of ``training.objective``."""
    built_in: str
    """The module whose ``build`` makes it; a string, so that planning needs no torch."""
    program: str = "llama_core.planning.program.ends"
    """The module whose ``Head`` says what the head and the loss do; default: next-token's, for a loss that is
    ``linear_cross_entropy``."""
    keys: tuple[str, ...] = ()
    """The settings of ``training`` that it takes."""
    per_token: tuple[str, ...] = ()
    """The values that batches carry for it beside targets: one fp32 number for each token."""
    unit: str = "nats/token"
    """Unit of the loss."""
    reads: Reads = "documents"
    """What it reads of a record."""
    prepares: bool = False
    """Whether it measures other rows before each step, as many and as long: a forward that keeps nothing. What is built
    is then a ``PreparingObjective``."""

    shown: Mapping[str, str] = field(default_factory=dict, hash=False)
    """How the console shows some of what it measures, by name: texts such as ``"margin {:.4f}"``."""

    @property
    def unit_in_words(self) -> str:
        """The unit as it is read aloud."""
        return self.unit.replace("/", " per ")
