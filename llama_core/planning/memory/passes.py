"""The moments of one forward and one backward of a stage at which memory may peak, by category.

A forward runs the layers from first to last, and each keeps what its backward needs. So memory can peak at its end,
after the last layer or, on the last stage, in the last chunk of the loss; or while ``fully_shard`` gathers one of the
last layers or the head.

A backward runs the layers in reverse: it makes gradients, and each layer drops what it kept. Over equal layers memory
rises or falls evenly, so a run of them peaks at one of its ends; among several kinds in turn, memory peaks at a corner
of what is kept drawn over what is made. Within a layer, memory can peak after ``w2``, its
widest matrix; after ``w1`` and ``w3``, or in the norm before them, with three gradients of matrices; with few tokens
after ``wq``, with all gradients; and while ``fully_shard`` reduces them. The loss, the final norm and their reduction
come before the layers; the embedding, whose gradient is made in one piece, and the last reductions come after them.

Moments that are hardly ever the peak over a wide range of plans are left out. Those inside attention are among them,
unless it holds all scores or takes documents.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from llama_core.planning.memory.peaks import Category
from llama_core.planning.memory.tensors import FP32_BYTES, Tensors
from llama_core.planning.memory.weights import ShardedWeights, StageWeights, When
from llama_core.schedules.actions import Kind

Moment = Counter[Category]


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


class StageMoments:
    """The forward and the backward of one microbatch on one stage of one rank.

    Args:
        weights: the stage's weights and gradients.
        tensors: sizes of its other tensors.
    """

    def __init__(self, weights: StageWeights, tensors: Tensors) -> None:
        self.weights, self.stage, self.tensors = weights, weights.stage, tensors
        self.layers = weights.stage.layers
        below = tensors.shared + tensors.looked_up * self.stage.is_first
        if tensors.widens and self.stage.modes[0] == "none" and not self.stage.is_first:
            below += tensors.stream  # the received tensor; otherwise the first layer keeps that same tensor
        kept = (layer.layer(mode) for layer, mode in zip(self.layers, self.stage.modes, strict=True))
        self._kept_below = list(accumulate(kept, initial=below))
        """Bytes kept by the layers before each one (and by all of them), with those that all layers share."""
        self.kept = self._kept_below[weights.num_layers] + (tensors.final_norm if self.stage.is_last else 0)
        """Bytes of activations that a forward keeps for its backward."""
        self.kept_loss = tensors.loss_saved if self.stage.is_last else 0
        """Bytes that the loss keeps for its backward."""
        self.put_off = self._put_off_above(-1)
        """Bytes kept for the weight gradients of a split backward."""
        self._made = not self.put_off  # whether a backward makes the gradients of the layers
        self._peaks: dict[tuple[Kind, Around], Moment] = {}

    def _put_off_above(self, layer: int) -> int:
        """Return the bytes kept for the weight gradients of the layers after the stage's ``layer``-th."""
        return sum(tensors.put_off for tensors in self.layers[layer + 1 :])

    def peak(self, kind: Kind, around: Around) -> Moment:
        """Return the moment at which an action of this kind holds most, with the bytes of its microbatch and stage."""
        if (kind, around) not in self._peaks:
            ways = {Kind.FORWARD: self.forward, Kind.WEIGHT_GRADIENT: self.weight_gradients}
            self._peaks[kind, around] = max(ways.get(kind, self.backward)(around), key=Counter.total)
        return self._peaks[kind, around]

    def forward(self, around: Around) -> Iterator[Moment]:
        """Yield the moments of a forward."""
        t, weights, last = self.tensors, self.weights, self.weights.num_layers - 1
        for layer in {max(0, last - 1), last} if weights.at_work(last) else {last}:
            yield self._moment(
                around,
                activations=self._kept_below[layer + 1],
                communication=self._fetched(around, layer) + weights.at_work(layer) + around.buffer,
                temporaries=self.layers[layer].leaving(self.stage.modes[layer]),
                head=around.head,
            )
        attending, _ = t.attending
        if attending:
            yield self._moment(
                around,
                activations=self._kept_below[last],
                communication=self._fetched(around, last) + weights.at_work(last) + around.buffer,
                temporaries=self.layers[last].layer_attending + attending,
                head=around.head,
            )
        if self.stage.is_last:  # the final norm's output is dropped with the last chunk
            yield self._moment(
                around,
                activations=self.kept,
                loss=t.loss_working,
                communication=self._fetched(around, last + 1) + around.buffer,
                temporaries=t.stream,
                head=True,
            )

    def _fetched(self, around: Around, layer: int) -> int:
        return self.weights.fetched(around.when, layer, head=around.head)

    def backward(self, around: Around) -> Iterator[Moment]:
        """Yield the moments of a backward, in their order."""
        if self.stage.is_last:
            yield from self._in_head(around)
        for layer in self._telling_layers:
            yield from self._in_layer(around, layer)
            yield from self._after_layer(around, layer)
        yield from self._after_layers(around)

    def weight_gradients(self, around: Around) -> Iterator[Moment]:
        """Yield the moments at which deferred gradients are made, in the first layer and the last."""
        weights, trained = self.weights, self.weights.trained
        for layer in {0, weights.num_layers - 1}:
            t = self.layers[layer]
            yield self._moment(
                around,
                gradients=weights.gradients(around.when, sum(trained.layers[:layer]) + trained.tables),
                activations=self._put_off_above(layer - 1),
                temporaries=t.ffn_parameters * (t.itemsize * t.narrow + FP32_BYTES * weights.adds(around.when)),
            )

    @cached_property
    def _telling_layers(self) -> list[int]:
        """The layers of which one has the peak, last first."""
        last = self.weights.num_layers - 1
        kinds = list(zip(self.stage.modes, self.layers, strict=True))
        alike = defaultdict(list)  # layers of one kind with the same neighbours
        for layer in reversed(range(last + 1)):
            alike[tuple(kinds[max(0, layer - 1) : layer + 2])].append(layer)
        # the last but one is the first to find the buffer of a reduction; the second is the last to prefetch another
        # layer
        telling = {0, 1, last - 1, last}.union(*map(self._corners, alike.values()))
        return sorted(telling & set(range(last + 1)), reverse=True)

    def _corners(self, layers: list[int]) -> list[int]:
        """Return those of some layers, last first, that have the peak for some bytes per parameter with a gradient."""
        corners: list[tuple[int, int, int]] = []
        for layer in layers:
            made = self._made_above[layer]
            kept = self._kept_below[layer] + self._put_off_above(layer)
            while len(corners) > 1:
                (x, y, _), (x_between, y_between, _) = corners[-2:]
                if (x_between - x) * (kept - y) < (y_between - y) * (made - x):
                    break
                corners.pop()
            corners.append((made, kept, layer))
        return [layer for *_, layer in corners]

    def _in_head(self, around: Around) -> Iterator[Moment]:
        t, weights, when = self.tensors, self.weights, around.when
        communication = weights.at_work(weights.num_layers - 1) + around.buffer
        # the loss scales the gradients its forward saved, into new tensors
        yield self._moment(
            around,
            gradients=weights.gradients(when, 0) + weights.head_gradient,
            activations=self.kept,
            loss=t.loss_saved,
            temporaries=t.whole,
            communication=communication,
            head=True,
        )
        # the final norm: gradients of its output and, in fp32, of its saved tensors
        yield self._moment(
            around,
            gradients=weights.gradients_in_norm(when),
            activations=self.kept - t.weight_norm,
            temporaries=max(t.norm_working + t.weight_norm, 2 * t.whole + t.stream),
            communication=communication,
            head=True,
        )

    def _in_layer(self, around: Around, layer: int) -> Iterator[Moment]:
        t, weights, when = self.layers[layer], self.weights, around.when
        is_last, done = layer == weights.num_layers - 1, self._done_above(layer)
        recomputed = self.stage.modes[layer] != "none"
        below = self._kept_below[layer] + self._put_off_above(layer)
        if recomputed and t.widens:  # else the first norm keeps the same tensor as checkpointing
            below += t.stream
        above = [*weights.trained.layers, weights.trained.head][layer + 1]
        buffer = weights.reduction_buffer(when, above) if weights.held.head or not is_last else around.buffer
        matrix, layer_trained = t.ffn_parameters * self._made, t.layer_trained * self._made
        # beside the layer's own: the gradient of its output, that of the stage's output, and one to be added
        others = t.stream + FP32_BYTES * matrix * weights.adds(when)
        others += 0 if is_last else self._gradient_received
        copy = t.ffn_parameters * t.itemsize if t.narrow else 0  # a matrix's, and its gradient before it is widened
        for kept, temporaries, made in (
            (t.layer(), t.recomputing * recomputed, 0),
            # after w2: gradients of the product, silu(gate) and up; or, with few tokens, w2's gradient before widening
            (t.layer_before_w2, max(3 * t.ffn, t.ffn + copy + t.whole * t.is_divided), matrix),
            # after w1 and w3: two gradients of their input and the sum, or in the norm before them
            (t.layer_before_norm, max(3 * t.entering, t.norm_working - t.whole), 3 * matrix),
            *([(t.layer_attending, t.attending[1], 3 * matrix)] if t.attending[1] else []),
            # after wq: the gradient of the queries, and two of its input
            (t.norm + t.whole, t.queries + 2 * t.whole, layer_trained),
        ):
            yield self._moment(
                around,
                gradients=weights.gradients(when, done, made) + weights.waiting_head(when),
                activations=below + (0 if recomputed else kept),
                temporaries=temporaries + others + (kept if recomputed else 0),
                communication=weights.at_work(layer) + weights.fetched_ahead(layer) + buffer,
                done=done,
            )

    def _done_above(self, layer: int) -> int:
        """Return the number of parameters whose gradients are done when the backward reaches a layer."""
        return self._made_above[layer] * self._made + self.weights.head_done

    @cached_property
    def _made_above(self) -> list[int]:
        """Parameters of the layers after each one that get gradients."""
        return list(accumulate(reversed(self.weights.trained.layers), initial=0))[-2::-1]

    @property
    def _gradient_received(self) -> int:
        """Bytes of the gradient that the backward of a stage before the last starts from, held to the end."""
        return 0 if self.stage.is_last else self.tensors.stream

    def _after_layer(self, around: Around, layer: int) -> Iterator[Moment]:
        """Yield the moments between the backward of a layer and that of the one before it."""
        yield from ()

    def _after_layers(self, around: Around) -> Iterator[Moment]:
        """Yield the moments at the end of a backward: in the embedding, whose gradient is made in one piece."""
        if not (self.stage.is_first and self.tensors.embedding_trained):
            return
        t, weights, when = self.tensors, self.weights, around.when
        added = int(weights.adds(when) or self.stage.shares_table)
        meets_head = self.stage.tied and self.stage.is_last
        # its upstream gradient: with a divided vocabulary zero for other ranks' tokens, then widened to fp32
        upstream = t.stream + t.whole * t.is_divided
        if t.narrow and t.spec.trains_table:
            upstream += 2 * t.whole * (2 if t.looked_up else 1)
        made = weights.trained.total - (t.head_trained if meets_head else 0)
        yield self._moment(
            around,
            gradients=weights.gradients(when, made) + weights.embedding_gradient * (2 if meets_head else added),
            activations=self._kept_below[0] + self.put_off,
            temporaries=upstream + self._gradient_received,
        )
        if meets_head:  # the two gradients, their sum and, if there is one, the gradient it is added to
            yield self._moment(
                around,
                gradients=weights.gradients(when, weights.trained.total) + weights.embedding_gradient * (2 + added),
                activations=self._kept_below[0] + self.put_off,
            )

    def _moment(
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
    ) -> Moment:
        """Return a moment at which ``group`` parameters' gradients are reduced after ``done`` others."""
        weights, when = self.weights, around.when
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


