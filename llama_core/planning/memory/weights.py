"""The weights and gradients that a rank holds of one pipeline stage within an optimizer step.

A single rank and a rank with a copy of the whole model always hold all weights, and make their gradients in fp32.
``fully_shard`` gathers a unit's weights in the compute dtype, while the unit before computes, and makes its gradients
in that dtype. After the unit's backward it reduces the gradients, in fp32, into the shards. ``planning.fully_shard``
says what a unit is.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, Self

from llama_core.planning.fully_shard import Resharding, Unit
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.operations import FP32_BYTES, Program
from llama_core.planning.program.passes import Passes
from llama_core.planning.work import Stage, Work


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a stage, by the units of ``fully_shard``."""

    layers: tuple[int, ...]
    head: int
    """Of the final norm and a head of its own."""
    root: int
    """Of an embedding that is also the head, and of the final norm beside it."""
    embedding: int

    @cached_property
    def tables(self) -> int:
        """Parameters outside the layers."""
        return self.head + self.root + self.embedding

    @cached_property
    def total(self) -> int:
        """All of them."""
        return sum(self.layers) + self.tables

    @classmethod
    def of(cls, units: Iterable[Unit[Passes]], count: Callable[[Program], int]) -> Self:
        """Return the counts of some units, given the number of a program's parameters that count."""
        layers: list[int] = []
        others = {"embedding": 0, "head": 0, "root": 0}
        for unit in units:
            num_parameters = sum(count(part.program) for part in unit.parts)
            if unit.role == "layer":
                layers.append(num_parameters)
            else:
                others[unit.role] = num_parameters
        return cls(tuple(layers), **others)


def _num_trained(passes: Passes | None) -> int:
    return 0 if passes is None else passes.program.num_trained


class Position(NamedTuple):
    """A stage's position in the step, and what its rank holds on to, as far as the stage's own bytes depend on it."""

    is_first: bool
    """Whether the stage has not run before in this step."""
    accumulated: int
    """Parameters of the stage with gradients of earlier microbatches: usually none or all."""
    repeated: bool
    """Whether the stage has run two or more backwards."""
    root_is_gathered: bool = False
    """Whether an earlier action of the rank has gathered the root."""
    is_final: bool = False
    """Whether this is the rank's last backward of the step."""
    head_gathered: bool = False
    """Whether the stage's own head stayed gathered after an earlier forward."""
    head_has_gradient: bool = False
    """Whether the rank's last stage has run a backward; its head may be the embedding of the stage at work."""
    head_is_averaged: bool = False
    """Whether it has run two or more."""
    buffer: int = 0
    """The buffer of the last reduction, which ``fully_shard`` keeps until the next."""


