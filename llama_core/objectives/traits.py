"""The traits of an objective that planning and reports need. Each states its own: nobody asks for its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from llama_core.objectives.records import DOCUMENTS, RECORD_KINDS, RecordKind


@dataclass(frozen=True)
class Reference:
    """A forward over all rows before the first step, which keeps nothing; every row has its results from then on."""

    values: tuple[str, ...]
    """The values of each token that come of it: the last of the objective's ``per_token``."""
    num_forwards: int = 1
    """How many forwards it takes over each row."""
    name: str = "reference"
    """The model that computes it, in messages."""
    lost: str = "the reference is the model of step 0, which this run no longer has"
    """Why a run that goes on does not compute it again, as a clause."""
    weights: str = ""
    """The setting of ``training`` that names its weights; by default they are those that the run begins with."""


@dataclass(frozen=True)
class ObjectiveType:
    """What a model is trained for: a loss that is a sum over what counts, divided by how much counts."""

    name: str
    """Value of ``training.objective``."""
    module: str
    """The module whose ``build`` makes it; a string, so that planning needs no torch."""
    program: str = "llama_core.planning.program.ends"
    """The module whose ``Head`` says what the head and the loss do; default: next-token's, for a loss that is
    ``linear_cross_entropy``."""
    keys: tuple[str, ...] = ()
    """The settings of ``training`` that it takes."""
    required: tuple[str, ...] = ()
    """Those of them that it cannot do without."""
    per_token: tuple[str, ...] = ()
    """The values that batches carry for it beside targets: for each token an fp32 number, or ``sized_by`` says how
    many."""
    sized_by: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The setting of ``training`` that says of how many numbers a value is, by the value's name."""
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    """These numbers, once the settings of a run are known."""
    unit: str = "nats/token"
    """Unit of the loss."""
    reads: str = DOCUMENTS.name
    """The name of the kind of records that it reads (``records.py``)."""
    prepares: bool = False
    """Whether it measures other rows before each step, as many and as long: a forward that keeps nothing. What is built
    is then a ``PreparingObjective``. ``planning/before.py``, ``rehearsal/before.py`` and ``parallel/prepared.py`` see
    to it."""
    reference: Reference | None = None
    """The forward that it needs before the run. What is built is then a ``ReferringObjective``. ``planning/before.py``
    and ``training/reference.py`` see to it."""

    shown: Mapping[str, str] = field(default_factory=dict, hash=False)
    """How the console shows some of what it measures, by name: texts such as ``"margin {:.4f}"``."""

    def with_settings(self, training: object) -> Self:
        """Return it with the sizes of its values under the settings of a run."""
        if not self.sized_by:
            return self
        return replace(self, sizes={name: getattr(training, key) for name, key in self.sized_by.items()})

    @property
    def values_per_token(self) -> dict[str, int]:
        """The values that batches carry, by name, and of how many numbers each is."""
        return {name: self.sizes.get(name, 1) for name in self.per_token}

    @property
    def records(self) -> RecordKind:
        """The kind of records that it reads."""
        return RECORD_KINDS.named(self.reads)

    @property
    def unit_in_words(self) -> str:
        """The unit as it is read aloud."""
        return self.unit.replace("/", " per ")
