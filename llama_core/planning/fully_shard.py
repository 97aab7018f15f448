"""How ``fully_shard`` groups the weights of a rank, and when it gathers, drops and reduces each group.

This is the one description. ``parallel.zero`` calls ``fully_shard`` as it says, the estimates of memory and
communication count what follows from it, and the rehearsal asks it which states of a step are alike.

A unit is what one call of ``fully_shard`` takes. Its weights are gathered in one transfer, and so are its gradients
reduced; only experts that fewer ranks shard travel apart. The units are each layer, the embedding, the final norm
with the head, and the root, which is what is left: an embedding that both ends of the model use and, if it is the head
itself, the norm beside it.

The ZeRO stages differ in how long weights and gradients stay whole:

====== ====================================== ====================================== =========================
stage  weights within a step                  gradients within a step                per step and parameter
====== ====================================== ====================================== =========================
1      gathered once, whole to the last       whole, reduce-scattered once           2 transfers
       backward
2      the same                               reduce-scattered after every backward  1 + microbatches
3      gathered for every unit, dropped       the same                               3 x microbatches
       after it
====== ====================================== ====================================== =========================

Between steps all three hold weights, gradients and optimizer states in shards. Stage 0 with tensor, pipeline or expert
parallelism is stage 1 with replicas instead of shards.

Sources: Zhao et al. 2023, arXiv:2304.11277 (units); Rajbhandari et al. 2020, arXiv:1910.02054 (stages).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Self, TypeVar

from llama_core.config.models import ModelSpec
from llama_core.config.strategy import EMBEDDING
from llama_core.config.trained_ends import adapted_tables
from llama_core.planning.plan import ParallelPlan

Role = Literal["embedding", "layer", "head", "root"]
Part = TypeVar("Part")
"""A part of the model: a module in the engine, its program in the estimates."""


class Unit(NamedTuple, Generic[Part]):
    """Weights that ``fully_shard`` gathers at once, and whose gradients it reduces at once."""

    role: Role
    parts: tuple[Part, ...]
    gathers_in_backward: bool = True
    """Whether its backward needs its weights."""


def units_of(
    spec: ModelSpec,
    layers: Iterable[Part],
    *,
    embedding: Part | None,
    final_norm: Part | None,
    head: Part | None,
) -> tuple[Unit[Part], ...]:
    """Return the units of a part of a model, in the order in which a forward needs them, and the root last.

    Args:
        spec: the model.
        layers: the layers of the part.
        embedding: None if the part lacks it.
        final_norm: None if the part lacks it.
        head: None if the part lacks it. If it is the embedding, either may be given, or both.
    """
    units: list[Unit[Part]] = []
    if embedding is not None and not spec.embeds_at_end:
        # the gradient of a look-up depends on the tokens alone, that of an adapter on its other
        # factor
        is_adapted = EMBEDDING in adapted_tables(spec)
        units.append(Unit("embedding", (embedding,), gathers_in_backward=is_adapted))
    units += [Unit("layer", (layer,)) for layer in layers]
    if not spec.tied_embeddings:
        outer = tuple(part for part in (final_norm, head) if part is not None)
        if outer:
            units.append(Unit("head", outer))
        if embedding is not None and spec.embeds_at_end:
            units.append(Unit("root", (embedding,)))
        return tuple(units)
    # both ends of the model use the table, so no unit in between can have it
    table = head if head is not None else embedding
    shared = tuple(part for part in (table, final_norm) if part is not None)
    return (*units, Unit("root", shared)) if shared else tuple(units)


@dataclass(frozen=True)
class Resharding:
    """When ``fully_shard`` gathers and drops weights and reduces gradients within a step."""

    zero_stage: int
    """The effective ZeRO stage."""
    averages_every_backward: bool = False
    """Whether the copies of a shard average gradients after every backward, not once in the step's last one."""

    @classmethod
    def of(cls, plan: ParallelPlan) -> Self:
        """Return that of a plan."""
        stage = plan.effective_zero_stage
        # with several stages on a rank, the last backward of the step is the last of one stage only
        has_several_stages = len(plan.layout.stages_of(0)) > 1
        return cls(stage, stage >= 2 and plan.dp_replicate > 1 and has_several_stages)

    @property
    def drops_weights(self) -> bool:
        """Whether every forward and every backward gathers its weights anew, and drops them."""
        return self.zero_stage == 3

    @property
    def shards_gradients(self) -> bool:
        """Whether every backward reduces its gradients into shards, so that they are never whole for a step."""
        return self.zero_stage >= 2

    def drops_after_forward(self, unit: Unit[Part]) -> bool:
        """Return whether a unit's weights are dropped after its forward (``reshard_after_forward``).

        Those of the head are not: without a pipeline, or on the last rank of a 1F1B pipeline, their backward follows.
        The root's are not: the last layer's forward is not the last that needs them.
        """
        return self.drops_weights and unit.role in {"embedding", "layer"}

    def drops_after_backward(self, *, last: bool) -> bool:
        """Return whether a backward drops the weights that it used; ``last`` says that it is the step's last one."""
        return last or self.drops_weights

    def reduces(self, *, last: bool) -> bool:
        """Return whether a backward reduces gradients into shards."""
        return last or self.shards_gradients

    def averages(self, *, last: bool) -> bool:
        """Return whether a backward averages the reduced gradients over the copies of a shard."""
        return last or self.averages_every_backward
