"""What a gated feed-forward, or an expert in its place, makes of its two projections before the last one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llama_core.config.model_spec import SWIGLU_LIMIT, SWIGLU_SLOPE, Activation


class _ClampedSwiGLU(torch.autograd.Function):
    """See ``clamped_swiglu``. It keeps its two inputs; autograd would keep six tensors of that size."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        low = gate.clamp(max=SWIGLU_LIMIT)
        low.mul_(torch.sigmoid_(low * SWIGLU_SLOPE))
        return up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1).mul_(low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        beyond_gate = gate > SWIGLU_LIMIT
        beyond_up = up.abs() > SWIGLU_LIMIT
        low = gate.clamp(max=SWIGLU_LIMIT)
        share = torch.sigmoid_(low * SWIGLU_SLOPE)
        grad_up = (low * share).mul_(grad).masked_fill_(beyond_up, 0)
        # the derivative of low * share: share * (1 + slope * low * (1 - share))
        slopes = low.mul_(SWIGLU_SLOPE).mul_(1 - share).add_(1).mul_(share)
        slopes.mul_(up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1))
        return slopes.mul_(grad).masked_fill_(beyond_gate, 0), grad_up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``(up + 1) * gate * sigmoid(slope * gate)``, with the gate at most at a limit, and up within it both ways.

    What is clamped gets no gradient.

    Source: OpenAI 2025, arXiv:2508.10925, section 2.2; equal to transformers' ``GptOssExperts``.
    """
    out: Tensor = _ClampedSwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


OF_GATE: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""What may be made of the gate, to multiply up with it. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section
2."""
OF_BOTH: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {"clamped_swiglu": clamped_swiglu}
"""What may be made of gate and up at once."""


def gated(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return what an activation makes of gate and up."""
    if activation in OF_GATE:
        return OF_GATE[activation](gate) * up
    return OF_BOTH[activation](gate, up)
