"""The gradients of a stage on a rank throughout a step: as they are made, added up, reduced and averaged.

A single rank and a rank with a copy of the whole model make gradients in fp32, and add each to the one before it.
``fully_shard`` makes those of a unit in the dtype of activations. After the unit's backward it either reduces them, in
fp32, into the shards, or widens them to fp32 and keeps them whole for the next microbatch.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from llama_core.planning.fully_shard import Resharding
from llama_core.planning.memory.position import Position
from llama_core.planning.memory.weights import StageWeights
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.program.passes import Passes
from llama_core.planning.work import Work


class Reduction(NamedTuple):
    """What a unit takes while its gradients are reduced."""

    gradients: int
    """Bytes of its gradients, reduced or not."""
    buffers: int
    """Bytes of the buffers that they are reduced from."""


def _num_trained(passes: Passes | None) -> int:
    return 0 if passes is None else passes.program.num_trained


class StageGradients:
    """The gradients of a stage.

    Args:
        weights: its parameters.
        work: the model, the plan and the sequences.
    """

    def __init__(self, weights: StageWeights, work: Work) -> None:
        stage = weights.stage
        trained = weights.trained
        self.trained = trained
        self.weights = weights
        self.num_shards = weights.num_shards
        self.is_sharded = weights.is_sharded
        self.has_buckets = work.plan.averages_in_buckets
        """Whether copies of the model average their gradients in buckets, which always exist."""
        self.resharding = Resharding.of(work.plan)
        self.copies_buffers = not work.on_cuda
        """Whether gloo reduces a copy of each buffer, as on a CPU."""
        self.shards_often = self.resharding.shards_gradients
        """Whether every backward reduces its gradients into shards."""
        self.itemsize = work.itemsize if weights.is_sharded else FP32_BYTES
        """Bytes per element of a gradient when it is made."""
        self.num_in_embedding = _num_trained(stage.embedding)
        """Parameters of the embedding that get gradients."""
        self.num_in_head = _num_trained(stage.head)
        """Parameters of the head that get gradients; of an embedding in its place too."""
        self.ends_with_table = stage.is_last and stage.tied
        """Whether the head is a table whose gradient is complete only after the layers."""
        self.of_table = 0
        """Bytes of the embedding's gradient that prediction modules make, if no head waits with it."""
        if stage.is_last and stage.embeds_at_end and not stage.tied:
            self.of_table = self.itemsize * _num_trained(work.embedding)
        self.of_head = self.itemsize * self.num_in_head
        """Bytes of the head's gradient when it is made."""
        self.num_before_layers = trained.head
        """Parameters whose gradients are done when the backward reaches the layers."""
        if not self.is_sharded and self.ends_with_table:
            self.num_before_layers = trained.root - self.num_in_head  # the final norm alone
        last_unit = trained.embedding or trained.root or trained.layers[0]
        self.last_buffer = FP32_BYTES * last_unit if self.shards_often else 0
        """Bytes of the buffer of a backward's last reduction, kept until the next one."""
        layers_done = accumulate(reversed(trained.layers), initial=trained.head)
        self._layers_done = list(layers_done)[1:]
        """Parameters whose gradients are done after the backward of each layer, last first."""
        self._experts_done = list(accumulate(reversed(weights.experts), initial=0))
        """Those of them that are of experts which travel apart, before the first of these backwards and after each."""

    def held(self, at: Position, done: int, fresh: int = 0) -> int:
        """Return the bytes of the gradients in a backward.

        Args:
            at: the stage's position.
            done: parameters whose gradients this backward has made and, if they are sharded, reduced.
            fresh: parameters of the layer at work whose gradients it has made.
        """
        if not self.is_sharded:
            return self._held_whole(at, done + fresh)
        reduced = FP32_BYTES * done
        held = max(reduced, FP32_BYTES * at.accumulated)
        unreduced = 0 if self.adds(at) else self.itemsize * fresh
        if self.shards_often:
            return self._shards(max(done, at.accumulated)) + unreduced
        if at.is_final:  # this backward reduces what earlier ones have kept whole
            return held - reduced + self._shards(done) + unreduced
        return held + unreduced

    def _shards(self, done: int) -> int:
        """Return the bytes of the shards of ``done`` parameters' gradients, in the order in which these are reduced."""
        experts = self._experts_done[bisect_right(self._layers_done, done)]
        return int(FP32_BYTES * self.weights.shard(done, experts))

    def _held_whole(self, at: Position, num_made: int) -> int:
        """Return the bytes of gradients that no rank shards, of which this backward has made some."""
        made = FP32_BYTES * num_made
        held = max(made, FP32_BYTES * at.accumulated)
        if not self.has_buckets:
            return held
        # DistributedDataParallel's buckets are there from the start; the final backward moves every
        # gradient into them
        moved = made if at.is_final else 0
        return FP32_BYTES * self.trained.total + held - moved

    def adds(self, at: Position) -> bool:
        """Return whether a gradient is made beside the one that it is added to or moved into."""
        if not self.is_sharded:
            return at.accumulated > 0 or self.has_buckets
        # autograd itself adds to a whole gradient only if that has the dtype of the new one
        is_wide = self.itemsize == FP32_BYTES
        return at.accumulated > 0 and is_wide and not self.shards_often

    def also_made(self, at: Position, making: int) -> int:
        """Return the bytes in which the gradients of ``making`` parameters are made, beside those in ``held``."""
        return self.itemsize * making if self.adds(at) else 0

    def waiting_table(self, at: Position, *, after_module: bool = False) -> int:
        """Return the bytes of a table's gradient while the backward is in the layers: it is done after them.

        Args:
            at: the stage's position.
            after_module: whether a prediction module, if there is one, has made its part.
        """
        if self.is_sharded and self.adds(at):
            return 0
        if self.ends_with_table:
            return self.of_head
        return self.of_table if after_module else 0

    def held_in_norm(self, at: Position) -> int:
        """Return the bytes of gradients while the backward is in the final norm, before the head's are reduced."""
        if not self.is_sharded:
            return self.held(at, self.num_before_layers) + self.waiting_table(at)
        return self.held(at, 0) + (0 if self.adds(at) else self.of_head)

    def averaged(self, at: Position, done: int, unit: int = 0) -> int:
        """Return the bytes of averages over copies that were added to gradients and are kept until the next ones.

        The first average of a step becomes the gradient itself.

        Args:
            at: the stage's position.
            done: parameters whose gradients this backward has reduced.
            unit: parameters of the unit being reduced, whose previous average is freed.
        """
        if not at.accumulated:
            return 0
        return self.average(self.trained.total - unit if at.repeated else done)

    def average(self, num_parameters: int) -> int:
        """Return the bytes of the average of some parameters' gradients, if it is kept."""
        if not self.resharding.averages_every_backward:
            return 0
        return int(FP32_BYTES * num_parameters // self.num_shards)

    def reduces(self, at: Position) -> bool:
        """Return whether a backward reduces gradients into shards."""
        return self.is_sharded and (self.shards_often or at.is_final)

    def reduction_buffer(self, at: Position, unit: int) -> int:
        """Return the bytes of the buffer from which a backward reduces the gradients of a unit (``chunk_cat``)."""
        return FP32_BYTES * unit if self.reduces(at) else 0

    def in_reduction(
        self, at: Position, unit: int, largest: int, *, accumulated: bool, experts: int, others: int
    ) -> Reduction:
        """Return the bytes of a unit's gradients as they are reduced or, if they are reduced later, widened.

        Args:
            at: the stage's position.
            unit: parameters of the unit.
            largest: parameters of the last one, whose gradient is kept a little longer.
            accumulated: whether the unit has gradients of earlier microbatches.
            experts: parameters of the unit that are reduced apart, before the others.
            others: bytes of gathered weights that are kept until these have been reduced.
        """
        if experts and self.reduces(at):
            return self._of_two_reductions(at, unit, largest, accumulated=accumulated, experts=experts, others=others)
        buffer = self.reduction_buffer(at, unit)
        copy = buffer if self.copies_buffers and self.weights.num_frozen_shards > 1 else 0
        made, reduced = self._in_reduction(at, unit, largest, accumulated=accumulated, experts=experts)
        return max(Reduction(made, buffer), Reduction(reduced, buffer + copy), key=sum)

    def _of_two_reductions(
        self, at: Position, unit: int, largest: int, *, accumulated: bool, experts: int, others: int
    ) -> Reduction:
        """Return the bytes of a unit whose experts are reduced first, and whose buffers are freed together."""
        kept_whole = accumulated and not self.shards_often
        # the gradients of earlier microbatches, to which torch has added these, are in ``held``
        made = 0 if kept_whole else self.itemsize * unit
        made_of_others = 0 if kept_whole else self.itemsize * (unit - experts)
        of_experts = int(FP32_BYTES * self.weights.shard(experts, experts))
        of_others = int(FP32_BYTES * self.weights.shard(unit - experts, 0))
        # a shard that is added to an earlier one is freed
        kept = 0 if accumulated and not kept_whole else of_experts
        outliving = (FP32_BYTES if kept_whole else self.itemsize) * largest if self.weights.num_expert_shards > 1 else 0
        # those of experts have been freed when the others are reduced
        freed = FP32_BYTES * experts if kept_whole else 0
        buffers = FP32_BYTES * experts, FP32_BYTES * unit
        copies = 0, 0
        if self.copies_buffers:
            copies = buffers[0] if self.weights.num_expert_shards > 1 else 0, buffers[1] - buffers[0]
        instants = (
            Reduction(made, buffers[0] + others),
            Reduction(made_of_others + of_experts + outliving - freed, buffers[0] + copies[0] + others),
            Reduction(made_of_others + kept - freed, buffers[1]),
            Reduction(kept + of_others - freed, buffers[1] + copies[1]),
        )
        return max(instants, key=sum)

    def _in_reduction(
        self, at: Position, unit: int, largest: int, *, accumulated: bool, experts: int
    ) -> tuple[int, int]:
        """Return the bytes of a unit's gradients before they are reduced, or widened, and those after."""
        made = self.itemsize * unit
        reduces = self.reduces(at)
        if not reduces and self.itemsize == FP32_BYTES:
            return (0, 0) if accumulated else (made, 0)
        result = int(FP32_BYTES * (self.weights.shard(unit, experts) if reduces else unit))
        if accumulated and not self.shards_often:
            # torch has added it to the earlier gradient, which is in ``held``
            # (accumulate_unsharded_grad_if_needed)
            result = 0
            if reduces:
                made = 0
        # when torch's loop over the gradients of a unit has ended (foreach_reduce), it still refers to
        # the last one; with one shard there is no such loop
        outlives = self.weights.num_frozen_shards > 1 or not reduces
        outliving = self.itemsize * largest if outlives else 0
        return made, result + outliving
