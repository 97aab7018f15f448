"""PiSSA: adapters begin as the principal part of their matrix, and what is left of the matrix is frozen.

Both follow from the matrix alone, so they are computed whenever its weights are read, and stored nowhere. In fp64 and
from a fixed start they are the same on every rank and device, but for rounding.

Source: Meng et al. 2024, arXiv:2404.02948, sections 3 and 4; the power iterations are those of Halko et al. 2011,
arXiv:0909.4061, algorithm 4.4.
"""

# Shape suffixes: I columns of a matrix, O its rows, R the rank

from typing import NamedTuple

import torch
from torch import Tensor

from llama_core.adapters.lora import A, B
from llama_core.config.strategy import LoRA

POWER_ITERATIONS = 16
"""PEFT's ``pissa_niter_16``. The subspace is exactly as wide as the rank: to cut one down at a small gap between two
singular values would let rounding decide what is in it."""


class Principal(NamedTuple):
    """The principal part of a matrix, as the initial weights of its adapter, in fp64."""

    a_RI: Tensor
    b_OR: Tensor

    @property
    def by_name(self) -> dict[str, Tensor]:
        """Both, by the names of the adapter's weights."""
        return {A.name: self.a_RI, B.name: self.b_OR}


def principal(matrix_OI: Tensor, lora: LoRA) -> Principal:
    """Return A and B of which ``scale * B A`` is about the best approximation of its rank to a matrix.

    Args:
        matrix_OI: the whole matrix.
        lora: the adapters.
    """
    wide_OI = matrix_OI.double()
    generator = torch.Generator().manual_seed(0)
    start_IR = torch.randn(wide_OI.shape[1], lora.lora_rank, generator=generator, dtype=torch.float64)
    right_IR = start_IR.to(wide_OI.device)
    for _ in range(POWER_ITERATIONS):
        right_IR = torch.linalg.qr(wide_OI.mT @ (wide_OI @ right_IR)).Q
    left_OR = torch.linalg.qr(wide_OI @ right_IR).Q
    turn_RR, values_R, right_RI = torch.linalg.svd(left_OR.mT @ wide_OI, full_matrices=False)
    largest_R1 = right_RI.gather(1, right_RI.abs().argmax(dim=1, keepdim=True))
    signs_R1 = torch.where(largest_R1 < 0, -1.0, 1.0)  # a library is free to choose them
    roots_R = (values_R / lora.scale).sqrt()
    return Principal(roots_R[:, None] * signs_R1 * right_RI, left_OR @ turn_RR * signs_R1.mT * roots_R)


def rest(matrix_OI: Tensor, part: Principal, lora: LoRA) -> Tensor:
    """Return what is left of a matrix without its principal part, in fp64."""
    return torch.addmm(matrix_OI.double(), part.b_OR, part.a_RI, alpha=-lora.scale)


def over_whole(name: str, trained: Tensor, matrix_OI: Tensor, lora: LoRA) -> Tensor:
    """Return a weight of the adapter of twice the rank that gives over the whole matrix what a trained one gives.

    ``rest + s B A = W + s [B, -B0] [A; A0]``, where A0 and B0 are the initial values.

    Args:
        name: the weight's name in the adapter.
        trained: this weight as it was trained.
        matrix_OI: the whole matrix.
        lora: the adapters.
    """
    part = principal(matrix_OI, lora)
    if name == A.name:
        return torch.cat([trained, part.a_RI.to(trained.dtype)])
    return torch.cat([trained, -part.b_OR.to(trained.dtype)], dim=1)
