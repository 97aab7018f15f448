"""The weights and gradients that a rank holds of one pipeline stage within an optimizer step.

A single rank and a rank with a copy of the whole model always hold all weights, and make their gradients in fp32.
``fully_shard`` has four kinds of groups: each layer, the embedding, the final norm with the head, and the root, which
has the embedding and the final norm if the head is tied. It gathers a group's weights in the compute dtype, while the
group before computes, and makes its gradients in that dtype. After the group's backward it reduces the gradients, in
fp32, into the shards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Self

from llama_core.config.run import RecomputeMode
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.operations import FP32_BYTES, Program
from llama_core.planning.program.passes import Passes


@dataclass(frozen=True)
class Stage:
    """The part of a pipeline stage that one rank holds."""

    modes: tuple[RecomputeMode, ...]
    """The recompute mode of each layer."""
    layers: tuple[Passes, ...]
    """The forward and the backward of each layer."""
    embedding: Passes | None
    """Those of the embedding, on the first stage."""
    final_norm: Passes | None
    """Those of the norm before the head, on the last stage."""
    head: Passes | None
    """Those of the head and the loss, on the last stage."""
    tied: bool
    """Whether the head is the embedding."""
    shares_table: bool
    """Whether another stage of the same rank holds the embedding, as its head."""

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.embedding is not None

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.head is not None


class Counts(NamedTuple):
    """Numbers of parameters of a stage, by the groups of ``fully_shard``."""

    layers: tuple[int, ...]
    head: int
    """Of the final norm and a head of its own."""
    root: int
    """Of an embedding that is also the head, and of the final norm beside it."""
    embedding: int

    @property
    def tables(self) -> int:
        """Parameters outside the layers."""
        return self.head + self.root + self.embedding

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.layers) + self.tables

    def around(self, layer: int, *, head_is_gathered: bool) -> tuple[int, int]:
        """Return the parameters of a group and of the one after it, in the order of a forward.

        Args:
            layer: the group's layer; -1 for the embedding, and the number of layers for the head.
            head_is_gathered: whether the head need not be gathered.
        """
        groups = [self.embedding, *self.layers, 0 if head_is_gathered else self.head, 0]
        return groups[layer + 1], groups[layer + 2]

    @classmethod
    def of(cls, stage: Stage, count: Callable[[Program], int]) -> Self:
        """Return the counts of a stage, given the number of a program's parameters that count."""
        embedding, norm, head = (
            0 if part is None else count(part.program) for part in (stage.embedding, stage.final_norm, stage.head)
        )
        layers = tuple(count(layer.program) for layer in stage.layers)
        if not stage.tied:
            return cls(layers, head=head + norm, root=0, embedding=embedding)
        return cls(layers, head=0, root=head + norm or (0 if stage.shares_table else embedding), embedding=0)


def _num_trained(passes: Passes | None) -> int:
    return 0 if passes is None else passes.program.num_trained


@dataclass(frozen=True)
class When:
    """The position of a stage's forward or backward in the step."""

    is_first: bool
    """Whether the stage has not run before in this step."""
    after_forward: bool
    """Whether the rank's previous action was a forward, not a backward, which drops weights at its end in ZeRO 3."""
    accumulated: int
    """Parameters of the stage with gradients of earlier microbatches: usually none or all."""
    final: bool
    """Whether this is the rank's last backward of the step."""
    repeated: bool = False
    """Whether the stage has run two or more backwards."""


