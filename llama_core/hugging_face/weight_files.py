"""Safetensors files, alone or sharded with an index: read and check their headers without torch.

A file holds the length of its header in 8 bytes, little endian; the header, in JSON; then the bytes of all tensors.

Source: https://github.com/huggingface/safetensors, "Format"; the index is transformers'.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_core.config.model_weights import name_in_layer
from llama_core.config.models import ModelSpec
from llama_core.errors import WeightsError
from llama_core.records.files import DAMAGE, open_file, read_file

WHOLE = "model.safetensors"
"""The weights file of an unsharded model."""
INDEX = "model.safetensors.index.json"
"""The file that says where each weight of a sharded model is."""
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the dtypes that we read, by the format's names."""
ELEMENT_BYTES = FLOAT_BYTES | {"U8": 1, "F8_E4M3": 1}
"""The same, and that of the parts of quantised matrices."""
_STACKED = {"experts.gate_up_proj": ("w1", "w3"), "experts.down_proj": ("w2",)}
"""Tensors that hold the matrices of all experts, with the names of the matrices that they hold for each expert."""
_AGAIN = "download it again"
_COMPARED_AT_ONCE = 1 << 24
"""Bytes of two tensors that are in memory at a time."""
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

    def pieces(self, number: int, shape: tuple[int, ...]) -> list["StoredTensor"]:
        """Return so many tensors of a shape that it consists of, one after another."""
        size = math.prod(shape) * ELEMENT_BYTES[self.dtype]
        return [replace(self, shape=shape, start=self.start + place * size) for place in range(number)]


@dataclass(frozen=True)
class QuantisedTensor(StoredTensor):
    """Where the parts of a quantised matrix are stored; ``shape`` is that of the matrix."""


def read_tensors(folder: Path, tell: Callable[[str], None] = lambda note: None) -> dict[str, StoredTensor]:
    """Return every tensor of the model in ``folder``. Reads only the headers of its files.

    As in transformers, an unsharded model comes first, then the files that the index names.

    Args:
        folder: the folder, in which other files may lie beside those of the model.
        tell: called with a sentence on what is not read, and on an index that is out of date.

    Raises:
        WeightsError: if there is no model, or only part of one.
    """
    files = {path.name for path in folder.glob("*.safetensors")}
    index = folder / INDEX
    if (folder / WHOLE).exists():
        unread = sorted(files - {WHOLE})
        if index.exists():
            unread.append(INDEX)
        if unread:
            tell(f"{folder}: {_some(unread)} not read, only {WHOLE}, as in transformers")
        return read_header(folder / WHOLE)
    if not index.exists():
        raise _no_model(folder, files)
    placed = weight_map(index)
    listed = sorted(set(placed.values()))
    for name in listed:
        if not (folder / name).exists():  # or is a dangling link
            raise WeightsError(f"{INDEX} in {folder} names {name}, which is not there; download it")
    if unread := sorted(files.difference(listed)):
        tell(f"{folder}: {_some(unread)} not read, only the files that {INDEX} names, as in transformers")
    tensors = _read_headers([folder / name for name in listed])
    for name in placed.keys() - tensors.keys():
        raise WeightsError(f"{folder / placed[name]} does not hold {name}, which {INDEX} places there; {_AGAIN}")
    if in_other_file := [name for name, tensor in tensors.items() if placed.get(name) != tensor.file.name]:
        tell(f"{folder}: {_some(in_other_file)} read from another file than {INDEX} says")
    return tensors


def _read_headers(files: Sequence[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise WeightsError(f"{file} holds {name}, and so does {tensors[name].file.name}; {_AGAIN}")
            tensors[name] = tensor
    return tensors


def _some(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others."""
    return f"{names[0]} and {len(names) - 1:,} more are" if len(names) > 1 else f"{names[0]} is"


def holds_same_numbers(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors of floats are equal, bit for bit. Reads them.

    Raises:
        WeightsError: if a file cannot be read.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape) or one.dtype not in FLOAT_BYTES:
        return False
    left = math.prod(one.shape) * FLOAT_BYTES[one.dtype]
    try:
        with open_file(one.file) as first, open_file(other.file) as second:
            first.seek(one.start)
            second.seek(other.start)
            while left > 0:
                size = min(left, _COMPARED_AT_ONCE)
                if first.read(size) != second.read(size):
                    return False
                left -= size
    except OSError as error:
        raise WeightsError(f"cannot read {one.file} or {other.file}: {error.strerror or error}") from None
    return True


def per_expert(tensors: Mapping[str, StoredTensor], spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return a mixture's tensors with those of all experts cut into the matrices of each, as its files name them.

    transformers 5 stacks them in memory, and in the files too with ``save_original_format=False``. Of types whose own
    files stack them, they stay as they are.
    """
    if "{}" not in name_in_layer("feed_forward.experts.w1.weight", spec.model_type):
        return dict(tensors)
    cut: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".mlp.")
        if part == "gate.weight":
            cut[f"{layer}.{name_in_layer('feed_forward.router.weight', spec.model_type)}"] = tensor
        elif part in _STACKED and len(tensor.shape) == 3 and tensor.dtype in FLOAT_BYTES:
            num_experts, rows, columns = tensor.shape
            matrices = [(expert, matrix) for expert in range(num_experts) for matrix in _STACKED[part]]
            shape = (rows // len(_STACKED[part]), columns)
            for piece, (expert, matrix) in zip(tensor.pieces(len(matrices), shape), matrices, strict=True):
                template = name_in_layer(f"feed_forward.experts.{matrix}.weight", spec.model_type)
                cut[f"{layer}.{template.format(expert)}"] = piece
        else:
            cut[name] = tensor
    return cut


def _no_model(folder: Path, files: set[str]) -> WeightsError:
    """Return why a folder without an index and without the file of an unsharded model cannot be read."""
    if files:
        held = ", ".join(sorted(files)[:3])
        return WeightsError(f"{folder} holds {held}, but neither {WHOLE} nor {INDEX}; download it")
    for pattern in PICKLED:
        for path in sorted(folder.glob(pattern)):
            return WeightsError(
                f"{folder} holds pickled weights ({path.name}), which can run code when they are read; if you trust "
                "them, convert them with save_pretrained(safe_serialization=True)"
            )
    return WeightsError(
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
            text = opened.read(length) if 8 + length <= size and length <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror or error}") from None
    if prefix == b"version ":
        raise WeightsError(f"{file} is a Git LFS pointer without the weights; run git lfs pull")
    if 8 + length <= size and length > MAX_HEADER_BYTES:
        raise WeightsError(
            f"{file} has a header of {length:,} bytes, more than the {MAX_HEADER_BYTES:,} of the format; {_AGAIN}"
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


def new_header(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the length and header of a file of tensors, and the offset of each tensor in the file.

    Args:
        shapes: shapes of the tensors, in the order of their bytes; those of wider dtypes come first, to be aligned.
        dtypes: the format's names for their dtypes.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without this
    begins = {}
    end = 0
    for name, shape in shapes.items():
        begins[name] = end
        end = end + math.prod(shape) * FLOAT_BYTES[dtypes[name]]
        entries[name] = {"dtype": dtypes[name], "shape": shape, "data_offsets": (begins[name], end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns every tensor to its element size
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: first + begin for name, begin in begins.items()}