class StageWeights:
    """One stage's weights and gradients on a rank, whole or sharded.

    Args:
        stage: the stage.
        work: the model, the plan and the sequences.
    """

    def __init__(self, stage: Stage, work: Work) -> None:
        plan = work.plan
        self.stage = stage
        self.num_layers = len(stage.layers)
        self.held = Counts.of(stage.units, lambda program: program.num_held)
        """Parameters the rank computes with."""
        self.trained = Counts.of(stage.units, lambda program: program.num_trained)
        """Those of them that get gradients."""
        self.trained_above_root = self.trained.head + sum(self.trained.layers)
        """Those whose gradients come before the root's."""
        self.groups = (self.held.embedding, *self.held.layers, self.held.head, 0)
        """Parameters that a forward gathers one after the other, apart from the root."""
        self.accumulated = {"none": 0, "tables": self.trained.tables, "all": self.trained.total}
        """Those that have gradients when a stage has come so far."""
        self.cast = sum(layer.program.num_copied for layer in stage.layers)
        """Those of them with a lasting copy in the activations' dtype."""
        self.num_in_embedding = _num_trained(stage.embedding)
        """Parameters of the embedding that get gradients."""
        self.num_in_head = _num_trained(stage.head)
        """Parameters of the head that get gradients; of an embedding in its place too."""

        self.is_sharded = plan.uses_fully_shard
        self.zero_stage = plan.effective_zero_stage
        self.drops = self.zero_stage == 3
        """Whether a layer's weights are dropped after its forward and its backward."""
        self.has_buckets = plan.averages_in_buckets
        """Whether copies of the model average their gradients in buckets, which always exist."""
        self.averages_often = Resharding.of(plan).averages_every_backward
        self.num_frozen_shards = plan.num_shards
        """Ranks that share a frozen parameter."""
        self._num_again = self._experts_again(plan)
        self.num_shards = self._num_shards(plan)
        """Ranks that share a trained parameter; an average if experts are sharded over fewer ranks than the rest."""

        self.gathered_itemsize = work.itemsize if self.is_sharded else 0
        """Bytes per element of what is gathered."""
        self.gradient_itemsize = work.itemsize if self.is_sharded else FP32_BYTES
        """Bytes per element of a gradient when it is made."""
        self.root_gathered = self.gathered_itemsize * self.held.root
        """Bytes gathered in whichever stage of the rank runs."""
        self.stay_gathered = self.gathered_itemsize * (self.held.root if self.drops else self.held.total)
        """Bytes that stay gathered between the stage's forwards and backwards, apart from ``head_gathered``."""
        self.head_gathered = self.gathered_itemsize * self.held.head if self.drops else 0
        """Bytes that stay gathered from the last stage's forward to the end of the rank's next backward."""
        last_group = self.trained.embedding or self.trained.root or self.trained.layers[0]
        self.last_buffer = FP32_BYTES * last_group if self.zero_stage >= 2 else 0
        """Bytes of the buffer of a backward's last reduction, kept until the next one."""
        self.head_gradient = self.gradient_itemsize * self.num_in_head
        """Bytes of the head's gradient when it is made."""
        self.head_done = self.trained.head
        """Parameters whose gradients are done when the backward reaches the layers."""
        if not self.is_sharded and stage.is_last and stage.tied:
            self.head_done = self.trained.root - self.num_in_head

    def _experts_again(self, plan: ParallelPlan) -> int:
        """Return the parameters of experts, once for each time that a rank has more of them than of others."""
        experts = sum(layer.program.num_of_experts for layer in self.stage.layers)
        return (plan.fewer_expert_shards - 1) * experts if self.is_sharded else 0

    def _num_shards(self, plan: ParallelPlan) -> int | Fraction:
        if not self._num_again:
            return plan.num_shards
        # a parameter that fewer ranks share counts as that many more
        return plan.num_shards * Fraction(self.trained.total, self.trained.total + self._num_again)

    @property
    def undivided_bytes(self) -> int:
        """Bytes beside the parameters that no rank divides."""
        return sum(layer.program.undivided_bytes for layer in self.stage.layers)

    @property
    def updated_in_matrices(self) -> Fraction:
        """Elements of the trained matrices inside layers that a rank updates."""
        return Fraction(self.stage.num_trained_in_matrices + self._num_again, self.num_frozen_shards)

    # --- what is gathered

    def at_work(self, place: int) -> int:
        """Return the bytes of a group's weights, if they are gathered only for its own forward and backward.

        Args:
            place: the layer; -1 for the embedding, and the number of layers for the head, which stays gathered.
        """
        return self.gathered_itemsize * self.groups[place + 1] if self.drops and place < self.num_layers else 0

    def gathers(self, at: Position) -> bool:
        """Return whether a forward gathers the layers."""
        return self.is_sharded and (self.drops or at.is_first) and self.num_shards > 1

    def gathered_in_forward(self, at: Position, place: int) -> int:
        """Return the bytes gathered while a forward is in a group; places are those of ``at_work``."""
        if self.drops:
            has_head = at.head_gathered or place == self.num_layers
            return self.root_gathered + self.at_work(place) + (self.head_gathered if has_head else 0)
        if at.is_first:
            return self.root_gathered + self.gathered_itemsize * sum(self.groups[: place + 2])
        return self.stay_gathered

    def gather_buffers(self, at: Position, place: int) -> int:
        """Return the bytes of gathers' buffers while a forward is in a group; places are those of ``at_work``.

        The buffer of the group's own gather is kept until the next group's gather, which has begun, is used.
        """
        if not self.gathers(at):
            return 0
        groups = self.groups
        if at.head_gathered:
            groups = (*groups[:-2], 0, 0)
        own = groups[place + 1]
        following = groups[place + 2]
        if place < 0 and self.stage.tied:  # a group of its own gathers the first layer, once the embedding is done
            return self.root_buffer(at)
        if place == self.num_layers:
            return self.gathered_itemsize * (own or self.held.layers[-1])
        return self.gathered_itemsize * (own + following)

    def root_buffer(self, at: Position) -> int:
        """Return the bytes of the buffer of the root's gather, kept until a layer's gather is used."""
        return 0 if at.root_is_gathered else self.gathered_itemsize * self.stage.root

    def prefetched(self, layer: int) -> int:
        """Return the bytes of the stage prefetched while its backward is in a layer, counted from the first."""
        # the backward of an embedding needs it only for its adapter
        is_needed = layer > 0 or 0 < self.trained.embedding < self.held.embedding
        return self.at_work(layer - 1) if is_needed else 0

    def gathered_in_backward(self, at: Position, done: int, *, head: bool) -> int:
        """Return the bytes gathered when a backward has reduced the gradients of ``done`` parameters.

        Args:
            at: the stage's position.
            done: parameters whose gradients this backward has reduced; a forward has none.
            head: whether the stage's head is gathered if it is not always.
        """
        above_root = self.trained_above_root
        if self.drops:
            root = self.stay_gathered if done <= above_root else 0
            return root + (self.head_gathered if head else 0)
        if not at.is_final:
            return self.stay_gathered
        # a group is freed when its gradients come, with its frozen part
        freed = 0 if head else self.held.head
        reached = self.trained.head
        for held, trained in zip(reversed(self.held.layers), reversed(self.trained.layers), strict=True):
            reached += trained
            freed += held if reached <= done and not head else 0
        if self.trained.root and done >= above_root + self.trained.root:
            freed += self.held.root
        freed += max(0, done - above_root - self.trained.root)  # the embedding
        return self.stay_gathered - self.gathered_itemsize * freed

    def kept_gathered(self, at: Position, *, head: bool) -> int:
        """Return the gathered and averaged bytes that the stage keeps while another one runs."""
        gathered = self.root_gathered if at.is_first else self.stay_gathered
        return self.averaged(at, 0) + gathered + (self.head_gathered if head else 0)

    # --- gradients

    def gradients(self, at: Position, done: int, fresh: int = 0) -> int:
        """Return the bytes of the gradients in a backward.

        Args:
            at: the stage's position.
            done: parameters whose gradients this backward has made and, if they are sharded, reduced.
            fresh: parameters of the layer at work whose gradients it has made.
        """
        if not self.is_sharded:
            made = FP32_BYTES * (done + fresh)
            held = max(made, FP32_BYTES * at.accumulated)
            if self.has_buckets:  # the final backward moves every gradient into them
                return FP32_BYTES * self.trained.total + held - (made if at.is_final else 0)
            return held
        reduced = FP32_BYTES * done
        held = max(reduced, FP32_BYTES * at.accumulated)
        unreduced = 0 if self.adds(at) else self.gradient_itemsize * fresh
        if self.zero_stage >= 2:
            return int(held // self.num_shards) + unreduced
        if at.is_final:
            return held - reduced + int(reduced // self.num_shards) + unreduced
        return held + unreduced

    def adds(self, at: Position) -> bool:
        """Return whether a gradient is made beside the one that it is added to or moved into."""
        if self.is_sharded:
            return at.accumulated > 0 and self.gradient_itemsize == FP32_BYTES and self.zero_stage < 2
        return at.accumulated > 0 or self.has_buckets

    def made_beside(self, at: Position, making: int) -> int:
        """Return the bytes in which the gradients of ``making`` parameters are made, beside those in ``gradients``."""
        return self.gradient_itemsize * making if self.adds(at) else 0

    def waiting_head(self, at: Position) -> int:
        """Return the bytes of a tied head's gradient while the backward is in the layers: it is done after them."""
        if self.is_sharded and self.adds(at):
            return 0
        return self.head_gradient if self.stage.is_last and self.stage.tied else 0

    def gradients_in_norm(self, at: Position) -> int:
        """Return the bytes of gradients while the backward is in the final norm, before the head's are reduced."""
        if not self.is_sharded:
            return self.gradients(at, self.head_done) + self.waiting_head(at)
        return self.gradients(at, 0) + (0 if self.adds(at) else self.head_gradient)

    # --- reductions

    def averaged(self, at: Position, done: int, group: int = 0) -> int:
        """Return the bytes of averages over copies that were added to gradients and are kept until the next ones.

        The first average of a step becomes the gradient itself.

        Args:
            at: the stage's position.
            done: parameters whose gradients this backward has reduced.
            group: parameters of the group being reduced, whose previous average is freed.
        """
        if not at.accumulated:
            return 0
        return self.average(self.trained.total - group if at.repeated else done)

    def average(self, num_parameters: int) -> int:
        """Return the bytes of the average of some parameters' gradients, if it is kept."""
        return int(FP32_BYTES * num_parameters // self.num_shards) if self.averages_often else 0

    def reduces(self, at: Position) -> bool:
        """Return whether a backward reduces gradients into shards."""
        return self.is_sharded and (self.zero_stage >= 2 or at.is_final)

    def reduction_buffer(self, at: Position, group: int) -> int:
        """Return the bytes of the buffer in which a backward reduces the gradients of ``group`` parameters."""
        return FP32_BYTES * group if self.reduces(at) else 0

    def in_reduction(self, at: Position, group: int, largest: int, *, accumulated: bool) -> int:
        """Return the bytes of a group's gradients as they are reduced or, if they are reduced later, widened.

        Args:
            at: the stage's position.
            group: parameters of the group.
            largest: parameters of the last one, whose gradient is kept a little longer.
            accumulated: whether the group has gradients of earlier microbatches.
        """
        made = self.gradient_itemsize * group
        reduces = self.reduces(at)
        if not reduces and self.gradient_itemsize == FP32_BYTES:
            return 0 if accumulated else made
        result = int(FP32_BYTES * group // (self.num_shards if reduces else 1))
        if accumulated and self.zero_stage < 2:  # it has been added to the earlier gradient
            made = 0 if reduces else made
            result = 0
        holds_on = self.num_shards > 1 or not reduces
        return max(made, result + (self.gradient_itemsize * largest if holds_on else 0))
