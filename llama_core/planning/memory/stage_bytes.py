"""What a stage holds of weights, gradients and activations, for every instant of its forward and its backward."""

from itertools import accumulate
from typing import NamedTuple

from llama_core.planning.memory.gathered import GatheredWeights
from llama_core.planning.memory.gradients import StageGradients
from llama_core.planning.memory.kept import KeptActivations
from llama_core.planning.memory.profile import Category
from llama_core.planning.memory.weights import StageWeights
from llama_core.planning.work import Stage, Work


class Snapshot(NamedTuple):
    """The bytes alive at an instant, by the categories that rise and fall within a forward or a backward."""

    gradients: int
    activations: int
    loss: int
    communication: int
    temporaries: int

    def categories(self) -> dict[Category, int]:
        """Return the bytes by category."""
        return dict(zip(CATEGORIES, self, strict=True))


CATEGORIES: tuple[Category, ...] = (
    "gradients",
    "activations",
    "loss",
    "communication",
    "temporaries",
)
"""Those of a ``Snapshot``, in order."""


class StageBytes:
    """A stage of one rank, and what it holds of one microbatch.

    Args:
        stage: the stage.
        work: the model, the plan and the sequences.
    """

    def __init__(self, stage: Stage, work: Work) -> None:
        self.stage = stage
        self.layers = stage.layers
        self.last = len(stage.layers) - 1
        """The last layer, counted from the stage's first."""
        self.weights = StageWeights(stage, work)
        self.gathered = GatheredWeights(self.weights, work)
        self.gradients = StageGradients(self.weights, work)
        self.kept = KeptActivations(stage, work)
        self.stream = work.stream_bytes
        """Bytes of the residual stream."""
        self.gradient_received = 0 if stage.is_last else self.stream
        """Bytes of the gradient that the backward of a stage before the last starts from, held to the end."""
        self.first_module = len(stage.layers) - stage.num_modules
        """The place of the first prediction module, or of what follows the layers."""
        self.divides_table = work.plan.tp > 1
        """Whether tensor-parallel ranks divide the embedding."""
        self.num_deferred = sum(layer.num_deferred for layer in stage.layers)
        """Parameters whose gradients a split backward defers."""
        made = (layer.program.num_trained - layer.num_deferred for layer in reversed(stage.layers))
        self.made_above = list(accumulate(made, initial=0))[-2::-1]
        """Parameters of the layers after each one whose gradients a backward makes, but for those it defers."""

    def predicted(self, place: int) -> int:
        """Return the bytes of the hidden states that prediction modules before a place have made for the head."""
        return self.stream * max(0, place - self.first_module)

    def waiting_gradients(self, place: int) -> int:
        """Return the bytes of gradients that wait while a backward is in a module, beside that of its output.

        They are those of the hidden states of the modules before it, of what the final norm reads and, from the module
        after it, of its residual stream.
        """
        if place < self.first_module:
            return 0
        num_after = self.last - place
        return self.stream * (place - self.first_module + 1 + min(num_after, 1))
