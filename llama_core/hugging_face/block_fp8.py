"""Matrices in 8-bit floats with a scale for each block, as in files of DeepSeek-V3: found and checked without torch.

Beside ``X.weight``, the tensor ``X.weight_scale_inv`` has what the numbers of each block of 128 x 128 are multiplied
by; the last blocks of a row or a column may be smaller. Matrices that are not quantised stand without one.

Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2 (figure 7b); the names are those of transformers'
``integrations/finegrained_fp8.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llama_core.config.config_json.quantised import FP8_BLOCK
from llama_core.errors import WeightsError
from llama_core.hugging_face.weight_files import QuantisedTensor, StoredTensor

_SCALES = "_scale_inv"
_DTYPE = "F8_E4M3"
_AGAIN = "download it again, or use the unquantised model"


@dataclass(frozen=True)
class BlockFp8Tensor(QuantisedTensor):
    """Where such a matrix is stored; ``shape`` is [O, I]."""

    codes: StoredTensor
    """[O, I], F8_E4M3."""
    scales: StoredTensor
    """[O / 128, I / 128], both rounded up, F32."""


def join_block_fp8(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a model, those that store one matrix in blocks of 8-bit floats as one.

    Raises:
        WeightsError: if one lacks its numbers or its scales, or their dtypes or shapes do not fit.
    """
    joined = {name: tensor for name, tensor in tensors.items() if not name.endswith(_SCALES)}
    for name in tensors.keys() - joined.keys():
        matrix = name.removesuffix(_SCALES)
        if matrix not in joined:
            raise WeightsError(f"{tensors[name].file}: {matrix} is missing, but its scales are there; {_AGAIN}")
        joined[matrix] = _joined(matrix, joined[matrix], tensors[name])
    for name, tensor in joined.items():
        if tensor.dtype == _DTYPE and not isinstance(tensor, BlockFp8Tensor):
            raise WeightsError(f"{tensor.file}: {name}{_SCALES} is missing; {_AGAIN}")
    return joined


def _joined(matrix: str, codes: StoredTensor, scales: StoredTensor) -> BlockFp8Tensor:
    if codes.dtype != _DTYPE or len(codes.shape) != 2:
        given = f"{codes.dtype} {list(codes.shape)}"
        raise WeightsError(f"{codes.file}: {matrix} is {given}, not a matrix in {_DTYPE}, but has scales; {_AGAIN}")
    blocks = tuple(-(-size // FP8_BLOCK) for size in codes.shape)
    if (scales.dtype, scales.shape) != ("F32", blocks):
        raise WeightsError(
            f"{scales.file}: {matrix}{_SCALES} is {scales.dtype} {list(scales.shape)} instead of F32 {list(blocks)}, "
            f"for the numbers in {codes.file.name}; {_AGAIN}"
        )
    return BlockFp8Tensor(codes.file, "FP8", codes.shape, codes.start, codes=codes, scales=scales)
