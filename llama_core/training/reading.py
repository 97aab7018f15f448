"""Read checkpoints in torch's distributed format without running any code that is in them.

Its metadata and its numbers beside tensors are pickles. Only the classes that torch writes there are loaded.
"""

import io
import pickle
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_HARMLESS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""What torch writes into metadata, by module; dtypes are added to them."""


def _member(kind: object, name: str) -> Enum:
    """Return a member of an enum, which Python 3.11.2, for one, pickles as a ``getattr``."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise pickle.UnpicklingError(
            f"the checkpoint's metadata names {name!r} of {kind!r}, which torch does not write"
        )
    member: Enum = kind[name]
    return member


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name in _HARMLESS.get(module, ()) or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's metadata names {module}.{name}, which torch does not write")


class PlainReader(dcp.FileSystemReader):
    """Reads a checkpoint's folder, and its metadata once instead of once per tensor."""

    _parsed: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata.

        Raises:
            UnpicklingError: if they name a class that torch does not write.
        """
        if self._parsed is None:
            path = Path(self.path) / ".metadata"
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"{path} holds no metadata")
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            self._parsed = metadata
        return self._parsed


class PlainPlanner(DefaultLoadPlanner):
    """Loads tensors, and plain numbers and texts beside them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set an entry that is not a tensor.

        Raises:
            UnpicklingError: if it is not plain.
        """
        plain = torch.load(value, weights_only=True)
        again = io.BytesIO()  # torch's planner reads it without this check
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)
