"""Matrices of experts in MXFP4, in the files of GPT-OSS: found and checked without torch.

The matrices of all experts are two tensors: codes of four bits in blocks of 32, two codes in a byte, and the exponent
of every block's scale. A block is part of the row of one output, while unquantised files of these models have columns
before rows.

Source: Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification" 1.0, section 5.4; names and order are
those of transformers' ``integrations/mxfp4.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llama_core.errors import WeightsError
from llama_core.hugging_face.weight_files import QuantisedTensor, StoredTensor

BLOCK = 32
"""Numbers with one scale."""
_BLOCKS = "_blocks"
_SCALES = "_scales"
_AGAIN = "download it again, or use the unquantised model"


@dataclass(frozen=True)
class Mxfp4Tensor(QuantisedTensor):
    """Where such matrices are stored; ``shape`` is [E, I, O], as in unquantised files, or [I, O] for one."""

    codes: StoredTensor
    """[E, O, I / 32, 16], U8: a byte has the code of an even place in its lower half, and that of the next above it."""
    scales: StoredTensor
    """[E, O, I / 32], U8: an exponent of two, plus 127."""

    @property
    def matrices(self) -> tuple["Mxfp4Tensor", ...]:
        """The matrix of each expert."""
        codes, scales = (stored.pieces(stored.shape[0], stored.shape[1:]) for stored in (self.codes, self.scales))
        return tuple(
            replace(self, shape=self.shape[1:], codes=own_codes, scales=own_scales)
            for own_codes, own_scales in zip(codes, scales, strict=True)
        )


def join_mxfp4(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a model, those that store matrices in MXFP4 as one, under the name of the unquantised ones.

    Raises:
        WeightsError: if one lacks its codes or its scales, or their dtypes or shapes do not fit.
    """
    joined = dict(tensors)
    for name in tensors:
        matrix = name.removesuffix(_SCALES).removesuffix(_BLOCKS)
        if matrix == name or matrix in joined:
            continue
        joined[matrix] = _joined(matrix, joined.pop(f"{matrix}{_BLOCKS}", None), joined.pop(f"{matrix}{_SCALES}", None))
    return joined


def _joined(matrix: str, codes: StoredTensor | None, scales: StoredTensor | None) -> Mxfp4Tensor:
    if codes is None or scales is None:
        found, missing = (scales, _BLOCKS) if codes is None else (codes, _SCALES)
        assert found is not None
        raise WeightsError(f"{found.file}: {matrix}{missing} is missing; {_AGAIN}")
    for part, stored, num_dims in ((_BLOCKS, codes, 4), (_SCALES, scales, 3)):
        if stored.dtype != "U8" or len(stored.shape) != num_dims:
            given = f"{stored.dtype} {list(stored.shape)}"
            raise WeightsError(f"{stored.file}: {matrix}{part} is {given}, not U8 in {num_dims} dims; {_AGAIN}")
    experts, rows, blocks = scales.shape
    if codes.shape != (*scales.shape, BLOCK // 2):
        raise WeightsError(
            f"{codes.file}: {matrix}{_BLOCKS} is {list(codes.shape)} instead of {[*scales.shape, BLOCK // 2]}, for the "
            f"scales in {scales.file.name}; {_AGAIN}"
        )
    shape = (experts, blocks * BLOCK, rows)
    return Mxfp4Tensor(codes.file, "MXFP4", shape, codes.start, codes=codes, scales=scales)