class StageWeights:
    """One stage's weights and gradients on a rank that holds them whole.

    Args:
        stage: the stage.
        has_buckets: whether copies of the model average their gradients in buckets, which always exist.
    """

    def __init__(self, stage: Stage, *, has_buckets: bool = False) -> None:
        self.stage = stage
        self.has_buckets = has_buckets
        self.num_layers = len(stage.modes)
        self.held = Counts.of(stage, lambda program: program.num_parameters)
        """Parameters the rank computes with."""
        self.trained = Counts.of(stage, lambda program: program.num_trained)
        """Those of them that get gradients."""
        self.cast = sum(layer.program.num_copied for layer in stage.layers)
        """Those of them with a lasting copy in the activations' dtype."""
        self.num_shards: int | Fraction = 1
        """Ranks that share a trained parameter; an average if experts are sharded over fewer ranks than the rest."""
        self.num_frozen_shards = 1
        """Ranks that share a frozen parameter."""
        self.root_gathered = 0
        """Bytes gathered in whichever stage of the rank runs."""
        self.stay_gathered = 0
        """Bytes that stay gathered between the stage's forwards and backwards, apart from ``head_gathered``."""
        self.head_gathered = 0
        """Bytes that stay gathered from the last stage's forward to the end of the rank's next backward."""
        self.num_in_embedding = _num_trained(stage.embedding)
        """Parameters of the embedding that get gradients."""
        self.num_in_head = _num_trained(stage.head)
        """Parameters of the head that get gradients; of an embedding in its place too."""
        self.gradient_itemsize = FP32_BYTES
        """Bytes per element of a gradient when it is made."""
        self.head_done = self.trained.head
        """Parameters whose gradients are done when the backward reaches the layers."""
        if stage.is_last and stage.tied:
            self.head_done = self.trained.root - self.num_in_head
        self.last_buffer = 0
        """Bytes of the buffer of a backward's last reduction, kept until the next one."""

    @property
    def embedding_gradient(self) -> int:
        """Bytes of the embedding's gradient when it is made."""
        return self.gradient_itemsize * self.num_in_embedding

    @property
    def head_gradient(self) -> int:
        """Bytes of the head's gradient when it is made."""
        return self.gradient_itemsize * self.num_in_head

    def at_work(self, layer: int) -> int:
        """Return the bytes of a layer's weights, if they are gathered only for its own forward and backward."""
        return 0

    @property
    def embedding_at_work(self) -> int:
        """Bytes of the embedding, if it is gathered only for its own forward."""
        return 0

    def gathered(self, when: When, done: int, *, head: bool) -> int:
        """Return the bytes gathered when a backward has reduced the gradients of ``done`` parameters.

        Args:
            when: which forward or backward; a forward has ``done`` none.
            done: parameters whose gradients this backward has reduced.
            head: whether the stage's head is gathered if it is not always.
        """
        return 0

    def fetched(self, when: When, layer: int, *, head: bool) -> int:
        """Return the bytes of gathers' buffers while a forward is in a layer, in the embedding or in the head.

        The buffer of the layer's own gather is kept until the next group's gather, which has begun, is used.

        Args:
            when: which forward.
            layer: the layer; -1 for the embedding, and the number of layers for the head.
            head: whether the head is gathered already.
        """
        return 0

    def fetched_ahead(self, layer: int) -> int:
        """Return the bytes of the stage prefetched while its backward is in a layer, counted from the first."""
        return 0

    def averaged(self, when: When, done: int, group: int = 0) -> int:
        """Return the bytes of averages over copies that were added to gradients and are kept until the next ones."""
        return 0

    def gradients(self, when: When, done: int, fresh: int = 0) -> int:
        """Return the bytes of the gradients in a backward.

        Args:
            when: which backward.
            done: parameters whose gradients this backward has made and, if necessary, reduced.
            fresh: parameters of the layer at work whose gradients it has made.
        """
        made = FP32_BYTES * (done + fresh)
        whole = FP32_BYTES * self.trained.total
        held = max(made, FP32_BYTES * when.accumulated)
        if self.has_buckets:  # the final backward moves every gradient into them
            return whole + held - (made if when.final else 0)
        return held

    def adds(self, when: When) -> bool:
        """Return whether a gradient is made beside the one that it is then added to or moved into."""
        return when.accumulated > 0 or self.has_buckets

    def waiting_head(self, when: When) -> int:
        """Return the bytes of the head's gradient while the backward is in the layers and it is not done yet."""
        return self.head_gradient if self.stage.is_last and self.stage.tied else 0

    def gradients_in_norm(self, when: When) -> int:
        """Return the bytes of gradients while the backward is in the final norm."""
        return self.gradients(when, self.head_done) + self.waiting_head(when)

    def reduction_buffer(self, when: When, group: int) -> int:
        """Return the bytes of the buffer in which a backward reduces the gradients of ``group`` parameters."""
        return 0


