"""Leave layers out of a trace that repeat their neighbours.

In a stretch of equal layers, only those near its ends differ in what they hold: there weights are gathered ahead and
gradients reduced late across the border. So a trace runs the layers near the ends, and the changes of the last one
before the gap stand for each layer that is left out. If the layers on both sides of the gap do not change the same
bytes, this does not hold, and all layers have to run.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from llama_core.config.model_spec import LayerTraits
from llama_core.config.models import ModelSpec
from llama_core.config.run import RecomputeMode
from llama_core.models.layers import local_part
from llama_core.models.llama import Llama
from llama_core.planning.fully_shard import Resharding
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.compose import BytesChange

KEPT_AT_EACH_END = 3
"""Layers that run at each end of a stretch. The third one gathers weights only for layers of its own kind."""


class FoldedStage:
    """The layers of a stage without those that are left out; in a model it takes the place of their range.

    Args:
        layers: the layers of the stage.
        gaps: the layers left out, each gap in the middle of equal layers.
    """

    def __init__(self, layers: range, gaps: Sequence[range]) -> None:
        self.start = layers.start
        self.stop = layers.stop
        self.gaps = tuple(gaps)
        left_out = {layer for gap in gaps for layer in gap}
        self._kept = [layer for layer in layers if layer not in left_out]
        self._places = {layer: place for place, layer in enumerate(self._kept)}

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def watched(self) -> list[int]:
        """The layers that run beside a gap, two on each side."""
        watched: list[int] = []
        for gap in self.gaps:
            watched += range(gap.start - 2, gap.start)
            watched += range(gap.stop, gap.stop + 2)
        return watched

    def unfolded(self, changes: Sequence[tuple[int | None, BytesChange]]) -> BytesChange | None:
        """Return the change through the whole stage; None if the layers on both sides of a gap differ.

        Args:
            changes: the changes of a trace, each with the watched layer that it begins with; None for the first.
        """
        parts: list[BytesChange] = []
        for number, (layer, change) in enumerate(changes):
            parts.append(change if layer is None else self._placed(change, layer, layer))
            if layer is None or number + 1 == len(changes):
                continue
            following, next_change = changes[number + 1]
            gap = self._gap_between(layer, following)
            if gap is None or following is None:
                continue
            before = self._placed(change, layer, 0)
            after = self._placed(next_change, following, 0)
            if _plainly(before) != _plainly(after):
                return None
            # a backward runs the layers in reverse
            left_out = gap if layer < following else reversed(gap)
            parts += [self._placed(change, layer, at) for at in left_out]
        return BytesChange.joined(parts)

    def _gap_between(self, one: int | None, other: int | None) -> range | None:
        sides = {one, other}
        return next((gap for gap in self.gaps if sides == {gap.start - 1, gap.stop}), None)

    def _placed(self, change: BytesChange, layer: int, at: int) -> BytesChange:
        """Return the change of ``layer`` as if it were layer ``at``, and number the layers around it accordingly."""
        places = self._places

        def renamed(named: int) -> int:
            return at + places[named] - places[layer] if named in places else named

        return change.placed(renamed)


def _plainly(change: BytesChange) -> tuple[Any, ...]:
    """Return the contents of a change without zeros, which are equal for changes that are alike."""
    rises = {phase: (+rise, -rise, where) for phase, (rise, where) in change.rises.items()}
    return +change.growth, -change.growth, rises, change.flops, change.transfers


def folded_stage(plan: ParallelPlan, spec: ModelSpec, stage: int) -> FoldedStage:
    """Return the layers of ``stage`` that a trace runs."""
    layers = plan.stage_layers(spec)[stage]
    modes = plan.recompute_modes(spec)[stage]
    if not _repeats_layers(plan):
        return FoldedStage(layers, [])
    gaps: list[range] = []

    def kind(layer: int) -> tuple[RecomputeMode, LayerTraits]:
        return modes[layer - layers.start], spec.layers[layer]

    for _, stretch in groupby(layers, key=kind):
        equal = list(stretch)
        gap = range(equal[0] + KEPT_AT_EACH_END, equal[-1] + 1 - KEPT_AT_EACH_END)
        if gap:
            gaps.append(gap)
    return FoldedStage(layers, gaps)


def _repeats_layers(plan: ParallelPlan) -> bool:
    """Return whether the layers of a stage run one after the other throughout a step.

    The weight gradients of a split backward are computed in a loop of their own. If a rank has several stages, the last
    backward of a step ends with a loop over the layers of the others, which gathers of ZeRO 1 and 2 lasted until then.
    """
    has_several_stages = len(plan.layout.stages_of(0)) > 1
    stays_gathered = plan.uses_fully_shard and not Resharding.of(plan).drops_weights
    return not plan.splits_backward and not (has_several_stages and stays_gathered)


def state_of(module: nn.Module | FSDPModule) -> Any:
    """Return the state that ``fully_shard`` keeps for a module."""
    return getattr(fully_shard, "state")(module)  # noqa: B009 - torch's annotations do not know it


class FoldedLayers:
    """The layers of a model that a trace leaves out: they have weights, gradients and optimizer states, but do not run.

    Args:
        model: a rank's part of the model.
        stages: its stages.
    """

    def __init__(self, model: Llama, stages: Sequence[FoldedStage]) -> None:
        self._model = model
        blocks = model.layers
        self._pairs = [
            (blocks[str(gap.start - 1)], [blocks[str(layer)] for layer in gap])
            for stage in stages
            for gap in stage.gaps
        ]
        for stage in stages:
            for gap in stage.gaps:
                before = blocks[str(gap.start - 1)]
                after = blocks[str(gap.stop)]
                if isinstance(before, FSDPModule) and isinstance(after, FSDPModule):
                    before.set_modules_to_forward_prefetch([after])
                    after.set_modules_to_backward_prefetch([before])

    def hide(self) -> None:
        """Keep ``fully_shard`` from ending the backward of layers that have none, once it knows all layers."""
        if not isinstance(self._model, FSDPModule) or not self._pairs:
            return
        hidden = {id(state_of(block)) for _, blocks in self._pairs for block in blocks}
        states: list[Any] = state_of(self._model)._state_ctx.all_states
        states[:] = [state for state in states if id(state) not in hidden]

    def accumulate(self, own: dict[nn.Parameter, Tensor]) -> None:
        """Give the layers gradients like those of the layer before the gap.

        Args:
            own: the memory for the gradients of some parameters.
        """
        for ran, blocks in self._pairs:
            for block in blocks:
                storages: dict[int, Tensor] = {}
                for like, parameter in zip(ran.parameters(), block.parameters(), strict=True):
                    if like.grad is not None:
                        parameter.grad = own[parameter] if parameter in own else _another(like.grad, storages)


def _another(gradient: Tensor, storages: dict[int, Tensor]) -> Tensor:
    """Return a gradient of the same form; those that share memory with each other also do so here."""
    local = local_part(gradient)
    storage = local.untyped_storage()
    if id(storage) not in storages:
        storages[id(storage)] = torch.empty(storage.nbytes() // local.itemsize, dtype=local.dtype, device=local.device)
    made = storages[id(storage)].as_strided(local.shape, local.stride(), local.storage_offset())
    if not isinstance(gradient, DTensor):
        return made
    return DTensor.from_local(
        made, gradient.device_mesh, gradient.placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
    )
