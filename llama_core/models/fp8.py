"""Matrix products in fp8: both operands are rounded to e4m3, each row with a scale of its own.

A row is what a product sums over, so the three products of a linear layer (its output and both gradients) each round
their operands anew, gradients to e4m3 too: with a scale for every row, its one more bit of precision is worth more than
the range of e5m2. A scale is a power of two, so scaling loses nothing, and only the rounding to four significant bits
does. The sums are fp32. What is kept for the backward is in bf16, as without fp8.

``torch._scaled_mm`` multiplies: ``torch.compile``, DTensor, selective recomputation and torch's FLOP counter know this
operator, and its public form, ``torch.nn.functional.scaled_mm``, has no FLOP formula. On CUDA it needs sm89 or newer; a
CPU computes the same rounded products, for tests.

Source: Micikevicius et al. 2022, arXiv:2209.05433, for the formats.
"""

# Shape suffixes: M, N rows of the operands and K their columns; T tokens (B * S), I columns of a weight, O its rows

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from llama_core.models.cast_weights import in_place_of
from llama_core.models.layers import BLOCK_MATRICES, Linear, multiply_own_part

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
SMALLEST_PEAK = 2.0**-100
"""A row whose largest number is smaller, such as one of zeros, is scaled as if it were this: no scale overflows."""
_EXPONENT_BITS = 0x7F800000


def rounded(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in fp8, and the number to multiply each row by, fp32, [M, 1]; NaN and infinity become NaN."""
    peak_M1 = torch.linalg.vector_norm(x_MK, torch.inf, dim=-1, keepdim=True)
    scale_M1 = LARGEST / peak_M1.float().clamp(min=SMALLEST_PEAK)
    scale_M1 = scale_M1.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)  # down to a power of two
    return (x_MK * scale_M1.to(x_MK.dtype)).to(FP8).contiguous(), scale_M1.reciprocal()


def scaled_product(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """Return ``left_MK @ right_NK.T`` of the operands rounded to fp8, in their own dtype."""
    return product_of_rounded(rounded(left_MK), rounded(right_NK), left_MK.dtype)


def product_of_rounded(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the product of two results of ``rounded``, the second one transposed, in ``dtype``."""
    (left_MK, left_M1), (right_NK, right_N1) = left, right
    # CUDA's kernel for a scale per row is fast only if it adds up within the tensor cores
    out_MN: Tensor = torch._scaled_mm(
        left_MK, right_NK.t(), scale_a=left_M1, scale_b=right_N1.t(), out_dtype=dtype, use_fast_accum=True
    )
    return out_MN


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight_OI if needs_x else None)
        return scaled_product(x.flatten(0, -2), weight_OI).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_TO = grad.flatten(0, -2)
        grad_x = None
        grad_weight_OI = None
        if weight_OI is not None:
            grad_x = scaled_product(grad_TO, weight_OI.t()).view(*grad.shape[:-1], -1)
        if x is not None:
            grad_weight_OI = scaled_product(grad_TO.t(), x.flatten(0, -2).t())
        return grad_x, grad_weight_OI


def multiply(x: Tensor, weight_OI: Tensor, cast_OI: Tensor | None) -> Tensor:
    """Return ``x @ weight.T`` in the dtype of ``x``: the product in fp8 of a ``Linear``.

    Tensor-parallel ranks each round and multiply their own part, so that no scale has to be agreed on.
    """
    if isinstance(weight_OI, DTensor):
        return multiply_own_part(multiply, x, weight_OI, cast_OI)
    cast_to_x_OI = weight_OI.to(x.dtype) if cast_OI is None else in_place_of(weight_OI, cast_OI)
    out: Tensor = _ScaledLinear.apply(x, cast_to_x_OI)  # type: ignore[no-untyped-call]
    return out


def use_fp8(blocks: nn.Module) -> None:
    """Make the attention and feed-forward matrices of some blocks multiply in fp8.

    Experts, the router, adapters, the embedding and the head multiply as without fp8.
    """
    for path, module in blocks.named_modules():
        if isinstance(module, Linear) and path.rpartition(".")[2] in BLOCK_MATRICES:
            module.multiply = multiply
