"""The numbers of matrices in 8-bit floats with a scale for each block."""

# Shape suffixes: O rows of a matrix, I its columns

from collections.abc import Callable

import torch
from torch import Tensor

from llama_core.config.config_json.quantised import FP8_BLOCK
from llama_core.hugging_face.block_fp8 import BlockFp8Tensor
from llama_core.hugging_face.weight_files import StoredTensor


def stored_numbers(stored: BlockFp8Tensor, view: Callable[[StoredTensor], Tensor]) -> Tensor:
    """Return the numbers of one matrix, [O, I] in fp32.

    Args:
        stored: where its codes and scales are.
        view: returns a stored tensor.
    """
    numbers_OI = view(stored.codes).to(torch.float32)
    scales = view(stored.scales)
    # a row of blocks at a time: scales as wide as the matrix would take as much memory as its numbers
    for rows_I, scales_of_row in zip(torch.split(numbers_OI, FP8_BLOCK), scales, strict=True):
        rows_I.mul_(scales_of_row.repeat_interleave(FP8_BLOCK)[: rows_I.shape[1]])
    return numbers_OI
