"""The index of a checkpoint: which file holds which part of which tensor, as plain values.

It says what torch's own metadata say, which are a pickle. A checkpoint has both: torch's for torch's tools, and the
index, a line of JSON for each entry, for us.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from llama_core.errors import CheckpointError, as_clause

INDEX = "index.jsonl"

MAX_DIMS = 64
"""Most dims of a tensor, as in torch."""
MAX_CUT_DIMS = 4
"""Most dims along which a tensor is cut into parts; a plan cuts along two."""

StoredSize = Annotated[int, Field(ge=0, lt=2**63)]
StoredShape = Annotated[tuple[StoredSize, ...], Field(max_length=MAX_DIMS)]
ShardName = Annotated[str, Field(pattern=r"^__[0-9]+_[0-9]+\.distcp$")]
"""The name that torch gives to a file of tensors: no other file is read, in this folder or elsewhere."""


@dataclass(frozen=True)
class StoredBlock:
    """A block of a tensor, or a whole value that is not a tensor, in one file."""

    offsets: StoredShape
    """Where the block begins along each dim of the tensor."""
    shape: StoredShape
    file: ShardName
    """A file in the checkpoint's folder."""
    begin: StoredSize
    """First byte in the file."""
    num_bytes: StoredSize


@dataclass(frozen=True)
class Entry:
    """A tensor or another value of a checkpoint."""

    name: str
    dtype: str | None
    """None if it is not a tensor."""
    shape: StoredShape
    parts: tuple[StoredBlock, ...]

    def problem(self) -> str:
        """Return how this contradicts itself, as a clause; "" if it does not."""
        if any(not len(part.offsets) == len(part.shape) == len(self.shape) for part in self.parts):
            return "has a part with another number of dims"
        if self.dtype is None:
            return "" if len(self.parts) == 1 and not self.shape else "is no tensor, but is in several parts"
        if not isinstance(vars(torch).get(self.dtype), torch.dtype):
            return f"has the dtype {self.dtype!r}, which torch does not know"
        held = sum(math.prod(part.shape) for part in self.parts)
        whole = math.prod(self.shape)
        if held != whole:
            return f"has {held} of its {whole} elements"
        return "" if self._is_tiled() else "has parts that overlap or lie outside of it"

    def _is_tiled(self) -> bool:
        """Return whether the parts, which have as many elements as the tensor, hold each of them.

        Otherwise memory that nobody has written would be taken for weights. If each corner belongs to an even number of
        boxes, the tensor being one, then every element is in an odd number of parts. So it is in exactly one.
        """
        whole = ((0,) * len(self.shape), self.shape)
        boxes = [whole, *((part.offsets, part.shape) for part in self.parts)]
        cut = [dim for dim, size in enumerate(self.shape) if any((at[dim], of[dim]) != (0, size) for at, of in boxes)]
        if len(cut) > MAX_CUT_DIMS:
            return False
        unpaired: set[tuple[int, ...]] = set()
        for begin, size in boxes:
            for corner in product(*((begin[dim], begin[dim] + size[dim]) for dim in cut)):
                unpaired ^= {corner}
        return not unpaired


_ENTRY = TypeAdapter(Entry)


def index_lines(metadata: Metadata) -> Iterator[bytes]:
    """Yield the lines of the index that says what ``metadata`` say."""
    for name, stored in metadata.state_dict_metadata.items():
        yield _ENTRY.dump_json(_entry(name, stored, metadata)) + b"\n"


def _entry(name: str, stored: TensorStorageMetadata | BytesStorageMetadata, metadata: Metadata) -> Entry:
    places = metadata.storage_data
    if isinstance(stored, BytesStorageMetadata):
        return Entry(name, None, (), (_part((), (), places[MetadataIndex(name)]),))
    parts = (_part(chunk.offsets, chunk.sizes, places[MetadataIndex(name, chunk.offsets)]) for chunk in stored.chunks)
    return Entry(name, str(stored.properties.dtype).removeprefix("torch."), tuple(stored.size), tuple(parts))


def _part(offsets: Iterable[int], shape: Iterable[int], place: _StorageInfo) -> StoredBlock:
    return StoredBlock(tuple(offsets), tuple(shape), place.relative_path, place.offset, place.length)


def parse_index(lines: Iterable[bytes], path: Path) -> Iterator[Entry]:
    """Yield the entries of the index in ``path``.

    Raises:
        CheckpointError: if a line is no entry; it names ``path`` and the first key that is missing or wrong.
    """
    for line in lines:
        try:
            entry = _ENTRY.validate_json(line)
        except ValidationError as error:
            detail = error.errors()[0]
            key = ".".join(map(str, detail["loc"]))
            problem = as_clause(detail["msg"])
            raise CheckpointError(f"{path} is no index of a checkpoint ({key}: {problem})") from None
        yield entry


def metadata_of(entries: Iterable[Entry], path: Path) -> Metadata:
    """Return torch's metadata of a checkpoint with these entries.

    Raises:
        CheckpointError: if an entry contradicts itself; it names ``path``.
    """
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for entry in entries:
        if problem := entry.problem():
            raise CheckpointError(f"{path}: {entry.name!r} {problem}")
        for part in entry.parts:
            offsets = None if entry.dtype is None else part.offsets
            places[MetadataIndex(entry.name, offsets)] = _StorageInfo(part.file, part.begin, part.num_bytes)
        if entry.dtype is None:
            stored[entry.name] = BytesStorageMetadata()
            continue
        chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for part in entry.parts]
        properties = TensorProperties(dtype=vars(torch)[entry.dtype])
        stored[entry.name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    return Metadata(stored, storage_data=places)
