"""Matrices that bitsandbytes has quantised to NF4, in files of transformers: found and checked without torch.

A matrix is stored as its codes, two in a byte; the scale of every block (``absmax``); what codes stand for
(``quant_map``); and a JSON of its shape (``quant_state``). With double quantisation, scales are codes of eight bits,
and ``nested_absmax``, ``nested_quant_map`` and the JSON's ``nested_offset`` say what these stand for.

Source: bitsandbytes 0.50, ``QuantState.as_dict``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llama_core.config.nf4 import BLOCK, num_groups
from llama_core.errors import WeightsError, as_clause
from llama_core.hugging_face.weight_files import ELEMENT_BYTES, QuantisedTensor, StoredTensor
from llama_core.records.files import open_file

_NF4 = "NF4"
"""The dtype of a quantised matrix, beside the format's own names."""
_NUM_CODES = 16
_NUM_SCALE_CODES = 256
_STATE = "quant_state.bitsandbytes__"
_TENSORS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_MAX_STATE_BYTES = 4096
"""Many times what bitsandbytes writes."""
_AGAIN = "download it again, or use the unquantised model"


@dataclass(frozen=True)
class NestedScales:
    """What the codes of scales stand for, with double quantisation."""

    groups: StoredTensor
    """The number of every group of blocks, fp32."""
    levels: StoredTensor
    """The numbers of the 256 codes, fp32."""
    offset: float
    """What is added to every scale."""


@dataclass(frozen=True)
class Nf4Tensor(QuantisedTensor):
    """Where the parts of a matrix in NF4 are stored."""

    codes: StoredTensor
    """Two in a byte, rows first."""
    levels: StoredTensor
    """The numbers of the 16 codes, fp32."""
    scales: StoredTensor
    """The scale of every block in fp32, or its code."""
    nested: NestedScales | None
    """None without double quantisation."""


_Size = Annotated[int, Field(ge=1)]


class _State(BaseModel):
    """What is read of bitsandbytes' JSON."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    quant_type: Literal["nf4"]
    blocksize: Literal[64]
    shape: tuple[_Size, _Size]
    nested_blocksize: Literal[256] | None = None
    nested_offset: float | None = None


def join_nf4(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a model, those that store one matrix in NF4 as one. Reads only headers and its JSON.

    Raises:
        WeightsError: if a matrix is incomplete, or quantised in another way.
    """
    joined = {}
    parts_of: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        matrix, part = _split(name)
        if part:
            parts_of.setdefault(matrix, {})[part] = tensor
        else:
            joined[name] = tensor
    for matrix, parts in parts_of.items():
        joined[matrix] = _joined(matrix, joined.get(matrix), parts)
    return joined


def _split(name: str) -> tuple[str, str]:
    """Return the matrix that a tensor belongs to and the part of it that it is; no part if it is no such tensor."""
    matrix, is_state, kind = name.partition(f".{_STATE}")
    if is_state:
        return matrix, _STATE + kind
    matrix, _, part = name.rpartition(".")
    return (matrix, part) if part in _TENSORS else (name, "")


def _joined(matrix: str, codes: StoredTensor | None, parts: Mapping[str, StoredTensor]) -> Nf4Tensor:
    file = next(iter(parts.values())).file
    if codes is None:
        raise WeightsError(f"{file} holds {', '.join(sorted(parts))} of {matrix}, but not its codes; {_AGAIN}")
    state = _state(matrix, file, parts)
    is_nested = "nested_absmax" in parts
    if is_nested and (state.nested_offset is None or state.nested_blocksize is None):
        raise WeightsError(f"{file}: the quant_state of {matrix} lacks nested_offset or nested_blocksize; {_AGAIN}")
    elements = math.prod(state.shape)
    if elements % BLOCK:
        raise WeightsError(f"{file}: {matrix} has {elements:,} numbers, which are no whole blocks of 64; {_AGAIN}")
    if math.prod(codes.shape) * ELEMENT_BYTES.get(codes.dtype, 0) != elements // 2:
        raise WeightsError(
            f"{codes.file}: {matrix} has codes in {codes.dtype} {list(codes.shape)}, but its {elements:,} numbers need "
            f"{elements // 2:,} bytes; {_AGAIN}"
        )
    _check_parts(matrix, file, parts, elements // BLOCK, is_nested=is_nested)
    nested = None
    if is_nested:
        assert state.nested_offset is not None
        nested = NestedScales(parts["nested_absmax"], parts["nested_quant_map"], state.nested_offset)
    return Nf4Tensor(
        codes.file,
        _NF4,
        state.shape,
        codes.start,
        codes=StoredTensor(codes.file, "U8", (elements // 2,), codes.start),
        levels=parts["quant_map"],
        scales=parts["absmax"],
        nested=nested,
    )


def _state(matrix: str, file: Path, parts: Mapping[str, StoredTensor]) -> _State:
    """Return the JSON of a matrix.

    Raises:
        WeightsError: if it has none, or one that is not for NF4 as it can be read.
    """
    kinds = [part.removeprefix(_STATE) for part in parts if part.startswith(_STATE)]
    if not kinds:
        raise WeightsError(f"{file} holds {', '.join(sorted(parts))} of {matrix}, but no quant_state; {_AGAIN}")
    if kinds != ["nf4"]:
        raise WeightsError(
            f"{file}: {matrix} is quantised to {', '.join(map(repr, kinds))}, and only nf4 can be read; use the "
            "unquantised model"
        )
    stored = parts[f"{_STATE}nf4"]
    num_bytes = math.prod(stored.shape)
    if stored.dtype != "U8" or num_bytes > _MAX_STATE_BYTES:
        raise WeightsError(
            f"{stored.file}: the quant_state of {matrix} is {stored.dtype} {list(stored.shape)}, not at most "
            f"{_MAX_STATE_BYTES} bytes; {_AGAIN}"
        )
    try:
        with open_file(stored.file) as opened:
            opened.seek(stored.start)
            return _State.model_validate_json(opened.read(num_bytes))
    except OSError as error:
        raise WeightsError(f"cannot read {stored.file}: {error.strerror or error}") from None
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, detail["loc"]))
        value = f"={detail['input']}" if isinstance(detail["input"], int) else ""
        raise WeightsError(
            f"{stored.file}: the quant_state of {matrix} cannot be read: {f'{key}{value}: ' if key else ''}"
            f"{as_clause(detail['msg'])}; {_AGAIN}"
        ) from None


def _check_parts(
    matrix: str, file: Path, parts: Mapping[str, StoredTensor], num_blocks: int, *, is_nested: bool
) -> None:
    expected = {
        f"{_STATE}nf4": ("U8", parts[f"{_STATE}nf4"].shape),
        "absmax": ("U8" if is_nested else "F32", (num_blocks,)),
        "quant_map": ("F32", (_NUM_CODES,)),
    }
    if is_nested:
        expected["nested_absmax"] = ("F32", (num_groups(num_blocks),))
        expected["nested_quant_map"] = ("F32", (_NUM_SCALE_CODES,))
    for part in sorted(expected.keys() ^ parts.keys()):
        problem = "is missing" if part in expected else "is unknown"
        raise WeightsError(f"{file}: {matrix}.{part} {problem}; {_AGAIN}")
    for part, (dtype, shape) in expected.items():
        stored = parts[part]
        if (stored.dtype, stored.shape) != (dtype, shape):
            raise WeightsError(
                f"{stored.file}: {matrix}.{part} is {stored.dtype} {list(stored.shape)} instead of {dtype} "
                f"{list(shape)}; {_AGAIN}"
            )
