"""The weights of a stage that ``fully_shard`` has gathered on a rank, and their buffers, throughout a step.

``fully_shard`` gathers the shards of a unit into one flat buffer while the unit before computes, and then unpacks that
into the weights (``split_with_sizes_copy``): for a while, both exist. All this is in the dtype of activations. A
single rank and a rank with a copy of the whole model gather nothing, and have zeros here.

Experts that fewer ranks shard are gathered after the rest of their layer, into a buffer of their own. A rank that has
them to itself copies them into the weights when the layer begins, without a buffer.

The place of a unit is that of its layer in the stage: -1 for the embedding, and the number of layers for the final norm
with the head.
"""

from llama_core.planning.fully_shard import Resharding
from llama_core.planning.memory.position import Position
from llama_core.planning.memory.weights import StageWeights
from llama_core.planning.work import Work

EMBEDDING = -1
"""The place of the embedding."""


class GatheredWeights:
    """The gathered weights of a stage.

    Args:
        weights: its parameters.
        work: the model, the plan and the sequences.
    """

    def __init__(self, weights: StageWeights, work: Work) -> None:
        held = weights.held
        self.held = held
        self.trained = weights.trained
        self.stage = weights.stage
        self.num_layers = weights.num_layers
        self.drops = Resharding.of(work.plan).drops_weights
        """Whether a layer's weights are dropped after its forward and its backward."""
        self.has_other_shards = weights.is_sharded and weights.num_shards > 1
        self.itemsize = work.itemsize if weights.is_sharded else 0
        """Bytes per element of what is gathered."""
        self.in_order = (held.embedding, *held.layers, held.head, 0)
        """Parameters that a forward gathers one after the other, apart from the root; the last 0 follows the head."""
        self.experts = (0, *weights.experts, 0, 0)
        """Those of them that are gathered apart from the rest of their unit."""
        copied = self.experts if weights.num_expert_shards == 1 else (0,) * len(self.experts)
        self.fetched = tuple(unit - own for unit, own in zip(self.in_order, copied, strict=True))
        """Those of them that come from other ranks, through a buffer."""
        self.root = self.itemsize * held.root
        """Bytes gathered in whichever stage of the rank runs."""
        self.staying = self.itemsize * (held.root if self.drops else held.total)
        """Bytes that stay gathered between the stage's forwards and backwards, apart from ``head``."""
        self.head = self.itemsize * held.head if self.drops else 0
        """Bytes that stay gathered from the last stage's forward to the end of the rank's next backward."""

    def gathers(self, at: Position) -> bool:
        """Return whether a forward gathers the layers."""
        return self.has_other_shards and (self.drops or at.is_first)

    def at_work(self, place: int) -> int:
        """Return the bytes of a unit's weights, if they are gathered only for its own forward and backward."""
        if not self.drops or place == self.num_layers:  # the head stays gathered
            return 0
        return self.itemsize * self.in_order[place + 1]

    def buffer(self, place: int) -> int:
        """Return the bytes of the buffers of a unit's gather, if that is for its own forward and backward alone."""
        return self.itemsize * self.fetched[place + 1] if self.at_work(place) else 0

    def others_of_experts(self, at: Position, layer: int) -> int:
        """Return the bytes of a layer's gathered weights that a backward drops only when its experts are reduced."""
        experts = self.experts[layer + 1]
        is_dropped = self.drops or at.is_final
        return self.itemsize * (self.in_order[layer + 1] - experts) if experts and is_dropped else 0

    def _waiting(self, number: int) -> int:
        """Return the parameters of a unit's buffer that is kept until the next unit is unpacked: its last one."""
        experts = self.experts[number]
        return experts - (self.in_order[number] - self.fetched[number]) if experts else self.fetched[number]

    def unpacking(self, at: Position, number: int) -> int:
        """Return the bytes of buffers when a unit has been unpacked: its own, and the one before if that still waits.

        Args:
            at: the stage's position.
            number: the unit's place in ``in_order``.
        """
        if self.experts[number]:  # its first buffer has taken the place of the unit before
            return self.itemsize * self.fetched[number]
        before = self.itemsize * self._waiting(number - 1)
        if number == 1 and not self.in_order[0]:  # an embedding tied to the head is in the root, gathered first
            before = self.root_buffer(at)
        return before + self.itemsize * self.fetched[number]

    def in_forward(self, at: Position, place: int) -> int:
        """Return the bytes gathered while a forward is in a unit."""
        if self.drops:
            has_head = at.head_gathered or place == self.num_layers
            return self.root + self.at_work(place) + (self.head if has_head else 0)
        if at.is_first:
            return self.root + self.itemsize * sum(self.in_order[: place + 2])
        return self.staying

    def buffers(self, at: Position, place: int) -> int:
        """Return the bytes of gathers' buffers while a forward is in a unit.

        torch defers to free a buffer (``all_gather_state``): it is kept until the next unit's gather, which has begun,
        is unpacked.
        """
        if not self.gathers(at):
            return 0
        if place == EMBEDDING and self.stage.embeds_at_end:
            # the root has the embedding; the first layer is gathered only once the look-up is done
            return self.root_buffer(at)
        own = self._waiting(place + 1)
        following = self.fetched[place + 2]
        if place == self.num_layers:
            if at.head_gathered:
                own = 0
            # nothing follows the head; if that needs no gather, the last layer's buffer is left
            return self.itemsize * (own or self._waiting(self.num_layers))
        if place == self.num_layers - 1 and at.head_gathered:
            following = 0
        return self.itemsize * (own + following)

    def root_buffer(self, at: Position) -> int:
        """Return the bytes of the buffer of the root's gather, kept until a layer's gather is unpacked."""
        return 0 if at.root_is_gathered else self.itemsize * self.stage.root

    def prefetched(self, layer: int) -> int:
        """Return the bytes of the unit prefetched while a backward is in a layer, counted from the first."""
        if layer > 0:
            return self.buffer(layer - 1)
        embedding = self.stage.units[0]
        if embedding.role == "embedding" and embedding.gathers_in_backward:
            return self.buffer(EMBEDDING)
        return 0

    def in_backward(self, at: Position, done: int, *, head: bool) -> int:
        """Return the bytes gathered when a backward has reduced the gradients of ``done`` parameters.

        Args:
            at: the stage's position.
            done: parameters whose gradients this backward has reduced; a forward has none.
            head: whether the stage's head is gathered if it is not always.
        """
        before_root = self.trained.head + self.trained.in_layers
        if self.drops:
            root = self.staying if done <= before_root else 0
            return root + (self.head if head else 0)
        if not at.is_final:
            return self.staying
        return self.staying - self.itemsize * self._freed(done, head=head)

    def _freed(self, done: int, *, head: bool) -> int:
        """Return the parameters whose weights the step's last backward has freed: each unit, as its gradients come."""
        held = self.held
        trained = self.trained
        freed = 0
        reached = trained.head
        if not head:
            freed += held.head
            for of_layer, num_trained in zip(held.layers[::-1], trained.layers[::-1], strict=True):
                reached += num_trained
                if reached <= done:
                    freed += of_layer  # with its frozen part
        through_root = trained.head + trained.in_layers + trained.root
        if trained.root and done >= through_root:
            freed += held.root
        of_embedding = max(0, done - through_root)
        return freed + of_embedding

    def between_actions(self, at: Position, *, head: bool) -> int:
        """Return the bytes that stay gathered while another stage of the rank runs."""
        gathered = self.root if at.is_first else self.staying
        return gathered + (self.head if head else 0)
