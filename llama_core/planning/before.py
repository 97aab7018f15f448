"""What planning knows of forwards that keep nothing: those before a step, over other rows, and before a run, over all.

Memory, time, transfers and costs multiply with these numbers, and none of them asks an objective's row.
"""

from llama_core.objectives.traits import ObjectiveType


def forwards_before_step(objective: ObjectiveType) -> int:
    """Return how many forwards over other rows, as many and as long as its own, each step begins with."""
    return 1 if objective.prepares else 0


def forwards_before_run(objective: ObjectiveType) -> int:
    """Return how many forwards over all rows, held-out ones too, there are before the first step."""
    return 0 if objective.reference is None else objective.reference.num_forwards
