"""Safetensors files, alone or sharded with an index: read and check their headers without torch.

A file holds the length of its header in 8 bytes, little endian; the header, in JSON; then the bytes of all tensors.

Source: https://github.com/huggingface/safetensors, "Format"; the index is transformers'.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_core.config.models import ModelSpec, name_in_mixture
from llama_core.errors import WeightsError
from llama_core.records.files import DAMAGE, open_file, read_file

WHOLE = "model.safetensors"
"""The weights file of an unsharded model."""
INDEX = "model.safetensors.index.json"
"""The file that says where each weight of a sharded model is."""
MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the dtypes that we read, by the format's names."""
ELEMENT_BYTES = FLOAT_BYTES | {"U8": 1}
"""The same, and that of the parts of quantised matrices."""
_STACKED = {"experts.gate_up_proj": ("w1", "w3"), "experts.down_proj": ("w2",)}
"""Tensors that hold the matrices of all experts, with the names of the matrices that they hold for each expert."""
_AGAIN = "download it again"
PICKLED = ("*.bin", "*.pth", "*.pt")
"""Patterns of weights that can run code when they are read."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored."""

    file: Path
    dtype: str
    """The format's name for it, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the model in ``folder``. Reads only the headers of its files.

    Raises:
        WeightsError: if there is no model, only part of one, or another weights file beside it.
    """
    files = {path.name for path in folder.glob("*.safetensors")}
    index = folder / INDEX
    if not index.exists():
        _check_alone(folder, files)
        return read_header(folder / WHOLE)
    placed = weight_map(index)
    listed = set(placed.values())
    for name in sorted(listed):
        if not (folder / name).exists():  # or is a dangling link
            raise WeightsError(f"{INDEX} in {folder} names {name}, which is not there; download it")
    for name in sorted(files - listed):
        raise WeightsError(f"{folder} holds {name}, which {INDEX} does not name; move it elsewhere")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(listed):
        for name, tensor in read_header(folder / file).items():
            if placed.get(name) != file:
                raise WeightsError(f"{folder / file} holds {name}, which {INDEX} does not place there; {_AGAIN}")
            tensors[name] = tensor
    for name in placed.keys() - tensors.keys():
        raise WeightsError(f"{folder / placed[name]} does not hold {name}, which {INDEX} places there; {_AGAIN}")
    return tensors


def per_expert(tensors: Mapping[str, StoredTensor], spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return a mixture's tensors with those of all experts cut into the matrices of each, as its files name them.

    transformers 5 stacks them in memory, and in the files too with ``save_original_format=False``.
    """
    cut: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".mlp.")
        if part == "gate.weight":
            cut[name_in_mixture(f"{layer}.block_sparse_moe.gate.weight", spec)] = tensor
        elif part in _STACKED and len(tensor.shape) == 3 and tensor.dtype in FLOAT_BYTES:
            num_experts, rows, columns = tensor.shape
            matrices = [(expert, matrix) for expert in range(num_experts) for matrix in _STACKED[part]]
            shape = (rows // len(_STACKED[part]), columns)
            for place, (expert, matrix) in enumerate(matrices):
                start = tensor.start + place * math.prod(shape) * FLOAT_BYTES[tensor.dtype]
                path = f"{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"
                cut[name_in_mixture(path, spec)] = replace(tensor, shape=shape, start=start)
        else:
            cut[name] = tensor
    return cut


def _check_alone(folder: Path, files: set[str]) -> None:
    """Refuse a folder without an index unless it holds exactly the one file of an unsharded model."""
    if files == {WHOLE}:
        return
    if files:
        raise WeightsError(
            f"{folder} holds {', '.join(sorted(files)[:3])} but no {INDEX}; download it, or keep only {WHOLE} there"
        )
    for pattern in PICKLED:
        for path in sorted(folder.glob(pattern)):
            raise WeightsError(
                f"{folder} holds pickled weights ({path.name}), which can run code when they are read; if you trust "
                "them, convert them with save_pretrained(safe_serialization=True)"
            )
    raise WeightsError(
        f"{folder} holds no weights: neither {WHOLE}, nor {INDEX} with its files, nor a run of training-infra with a "
        "checkpoint; name a folder that does"
    )


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor of a sharded model, which is a name without a folder.

    Raises:
        WeightsError: if the index cannot be read, or names anything else.
    """
    try:
        placed = dict(json.loads(read_file(index))["weight_map"])
        if not all(isinstance(text, str) for text in (*placed, *placed.values())):
            raise TypeError("not names")
    except (OSError, *DAMAGE) as error:
        raise WeightsError(f"cannot read {index}: {error!r}; {_AGAIN}") from None
    for file in set(placed.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(f"{index} names {file!r}, which is not the name of a safetensors file; {_AGAIN}")
    return placed


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a safetensors file.

    Raises:
        WeightsError: if the file is incomplete or not in this format.
    """
    try:
        with open_file(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            prefix = opened.read(8)
            length = int.from_bytes(prefix, "little")
            text = opened.read(length) if 8 + length <= size and length <= MOST_HEADER_BYTES else b""
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror or error}") from None
    if prefix == b"version ":
        raise WeightsError(f"{file} is a Git LFS pointer without the weights; run git lfs pull")
    if 8 + length <= size and length > MOST_HEADER_BYTES:
        raise WeightsError(
            f"{file} has a header of {length:,} bytes, more than the {MOST_HEADER_BYTES:,} of the format; {_AGAIN}"
        )
    if not text:
        raise WeightsError(f"{file} has {size:,} bytes, fewer than its header; {_AGAIN}")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, 8 + length, entry) for name, entry in header.items()}
        expected = 8 + length + _end_of_data([entry["data_offsets"] for entry in header.values()])
    except DAMAGE:
        raise WeightsError(f"{file} is not a safetensors file; {_AGAIN}") from None
    if size != expected:
        raise WeightsError(f"{file} has {size:,} of {expected:,} bytes; {_AGAIN}")
    return tensors


def _stored(file: Path, first: int, entry: Mapping[str, Any]) -> StoredTensor:
    dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("not sizes")
    if dtype in ELEMENT_BYTES and end - begin != math.prod(shape) * ELEMENT_BYTES[dtype]:
        raise ValueError("bytes and shape disagree")
    return StoredTensor(file, dtype, shape, first + begin)


def _end_of_data(offsets: Sequence[tuple[int, int]]) -> int:
    """Return the end of the last tensor; tensors neither overlap nor leave a gap."""
    reached = 0
    for begin, end in sorted(offsets):
        if begin != reached or end < begin:
            raise ValueError("a gap or an overlap")
        reached = end
    return reached


def new_header(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> tuple[bytes, dict[str, int]]:
    """Return the length and header of a file of tensors of one dtype, and the offset of each tensor in the file.

    Args:
        shapes: shapes of the tensors, in the order of their bytes.
        dtype: the format's name for it.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without this
    begins = {}
    end = 0
    for name, shape in shapes.items():
        begins[name] = end
        end = end + math.prod(shape) * FLOAT_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begins[name], end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns every tensor to its element size
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: first + begin for name, begin in begins.items()}