class ShardedMoments(StageMoments):
    """The forward and the backward of a stage whose weights are sharded with ``fully_shard``.

    Args:
        weights: the stage's weights and gradients.
        tensors: sizes of its other tensors.
    """

    def __init__(self, weights: ShardedWeights, tensors: Tensors) -> None:
        super().__init__(weights, tensors)
        self.weights: ShardedWeights = weights

    def forward(self, around: Around) -> Iterator[Moment]:
        """Yield the moments of a forward."""
        yield from self._gathering(around)
        yield from super().forward(around)

    def backward(self, around: Around) -> Iterator[Moment]:
        """Yield the moments of a backward, in their order."""
        weights, last = self.weights, self.weights.num_layers - 1
        if weights.drops and not self.stage.is_last:  # on the last stage the head is at work before the layers
            root = 0 if around.when.after_forward else weights.held.root
            yield self._moment(
                around,
                activations=self._kept_below[last + 1],
                communication=weights.itemsize * root + 2 * weights.at_work(last) + around.buffer,
                temporaries=self.tensors.stream,
            )
        yield from super().backward(around)

    def _in_head(self, around: Around) -> Iterator[Moment]:
        """Yield the moments of a backward before the layers: in the loss, in the norm, and the reduction of both."""
        yield from super()._in_head(around)
        weights, last = self.weights, self.weights.num_layers - 1
        if weights.trained.head:
            largest, waiting = self.tensors.head_trained, weights.at_work(last)
            yield self._reduction(
                around, weights.trained.head, largest=largest, done=0, layer=last + 1, waiting=waiting
            )

    def _gathering(self, around: Around) -> Iterator[Moment]:
        """Yield the moments of a forward at which a layer is gathered, with the buffer of the previous gather."""
        weights, held, last = self.weights, self.weights.held, self.weights.num_layers - 1
        if not weights.gathers(around.when):
            return
        root = 0 if around.when.after_forward else held.root
        groups = [held.embedding or root, *held.layers, held.head]
        if around.head or not held.head:
            groups.pop()
        telling = {1, last, last + 1, len(groups) - 1} if weights.drops else {len(groups) - 1}
        for place in telling - {0}:  # if layers stay gathered, the last one finds the most
            yield self._moment(
                around,
                activations=self._kept_below[place - 1],
                communication=weights.itemsize * (groups[place - 1] + groups[place] * (1 + weights.drops))
                + around.buffer,
                temporaries=self.tensors.stream,
                head=around.head or not weights.drops,
            )

    def _after_layer(self, around: Around, layer: int) -> Iterator[Moment]:
        """Yield the moment at which a layer's gradients are reduced."""
        group, largest = self.weights.trained.layers[layer], self.layers[layer].ffn_parameters
        yield self._reduction(around, group, layer=layer, done=self._done_above(layer), largest=largest)

    def _after_layers(self, around: Around) -> Iterator[Moment]:
        """Yield the moments at the end of a backward: the reductions of the root and of the embedding."""
        weights, trained, table = self.weights, self.weights.trained, self.tensors.embedding_trained
        layers = sum(trained.layers)
        if table and self.stage.is_first and self.stage.is_last and self.stage.tied:
            yield self._moment(  # the table's two gradients and their sum
                around,
                gradients=weights.gradients(around.when, layers) + 3 * weights.embedding_gradient,
                activations=self._kept_below[0],
                communication=weights.reduction_buffer(around.when, trained.layers[0]),
                done=layers,
            )
        if table and self.stage.shares_table:
            yield self._moment(  # beside the gradient of the head
                around,
                gradients=weights.gradients(around.when, layers) + weights.embedding_gradient,
                activations=self._kept_below[0],
                temporaries=self.tensors.stream,
                done=layers,
            )
            largest = 0 if around.head_has_gradient else table  # it has been added to the head's
            yield self._reduction(around, table, largest=largest, done=layers, accumulated=around.head_has_gradient)
        elif trained.root:
            yield self._reduction(around, trained.root, largest=self.tensors.head_trained, done=layers)
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
    ) -> Moment:
        """Return the moment at which ``fully_shard`` reduces the gradients of a group of parameters.

        Args:
            around: the rank around this action.
            group: parameters of the group.
            largest: parameters of its last matrix.
            done: parameters of this stage that were reduced earlier.
            layer: the layers before this one have not run yet.
            waiting: bytes of the next group, minus those already dropped.
            accumulated: whether another stage has made gradients of the group.
        """
        weights, when = self.weights, around.when
        accumulated = accumulated or when.accumulated > 0
        return self._moment(
            around,
            gradients=weights.gradients(when, done)
            + weights.in_reduction(when, group, largest, accumulated=accumulated),
            activations=self._kept_below[layer],
            temporaries=self.tensors.stream + self._gradient_received,
            communication=weights.reduction_buffer(when, group) + waiting,
            done=done,
            group=group,
        )
