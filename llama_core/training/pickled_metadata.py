"""Read the metadata that torch pickles into a checkpoint, without any class or function of Python.

Checkpoints of earlier versions have no index. The pickle's opcodes are those of ``pickle``, but a class in it is only a
name, an instance only a name with a state, and nothing is called: the result can hold no object that does anything.
"""

import io
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from llama_core.errors import CheckpointError
from llama_core.records.files import DAMAGE
from llama_core.training.index import MOST_DIMS, Entry, checked_entry

_OPCODES = (
    *("PROTO", "FRAME", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "STOP"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
)
"""What ``pickle`` writes for metadata since protocol 4, which has been its default since Python 3.8."""

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_INSTANCES = {
    _METADATA: {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata",
    },
    _FILESYSTEM: {"_StorageInfo"},
}  # fmt: skip
"""The classes whose instances are read, by module."""
_CALLED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    _METADATA: {"_MEM_FORMAT_ENCODING"},
    "builtins": {"getattr"},  # a member of an enum, as Python 3.11.2, for one, pickles it
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}
"""What would be called, by module. A size is read as its argument; nobody needs the results of the others."""


@dataclass(frozen=True, slots=True)
class _Name:
    """The name of a class or a function."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class _Instance:
    """What an instance is made of."""

    of: str
    state: Any = None


class _Names(pickle._Unpickler):  # written in Python: a subclass can replace what an opcode does
    """Reads a pickle as plain values, ``_Name`` and ``_Instance``."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        opcode: pickle._Unpickler.dispatch[opcode] for (opcode,) in (getattr(pickle, name) for name in _OPCODES)
    }

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return name
        if name in _INSTANCES.get(module, ()) or name in _CALLED.get(module, ()):
            return _Name(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which torch does not write")

    def _new_instance(self) -> None:
        arguments = self.stack.pop()
        kind = self.stack.pop()
        if type(kind) is not _Name or kind.name not in _INSTANCES.get(kind.module, ()) or arguments != ():
            raise pickle.UnpicklingError("it makes an object that torch does not write")
        self.append(_Instance(kind.name))

    def _call(self) -> None:
        arguments = self.stack.pop()
        called = self.stack.pop()
        if type(called) is not _Name or called.name not in _CALLED.get(called.module, ()):
            raise pickle.UnpicklingError("it calls what torch does not call")
        if called.name == "Size":
            (sizes,) = arguments
            self.append(sizes)
        else:
            self.append(None)

    def _build(self) -> None:
        state = self.stack.pop()
        built = self.stack[-1]
        if type(built) is not _Instance or built.state is not None or type(state) not in {dict, tuple}:
            raise pickle.UnpicklingError("it sets the state of something that has none")
        built.state = state

    def _set_item(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._set([key], [value])

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._set(items[::2], items[1::2])

    def _set(self, keys: list[Any], values: list[Any]) -> None:
        target = self.stack[-1]
        # no other keys: to hash deeply nested tuples would overflow the stack of C
        if type(target) is not dict or any(type(key) not in {str, _Instance} for key in keys):
            raise pickle.UnpicklingError("it has keys that torch does not write")
        target.update(zip(keys, values, strict=True))

    dispatch[pickle.NEWOBJ[0]] = _new_instance
    dispatch[pickle.REDUCE[0]] = _call
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items


def pickled_entries(content: bytes, path: Path) -> Iterator[Entry]:
    """Yield the entries of pickled metadata.

    Args:
        content: the pickle.
        path: its file, for errors.

    Raises:
        CheckpointError: if it is anything but metadata as torch writes them.
    """
    try:
        metadata = _Names(io.BytesIO(content)).load()
        yield from _entries(_state(metadata, "Metadata"), path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is refused: {error}") from None
    except (EOFError, struct.error, *DAMAGE):
        raise CheckpointError(f"{path} is damaged, or a file of another kind") from None


def _entries(metadata: dict[str, Any], path: Path) -> Iterator[Entry]:
    stored = metadata["state_dict_metadata"]
    places = _places(metadata["storage_data"])
    chunks = {
        name: _state(one, one.of)["chunks"] if one.of == "TensorStorageMetadata" else None
        for name, one in stored.items()
    }
    num_parts = sum(1 if of_tensor is None else len(of_tensor) for of_tensor in chunks.values())
    if num_parts > len(places):  # each part has a place of its own; a shared list could stand for billions of parts
        raise pickle.UnpicklingError("it has more parts than places for them")
    for name, of_tensor in chunks.items():
        if of_tensor is None:
            value = {"dtype": None, "shape": (), "parts": [{"offsets": (), "shape": ()} | places[name, None]]}
            yield checked_entry({"name": name} | value, path)
            continue
        tensor = _state(stored[name], "TensorStorageMetadata")
        parts = []
        for chunk in of_tensor:
            state = _state(chunk, "ChunkStorageMetadata")
            offsets = _size(state["offsets"])
            parts.append({"offsets": offsets, "shape": _size(state["sizes"])} | places[name, offsets])
        dtype, *_ = tensor["properties"].state
        yield checked_entry({"name": name, "dtype": dtype, "shape": _size(tensor["size"]), "parts": parts}, path)


def _places(storage_data: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], dict[str, Any]]:
    """Return where each part is, by the name of its entry and its offsets; a value that is no tensor has none."""
    places = {}
    for index, info in storage_data.items():
        key = _state(index, "MetadataIndex")
        place = _state(info, "_StorageInfo")
        offsets = None if key.get("offset") is None else _size(key["offset"])
        places[key["fqn"], offsets] = {
            "file": place["relative_path"],
            "begin": place["offset"],
            "num_bytes": place["length"],
        }
    return places


def _state(instance: Any, of: str) -> dict[str, Any]:
    if type(instance) is not _Instance or instance.of != of or type(instance.state) is not dict:
        raise pickle.UnpicklingError(f"it has something else where torch writes a {of}")
    return instance.state


def _size(value: Any) -> tuple[int, ...]:
    if type(value) not in {tuple, list} or len(value) > MOST_DIMS or any(type(number) is not int for number in value):
        raise pickle.UnpicklingError("it has something else where torch writes a size")
    return tuple(value)
