"""Where weights are read from, by our names or by Hugging Face's: folders, checkpoints, a seed, or made of others.

Files are memory-mapped and copied tensor by tensor, so the host holds at most one tensor beside what is read into.
"""

import math
import mmap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llama_core.config.model_types import Layout
from llama_core.config.model_weights import adapter_weight, matrix_name
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import EMBEDDING, LoRA
from llama_core.errors import CheckpointError, WeightsError
from llama_core.hugging_face.block_fp8 import BlockFp8Tensor
from llama_core.hugging_face.mxfp4 import Mxfp4Tensor
from llama_core.hugging_face.nf4 import Nf4Tensor
from llama_core.hugging_face.peft import adapter_weights
from llama_core.hugging_face.pretrained import Origin, hugging_face_weights, is_checkpoint
from llama_core.hugging_face.weight_files import StoredTensor
from llama_core.hugging_face.weight_names import dense_name, hugging_face_names, is_per_expert, other_layouts
from llama_core.models import block_fp8, mxfp4, nf4, pissa
from llama_core.models.adapters import method_of
from llama_core.models.llama import initialize_parameter
from llama_core.parallel.deepspeed import saved_weights
from llama_core.records.checkpoints import LAYOUT
from llama_core.records.files import open_file
from llama_core.training.checkpoint import one_line
from llama_core.training.reading import PlainPlanner, PlainReader

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
"""Torch's dtypes by the names of safetensors' format."""
_DEQUANTISED: dict[type[StoredTensor], Callable[..., Tensor]] = {
    Nf4Tensor: nf4.stored_numbers,
    Mxfp4Tensor: mxfp4.stored_numbers,
    BlockFp8Tensor: block_fp8.stored_numbers,
}
"""What returns the numbers of a quantised matrix, by how it is stored."""
FORMAT_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""The same names by ours."""
_COPIED_AT_ONCE = 1 << 26
"""Elements converted at a time, so that a copy to a device needs no second copy of the whole tensor."""


class WeightSource(Protocol):
    """A source of the whole model's parameters, by our names."""

    def read(self, name: str, into: Tensor) -> None:
        """Set ``into``, or this rank's part of it, converted to its dtype."""


def base_source(spec: ModelSpec, origin: Origin) -> WeightSource:
    """Return the source of the weights without adapters."""
    if origin.base is None:
        return _Drawn(spec, origin.drawn_by.training.seed if origin.drawn_by else 0)
    if is_checkpoint(origin.base):
        return saved_source(origin.base)
    return _Folder(hugging_face_weights(spec, origin.base), other_layouts(spec))


def adapter_source(spec: ModelSpec, source: Path) -> WeightSource:
    """Return the source of adapters: a PEFT folder, or a checkpoint with all that was trained."""
    return (
        saved_source(source)
        if is_checkpoint(source)
        else _Folder({name: (stored,) for name, stored in adapter_weights(spec, source).items()})
    )


def packed_matrix(source: WeightSource, name: str, scratch_OI: Tensor) -> nf4.Packed:
    """Return a matrix in NF4: with the codes that it is stored with, or else rounded.

    Args:
        source: has the matrix.
        name: its name.
        scratch_OI: where its numbers may be read to.
    """
    stored = source.stored_codes(name) if isinstance(source, _Folder) else None
    if stored is not None:
        return stored
    source.read(name, scratch_OI)
    return nf4.pack(scratch_OI)


def saved_source(checkpoint: Path) -> WeightSource:
    """Return the source of the weights in a run's checkpoint."""
    return _DeepSpeedCheckpoint(checkpoint) if (checkpoint / LAYOUT).exists() else _Checkpoint(checkpoint)


def mean_source(checkpoints: Sequence[Path]) -> WeightSource:
    """Return the source of the mean weights of one or several checkpoints of a run."""
    return _Mean(checkpoints) if len(checkpoints) > 1 else saved_source(checkpoints[0])


class _Mean:
    """Averages whole weights in fp32, one at a time, so that two copies of one are in memory beside the result.

    Of adapters it averages each factor, not the products that are added to matrices.

    Raises:
        WeightsError: in ``read``, if a value is not finite.
    """

    def __init__(self, checkpoints: Sequence[Path]) -> None:
        self._sources = {checkpoint: saved_source(checkpoint) for checkpoint in checkpoints}

    def read(self, name: str, into: Tensor) -> None:
        total = torch.zeros(into.shape)
        one = torch.empty(into.shape)
        for checkpoint, source in self._sources.items():
            source.read(name, one)
            if not all(math.isfinite(extreme) for extreme in torch.aminmax(one)):
                raise WeightsError(f"{name} of {checkpoint} is not finite; average other checkpoints")
            total += one
        into.copy_(total.div_(len(self._sources)))


