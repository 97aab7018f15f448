"""The forward of one microbatch on one stage, at the instants when its memory may peak.

A forward runs the layers from first to last, and each keeps what its backward needs. So memory can peak at its end,
after the last layer or, on the last stage, in the last chunk of the loss; or while ``fully_shard`` gathers one of the
last layers or the head.
"""

from collections.abc import Iterator

from llama_core.config.run import RecomputeMode
from llama_core.planning.memory.gathered import EMBEDDING
from llama_core.planning.memory.position import Position
from llama_core.planning.memory.stage_bytes import Snapshot, StageBytes
from llama_core.planning.program.passes import Passes


class ForwardBytes:
    """A forward.

    Args:
        stage: the stage.
        at: its position in the step.
    """

    def __init__(self, stage: StageBytes, at: Position) -> None:
        self.stage = stage
        self.at = at
        self.last = stage.last
        self.kept = stage.kept
        self.gathered = stage.gathered

    def snapshots(self) -> Iterator[Snapshot]:
        """Yield the snapshots, of which one is the peak."""
        if self.gathered.gathers(self.at):
            yield from self._gathering()
        embedding = self.stage.stage.embedding
        if embedding:
            yield from self._running(embedding, "none", place=EMBEDDING, below=self.kept.shared)
        yield from self._in_layers()
        yield from self._in_head()

    def _gathering(self) -> Iterator[Snapshot]:
        """Yield the snapshots in which a unit has been unpacked, with the buffer of the gather before its own."""
        gathered = self.gathered
        has_head = gathered.in_order[-2] and not self.at.head_gathered
        end = len(gathered.in_order) - (2 if has_head else 3)
        # if layers stay gathered, the last one finds the most, unless the first unit is large
        candidates = {1, end}
        if gathered.drops:
            # of equal layers the last one finds the most kept; the head, which is larger, follows
            candidates |= {self.last, self.last + 1}
        for number in sorted(candidates - {0}):
            yield self._snapshot(
                place=number - 1,
                activations=self.kept.below[number - 1],
                temporaries=self.stage.stream,
                buffers=gathered.unpacking(self.at, number),
            )

    def _in_layers(self) -> Iterator[Snapshot]:
        """Yield the snapshots in those layers that find the most."""
        kinds = list(zip(self.stage.layers, self.stage.stage.modes, strict=True))
        # the last layer of every kind, after which most is kept; before the last of all, two layers
        # may be gathered
        last_of_kind = {kind: layer for layer, kind in enumerate(kinds)}
        for layer in sorted({*last_of_kind.values(), max(0, self.last - 1)}):
            passes, mode = kinds[layer]
            yield from self._running(passes, mode, place=layer, below=self.kept.below[layer])

    def _in_head(self) -> Iterator[Snapshot]:
        """Yield the snapshots in the final norm and in the last chunk of the loss."""
        norm = self.stage.stage.final_norm
        head = self.stage.stage.head
        if norm is None or head is None:
            return
        place = self.last + 1
        yield from self._running(norm, "none", place=place, below=self.kept.below[-1])
        for instant in head.frontier("forward", "none"):
            yield self._snapshot(
                place=place,
                activations=self.kept.total,
                loss=instant.kept + instant.temporaries - self.stage.stream,
                temporaries=self.stage.stream,  # the norm's output is dropped with the last chunk
            )

    def _running(
        self,
        passes: Passes,
        mode: RecomputeMode,
        *,
        place: int,
        below: int,
    ) -> Iterator[Snapshot]:
        """Yield the snapshots of the forward of a part.

        Args:
            passes: of the part.
            mode: its recomputation.
            place: that of its unit.
            below: bytes that the parts before it keep.
        """
        predicted = self.stage.predicted(place)
        for instant in passes.frontier("forward", mode):
            yield self._snapshot(
                place=place,
                activations=below + instant.kept,
                temporaries=instant.temporaries + predicted,
            )

    def _snapshot(
        self,
        *,
        place: int,
        activations: int,
        temporaries: int,
        loss: int = 0,
        buffers: int | None = None,
    ) -> Snapshot:
        """Return a snapshot in a unit, with the usual buffers of gathers or with these."""
        at = self.at
        if buffers is None:
            buffers = self.gathered.buffers(at, place)
        averages = self.stage.gradients.averaged(at, 0)
        return Snapshot(
            gradients=self.stage.gradients.held(at, 0),
            activations=activations,
            loss=loss,
            communication=self.gathered.in_forward(at, place) + averages + buffers + at.buffer,
            temporaries=temporaries,
        )
