"""AdamW's moments in bf16, rounded stochastically: up with a probability that makes the mean of the results exact.

bf16 has 8 bits of precision, so a moment that a step changes by less than half of the last one would never change if it
were rounded to the nearest: with beta2 = 0.999 the second moment could not fall. Rounded stochastically, it falls as it
should on average. The update itself is torch's fused kernel on moments in fp32, some at a time; only what is kept is
rounded.

The random bits of an element are a hash of the seed, the parameter's name, how often it was updated, and the element's
place in the whole parameter. So they are the same after a resume, and under every plan.

Source: Gupta et al. 2015, arXiv:1502.02551, section 3; Zamirai et al. 2021, arXiv:2010.06192, for bf16.
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from llama_core.models.layers import local_part
from llama_core.optimizers.adamw import CHUNK_ELEMENTS
from llama_core.optimizers.traits import NAMES
from llama_core.training.local import adamw_kernel, whether_it_happens

DROPPED_BITS = 16
"""Bits of fp32 that bf16 does not have."""
_LOW = 2**DROPPED_BITS - 1
_MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))
"""Shifts and factors of a hash of 32 bits, found by a search for the least bias.

Source: Wellons 2018, nullprogram.com/blog/2018/07/31.
"""
_LAST_SHIFT = 16
_COLUMNS = 0x5BD1E995
"""Any number: it makes the hashes of columns others than those of rows."""


class Bf16Moments:
    """AdamW's update of a parameter whose moments are kept in bf16.

    Args:
        groups: groups of parameters with their names, which it takes out.
        seed: of the random bits.
    """

    def __init__(self, groups: list[dict[str, Any]], seed: int) -> None:
        self._keys = {
            parameter: _key(seed, name)
            for group in groups
            for parameter, name in zip(group["params"], group.pop(NAMES), strict=True)
        }

    def update(
        self,
        parameter: Tensor,
        kept: dict[str, Tensor],
        group: Mapping[str, Any],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Change this rank's part of a parameter, and its states.

        Args:
            parameter: the parameter, with a gradient.
            kept: its states; empty before its first update.
            group: the settings of its group.
            grad_scale: what the gradient is divided by; None for 1.
            found_inf: 1 if nothing is to change, else 0; None if the gradients are known to be finite.
        """
        weight = local_part(parameter)
        if not kept:
            kept["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            kept["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            kept["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        key = _mixed(kept["step"].int()).add_(self._keys[parameter])
        happens = whether_it_happens(kept["step"], found_inf)
        tensors = (parameter, cast("Tensor", parameter.grad), kept["exp_avg"], kept["exp_avg_sq"])
        for chunk in _chunks(parameter, tuple(map(local_part, tensors))):
            bits = random_bits(key, chunk.place, chunk.weight.shape)
            _update(chunk, bits, kept["step"], group, grad_scale=grad_scale, found_inf=found_inf)
        kept["step"].add_(happens)


class Place(NamedTuple):
    """Where a block of a parameter begins. Experts' rows are counted from the first expert on."""

    row: int
    column: int


class _Chunk(NamedTuple):
    """Some rows of a parameter, or of an expert of one, each tensor [rows, columns]."""

    place: Place
    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor


def _update(
    chunk: _Chunk,
    bits: Tensor,
    step: Tensor,
    group: Mapping[str, Any],
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update a chunk, given 32 random bits for each element, which are overwritten; the rest is as in ``update``."""
    wide_first = chunk.first.to(chunk.weight.dtype)
    wide_second = chunk.second.to(chunk.weight.dtype)
    adamw_kernel(
        [chunk.weight],
        [chunk.gradient.contiguous()],
        ([wide_first], [wide_second]),
        [step.clone()],  # it is counted up, and other chunks are of the same step
        group,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )
    # if nothing is to change, the moments are still numbers of bf16, which rounding keeps
    round_stochastically(wide_first, bits & _LOW, chunk.first)
    round_stochastically(wide_second, bits.bitwise_right_shift_(DROPPED_BITS).bitwise_and_(_LOW), chunk.second)


def random_bits(key: Tensor, place: Place, shape: torch.Size) -> Tensor:
    """Return 32 random bits for each element of a block, [rows, columns], as int32.

    Args:
        key: int32 scalar, from which they follow together with an element's row and column in the whole.
        place: where the block begins.
        shape: its rows and columns.
    """
    rows = _mixed(torch.arange(place.row, place.row + shape[0], dtype=torch.int32, device=key.device) + key)
    columns = torch.arange(place.column, place.column + shape[1], dtype=torch.int32, device=key.device)
    columns = _mixed(columns + _mixed(key ^ _COLUMNS))
    return _mixed(rows[:, None] + columns, rounds=1)  # the sums are random already, but not independent


def round_stochastically(wide: Tensor, bits: Tensor, narrow: Tensor) -> None:
    """Round numbers to bf16: added to what bf16 drops, random bits carry as often as its value says.

    Args:
        wide: the numbers, which are overwritten if they are fp32.
        bits: as many int32 numbers from 0 to 2**16 - 1.
        narrow: bf16, which is set to the result.
    """
    sums = wide.float().view(torch.int32).add_(bits)
    upper_halves = sums.view(torch.int16)[..., 1::2]  # the machines of PyTorch store the lower half first
    narrow.view(torch.int16).copy_(upper_halves)


def _chunks(parameter: Tensor, parts: tuple[Tensor, ...]) -> Iterator[_Chunk]:
    """Yield this rank's part of a parameter in chunks.

    Args:
        parameter: [columns], [rows, columns] or [experts, rows, columns].
        parts: this rank's elements of it, and of what belongs to them.
    """
    offsets = _offsets(parameter)
    first_row = offsets[-2] if parameter.ndim > 1 else 0
    for expert, matrices in enumerate(zip(*map(_matrices, parts), strict=True)):
        if parameter.ndim > 2:
            first_row = (offsets[0] + expert) * parameter.shape[1] + offsets[1]
        num_rows, num_columns = matrices[0].shape
        height = max(1, CHUNK_ELEMENTS // max(1, num_columns))
        for top in range(0, num_rows, height):
            place = Place(first_row + top, offsets[-1])
            yield _Chunk(place, *(matrix[top : top + height] for matrix in matrices))


def _matrices(part: Tensor) -> tuple[Tensor, ...]:
    if part.ndim > 2:
        return part.unbind()
    return (part,) if part.ndim == 2 else (part[None],)


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


def _key(seed: int, name: str) -> int:
    """Return a number of 32 bits for a parameter of a run."""
    return int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=4).digest(), "little", signed=True)


def _mixed(numbers: Tensor, rounds: int = 2) -> Tensor:
    """Replace int32 numbers by hashes of them."""
    for shift, factor in _MIXING[:rounds]:
        _fold(numbers, shift).mul_(factor)
    return _fold(numbers, _LAST_SHIFT)


def _fold(numbers: Tensor, shift: int) -> Tensor:
    """Add upper bits to lower ones; what int32 shifts in from above is the sign, and does not count."""
    return numbers.bitwise_xor_((numbers >> shift).bitwise_and_(2 ** (32 - shift) - 1))
