"""The forward over other rows before a step, as a rehearsal has it: the rows, and what it computes and sends."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace

from llama_core.models.batch import Batch
from llama_core.objectives.traits import ObjectiveType
from llama_core.rehearsal.compose import ComposedStep
from llama_core.rehearsal.transfers import Transfer


def with_rows_before(rows: Batch, objective: ObjectiveType) -> Batch:
    """Return a microbatch with those that are measured before it: here the same ones, as only sizes matter."""
    return replace(rows, before=deepcopy(rows)) if objective.prepares else rows


def whole_step(step: ComposedStep, objective: ObjectiveType) -> tuple[int, Counter[Transfer]]:
    """Return the FLOPs and the transfers of a step with the forward before it.

    What a forward computes and sends is the same without a gradient.
    """
    if not objective.prepares:
        return step.flops, step.transfers
    return step.flops + step.forward_flops, step.transfers + step.forward_transfers
