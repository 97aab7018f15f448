"""AdamW's moments in bf16, rounded stochastically: up with a probability that makes the mean of the results exact.

bf16 has 8 bits of precision, so a moment that a step changes by less than half of the last one would never change if it
were rounded to the nearest: with beta2 = 0.999 the second moment could not fall. Rounded stochastically, it falls as it
should on average. On CUDA the update is one Triton kernel. Elsewhere it is torch's fused kernel on moments in fp32,
some at a time; only what is kept is rounded.

The random bits of an element (``random_bits``) are the same after a resume, and under every plan.

Source: Gupta et al. 2015, arXiv:1502.02551, section 3; Zamirai et al. 2021, arXiv:2010.06192, for bf16.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from llama_core.machine.toolchain import can_build_kernels
from llama_core.models.layers import local_part
from llama_core.optimizers.adamw import CHUNK_ELEMENTS
from llama_core.optimizers.traits import NAMES
from llama_core.training.local import adamw_kernel
from llama_core.training.random_bits import BlockOrigin, key_of, mixed, random_bits

DROPPED_BITS = 16
"""Bits of fp32 that bf16 does not have."""
_LOW = 2**DROPPED_BITS - 1


class Bf16Moments:
    """AdamW's update of parameters whose moments are kept in bf16.

    Args:
        groups: groups of parameters with their names, which it takes out.
        seed: of the random bits.
    """

    def __init__(self, groups: list[dict[str, Any]], seed: int) -> None:
        self._keys = {
            parameter: key_of(seed, name)
            for group in groups
            for parameter, name in zip(group["params"], group.pop(NAMES), strict=True)
        }

    def update(
        self,
        parameters: Sequence[Tensor],
        states: Mapping[Tensor, dict[str, Tensor]],
        group: Mapping[str, Any],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Change this rank's part of each of some parameters, and its states.

        Args:
            parameters: the parameters, each with a gradient.
            states: the states of each; empty before its first update.
            group: the settings of their group.
            grad_scale: what the gradients are divided by; None for 1.
            found_inf: 1 if nothing is to change, else 0; None if the gradients are known to be finite.
        """
        for parameter in parameters:
            weight = local_part(parameter)
            kept = states[parameter]
            if not kept:
                kept["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                kept["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                kept["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            tensors = (parameter, cast("Tensor", parameter.grad), kept["exp_avg"], kept["exp_avg_sq"])
            one = MomentsUpdate(
                parts=tuple(map(local_part, tensors)),
                step=kept["step"],
                group=group,
                grad_scale=grad_scale,
                found_inf=found_inf,
                key=self._keys[parameter],
                place=_place(parameter),
                rows_of_an_expert=parameter.shape[1] if parameter.ndim > 2 else 0,
            )
            if uses_kernel(weight):
                run_in_one_kernel(one)
            else:
                _run_in_chunks(one)
        steps = [states[parameter]["step"] for parameter in parameters]
        if steps:  # all at once: a launch takes as long as the update of a small matrix
            torch._foreach_add_(steps, 1)
            if found_inf is not None:
                torch._foreach_sub_(steps, [found_inf] * len(steps))


class MomentsUpdate(NamedTuple):
    """The update of this rank's part of a parameter; ``bf16_moments_kernel.update`` says what each of these is."""

    parts: tuple[Tensor, ...]
    step: Tensor
    group: Mapping[str, Any]
    grad_scale: Tensor | None
    found_inf: Tensor | None
    key: int
    place: BlockOrigin
    rows_of_an_expert: int


def uses_kernel(weight: Tensor) -> bool:
    """Return whether a weight is updated in a kernel of its own. The dry run of a CUDA run replaces this."""
    return weight.is_cuda and weight.dtype == torch.float32 and can_build_kernels()


def run_in_one_kernel(one: MomentsUpdate) -> None:
    """Update a rank's part of a parameter in one kernel."""
    from llama_core.training import bf16_moments_kernel  # needs Triton

    bf16_moments_kernel.update(**one._asdict())


def _run_in_chunks(one: MomentsUpdate) -> None:
    """Do the same with kernels of torch, a chunk at a time."""
    key_of_step = mixed(one.step.int()).add_(one.key)
    for chunk in _chunks(one):
        _update(chunk, random_bits(key_of_step, chunk.place, chunk.weight.shape), one)


class _Chunk(NamedTuple):
    """Some rows of a parameter, or of an expert of one, each tensor [rows, columns]."""

    place: BlockOrigin
    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor


def _update(chunk: _Chunk, bits: Tensor, one: MomentsUpdate) -> None:
    """Update a chunk, given 32 random bits for each element, which are overwritten."""
    wide_first = chunk.first.to(chunk.weight.dtype)
    wide_second = chunk.second.to(chunk.weight.dtype)
    adamw_kernel(
        [chunk.weight],
        [chunk.gradient.contiguous()],
        ([wide_first], [wide_second]),
        [one.step.clone()],  # it is counted up, and other chunks are of the same step
        one.group,
        grad_scale=one.grad_scale,
        found_inf=one.found_inf,
    )
    # if nothing is to change, the moments are still numbers of bf16, which rounding keeps
    round_stochastically(wide_first, bits & _LOW, chunk.first)
    round_stochastically(wide_second, bits.bitwise_right_shift_(DROPPED_BITS).bitwise_and_(_LOW), chunk.second)


def round_stochastically(wide: Tensor, bits: Tensor, rounded: Tensor) -> None:
    """Round numbers to bf16: added to what bf16 drops, random bits carry as often as its value says.

    Args:
        wide: the numbers, which are overwritten if they are fp32.
        bits: as many int32 numbers from 0 to 2**16 - 1.
        rounded: bf16, which is set to the result.
    """
    sums = wide.float().view(torch.int32).add_(bits)
    upper_halves = sums.view(torch.int16)[..., 1::2]  # the machines of PyTorch store the lower half first
    rounded.view(torch.int16).copy_(upper_halves)


def _chunks(one: MomentsUpdate) -> Iterator[_Chunk]:
    """Yield this rank's part of a parameter in chunks."""
    for expert, matrices in enumerate(zip(*map(_matrices, one.parts), strict=True)):
        first_row = one.place.row + expert * one.rows_of_an_expert
        num_rows, num_columns = matrices[0].shape
        height = max(1, CHUNK_ELEMENTS // max(1, num_columns))
        for top in range(0, num_rows, height):
            place = BlockOrigin(first_row + top, one.place.column)
            yield _Chunk(place, *(matrix[top : top + height] for matrix in matrices))


def _matrices(part: Tensor) -> tuple[Tensor, ...]:
    if part.ndim > 2:
        return part.unbind()
    return (part,) if part.ndim == 2 else (part[None],)


def _place(parameter: Tensor) -> BlockOrigin:
    """Return where this rank's part of a parameter begins: [columns], [rows, columns] or [experts, rows, columns]."""
    *rows, column = _offsets(parameter)
    if parameter.ndim > 2:
        return BlockOrigin(rows[0] * parameter.shape[1] + rows[1], column)
    return BlockOrigin(rows[0] if rows else 0, column)


def _offsets(parameter: Tensor) -> tuple[int, ...]:
    """Return where this rank's part of a parameter begins along each dim."""
    offsets = [0] * parameter.ndim
    lengths = list(parameter.shape)
    if not isinstance(parameter, DTensor):
        return tuple(offsets)
    mesh = parameter.device_mesh
    # ``fully_shard`` divides what the other axes leave, and its axis comes before theirs
    for number, placement in reversed(list(enumerate(parameter.placements))):
        if isinstance(placement, Shard | _StridedShard):
            length = lengths[placement.dim]
            part = -(-length // mesh.size(number))  # as ``torch.chunk`` cuts
            begin = min(length, part * mesh.get_local_rank(number))
            offsets[placement.dim] += begin
            lengths[placement.dim] = min(part, length - begin)
    return tuple(offsets)
