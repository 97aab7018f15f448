"""The fullest instant of a forward or a backward of a stage.

``forward.py`` and ``backward.py`` look at the instants when memory may peak. Those that are hardly ever the peak over a
wide range of plans are left out, among them those inside attention, unless it holds all scores or takes documents.

Of the layers, a backward looks only at those that may have the peak. Over equal layers memory rises or falls evenly, so
a run of them peaks at one of its ends. Among several kinds in turn, memory peaks at a corner of what is kept drawn over
what is made.
"""

from collections import defaultdict
from functools import cached_property

from llama_core.planning.memory.backward import Backward
from llama_core.planning.memory.forward import ForwardBytes
from llama_core.planning.memory.position import Position
from llama_core.planning.memory.stage_bytes import Snapshot, StageBytes
from llama_core.planning.work import Stage, Work
from llama_core.schedules.actions import Kind


class StageSnapshots(StageBytes):
    """The forward and the backward of one microbatch on one stage of one rank.

    Args:
        stage: the stage.
        work: the model, the plan and the sequences.
    """

    def __init__(self, stage: Stage, work: Work) -> None:
        super().__init__(stage, work)
        self._peaks: dict[tuple[Kind, Position], Snapshot] = {}

    def peak(self, kind: Kind, at: Position) -> Snapshot:
        """Return the fullest snapshot of an action of this kind, with the bytes of its microbatch and stage."""
        if (kind, at) not in self._peaks:
            self._peaks[kind, at] = self._peak(kind, at)
        return self._peaks[kind, at]

    def _peak(self, kind: Kind, at: Position) -> Snapshot:
        if kind is Kind.FORWARD:
            return max(ForwardBytes(self, at).snapshots(), key=sum)
        backward = Backward(self, at, self._candidates)
        if kind is Kind.WEIGHT_GRADIENT:
            return max(backward.weight_gradients(), key=sum)
        return max(backward.snapshots(), key=sum)

    @cached_property
    def _candidates(self) -> list[int]:
        """The layers of which one has the peak of a backward, last first."""
        kinds = list(zip(self.stage.modes, self.layers, strict=True))
        # layers with equal neighbours hold the same beside what is kept and made
        alike = defaultdict(list)
        for layer in reversed(range(self.last + 1)):
            with_neighbours = tuple(kinds[max(0, layer - 1) : layer + 2])
            alike[with_neighbours].append(layer)
        # the last but one is the first to find the buffer of a reduction; the second is the last to
        # prefetch another layer
        candidates = {0, 1, self.last - 1, self.last}
        for layers in alike.values():
            candidates.update(self._corners(layers))
        return sorted(candidates.intersection(range(self.last + 1)), reverse=True)

    def _corners(self, layers: list[int]) -> list[int]:
        """Return those of some layers, last first, that have the peak for some bytes per parameter with a gradient.

        Each layer is a point: the parameters whose gradients are made when the backward reaches it, and the bytes that
        are kept. The peak is the greatest sum of the two, at some price of a parameter. Whatever that price, it lies on
        the upper convex hull of the points, which Andrew's monotone chain finds.
        """
        hull: list[tuple[int, int, int]] = []
        for layer in layers:
            made = self.made_above[layer]
            kept = self.kept.below[layer] + self.kept.deferred_above(layer)
            while len(hull) > 1:
                made_before, kept_before, _ = hull[-2]
                made_between, kept_between, _ = hull[-1]
                rise_to_new = (made_between - made_before) * (kept - kept_before)
                rise_to_between = (kept_between - kept_before) * (made - made_before)
                # then the point between lies above the line to the new one
                if rise_to_new < rise_to_between:
                    break
                hull.pop()
            hull.append((made, kept, layer))
        return [layer for _, _, layer in hull]
