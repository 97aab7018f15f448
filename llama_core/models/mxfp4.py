"""The numbers of matrices in MXFP4: codes of four bits in blocks of 32, each with a power of two as its scale.

Source: Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.3.3 and 5.4.1.
"""

# Shape suffixes: O rows of a matrix, I its columns, N blocks of a row

from collections.abc import Callable

import torch
from torch import Tensor

from llama_core.hugging_face.mxfp4 import Mxfp4Tensor
from llama_core.hugging_face.weight_files import StoredTensor

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEVELS = (*_SIZES, *(-size for size in _SIZES))
"""The numbers of the 16 codes: a sign, two bits of exponent, and one of mantissa."""
_BIAS = 127
"""What is added to the exponents of scales in files."""


def stored_numbers(stored: Mxfp4Tensor, view: Callable[[StoredTensor], Tensor]) -> Tensor:
    """Return the numbers of one matrix, [I, O] with outputs first in memory, in fp32; bf16 holds them exactly, too.

    Args:
        stored: where its codes and scales are.
        view: returns the bytes of a stored tensor.
    """
    bytes_ONK = view(stored.codes)
    exponents_ON = view(stored.scales).to(torch.int32) - _BIAS
    codes_ON = torch.stack((bytes_ONK & 15, bytes_ONK >> 4), dim=-1).flatten(-2)
    numbers_ONI = torch.tensor(LEVELS)[codes_ON.to(torch.int32)]
    return torch.ldexp(numbers_ONI, exponents_ON[..., None]).flatten(-2).mT
