"""Snapshots of one forward and one backward of a stage, at the instants when memory may peak, by category.

A forward runs the layers from first to last, and each keeps what its backward needs. So memory can peak at its end,
after the last layer or, on the last stage, in the last chunk of the loss; or while ``fully_shard`` gathers one of the
last layers or the head.

A backward runs the layers in reverse: it makes gradients, and each layer drops what it kept. Over equal layers memory
rises or falls evenly, so a run of them peaks at one of its ends; among several kinds in turn, memory peaks at a corner
of what is kept drawn over what is made. Within a layer, memory can peak after ``w2``, its
widest matrix; after ``w1`` and ``w3``, or in the norm before them, with three gradients of matrices; with few tokens
after ``wq``, with all gradients; and while ``fully_shard`` reduces them. The loss, the final norm and their reduction
come before the layers; the embedding, whose gradient is made in one piece, and the last reductions come after them.

Instants that are hardly ever the peak over a wide range of plans are left out. Those inside attention are among them,
unless it holds all scores or takes documents.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from llama_core.planning.memory.profile import Category
from llama_core.planning.memory.weights import ShardedWeights, StageWeights, When
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.work import Work
from llama_core.schedules.actions import Kind

Snapshot = Counter[Category]
"""The bytes alive at an instant, by category."""


@dataclass(frozen=True)
class Around:
    """The state of a rank around one of its actions, as far as the action's own bytes depend on it."""

    when: When
    """The position in the step."""
    head: bool
    """Whether the stage's own head stayed gathered after an earlier forward."""
    buffer: int
    """The buffer of the last reduction, which ``fully_shard`` keeps until the next."""
    head_has_gradient: bool
    """Whether the rank's last stage has run a backward; its head may be the embedding of the stage at work."""