class _Drawn:
    """Draws again the weights that a run on the CPU drew from its seed."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._spec = replace(spec, lora=None)
        self._seed = seed

    def read(self, name: str, into: Tensor) -> None:
        whole = torch.empty(into.shape)
        initialize_parameter(name, whole, self._spec, self._seed)
        _copy_part(whole, into)


class AsHuggingFaceStores:
    """Reads what Hugging Face stores, by its names: matrices of each expert, or several of our weights as one."""

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        self._source = source
        self._shapes = spec.weight_shapes
        self._per_expert = frozenset(name for name in self._shapes if is_per_expert(name, spec))
        self._layouts = other_layouts(spec)
        self._places: dict[str, list[tuple[str, int]]] = {}
        for name in self._shapes:
            for expert, stored in enumerate(hugging_face_names(name, spec)):
                self._places.setdefault(stored, []).append((name, expert))
        self._held = torch.empty(0)
        self._name = ""

    def read(self, name: str, into: Tensor) -> None:
        """Set ``into`` to a tensor that Hugging Face stores, given its name there."""
        for ours, expert in self._places[name]:
            layout = self._layouts.get(ours)
            if layout is not None:
                # in fp32, since rounding to a narrower dtype would lose what is left of a weight near one
                numbers = _read(self._source, ours, self._shapes[ours])
                weight_in(into, layout).copy_(numbers - 1.0 if layout.less_one else numbers)
            elif ours in self._per_expert:
                into.copy_(self._all_experts(ours)[expert])
            else:
                self._source.read(ours, into)

    def _all_experts(self, name: str) -> Tensor:
        if name != self._name:  # the matrices of all experts follow each other
            self._held = _read(self._source, name, self._shapes[name])
            self._name = name
        return self._held


def weight_in(stored: Tensor, layout: Layout) -> Tensor:
    """Return the view of one of our weights in a tensor that is laid out as in files."""
    if layout.in_turns:
        stored = stored[..., layout.part :: layout.parts]
    else:
        stored = stored.chunk(layout.parts, dim=-1)[layout.part]
    return stored.mT if layout.transposed else stored


@dataclass(frozen=True)
class Merged:
    """Merges each matrix with its adapter, in fp32. What was trained in full comes from beside the adapters."""

    spec: ModelSpec
    lora: LoRA
    base: WeightSource
    adapters: WeightSource

    def read(self, name: str, into: Tensor) -> None:
        """Set ``into`` to a weight, merged if it is adapted."""
        if name not in self.spec.adapted:
            (self.adapters if name in self.spec.saved_in_full else self.base).read(name, into)
            return
        whole = _read(self.base, name, into.shape)
        path = name.removesuffix("weight")
        matrix = matrix_name(path.removesuffix("."))
        adapter = {}
        for weight in self.lora.weights(matrix):
            of_adapter = f"{path}{weight.name}"
            adapter[weight.name] = _read(self.adapters, of_adapter, self.spec.adapter_shapes[of_adapter])
        matrix_OI = whole.t() if matrix == EMBEDDING else whole
        method_of(self.lora.kind).merge(matrix_OI, adapter, self.lora)
        into.copy_(whole)


@dataclass(frozen=True)
class Rounded:
    """Reads matrices that are held in NF4 as they are multiplied with."""

    spec: ModelSpec
    base: WeightSource

    def read(self, name: str, into: Tensor) -> None:
        """Set ``into`` to a weight, rounded if it is held in NF4."""
        if name not in self.spec.packed:
            self.base.read(name, into)
            return
        packed = packed_matrix(self.base, name, torch.empty(into.shape))
        into.copy_(nf4.unpack_whole(packed, torch.float32))


@dataclass(frozen=True)
class OverWhole:
    """Makes PiSSA's adapters, which belong to the rest of a matrix, ones of twice the rank over the whole matrix."""

    spec: ModelSpec
    lora: LoRA
    base: WeightSource
    adapters: WeightSource

    def read(self, name: str, into: Tensor) -> None:
        """Set ``into`` to a weight of an adapter."""
        of_adapter = adapter_weight(name)
        assert of_adapter is not None
        matrix, weight = of_adapter
        matrix_OI = _read(self.base, matrix, self.spec.parameter_shapes[matrix])
        trained = _read(self.adapters, name, self.spec.adapter_shapes[name])
        into.copy_(pissa.over_whole(weight.name, trained, matrix_OI, self.lora))


def _read(source: WeightSource, name: str, shape: Sequence[int]) -> Tensor:
    """Return a whole weight, in fp32."""
    whole = torch.empty(tuple(shape))
    source.read(name, whole)
    return whole


