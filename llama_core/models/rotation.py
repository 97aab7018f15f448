"""What a layer makes of positions: the rotary embedding or, in layers without it, a factor on queries."""

# Shape suffixes: B batch, S sequence, N query or key heads, H head dim, R half of a head (one entry per rotated pair)

import math
from typing import NamedTuple

import torch
from torch import Tensor

from llama_core.config.rope import LinearScaling, QueryTemperature, RopePairs, RotaryEmbedding, YarnScaling


class Rotation(NamedTuple):
    """Cosines and sines of the rotary embedding, fp32 or wider, broadcastable to [B, S, 1, R]."""

    cos: Tensor
    sin: Tensor


Positional = Rotation | Tensor | None
"""What a layer knows of positions: a rotation; without one, a factor on each query, [B, S, 1, 1], or nothing."""


def rope_frequencies(rope: RotaryEmbedding, device: torch.device | None = None) -> Tensor:
    """Return the angle per position of every rotated pair, in radians: fp32, [R].

    ``rope.scaling``, if set, says how they are stretched.

    Source: Su et al. 2021, arXiv:2104.09864; for the scaling see the classes of ``config/rope.py``.
    """
    exponents_R = torch.arange(0, rope.head_dim, 2, dtype=torch.float32, device=device) / rope.head_dim
    plain_R = 1.0 / rope.theta**exponents_R
    scaling = rope.scaling
    if scaling is None:
        return plain_R
    if isinstance(scaling, LinearScaling):
        return plain_R / scaling.factor
    if isinstance(scaling, YarnScaling):
        first, last = scaling.blend(rope.head_dim, rope.theta)
        slowed_R = (torch.arange(len(plain_R), dtype=torch.float32, device=device) - first) / (last - first)
        return torch.lerp(plain_R, plain_R / scaling.factor, slowed_R.clamp(0.0, 1.0))
    turns_R = plain_R * (scaling.original_context / (2 * math.pi))
    kept_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(plain_R / scaling.factor, plain_R, kept_R.clamp(0.0, 1.0))


def rotation(rope: RotaryEmbedding, positions_BS: Tensor, dtype: torch.dtype = torch.float32) -> Rotation:
    """Return the rotation of every token, computed in fp32; ``positions_BS`` counts from 0 (B may be 1)."""
    angles_BS1R = positions_BS[:, :, None, None].float() * rope_frequencies(rope, positions_BS.device)
    cos_BS1R = angles_BS1R.cos()
    sin_BS1R = angles_BS1R.sin()
    if isinstance(rope.scaling, YarnScaling):
        cos_BS1R *= rope.scaling.amplitude
        sin_BS1R *= rope.scaling.amplitude
    return Rotation(cos_BS1R.to(dtype), sin_BS1R.to(dtype))


def positional(
    kind: RotaryEmbedding | QueryTemperature | None, positions_BS: Tensor, dtype: torch.dtype = torch.float32
) -> Positional:
    """Return what a layer makes of the positions of every token in its document, which count from 0 (B may be 1)."""
    if kind is None:
        return None
    if isinstance(kind, RotaryEmbedding):
        return rotation(kind, positions_BS, dtype)
    steps_BS11 = torch.floor((positions_BS[:, :, None, None].float() + 1) / kind.floor)
    return (1 + kind.scale * steps_BS11.log1p()).to(dtype)


def rotate(x_BSNH: Tensor, rotary: Rotation, pairs: RopePairs = "halves") -> Tensor:
    """Rotate pairs of numbers of every head; computed in the rotation's dtype.

    Args:
        x_BSNH: queries or keys.
        rotary: the rotation of every token.
        pairs: (i, i + H/2), as Hugging Face lays out most models, or (2i, 2i + 1). The results of both have the first
            of each pair in their first half: scores do not show the order, which queries and keys share.
    """
    wide_BSNH = x_BSNH.to(rotary.cos.dtype)
    if pairs == "adjacent":
        first_BSNR, second_BSNR = torch.unflatten(wide_BSNH, -1, (-1, 2)).unbind(-1)
    else:
        first_BSNR, second_BSNR = wide_BSNH.chunk(2, dim=-1)
    rotated_BSNH = torch.cat(
        (
            first_BSNR * rotary.cos - second_BSNR * rotary.sin,
            second_BSNR * rotary.cos + first_BSNR * rotary.sin,
        ),
        dim=-1,
    )
    return rotated_BSNH.to(x_BSNH.dtype)


def with_temperature(q_BSNH: Tensor, factor_BS11: Tensor | None) -> Tensor:
    """Return queries times a factor each, in their own dtype; unchanged without one."""
    return q_BSNH if factor_BS11 is None else (q_BSNH.to(factor_BS11.dtype) * factor_BS11).to(q_BSNH.dtype)