class StageSnapshots:
    """The forward and the backward of one microbatch on one stage of one rank.

    Args:
        weights: the stage's weights and gradients.
        work: the model, the plan and the sequences.
    """

    def __init__(self, weights: StageWeights, work: Work) -> None:
        self.weights = weights
        self.stage = weights.stage
        self.stream = work.stream_bytes
        self.layers = weights.stage.layers
        self.divides_table = work.plan.tp > 1
        """Whether tensor-parallel ranks divide the embedding."""
        self.shared = work.shared_bytes
        """Bytes that all layers share, and what a stage keeps of a tensor that it received."""
        if not self.stage.is_first and self.stage.modes[0] == "none" and work.setting.widens_norms:
            self.shared += self.stream  # of which such a layer keeps only what it widens it to
        below = self.shared + (self.stage.embedding.kept() if self.stage.embedding else 0)
        kept = (layer.kept(mode) for layer, mode in zip(self.layers, self.stage.modes, strict=True))
        self._kept_below = list(accumulate(kept, initial=below))
        """Bytes kept before each layer (and by all of them)."""
        self.kept = self._kept_below[-1] + (self.stage.final_norm.kept() if self.stage.final_norm else 0)
        """Bytes of activations that a forward keeps for its backward."""
        self.kept_loss = self.stage.head.kept() if self.stage.head else 0
        """Bytes that the loss keeps for its backward."""
        self._deferred_below = list(accumulate((layer.kept_deferred for layer in self.layers), initial=0))
        """Bytes that a split backward keeps for the weight gradients of the layers before each one, and of all."""
        self.deferred = self._deferred_below[-1]
        """Bytes kept for the weight gradients of a split backward."""
        self._peaks: dict[tuple[Kind, Around], Snapshot] = {}

    def _deferred_above(self, layer: int) -> int:
        """Return the bytes kept for the weight gradients of the layers after the stage's ``layer``-th."""
        return self.deferred - self._deferred_below[layer + 1]

    def peak(self, kind: Kind, around: Around) -> Snapshot:
        """Return the fullest snapshot of an action of this kind, with the bytes of its microbatch and stage."""
        if (kind, around) not in self._peaks:
            ways = {Kind.FORWARD: self.forward, Kind.WEIGHT_GRADIENT: self.weight_gradients}
            self._peaks[kind, around] = max(ways.get(kind, self.backward)(around), key=Counter.total)
        return self._peaks[kind, around]

    def forward(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots of a forward, of which one is the peak."""
        yield from self._embedding_forward(around)
        weights = self.weights
        last = weights.num_layers - 1
        # the last layer of every kind, after which most is kept; before the last of all, two layers may be gathered
        kinds = list(zip(self.layers, self.stage.modes, strict=True))
        candidates = {*{kind: layer for layer, kind in enumerate(kinds)}.values(), max(0, last - 1)}
        for layer in candidates:
            for instant in self.layers[layer].frontier("forward", self.stage.modes[layer]):
                yield self._snapshot(
                    around,
                    activations=self._kept_below[layer] + instant.kept,
                    communication=self._fetched(around, layer) + weights.at_work(layer) + around.buffer,
                    temporaries=instant.temporaries,
                    head=around.head,
                )
        yield from self._head_forward(around)

    def _embedding_forward(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots of the forward of the embedding."""
        if self.stage.embedding is None:
            return
        weights = self.weights
        for instant in self.stage.embedding.frontier("forward", "none"):
            yield self._snapshot(
                around,
                activations=self.shared + instant.kept,
                temporaries=instant.temporaries,
                communication=self._fetched(around, -1) + weights.embedding_at_work + around.buffer,
                head=around.head,
            )

    def _head_forward(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots of the forward of the final norm, and of the head and the loss."""
        norm = self.stage.final_norm
        head = self.stage.head
        if norm is None or head is None:
            return
        communication = self._fetched(around, self.weights.num_layers) + around.buffer
        for instant in norm.frontier("forward", "none"):
            yield self._snapshot(
                around,
                activations=self._kept_below[-1] + instant.kept,
                temporaries=instant.temporaries,
                communication=communication,
                head=True,
            )
        for instant in head.frontier("forward", "none"):
            yield self._snapshot(
                around,
                activations=self.kept,
                loss=instant.kept + instant.temporaries - self.stream,
                temporaries=self.stream,  # the norm's output is dropped with the last chunk
                communication=communication,
                head=True,
            )

    def _fetched(self, around: Around, layer: int) -> int:
        return self.weights.fetched(around.when, layer, head=around.head)

    def backward(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots of a backward, of which one is the peak."""
        yield from self._in_head(around)
        for layer in self._candidates:
            yield from self._in_layer(around, layer)
            yield from self._after_layer(around, layer)
        yield from self._after_layers(around)

    def weight_gradients(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots at which deferred gradients are made."""
        weights = self.weights
        made_before = weights.trained.total - sum(layer.num_deferred for layer in self.layers)
        for layer in {0, weights.num_layers - 1}:
            made_above = made_before + sum(above.num_deferred for above in self.layers[layer + 1 :])
            for instant in self.layers[layer].weight_gradients():
                beside = FP32_BYTES * instant.making if weights.adds(around.when) else 0
                yield self._snapshot(
                    around,
                    gradients=weights.gradients(around.when, made_above, instant.made + instant.making),
                    activations=self._deferred_below[layer] + instant.kept,
                    temporaries=instant.temporaries + beside,
                )

    @cached_property
    def _candidates(self) -> list[int]:
        """The layers of which one has the peak of a backward, last first."""
        last = self.weights.num_layers - 1
        kinds = list(zip(self.stage.modes, self.layers, strict=True))
        with_neighbours = defaultdict(list)
        for layer in reversed(range(last + 1)):
            with_neighbours[tuple(kinds[max(0, layer - 1) : layer + 2])].append(layer)
        # the last but one is the first to find the buffer of a reduction; the second is the last to prefetch another
        # layer
        candidates = {0, 1, last - 1, last}.union(*map(self._corners, with_neighbours.values()))
        return sorted(candidates & set(range(last + 1)), reverse=True)

    def _corners(self, layers: list[int]) -> list[int]:
        """Return those of some layers, last first, that have the peak for some bytes per parameter with a gradient."""
        corners: list[tuple[int, int, int]] = []
        for layer in layers:
            made = self._made_above[layer]
            kept = self._kept_below[layer] + self._deferred_above(layer)
            while len(corners) > 1:
                (x, y, _), (x_between, y_between, _) = corners[-2:]
                if (x_between - x) * (kept - y) < (y_between - y) * (made - x):
                    break
                corners.pop()
            corners.append((made, kept, layer))
        return [layer for *_, layer in corners]

    def _in_head(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots of the backward of the loss, and of the final norm."""
        norm = self.stage.final_norm
        head = self.stage.head
        if norm is None or head is None:
            return
        weights = self.weights
        when = around.when
        communication = weights.at_work(weights.num_layers - 1) + around.buffer
        for instant in head.frontier("backward", "none"):
            made = weights.gradient_itemsize * (instant.made + instant.making)
            yield self._snapshot(
                around,
                gradients=weights.gradients(when, 0) + made,
                activations=self.kept,
                loss=instant.kept,
                temporaries=instant.temporaries,
                communication=communication,
                head=True,
            )
        for instant in norm.frontier("backward", "none"):
            yield self._snapshot(
                around,
                gradients=weights.gradients_in_norm(when),
                activations=self._kept_below[-1] + instant.kept,
                temporaries=instant.temporaries,
                communication=communication,
                head=True,
            )

    def _in_layer(self, around: Around, layer: int) -> Iterator[Snapshot]:
        weights = self.weights
        when = around.when
        is_last = layer == weights.num_layers - 1
        done = self._done_above(layer)
        above = [*weights.trained.layers, weights.trained.head][layer + 1]
        buffer = weights.reduction_buffer(when, above) if weights.held.head or not is_last else around.buffer
        received = 0 if is_last else self._gradient_received  # the last layer begins with it
        for instant in self.layers[layer].frontier("backward", self.stage.modes[layer]):
            beside = FP32_BYTES * instant.making if weights.adds(when) else 0
            yield self._snapshot(
                around,
                gradients=weights.gradients(when, done, instant.made + instant.making) + weights.waiting_head(when),
                activations=self._kept_below[layer] + self._deferred_above(layer) + instant.kept,
                temporaries=instant.temporaries + beside + received,
                communication=weights.at_work(layer) + weights.fetched_ahead(layer) + buffer,
                done=done,
            )

    def _done_above(self, layer: int) -> int:
        """Return the number of parameters whose gradients are done when the backward reaches a layer."""
        return self._made_above[layer] + self.weights.head_done

    @cached_property
    def _made_above(self) -> list[int]:
        """Parameters of the layers after each one whose gradients a backward makes, but for those it defers."""
        made = (layer.program.num_trained - layer.num_deferred for layer in reversed(self.layers))
        return list(accumulate(made, initial=0))[-2::-1]

    @property
    def _gradient_received(self) -> int:
        """Bytes of the gradient that the backward of a stage before the last starts from, held to the end."""
        return 0 if self.stage.is_last else self.stream

    def _after_layer(self, around: Around, layer: int) -> Iterator[Snapshot]:
        """Yield the snapshots between the backward of a layer and that of the one before it."""
        yield from ()

    def _after_layers(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots at the end of a backward: in the embedding, whose gradient is made in one piece."""
        embedding = self.stage.embedding
        weights = self.weights
        if embedding is None or not weights.num_in_embedding:
            return
        when = around.when
        meets_head = self.stage.tied and self.stage.is_last
        waiting = weights.embedding_gradient if meets_head else 0  # of the head, to which that of the table is added
        table = 0 if self.stage.tied and self.stage.shares_table else weights.num_in_embedding
        done = weights.trained.total - table
        reduced = weights.trained.head + sum(weights.trained.layers)
        activations = self.shared + self.deferred
        buffer = weights.reduction_buffer(when, weights.trained.layers[0])
        for instant in embedding.frontier("backward", "none"):
            fresh = instant.made + instant.making
            is_beside = weights.adds(when) or self.stage.shares_table
            beside = weights.gradient_itemsize * fresh if is_beside else 0
            yield self._snapshot(
                around,
                gradients=weights.gradients(when, done, min(fresh, table)) + waiting + beside,
                activations=activations + instant.kept,
                temporaries=instant.temporaries + self._gradient_received,
                communication=buffer,
                done=reduced,
            )
        if meets_head and self.divides_table:  # autograd sums the gradients of a DTensor in a third one
            yield self._snapshot(
                around,
                gradients=weights.gradients(when, done) + 3 * weights.embedding_gradient,
                activations=activations,
                communication=buffer,
                done=reduced,
            )

    def _snapshot(
        self,
        around: Around,
        *,
        activations: int,
        gradients: int | None = None,
        loss: int = 0,
        communication: int = 0,
        temporaries: int = 0,
        done: int = 0,
        group: int = 0,
        head: bool = False,
    ) -> Snapshot:
        """Return a snapshot in which ``group`` parameters' gradients are reduced after ``done`` others."""
        weights = self.weights
        when = around.when
        own = weights.gradients(when, 0) if gradients is None else gradients
        communication += weights.gathered(when, done + group, head=head) + weights.averaged(when, done, group)
        return Counter(
            {
                "gradients": own,
                "activations": activations,
                "loss": loss,
                "communication": communication,
                "temporaries": temporaries,
            }
        )


class ShardedSnapshots(StageSnapshots):
    """The forward and the backward of a stage whose weights are sharded with ``fully_shard``.

    Args:
        weights: the stage's weights and gradients.
        work: the model, the plan and the sequences.
    """

    def __init__(self, weights: ShardedWeights, work: Work) -> None:
        super().__init__(weights, work)
        self.weights: ShardedWeights = weights

    def forward(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots of a forward."""
        yield from self._gathering(around)
        yield from super().forward(around)

    def backward(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots of a backward, in their order."""
        weights = self.weights
        last = self.weights.num_layers - 1
        if weights.drops and not self.stage.is_last:  # on the last stage the head is at work before the layers
            root = 0 if around.when.after_forward else weights.held.root
            yield self._snapshot(
                around,
                activations=self._kept_below[last + 1],
                communication=weights.itemsize * root + 2 * weights.at_work(last) + around.buffer,
                temporaries=self.stream,
            )
        yield from super().backward(around)

    def _in_head(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots of a backward before the layers: in the loss, in the norm, and the reduction of both."""
        yield from super()._in_head(around)
        weights = self.weights
        last = self.weights.num_layers - 1
        if weights.trained.head:
            largest = self.weights.num_in_head
            waiting = weights.at_work(last)
            yield self._reduction(
                around, weights.trained.head, largest=largest, done=0, layer=last + 1, waiting=waiting
            )

    def _gathering(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots of a forward in which a layer is gathered, with the buffer of the previous gather."""
        weights = self.weights
        held = self.weights.held
        last = self.weights.num_layers - 1
        if not weights.gathers(around.when):
            return
        root = 0 if around.when.after_forward else held.root
        groups = [held.embedding or root, *held.layers, held.head]
        if around.head or not held.head:
            groups.pop()
        telling = {1, last, last + 1, len(groups) - 1} if weights.drops else {len(groups) - 1}
        for place in telling - {0}:  # if layers stay gathered, the last one finds the most
            yield self._snapshot(
                around,
                activations=self._kept_below[place - 1],
                communication=weights.itemsize * (groups[place - 1] + groups[place] * (1 + weights.drops))
                + around.buffer,
                temporaries=self.stream,
                head=around.head or not weights.drops,
            )

    def _after_layer(self, around: Around, layer: int) -> Iterator[Snapshot]:
        """Yield the snapshot in which a layer's gradients are reduced."""
        group = self.weights.trained.layers[layer]
        largest = self.layers[layer].program.largest_trained
        yield self._reduction(around, group, layer=layer, done=self._done_above(layer), largest=largest)

    def _after_layers(self, around: Around) -> Iterator[Snapshot]:
        """Yield the snapshots at the end of a backward: the reductions of the root and of the embedding."""
        weights = self.weights
        trained = weights.trained
        table = weights.num_in_embedding
        layers = sum(trained.layers)
        yield from super()._after_layers(around)
        if table and self.stage.shares_table:
            largest = 0 if around.head_has_gradient else table  # it has been added to the head's
            yield self._reduction(around, table, largest=largest, done=layers, accumulated=around.head_has_gradient)
        elif trained.root:
            yield self._reduction(around, trained.root, largest=weights.num_in_head or table, done=layers)
        if trained.embedding:
            done = trained.head + layers + trained.root
            waiting = weights.fetched_ahead(0)
            yield self._reduction(around, trained.embedding, largest=table, done=done, waiting=waiting)

    def _reduction(
        self,
        around: Around,
        group: int,
        *,
        largest: int,
        done: int,
        layer: int = 0,
        waiting: int = 0,
        accumulated: bool = False,
    ) -> Snapshot:
        """Return the snapshot in which ``fully_shard`` reduces the gradients of a group of parameters.

        Args:
            around: the rank around this action.
            group: parameters of the group.
            largest: parameters of its last matrix.
            done: parameters of this stage that were reduced earlier.
            layer: the layers before this one have not run yet.
            waiting: bytes of the next group, minus those already dropped.
            accumulated: whether another stage has made gradients of the group.
        """
        weights = self.weights
        when = around.when
        accumulated = accumulated or when.accumulated > 0
        return self._snapshot(
            around,
            gradients=weights.gradients(when, done)
            + weights.in_reduction(when, group, largest, accumulated=accumulated),
            activations=self._kept_below[layer],
            temporaries=self.stream + self._gradient_received,
            communication=weights.reduction_buffer(when, group) + waiting,
            done=done,
            group=group,
        )
