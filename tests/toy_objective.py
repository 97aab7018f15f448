"""The next token, only where the batch says so: an objective as somebody would add it, with next-token's program."""

from dataclasses import replace

from llama_core.models.batch import IGNORE_INDEX
from llama_core.models.next_token import NextToken
from llama_core.objectives.registry import OBJECTIVES
from llama_core.objectives.traits import ObjectiveType

MASKED = ObjectiveType("masked", module="toy_objective", per_token=("mask",), unit="nats/kept token")


class Masked(NextToken):
    def loss(self, head, batch):
        return super().loss(head, kept(batch))

    def count(self, batch):
        return kept(batch).num_targets()


def kept(batch):
    return replace(batch, targets_BS=batch.targets_BS.masked_fill(batch.per_token["mask"] == 0, IGNORE_INDEX))


def build(training):
    return Masked()


def register(objective=MASKED):
    """Add an objective to the registry of this process, as every rank of a test has to."""
    OBJECTIVES[objective.name] = objective
