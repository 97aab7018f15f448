"""The backward of one microbatch on one stage, at the instants when its memory may peak.

A backward runs the layers in reverse: it makes gradients, and each layer drops what it kept. Within a layer, memory can
peak after ``w2``, its widest matrix; after ``w1`` and ``w3``, or in the norm before them, with three gradients of
matrices; with few tokens after ``wq``, with all gradients; and while ``fully_shard`` reduces them. The loss, the final
norm and their reduction come before the layers; the embedding, whose gradient is made in one piece, and the last
reductions come after them.
"""

from collections.abc import Iterable, Iterator

from llama_core.planning.memory.position import Position
from llama_core.planning.memory.stage_bytes import Snapshot, StageBytes
from llama_core.planning.program.operations import FP32_BYTES


class Backward:
    """A backward.

    Args:
        stage: the stage.
        at: its position in the step.
        layers: the layers of which one has the peak, last first.
    """

    def __init__(self, stage: StageBytes, at: Position, layers: Iterable[int]) -> None:
        self.stage = stage
        self.at = at
        self.candidates = layers
        self.last = stage.last
        self.layers = stage.layers
        self.kept = stage.kept
        self.gathered = stage.gathered
        self.gradients = stage.gradients
        self.trained = stage.weights.trained
        self.is_sharded = stage.weights.is_sharded

    def snapshots(self) -> Iterator[Snapshot]:
        """Yield the snapshots, of which one is the peak, in their order."""
        if self.gathered.drops and not self.stage.stage.is_last:
            yield self._beginning()
        yield from self._in_head()
        for layer in self.candidates:
            yield from self._in_layer(layer)
            if self.is_sharded:
                yield self._reduction(
                    self.trained.layers[layer],
                    layer=layer,
                    done=self._done_above(layer),
                    largest=self.layers[layer].program.largest_trained,
                    extra=self.gathered.prefetched(layer),
                    experts=self.stage.weights.experts[layer],
                    others=self.gathered.others_of_experts(self.at, layer),
                )
        yield from self._in_embedding()
        if self.is_sharded:
            yield from self._last_reductions()

    def weight_gradients(self) -> Iterator[Snapshot]:
        """Yield the snapshots at which deferred gradients are made."""
        at = self.at
        gradients = self.gradients
        made_before = self.trained.total - self.stage.num_deferred
        # before the first one; a stage may have deferred none
        yield self._snapshot(
            gradients=gradients.held(at, made_before),
            activations=self.kept.deferred,
        )
        for layer in sorted({0, self.last}):
            deferred_above = sum(above.num_deferred for above in self.layers[layer + 1 :])
            made_above = made_before + deferred_above
            for instant in self.layers[layer].weight_gradients():
                yield self._snapshot(
                    gradients=gradients.held(at, made_above, instant.made + instant.making),
                    activations=self.kept.deferred_below(layer) + instant.kept,
                    temporaries=instant.temporaries + gradients.also_made(at, instant.making),
                )

    def _beginning(self) -> Snapshot:
        """Return the snapshot in which the last layer is gathered. With a head, that is at work before the layers."""
        gathered = self.gathered
        # the layer's own buffer, or the root's if that waits while the layer before is gathered
        waiting_root = gathered.root_buffer(self.at) + gathered.prefetched(self.last)
        buffers = max(gathered.buffer(self.last), waiting_root)
        return self._snapshot(
            activations=self.kept.below[-1],
            communication=gathered.at_work(self.last) + buffers + self.at.buffer,
            temporaries=self.stage.stream,
        )

    def _in_head(self) -> Iterator[Snapshot]:
        """Yield the snapshots before the layers: in the loss, in the final norm, and in the reduction of both."""
        norm = self.stage.stage.final_norm
        head = self.stage.stage.head
        if norm is None or head is None:
            return
        at = self.at
        gradients = self.gradients
        prefetched = self.gathered.buffer(self.last)
        for instant in head.frontier("backward", "none"):
            made = gradients.itemsize * (instant.made + instant.making)
            yield self._snapshot(
                gradients=gradients.held(at, 0) + made,
                activations=self.kept.total,
                loss=instant.kept,
                temporaries=instant.temporaries,
                communication=prefetched + at.buffer,
                head=True,
            )
        for instant in norm.frontier("backward", "none"):
            yield self._snapshot(
                gradients=gradients.held_in_norm(at),
                activations=self.kept.below[-1] + instant.kept,
                temporaries=instant.temporaries + self.stage.predicted(self.last + 1),
                communication=prefetched + at.buffer,
                head=True,
            )
        if self.is_sharded and self.trained.head:
            yield self._reduction(
                self.trained.head,
                largest=gradients.num_in_head,
                done=0,
                layer=self.last + 1,
                extra=prefetched,
            )

    def _in_layer(self, layer: int) -> Iterator[Snapshot]:
        """Yield the snapshots of the backward of a layer."""
        at = self.at
        gradients = self.gradients
        is_last = layer == self.last
        done = self._done_above(layer)
        received = 0 if is_last else self.stage.gradient_received  # the last layer begins with it
        gathered = self.gathered.at_work(layer) + self.gathered.prefetched(layer)
        # torch keeps the input of a reduce-scatter until the next unit's (reduce_scatter_states)
        buffer = at.buffer
        if not is_last:
            buffer = gradients.reduction_buffer(at, self.trained.layers[layer + 1])
        elif self.stage.weights.held.head:
            buffer = gradients.reduction_buffer(at, self.trained.head)
        for instant in self.layers[layer].frontier("backward", self.stage.stage.modes[layer]):
            made = gradients.held(at, done, instant.made + instant.making)
            extra = gradients.also_made(at, instant.making)
            yield self._snapshot(
                gradients=made + gradients.waiting_table(at, after_module=not is_last),
                activations=self.kept.below[layer] + self.kept.deferred_above(layer) + instant.kept,
                temporaries=instant.temporaries + extra + received + self.stage.waiting_gradients(layer),
                communication=gathered + buffer,
                done=done,
            )

    def _done_above(self, layer: int) -> int:
        """Return the number of parameters whose gradients are done when the backward reaches a layer."""
        return self.stage.made_above[layer] + self.gradients.num_before_layers

    def _in_embedding(self) -> Iterator[Snapshot]:
        """Yield the snapshots in the embedding, whose gradient is made in one piece."""
        at = self.at
        gradients = self.gradients
        stage = self.stage.stage
        embedding = stage.embedding
        if embedding is None or not gradients.num_in_embedding:
            return
        # a table that another stage of the rank has as its head is a parameter of that stage
        own = 0 if stage.shares_table else gradients.num_in_embedding
        done = self.trained.total - own - self.stage.num_deferred
        reduced = self.trained.head + self.trained.in_layers
        of_table = gradients.itemsize * gradients.num_in_embedding
        meets_head = stage.embeds_at_end and stage.is_last
        # autograd holds the table's gradient of the head, or of prediction modules, until it adds that of the look-up
        waiting_head = of_table if meets_head else 0
        activations = self.kept.shared + self.kept.deferred
        buffer = gradients.reduction_buffer(at, self.trained.layers[0])
        for instant in embedding.frontier("backward", "none"):
            fresh = instant.made + instant.making
            extra = gradients.also_made(at, fresh)
            if stage.shares_table:
                extra = gradients.itemsize * fresh
            yield self._snapshot(
                gradients=gradients.held(at, done, min(fresh, own)) + waiting_head + extra,
                activations=activations + instant.kept,
                temporaries=instant.temporaries + self.stage.gradient_received,
                communication=buffer,
                done=reduced,
            )
        if meets_head and self.stage.divides_table:
            # autograd adds plain tensors in place, but sums those of a DTensor in a third one
            yield self._snapshot(
                gradients=gradients.held(at, done) + 3 * of_table,
                activations=activations,
                communication=buffer,
                done=reduced,
            )

    def _last_reductions(self) -> Iterator[Snapshot]:
        """Yield the snapshots at the end of a backward: the reductions of the root and of the embedding."""
        gradients = self.gradients
        trained = self.trained
        table = gradients.num_in_embedding
        before_root = trained.head + trained.in_layers
        if table and self.stage.stage.shares_table:
            yield self._reduction_of_shared_table()
        elif trained.root:
            # the final norm comes after the table
            norm = trained.root - (gradients.num_in_head or table)
            is_norm_last = norm and gradients.reduces(self.at)
            yield self._reduction(
                trained.root,
                largest=norm if is_norm_last else trained.root - norm,
                done=before_root,
            )
        if trained.embedding:
            yield self._reduction(
                trained.embedding,
                largest=table,
                done=before_root + trained.root,
                extra=self.gathered.prefetched(0),
            )

    def _reduction_of_shared_table(self) -> Snapshot:
        """Return the snapshot in the reduction of a table that is also the head of another stage of the rank.

        The bytes beside it are those beyond what both stages hold. They are negative if the rank holds less than both:
        this backward drops and replaces what belongs to the head too.
        """
        at = self.at
        gradients = self.gradients
        table = gradients.num_in_embedding
        extra = 0
        if self.gathered.drops:  # the root, which was gathered for both
            extra -= self.gathered.itemsize * self.stage.stage.root
        if at.head_is_averaged:
            extra -= gradients.average(table)
        if gradients.shards_often and at.accumulated and not at.head_has_gradient:
            extra += int(FP32_BYTES * table // gradients.num_shards)
        # from ZeRO 2 on, the head's has been reduced already; else the table's is added to it
        is_alone = gradients.shards_often or not at.head_has_gradient
        return self._reduction(
            table,
            largest=table if is_alone else 0,
            done=self.trained.in_layers,
            extra=extra,
            accumulated=at.head_has_gradient,
        )

    def _reduction(
        self,
        unit: int,
        *,
        largest: int,
        done: int,
        layer: int = 0,
        extra: int = 0,
        accumulated: bool = False,
        experts: int = 0,
        others: int = 0,
    ) -> Snapshot:
        """Return the snapshot in which ``fully_shard`` reduces the gradients of a unit.

        Args:
            unit: parameters of the unit.
            largest: parameters of the last one, whose gradient is kept a little longer.
            done: parameters of this stage that were reduced earlier.
            layer: the layers before this one have not run yet.
            extra: bytes of the next unit, minus those already dropped.
            accumulated: whether another stage has made gradients of the unit.
            experts: parameters of the unit that are reduced apart, before the others.
            others: bytes of the unit's gathered weights that are kept until then.
        """
        at = self.at
        gradients = self.gradients
        has_earlier = accumulated or at.accumulated > 0
        reduction = gradients.in_reduction(at, unit, largest, accumulated=has_earlier, experts=experts, others=others)
        return self._snapshot(
            gradients=gradients.held(at, done) + reduction.gradients,
            activations=self.kept.below[layer],
            temporaries=self.stage.stream + self.stage.gradient_received,
            communication=reduction.buffers + extra,
            done=done,
            unit=unit,
        )

    def _snapshot(
        self,
        *,
        activations: int,
        gradients: int | None = None,
        loss: int = 0,
        communication: int = 0,
        temporaries: int = 0,
        done: int = 0,
        unit: int = 0,
        head: bool = False,
    ) -> Snapshot:
        """Return a snapshot in which a unit's gradients are reduced after those of ``done`` other parameters."""
        at = self.at
        gathered = self.gathered.in_backward(at, done + unit, head=head)
        averages = self.gradients.averaged(at, done, unit)
        return Snapshot(
            gradients=self.gradients.held(at, 0) if gradients is None else gradients,
            activations=activations,
            loss=loss,
            communication=communication + gathered + averages,
            temporaries=temporaries,
        )
