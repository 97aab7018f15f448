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

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from llama_core.config.run import RecomputeMode
from llama_core.planning.memory.profile import Category
from llama_core.planning.memory.weights import Position, StageWeights
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.program.passes import Passes
from llama_core.planning.work import Stage, Work
from llama_core.schedules.actions import Kind


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


CATEGORIES: tuple[Category, ...] = ("gradients", "activations", "loss", "communication", "temporaries")
"""Those of a ``Snapshot``, in order."""


class StageSnapshots:
    """The forward and the backward of one microbatch on one stage of one rank.

    Args:
        stage: the stage.
        work: the model, the plan and the sequences.
    """

    def __init__(self, stage: Stage, work: Work) -> None:
        self.stage = stage
        self.weights = StageWeights(stage, work)
        self.stream = work.stream_bytes
        self.layers = stage.layers
        self.last = len(stage.layers) - 1
        """The last layer, counted from the stage's first."""
        self.divides_table = work.plan.tp > 1
        """Whether tensor-parallel ranks divide the embedding."""
        self.shared = work.shared_bytes + stage.num_masks * work.mask_bytes
        """Bytes that all layers share, and what a stage keeps of a tensor that it received."""
        if not stage.is_first and stage.modes[0] == "none" and work.setting.widens_norms:
            self.shared += self.stream  # of which such a layer keeps only what it widens it to
        below = self.shared + (stage.embedding.kept() if stage.embedding else 0)
        kept = (layer.kept(mode) for layer, mode in zip(self.layers, stage.modes, strict=True))
        self._kept_below = list(accumulate(kept, initial=below))
        """Bytes kept before each layer (and by all of them)."""
        self.kept = self._kept_below[-1] + (stage.final_norm.kept() if stage.final_norm else 0)
        """Bytes of activations that a forward keeps for its backward."""
        self.kept_loss = stage.head.kept() if stage.head else 0
        """Bytes that the loss keeps for its backward."""
        self._deferred_below = list(accumulate((layer.kept_deferred for layer in self.layers), initial=0))
        """Bytes that a split backward keeps for the weight gradients of the layers before each one, and of all."""
        self.deferred = self._deferred_below[-1]
        """Bytes kept for the weight gradients of a split backward."""
        self._gradient_received = 0 if stage.is_last else self.stream
        """Bytes of the gradient that the backward of a stage before the last starts from, held to the end."""
        self._peaks: dict[tuple[Kind, Position], Snapshot] = {}

    def peak(self, kind: Kind, at: Position) -> Snapshot:
        """Return the fullest snapshot of an action of this kind, with the bytes of its microbatch and stage."""
        if (kind, at) not in self._peaks:
            ways = {Kind.FORWARD: self.forward, Kind.WEIGHT_GRADIENT: self.weight_gradients}
            self._peaks[kind, at] = max(ways.get(kind, self.backward)(at), key=sum)
        return self._peaks[kind, at]

    # --- a forward

    def forward(self, at: Position) -> Iterator[Snapshot]:
        """Yield the snapshots of a forward, of which one is the peak."""
        stage = self.stage
        if self.weights.gathers(at):
            yield from self._gathering(at)
        if stage.embedding:
            yield from self._running(at, stage.embedding, "none", place=-1, below=self.shared)
        # the last layer of every kind, after which most is kept; before the last of all, two layers may be gathered
        kinds = list(zip(self.layers, stage.modes, strict=True))
        for layer in {*{kind: layer for layer, kind in enumerate(kinds)}.values(), max(0, self.last - 1)}:
            yield from self._running(at, *kinds[layer], place=layer, below=self._kept_below[layer])
        if stage.final_norm and stage.head:
            yield from self._running(at, stage.final_norm, "none", place=self.last + 1, below=self._kept_below[-1])
            for instant in stage.head.frontier("forward", "none"):
                yield self._in_forward(
                    at,
                    self.last + 1,
                    activations=self.kept,
                    loss=instant.kept + instant.temporaries - self.stream,
                    temporaries=self.stream,  # the norm's output is dropped with the last chunk
                )

    def _running(
        self, at: Position, passes: Passes, mode: RecomputeMode, *, place: int, below: int
    ) -> Iterator[Snapshot]:
        """Yield the snapshots of the forward of a part.

        Args:
            at: the stage's position.
            passes: of the part.
            mode: its recomputation.
            place: the layer; -1 for the embedding, and the number of layers for the final norm.
            below: bytes that the parts before it keep.
        """
        for instant in passes.frontier("forward", mode):
            yield self._in_forward(at, place, activations=below + instant.kept, temporaries=instant.temporaries)

    def _gathering(self, at: Position) -> Iterator[Snapshot]:
        """Yield the snapshots in which a group has been gathered, with the buffer of the gather before its own."""
        weights = self.weights
        itemsize = weights.gathered_itemsize
        buffers = [itemsize * group for group in weights.groups[:-1]]
        if not buffers[0]:
            buffers[0] = weights.root_buffer(at)
        if at.head_gathered or not buffers[-1]:
            buffers.pop()
        end = len(buffers) - 1
        # if layers stay gathered, the last one finds the most, unless the first group is large
        for number in ({1, self.last, self.last + 1, end} if weights.drops else {1, end}) - {0}:
            yield self._in_forward(
                at,
                number - 1,
                activations=self._kept_below[number - 1],
                temporaries=self.stream,
                buffers=buffers[number - 1] + buffers[number],
            )

    def _in_forward(
        self, at: Position, place: int, *, activations: int, temporaries: int, loss: int = 0, buffers: int | None = None
    ) -> Snapshot:
        """Return a snapshot of a forward in a group, with the usual buffers of gathers or with these."""
        weights = self.weights
        if buffers is None:
            buffers = weights.gather_buffers(at, place)
        communication = weights.gathered_in_forward(at, place) + weights.averaged(at, 0) + buffers + at.buffer
        return Snapshot(weights.gradients(at, 0), activations, loss, communication, temporaries)

    # --- a backward

    def backward(self, at: Position) -> Iterator[Snapshot]:
        """Yield the snapshots of a backward, of which one is the peak, in their order."""
        weights = self.weights
        if weights.drops and not self.stage.is_last:  # on the last stage the head is at work before the layers
            layer = weights.at_work(self.last)
            # the layer's own buffer, or the root's if that waits while the layer before is gathered
            buffers = max(layer, weights.root_buffer(at) + weights.prefetched(self.last))
            yield self._snapshot(
                at,
                activations=self._kept_below[-1],
                communication=layer + buffers + at.buffer,
                temporaries=self.stream,
            )
        yield from self._in_head(at)
        for layer in self._candidates:
            yield from self._in_layer(at, layer)
            if weights.is_sharded:
                largest = self.layers[layer].program.largest_trained
                group = weights.trained.layers[layer]
                yield self._reduction(at, group, layer=layer, done=self._done_above(layer), largest=largest)
        yield from self._in_embedding(at)
        if weights.is_sharded:
            yield from self._last_reductions(at)

    def weight_gradients(self, at: Position) -> Iterator[Snapshot]:
        """Yield the snapshots at which deferred gradients are made."""
        weights = self.weights
        made_before = weights.trained.total - self._num_deferred
        # before the first one; a stage may have deferred none
        yield self._snapshot(at, gradients=weights.gradients(at, made_before), activations=self.deferred)
        for layer in {0, self.last}:
            made_above = made_before + sum(above.num_deferred for above in self.layers[layer + 1 :])
            for instant in self.layers[layer].weight_gradients():
                yield self._snapshot(
                    at,
                    gradients=weights.gradients(at, made_above, instant.made + instant.making),
                    activations=self._deferred_below[layer] + instant.kept,
                    temporaries=instant.temporaries + weights.made_beside(at, instant.making),
                )

    @cached_property
    def _candidates(self) -> list[int]:
        """The layers of which one has the peak of a backward, last first."""
        kinds = list(zip(self.stage.modes, self.layers, strict=True))
        with_neighbours = defaultdict(list)
        for layer in reversed(range(self.last + 1)):
            with_neighbours[tuple(kinds[max(0, layer - 1) : layer + 2])].append(layer)
        # the last but one is the first to find the buffer of a reduction; the second is the last to prefetch another
        # layer
        candidates = {0, 1, self.last - 1, self.last}.union(*map(self._corners, with_neighbours.values()))
        return sorted(candidates & set(range(self.last + 1)), reverse=True)

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

    def _in_head(self, at: Position) -> Iterator[Snapshot]:
        """Yield the snapshots before the layers: in the loss, in the final norm, and in the reduction of both."""
        norm = self.stage.final_norm
        head = self.stage.head
        if norm is None or head is None:
            return
        weights = self.weights
        waiting = weights.at_work(self.last)
        for instant in head.frontier("backward", "none"):
            made = weights.gradient_itemsize * (instant.made + instant.making)
            yield self._snapshot(
                at,
                gradients=weights.gradients(at, 0) + made,
                activations=self.kept,
                loss=instant.kept,
                temporaries=instant.temporaries,
                communication=waiting + at.buffer,
                head=True,
            )
        for instant in norm.frontier("backward", "none"):
            yield self._snapshot(
                at,
                gradients=weights.gradients_in_norm(at),
                activations=self._kept_below[-1] + instant.kept,
                temporaries=instant.temporaries,
                communication=waiting + at.buffer,
                head=True,
            )
        if weights.is_sharded and weights.trained.head:
            largest = weights.num_in_head
            yield self._reduction(
                at, weights.trained.head, largest=largest, done=0, layer=self.last + 1, waiting=waiting
            )

    def _in_layer(self, at: Position, layer: int) -> Iterator[Snapshot]:
        weights = self.weights
        is_last = layer == self.last
        done = self._done_above(layer)
        above = [*weights.trained.layers, weights.trained.head][layer + 1]
        buffer = weights.reduction_buffer(at, above) if weights.held.head or not is_last else at.buffer
        received = 0 if is_last else self._gradient_received  # the last layer begins with it
        for instant in self.layers[layer].frontier("backward", self.stage.modes[layer]):
            yield self._snapshot(
                at,
                gradients=weights.gradients(at, done, instant.made + instant.making) + weights.waiting_head(at),
                activations=self._kept_below[layer] + self._deferred_above(layer) + instant.kept,
                temporaries=instant.temporaries + weights.made_beside(at, instant.making) + received,
                communication=weights.at_work(layer) + weights.prefetched(layer) + buffer,
                done=done,
            )

    def _deferred_above(self, layer: int) -> int:
        """Return the bytes kept for the weight gradients of the layers after the stage's ``layer``-th."""
        return self.deferred - self._deferred_below[layer + 1]

    def _done_above(self, layer: int) -> int:
        """Return the number of parameters whose gradients are done when the backward reaches a layer."""
        return self._made_above[layer] + self.weights.head_done

    @cached_property
    def _num_deferred(self) -> int:
        """Parameters whose gradients a backward defers."""
        return sum(layer.num_deferred for layer in self.layers)

    @cached_property
    def _made_above(self) -> list[int]:
        """Parameters of the layers after each one whose gradients a backward makes, but for those it defers."""
        made = (layer.program.num_trained - layer.num_deferred for layer in reversed(self.layers))
        return list(accumulate(made, initial=0))[-2::-1]

    def _in_embedding(self, at: Position) -> Iterator[Snapshot]:
        """Yield the snapshots in the embedding, whose gradient is made in one piece."""
        embedding = self.stage.embedding
        weights = self.weights
        if embedding is None or not weights.num_in_embedding:
            return
        of_embedding = weights.gradient_itemsize * weights.num_in_embedding
        meets_head = self.stage.tied and self.stage.is_last
        waiting = of_embedding if meets_head else 0  # of the head, to which that of the table is added
        table = 0 if self.stage.shares_table else weights.num_in_embedding
        done = weights.trained.total - table - self._num_deferred
        reduced = weights.trained_above_root
        activations = self.shared + self.deferred
        buffer = weights.reduction_buffer(at, weights.trained.layers[0])
        for instant in embedding.frontier("backward", "none"):
            fresh = instant.made + instant.making
            shared = self.stage.shares_table
            beside = weights.gradient_itemsize * fresh if shared else weights.made_beside(at, fresh)
            yield self._snapshot(
                at,
                gradients=weights.gradients(at, done, min(fresh, table)) + waiting + beside,
                activations=activations + instant.kept,
                temporaries=instant.temporaries + self._gradient_received,
                communication=buffer,
                done=reduced,
            )
        if meets_head and self.divides_table:  # autograd sums the gradients of a DTensor in a third one
            yield self._snapshot(
                at,
                gradients=weights.gradients(at, done) + 3 * of_embedding,
                activations=activations,
                communication=buffer,
                done=reduced,
            )

    # --- reductions

    def _last_reductions(self, at: Position) -> Iterator[Snapshot]:
        """Yield the snapshots at the end of a backward: the reductions of the root and of the embedding."""
        weights = self.weights
        trained = weights.trained
        table = weights.num_in_embedding
        layers = sum(trained.layers)
        if table and self.stage.shares_table:
            # from ZeRO 2 on, the head's has been reduced already; else the table's is added to it
            largest = table if weights.zero_stage >= 2 or not at.head_has_gradient else 0
            accumulated = at.head_has_gradient
            waiting = self._beside_shared_table(at)
            yield self._reduction(at, table, largest=largest, done=layers, waiting=waiting, accumulated=accumulated)
        elif trained.root:
            # the final norm comes after the table
            norm = trained.root - (weights.num_in_head or table)
            largest = norm if norm and weights.reduces(at) else trained.root - norm
            yield self._reduction(at, trained.root, largest=largest, done=layers)
        if trained.embedding:
            done = weights.trained_above_root + trained.root
            waiting = weights.prefetched(0)
            yield self._reduction(at, trained.embedding, largest=table, done=done, waiting=waiting)

    def _beside_shared_table(self, at: Position) -> int:
        """Return the bytes held in the reduction of a table that is also the rank's head, beyond those of both stages.

        It is negative if the rank holds less than both: this backward drops and replaces what belongs to the head too.
        """
        weights = self.weights
        table = weights.num_in_embedding
        held = 0
        if weights.drops:  # the root, which was gathered for both
            held -= weights.gathered_itemsize * self.stage.root
        if at.head_is_averaged:
            held -= weights.average(table)
        if weights.zero_stage >= 2 and at.accumulated and not at.head_has_gradient:
            held += int(FP32_BYTES * table // weights.num_shards)
        return held

    def _reduction(
        self,
        at: Position,
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
            at: the stage's position.
            group: parameters of the group.
            largest: parameters of the last one, whose gradient is kept a little longer.
            done: parameters of this stage that were reduced earlier.
            layer: the layers before this one have not run yet.
            waiting: bytes of the next group, minus those already dropped.
            accumulated: whether another stage has made gradients of the group.
        """
        weights = self.weights
        accumulated = accumulated or at.accumulated > 0
        return self._snapshot(
            at,
            gradients=weights.gradients(at, done) + weights.in_reduction(at, group, largest, accumulated=accumulated),
            activations=self._kept_below[layer],
            temporaries=self.stream + self._gradient_received,
            communication=weights.reduction_buffer(at, group) + waiting,
            done=done,
            group=group,
        )

    def _snapshot(
        self,
        at: Position,
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
        own = weights.gradients(at, 0) if gradients is None else gradients
        communication += weights.gathered_in_backward(at, done + group, head=head) + weights.averaged(at, done, group)
        return Snapshot(own, activations, loss, communication, temporaries)
