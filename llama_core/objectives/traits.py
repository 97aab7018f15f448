"""The traits of an objective that planning and reports need. Each states its own: nobody asks for its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llama_core.objectives.records import DOCUMENTS, RECORD_KINDS, RecordKind


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
    reads: str = DOCUMENTS.name
    """The name of the kind of records that it reads (``records.py``)."""
    prepares: bool = False
    """Whether it measures other rows before each step, as many and as long: a forward that keeps nothing. What is built
    is then a ``PreparingObjective``."""

    shown: Mapping[str, str] = field(default_factory=dict, hash=False)
    """How the console shows some of what it measures, by name: texts such as ``"margin {:.4f}"``."""

    @property
    def records(self) -> RecordKind:
        """The kind of records that it reads."""
        return RECORD_KINDS.named(self.reads)

    @property
    def unit_in_words(self) -> str:
        """The unit as it is read aloud."""
        return self.unit.replace("/", " per ")