class ShardedWeights(StageWeights):
    """One stage's weights and gradients on a rank that shards them with ``fully_shard``.

    Args:
        stage: the stage.
        itemsize: bytes per element of activations.
        plan: how weights and gradients are divided.
    """

    def __init__(self, stage: Stage, itemsize: int, plan: ParallelPlan) -> None:
        super().__init__(stage)
        self.itemsize = itemsize
        self.zero_stage = plan.effective_zero_stage
        self.num_frozen_shards = plan.dp_shard * plan.cp if plan.zero_stage else 1
        self.num_shards = self.num_frozen_shards
        experts = sum(layer.program.num_of_experts for layer in stage.layers)
        if experts:  # a parameter that fewer ranks share counts as that many more
            more = (plan.fewer_expert_shards - 1) * experts
            self.num_shards *= Fraction(self.trained.total, self.trained.total + more)
        self.drops = self.zero_stage == 3  # drops a layer's weights after its forward and its backward
        self.root_gathered = self.itemsize * self.held.root
        self.stay_gathered = self.itemsize * (self.held.root if self.drops else self.held.total)
        self.head_gathered = self.itemsize * self.held.head if self.drops else 0
        self.gradient_itemsize = itemsize
        self.head_done = self.trained.head
        # the backward of an embedding needs it only for its adapter
        self._gathers_embedding_again = 0 < self.trained.embedding < self.held.embedding
        self._averages_often = plan.averages_every_backward
        last_group = self.trained.embedding or self.trained.root or self.trained.layers[0]
        self.last_buffer = FP32_BYTES * last_group if self.zero_stage >= 2 else 0

    def at_work(self, layer: int) -> int:
        """Return the bytes of a layer's weights, if they are gathered only for its own forward and backward."""
        return self.itemsize * self.held.layers[layer] if self.drops else 0

    @property
    def embedding_at_work(self) -> int:
        """Bytes of the embedding, if it is gathered only for its own forward."""
        return self.itemsize * self.held.embedding if self.drops else 0

    def gathered(self, when: When, done: int, *, head: bool) -> int:
        """Return the bytes gathered when a backward has reduced the gradients of ``done`` parameters."""
        above_root = self.trained.head + sum(self.trained.layers)
        if self.drops:
            root = self.stay_gathered if done <= above_root else 0
            return root + (self.head_gathered if head else 0)
        if not when.final:
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
        return self.stay_gathered - self.itemsize * freed

    def fetched(self, when: When, layer: int, *, head: bool) -> int:
        """Return the bytes of gathers' buffers while a forward is in a layer, in the embedding or in the head."""
        if not self.gathers(when):
            return 0
        own, following = self.held.around(layer, head_is_gathered=head)
        if layer == self.num_layers:
            return self.itemsize * (own or self.held.layers[-1])
        # without dropping, the next group counts as one of the weights that stay gathered
        return self.itemsize * (own + (following if self.drops else 0))

    def gathers(self, when: When) -> bool:
        """Return whether a forward gathers the layers."""
        return (self.drops or when.is_first) and self.num_shards > 1

    def fetched_ahead(self, layer: int) -> int:
        """Return the bytes of the stage prefetched while its backward is in a layer, counted from the first."""
        if layer:
            return self.at_work(layer - 1)
        return self.itemsize * self.held.embedding if self.drops and self._gathers_embedding_again else 0

    def averaged(self, when: When, done: int, group: int = 0) -> int:
        """Return the bytes of averages over copies that were added to gradients and are kept until the next ones.

        The first average of a step becomes the gradient itself.

        Args:
            when: which backward.
            done: parameters whose gradients this backward has reduced.
            group: parameters of the group being reduced, whose previous average is freed.
        """
        if not self._averages_often or not when.accumulated:
            return 0
        kept = self.trained.total - group if when.repeated else done
        return int(FP32_BYTES * kept // self.num_shards)

    def gradients(self, when: When, done: int, fresh: int = 0) -> int:
        """Return the bytes of the gradients in a backward."""
        reduced = FP32_BYTES * done
        held = max(reduced, FP32_BYTES * when.accumulated)
        unreduced = 0 if self.adds(when) else self.itemsize * fresh
        if self.zero_stage >= 2:
            return int(held // self.num_shards) + unreduced
        if when.final:
            return held - reduced + int(reduced // self.num_shards) + unreduced
        return held + unreduced

    def adds(self, when: When) -> bool:
        """Return whether a gradient is made beside the one that it is then added to, not reduced or widened."""
        return when.accumulated > 0 and self.itemsize == FP32_BYTES and self.zero_stage < 2

    def waiting_head(self, when: When) -> int:
        """Return the bytes of a tied head's gradient while the backward is in the layers: it is reduced after them."""
        return 0 if self.adds(when) else super().waiting_head(when)

    def gradients_in_norm(self, when: When) -> int:
        """Return the bytes of gradients while the backward is in the final norm, before the head's are reduced."""
        return self.gradients(when, 0) + (0 if self.adds(when) else self.head_gradient)

    def reduction_buffer(self, when: When, group: int) -> int:
        """Return the bytes of the buffer in which a backward reduces the gradients of ``group`` parameters."""
        return FP32_BYTES * group if self._reduces(when) else 0

    def _reduces(self, when: When) -> bool:
        return self.zero_stage >= 2 or when.final

    def in_reduction(self, when: When, group: int, largest: int, *, accumulated: bool) -> int:
        """Return the bytes of a group's gradients as they are reduced or, if they are reduced later, widened.

        Args:
            when: which backward.
            group: parameters of the group.
            largest: parameters of its last matrix, whose gradient is kept a little longer.
            accumulated: whether the group has gradients of earlier microbatches.
        """
        made = self.itemsize * group
        reduces = self._reduces(when)
        if not reduces and self.itemsize == FP32_BYTES:
            return 0 if accumulated else made
        result = int(FP32_BYTES * group // (self.num_shards if reduces else 1))
        if accumulated and self.zero_stage < 2:  # it has been added to the earlier gradient
            made = 0 if reduces else made
            result = 0
        holds_on = self.num_shards > 1 or not reduces
        return max(made, result + (self.itemsize * largest if holds_on else 0))