class Copied:
    """Reads a dense model's feed-forward into every expert."""

    def __init__(self, dense: WeightSource) -> None:
        self._dense = dense

    def read(self, name: str, into: Tensor) -> None:
        """Set each part of ``into`` that is an expert's, or this rank's part of it, to the dense matrix."""
        matrix = torch.empty(into.shape[1:])
        self._dense.read(dense_name(name), matrix)
        _copy_part(matrix.expand(into.shape), into)


class _Folder:
    """Reads from the memory-mapped files of a Hugging Face or PEFT folder.

    Args:
        stored: where each weight is, by our names.
        layouts: how the files lay out those that they do not lay out as we do, likewise.
    """

    def __init__(
        self, stored: Mapping[str, Sequence[StoredTensor]], layouts: Mapping[str, Layout] = MappingProxyType({})
    ) -> None:
        self._stored = stored
        self._layouts = layouts
        self._mapped: dict[Path, Tensor] = {}

    def read(self, name: str, into: Tensor) -> None:
        stored = self._stored[name]
        layout = self._layouts.get(name, Layout())
        if layout.less_one:
            wide = torch.promote_types(into.dtype, torch.float32)
            _copy_part(self._view(stored[0]).to(wide) + 1.0, into)
            return
        is_of_one_expert = len(stored[0].shape) < into.ndim
        begins, into = _held(into)
        if not is_of_one_expert:
            _copy(_cut(weight_in(self._view(stored[0]), layout), begins, into.shape), into)
            return
        first, *inner = begins
        for expert, matrix in enumerate(into, start=first):
            _copy(_cut(weight_in(self._view(stored[expert]), layout), inner, matrix.shape), matrix)

    def stored_codes(self, name: str) -> nf4.Packed | None:
        """Return a matrix that is stored in NF4; None of one that is not, or whose scales are not codes."""
        (stored,) = self._stored[name]
        return nf4.stored_codes(stored, self._view) if isinstance(stored, Nf4Tensor) else None

    def _view(self, stored: StoredTensor) -> Tensor:
        """Return a view of a tensor in its mapped file, where an aligned one is not read yet; or a dequantised one."""
        stored_numbers = _DEQUANTISED.get(type(stored))
        if stored_numbers is not None:
            return stored_numbers(stored, self._view)
        if stored.file not in self._mapped:
            self._mapped[stored.file] = _map(stored.file)
        dtype = DTYPES[stored.dtype]
        end = stored.start + torch.Size(stored.shape).numel() * dtype.itemsize
        raw = self._mapped[stored.file][stored.start : end]
        if stored.start % dtype.itemsize:  # old writers did not align tensors
            raw = raw.clone()
        return raw.view(dtype).view(stored.shape)


def _copy_part(whole: Tensor, into: Tensor) -> None:
    """Set ``into`` to ``whole``, or to the part of it that this rank holds, converted to its dtype."""
    begins, into = _held(into)
    _copy(_cut(whole, begins, into.shape), into)


def _held(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the part of a tensor that this rank holds, and where in the whole it begins along each dim."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tensor
    _, begins = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return begins, tensor.to_local()


def _cut(whole: Tensor, begins: Sequence[int], shape: Sequence[int]) -> Tensor:
    return whole[tuple(slice(begin, begin + size) for begin, size in zip(begins, shape, strict=True))]


def _copy(whole: Tensor, into: Tensor) -> None:
    rows = max(1, _COPIED_AT_ONCE * len(into) // max(1, into.numel()))
    for part, source in zip(torch.split(into, rows), torch.split(whole, rows), strict=True):
        part.copy_(source)


def _map(file: Path) -> Tensor:
    """Return the bytes of a file as uint8; they are read from disk when they are used."""
    with open_file(file) as opened:
        # Shared and read-only: a private mapping counts as memory that the process might write to.
        mapping = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about the mapping being read-only
        return torch.frombuffer(mapping, dtype=torch.uint8)


class _Checkpoint:
    """Reads weights from a checkpoint written by any number of ranks under any plan; needs no other rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = PlainReader(folder)

    def read(self, name: str, into: Tensor) -> None:
        try:
            dcp.load({f"model.{name}": into}, storage_reader=self._reader, planner=PlainPlanner(), no_dist=True)
        except dcp.CheckpointException as error:
            raise CheckpointError(f"cannot read {name} from {self._folder}: {one_line(error)}") from None


class _DeepSpeedCheckpoint:
    """Reads weights from a checkpoint that DeepSpeed wrote, one whole weight at a time."""

    def __init__(self, folder: Path) -> None:
        self._weight = saved_weights(folder)

    def read(self, name: str, into: Tensor) -> None:
        _copy_part(self._weight(name), into)
