"""A Triton kernel for AdamW with moments in bf16, which reads and writes each number once: 20 bytes an element.

Import it only where it runs: it needs Triton, which torch brings along on CUDA. In separate kernels, the same update
moves 168 bytes an element. The arithmetic is fp32; see ``bf16_moments`` for the rounding and its random bits.
"""

# Shape suffixes: E experts, or 1; R rows, C columns of one matrix; I and J those of the tile of one program

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_core.training.random_bits import LAST_SHIFT, MIXING, OF_COLUMNS, BlockOrigin

TILE = 2048
"""Most elements of a program's tile."""
WIDEST_TILE = 1024
"""Most of its columns."""
NUM_WARPS = 4


@triton.jit
def _fold(numbers, SHIFT: tl.constexpr):
    return numbers ^ (numbers >> SHIFT)


@triton.jit
def _mixed(numbers, ROUNDS: tl.constexpr, MIXING: tl.constexpr, LAST_SHIFT: tl.constexpr):
    """Replace uint32 numbers by hashes of them."""
    for number in tl.static_range(ROUNDS):
        numbers = _fold(numbers, MIXING[number][0]) * tl.full((), MIXING[number][1] & 0xFFFFFFFF, tl.uint32)
    return _fold(numbers, LAST_SHIFT)


@triton.jit
def _widened(bits):
    """Return the fp32 numbers whose upper halves are given as int16."""
    return (bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(wide, random):
    """Round fp32 numbers to bf16, up with a probability that their dropped halves give; return the bits as int16."""
    sums = wide.to(tl.uint32, bitcast=True) + random
    return (sums >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit(do_not_specialize=("own_key", "first_row", "first_column"))
def adamw(
    weights,
    gradients,
    firsts,
    seconds,
    step,
    grad_scale,
    found_inf,
    own_key,
    lr,
    decay,
    epsilon,
    num_rows,
    num_columns,
    first_row,
    first_column,
    rows_of_an_expert,
    gradient_expert,
    gradient_row,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr,
    MIXING: tl.constexpr,
    LAST_SHIFT: tl.constexpr,
    OF_COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Update a tile of a matrix: the weights and both moments, whose bits are int16."""
    expert = tl.program_id(2).to(tl.int64)
    rows_I1 = (tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    columns_1J = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    num_changed = num_rows
    if found_inf is not None:
        num_changed = tl.where(tl.load(found_inf) == 0, num_rows, 0)
    is_inside_IJ = (rows_I1 < num_changed) & (columns_1J < num_columns)
    places_IJ = (expert * num_rows + rows_I1) * num_columns + columns_1J
    weight_IJ = tl.load(weights + places_IJ, mask=is_inside_IJ, other=0.0)
    first_IJ = _widened(tl.load(firsts + places_IJ, mask=is_inside_IJ, other=0))
    second_IJ = _widened(tl.load(seconds + places_IJ, mask=is_inside_IJ, other=0))
    of_gradient_IJ = expert * gradient_expert + rows_I1.to(tl.int64) * gradient_row + columns_1J
    gradient_IJ = tl.load(gradients + of_gradient_IJ, mask=is_inside_IJ, other=0.0)
    if grad_scale is not None:
        gradient_IJ = gradient_IJ / tl.load(grad_scale)

    before = tl.load(step)
    count = (before + 1).to(tl.float64)
    correction1 = (1 - tl.exp(count * LOG_BETA1)).to(tl.float32)
    correction2 = tl.sqrt((1 - tl.exp(count * LOG_BETA2)).to(tl.float32))
    weight_IJ -= lr * decay * weight_IJ
    first_IJ += (1 - BETA1) * (gradient_IJ - first_IJ)
    second_IJ = BETA2 * second_IJ + (1 - BETA2) * gradient_IJ * gradient_IJ
    weight_IJ -= lr / correction1 * first_IJ / (tl.sqrt(second_IJ) / correction2 + epsilon)

    key = _mixed(before.to(tl.int32).to(tl.uint32, bitcast=True), 2, MIXING, LAST_SHIFT)
    key += own_key.to(tl.uint32, bitcast=True)
    row_I1 = (first_row + expert.to(tl.int32) * rows_of_an_expert + rows_I1).to(tl.uint32, bitcast=True)
    column_1J = (first_column + columns_1J).to(tl.uint32, bitcast=True)
    row_I1 = _mixed(row_I1 + key, 2, MIXING, LAST_SHIFT)
    column_1J = _mixed(column_1J + _mixed(key ^ OF_COLUMNS, 2, MIXING, LAST_SHIFT), 2, MIXING, LAST_SHIFT)
    random_IJ = _mixed(row_I1 + column_1J, 1, MIXING, LAST_SHIFT)
    tl.store(weights + places_IJ, weight_IJ, mask=is_inside_IJ)
    tl.store(firsts + places_IJ, _rounded(first_IJ, random_IJ & 0xFFFF), mask=is_inside_IJ)
    tl.store(seconds + places_IJ, _rounded(second_IJ, random_IJ >> 16), mask=is_inside_IJ)


def update(
    parts: tuple[Tensor, ...],
    step: Tensor,
    group: Mapping[str, Any],
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    key: int,
    place: BlockOrigin,
    rows_of_an_expert: int,
) -> None:
    """Change a rank's part of a parameter and its moments in place.

    Args:
        parts: the weights, fp32, their gradient, and both moments, bf16: each [C], [R, C] or [E, R, C]. All but the
            gradient are contiguous.
        step: how often the parameter was updated, an fp32 scalar.
        group: the settings of its group.
        grad_scale: what the gradient is divided by; None for 1.
        found_inf: 1 if nothing is to change, else 0; None if the gradients are known to be finite.
        key: of the parameter's random bits.
        place: where the part begins in the whole parameter.
        rows_of_an_expert: rows of the whole parameter from the first of one expert to that of the next.
    """
    weight_ERC, gradient_ERC, first_ERC, second_ERC = (part.reshape(_as_matrices(part)) for part in parts)
    if gradient_ERC.stride(2) != 1:
        gradient_ERC = gradient_ERC.contiguous()
    num_experts, num_rows, num_columns = weight_ERC.shape
    if not weight_ERC.numel():
        return
    width = min(WIDEST_TILE, triton.next_power_of_2(num_columns))
    height = TILE // width
    beta1, beta2 = group["betas"]
    adamw[triton.cdiv(num_rows, height), triton.cdiv(num_columns, width), num_experts](
        weight_ERC,
        gradient_ERC,
        first_ERC.view(torch.int16),
        second_ERC.view(torch.int16),
        step,
        grad_scale,
        found_inf,
        key,
        group["lr"],
        group["weight_decay"],
        group["eps"],
        num_rows,
        num_columns,
        *place,
        rows_of_an_expert,
        gradient_ERC.stride(0),
        gradient_ERC.stride(1),
        BETA1=beta1,
        BETA2=beta2,
        LOG_BETA1=math.log(beta1),
        LOG_BETA2=math.log(beta2),
        MIXING=MIXING,
        LAST_SHIFT=LAST_SHIFT,
        OF_COLUMNS=OF_COLUMNS,
        HEIGHT=height,
        WIDTH=width,
        num_warps=NUM_WARPS,
    )


def _as_matrices(part: Tensor) -> tuple[int, ...]:
    return (1,) * (3 - part.ndim) + tuple(part.shape)
