"""Read checkpoints in torch's distributed format without running any code that is in them.

What is where comes from the index, which is plain values; torch's own metadata are a pickle, and are not read. torch's
restricted unpickler reads the tensors, and the numbers and texts beside them.
"""

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from llama_core.errors import CheckpointError
from llama_core.models.saved_tensors import only_tensors
from llama_core.records.checkpoints import place_of
from llama_core.records.files import open_file
from llama_core.training.index import INDEX, metadata_of, parse_index
from llama_core.units import GIB, format_bytes

MAX_INDEX_BYTES = 4 * GIB
"""Largest index: that of some twenty million parts."""


class PlainReader(dcp.FileSystemReader):
    """Reads a checkpoint's folder, and what is where in it once instead of once per tensor.

    Raises:
        CheckpointError: if what is where cannot be read, or is not what torch writes.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _OwnFiles(place_of(folder))
        self._metadata = _read_metadata(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what is where."""
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


def _read_metadata(folder: Path) -> Metadata:
    index = folder / INDEX
    try:
        with open_file(index, place_of(folder)) as lines:
            num_bytes = os.fstat(lines.fileno()).st_size
            if num_bytes > MAX_INDEX_BYTES:
                most = format_bytes(MAX_INDEX_BYTES)
                raise CheckpointError(f"{index} has {format_bytes(num_bytes)}; at most {most} are read")
            return metadata_of(parse_index(lines, index), index)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror or error}") from None


class _OwnFiles(FileSystem):
    """The files of a checkpoint: regular ones, and no links below ``below``."""

    def __init__(self, below: Path) -> None:
        self._below = below

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Yield an open file to read tensors from, and name it if it does not hold what the index says."""
        with open_file(Path(path), self._below) as stream, only_tensors():
            try:
                yield stream
            except (CheckpointError, MemoryError, OSError, torch.AcceleratorError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # torch raises whatever its parsers happen to raise
                raise CheckpointError(
                    f"{Path(path).name} does not hold what was saved there; it is damaged, or a file of another kind"
                ) from error


class PlainPlanner(DefaultLoadPlanner):
    """Loads tensors, and plain numbers and texts beside them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set an entry that is not a tensor.

        Raises:
            UnpicklingError: if it is not plain.
            CheckpointError: if a tensor belongs there.
        """
        name = read_item.dest_index.fqn
        if isinstance(self.state_dict[name], torch.Tensor):
            raise CheckpointError(f"{name} is a tensor, but the checkpoint has another value for it")
        plain = torch.load(value, weights_only=True)
        again = io.BytesIO()  # torch's planner reads it without this check
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)
