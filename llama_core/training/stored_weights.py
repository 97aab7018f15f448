"""Read weights into any part of a model, each rank its own slices; write them in Hugging Face's and PEFT's formats.

Files are memory-mapped and copied tensor by tensor, so the host holds at most one tensor beside the model.
"""

import json
import logging
import math
import mmap
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llama_core.config.model_types import Layout
from llama_core.config.model_weights import adapter_weight, matrix_name, weight_of
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import EMBEDDING, LoRA
from llama_core.errors import CheckpointError, WeightsError
from llama_core.hugging_face.mxfp4 import Mxfp4Tensor
from llama_core.hugging_face.nf4 import Nf4Tensor
from llama_core.hugging_face.peft import ADAPTERS, adapter_weights, peft_name
from llama_core.hugging_face.pretrained import (
    Origin,
    check_pretrained,
    hugging_face_weights,
    is_checkpoint,
    names_with_adapters,
    origin_of,
    resolve_intact,
    stored_model,
)
from llama_core.hugging_face.weight_files import INDEX, WHOLE, StoredTensor, new_header
from llama_core.hugging_face.weight_names import (
    dense_name,
    hugging_face_names,
    hugging_face_shapes,
    is_per_expert,
    other_layouts,
)
from llama_core.models import mxfp4, nf4, pissa
from llama_core.models.adapters import method_of
from llama_core.models.layers import local_part
from llama_core.models.llama import (
    Llama,
    begin_with_principal_parts,
    initialize_parameter,
    pack_matrices,
    takes_principal_part,
    with_adapters,
)
from llama_core.parallel.deepspeed import saved_weights
from llama_core.parallel.ranks import is_first_rank
from llama_core.records.checkpoints import LAYOUT
from llama_core.records.files import open_file
from llama_core.training.checkpoint import one_line
from llama_core.training.reading import PlainPlanner, PlainReader
from llama_core.units import format_bytes, format_duration

logger = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000
"""Largest size of a written file, unless a single tensor is larger."""
SECONDS_BETWEEN_LINES = 10.0
"""How often rank 0 logs the progress of reading."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}
_FORMAT_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_COPIED_AT_ONCE = 1 << 26
"""Elements converted at a time, so that a copy to a device needs no second copy of the whole tensor."""


class Pretrained:
    """Initial weights for the part of a model that a rank holds.

    Adapters that the source lacks are drawn at random, as in a run from scratch. If the source is a dense model and
    ``spec`` has experts, each expert begins as a copy of its layer's feed-forward, and routers are drawn.

    Source: Komatsuzaki et al. 2022, arXiv:2212.05055, for experts from a dense model.

    Args:
        spec: the whole model.
        source: a Hugging Face or PEFT folder, or a checkpoint of a run.
        seed: seed of what is drawn.

    Raises:
        WeightsError: if the weights are missing, incomplete, or those of another model.
        ConfigError: if the folder's ``config.json`` does not describe a Llama.
    """

    def __init__(self, spec: ModelSpec, source: Path, *, seed: int = 0) -> None:
        differences = check_pretrained(spec, source)
        if is_first_rank():
            for difference in differences:
                logger.warning("%s", difference)
        self._spec = spec
        self._seed = seed
        origin = origin_of(source)
        stored = stored_model(spec, origin)
        base = _base(stored, origin)
        self._sources: dict[str, _Source] = dict.fromkeys(spec.parameter_shapes, base)
        if stored.moe != spec.moe:
            self._sources = {
                name: base if dense_name(name) == name else _Copied(base)
                for name in spec.parameter_shapes
                if weight_of(name).divided != "router"
            }
        if origin.adapters is not None:
            self._sources |= dict.fromkeys(names_with_adapters(spec, origin), _adapters(spec, origin.adapters))
        self._progress = _Progress(source)

    @torch.no_grad()
    def fill(self, model: Llama) -> None:
        """Read every parameter of ``model``, or this rank's part of it, converted to the parameter's dtype."""
        for name, parameter in model.named_parameters():
            takes_part = takes_principal_part(name, self._spec)
            # set below from whole matrices
            is_rest = takes_part and name in self._spec.adapted
            is_packed = name in self._spec.packed
            if name in self._sources and not is_rest and not is_packed:
                self._sources[name].read(name, parameter.detach())
            elif not takes_part and not is_packed:
                initialize_parameter(name, parameter, self._spec, self._seed, read=self._read)
            if name in self._sources:
                self._progress.add(name, parameter)
        begin_with_principal_parts(model, self._read, keep=self._sources)
        pack_matrices(model, self._packed)

    def _read(self, name: str, into: Tensor) -> None:
        self._sources[name].read(name, into)

    def _packed(self, name: str, device: torch.device) -> nf4.Packed:
        return _packed(self._sources[name], name, torch.empty(self._spec.parameter_shapes[name], device=device))

    def done(self) -> None:
        """Log the bytes read and the time taken."""
        self._progress.end()


def whole_model(
    spec: ModelSpec,
    source: Path | None = None,
    *,
    device: str = "cpu",
    dtype: str = "fp32",
    layers: Collection[int] | None = None,
    divide: Callable[[Llama], None] = lambda model: None,
) -> Llama:
    """Return a whole model, or some of its layers, on the meta device or, given a source, with its weights.

    Args:
        spec: the model, with its adapters.
        source: a Hugging Face or PEFT folder, a run's directory (its newest intact weights), or one of its checkpoints.
        device: where the weights go.
        dtype: dtype of the weights and of the arithmetic: bf16, fp16 or fp32.
        layers: see ``Llama``; default: all.
        divide: divides the model over ranks before its weights are read, so that each holds only its part.

    Raises:
        WeightsError: if there are no weights, or those of another model.
        CheckpointError: if the checkpoints of the run are damaged.
    """
    compute_dtype = _DTYPES[_FORMAT_NAMES[dtype]]
    with torch.device("meta"):
        model = with_adapters(Llama(spec, compute_dtype=compute_dtype, layers=layers).to(compute_dtype))
    divide(model)
    if source is not None:
        found = Path(resolve_intact(str(source), partial(logger.warning, "%s")))
        Pretrained(spec, found).fill(model.to_empty(device=device))
    return model


class _Source(Protocol):
    """A source of the whole model's parameters, by our names."""

    def read(self, name: str, into: Tensor) -> None:
        """Set ``into``, or this rank's part of it, converted to its dtype."""


def _base(spec: ModelSpec, origin: Origin) -> _Source:
    """Return the source of the weights without adapters."""
    if origin.base is None:
        return _Drawn(spec, origin.drawn_by.training.seed if origin.drawn_by else 0)
    if is_checkpoint(origin.base):
        return _saved(origin.base)
    return _Folder(hugging_face_weights(spec, origin.base), other_layouts(spec))


def _adapters(spec: ModelSpec, source: Path) -> _Source:
    return (
        _saved(source)
        if is_checkpoint(source)
        else _Folder({name: (stored,) for name, stored in adapter_weights(spec, source).items()})
    )


def _packed(source: _Source, name: str, scratch_OI: Tensor) -> nf4.Packed:
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


def _saved(checkpoint: Path) -> _Source:
    """Return the source of the weights in a run's checkpoint."""
    return _DeepSpeedCheckpoint(checkpoint) if (checkpoint / LAYOUT).exists() else _Checkpoint(checkpoint)


def _mean(checkpoints: Sequence[Path]) -> _Source:
    """Return the source of the mean weights of one or several checkpoints of a run."""
    return _Mean(checkpoints) if len(checkpoints) > 1 else _saved(checkpoints[0])


class _Mean:
    """Averages whole weights in fp32, one at a time, so that two copies of one are in memory beside the result.

    Of adapters it averages each factor, not the products that are added to matrices.

    Raises:
        WeightsError: in ``read``, if a value is not finite.
    """

    def __init__(self, checkpoints: Sequence[Path]) -> None:
        self._sources = {checkpoint: _saved(checkpoint) for checkpoint in checkpoints}

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


class _AsHuggingFaceStores:
    """Reads what Hugging Face stores, by its names: matrices of each expert, or several of our weights as one."""

    def __init__(self, source: _Source, spec: ModelSpec) -> None:
        self._source = source
        self._shapes = spec.parameter_shapes
        self._per_expert = frozenset(name for name in self._shapes if is_per_expert(name, spec))
        self._layouts = other_layouts(spec)
        self._places: dict[str, list[tuple[str, int]]] = {}
        for name in self._shapes:
            for expert, stored in enumerate(hugging_face_names(name, spec)):
                self._places.setdefault(stored, []).append((name, expert))
        self._held = torch.empty(0)
        self._name = ""

    def read(self, name: str, into: Tensor) -> None:
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
class _Merged:
    """Merges each matrix with its adapter, in fp32. What was trained in full comes from beside the adapters."""

    spec: ModelSpec
    lora: LoRA
    base: _Source
    adapters: _Source

    def read(self, name: str, into: Tensor) -> None:
        if name not in self.spec.adapted:
            (self.adapters if name in self.spec.trained_in_full else self.base).read(name, into)
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
class _Rounded:
    """Reads matrices that are held in NF4 as they are multiplied with."""

    spec: ModelSpec
    base: _Source

    def read(self, name: str, into: Tensor) -> None:
        if name not in self.spec.packed:
            self.base.read(name, into)
            return
        packed = _packed(self.base, name, torch.empty(into.shape))
        into.copy_(nf4.unpack_whole(packed, torch.float32))


@dataclass(frozen=True)
class _OverWhole:
    """Makes PiSSA's adapters, which belong to the rest of a matrix, ones of twice the rank over the whole matrix."""

    spec: ModelSpec
    lora: LoRA
    base: _Source
    adapters: _Source

    def read(self, name: str, into: Tensor) -> None:
        of_adapter = adapter_weight(name)
        assert of_adapter is not None
        matrix, weight = of_adapter
        matrix_OI = _read(self.base, matrix, self.spec.parameter_shapes[matrix])
        trained = _read(self.adapters, name, self.spec.adapter_shapes[name])
        into.copy_(pissa.over_whole(weight.name, trained, matrix_OI, self.lora))


def _read(source: _Source, name: str, shape: Sequence[int]) -> Tensor:
    """Return a whole weight, in fp32."""
    whole = torch.empty(tuple(shape))
    source.read(name, whole)
    return whole


class _Copied:
    """Reads a dense model's feed-forward into every expert."""

    def __init__(self, dense: _Source) -> None:
        self._dense = dense

    def read(self, name: str, into: Tensor) -> None:
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
        if isinstance(stored, Nf4Tensor):
            return nf4.stored_numbers(stored, self._view)
        if isinstance(stored, Mxfp4Tensor):
            return mxfp4.stored_numbers(stored, self._view)
        if stored.file not in self._mapped:
            self._mapped[stored.file] = _map(stored.file)
        dtype = _DTYPES[stored.dtype]
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


class _Progress:
    """Logs the progress of reading on rank 0, every few seconds."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._num_bytes = 0
        self._began = self._told = time.monotonic()

    def add(self, name: str, parameter: Tensor) -> None:
        local = local_part(parameter)
        self._num_bytes += local.numel() * local.itemsize
        if is_first_rank() and time.monotonic() - self._told >= SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            logger.info("reading weights: %s, at %s", format_bytes(self._num_bytes), name)

    def end(self) -> None:
        if is_first_rank():
            took = format_duration(time.monotonic() - self._began)
            logger.info("weights of %s read: %s on this rank in %s", self._source, format_bytes(self._num_bytes), took)


@torch.no_grad()
def write_hugging_face(
    checkpoint: Path,
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: str,
    others: Sequence[Path] = (),
    shard_bytes: int = SHARD_BYTES,
    on_file: Callable[[str], None] = lambda name: None,
) -> None:
    """Write the weights of a checkpoint as Hugging Face's safetensors files, with an index if there are several.

    Each weight is read into its place in the mapped file, so memory holds at most one piece of one weight, as large as
    a rank saved it, or one of the three tensors of a layer's experts. Adapters are merged into the weights that their
    run started from, one matrix at a time in fp32.

    Args:
        checkpoint: written by any number of ranks under any plan.
        spec: the model; with adapters if the checkpoint holds those.
        folder: where the files go.
        dtype: dtype of the files: bf16, fp16 or fp32.
        others: checkpoints of the same run to average it with.
        shard_bytes: largest size of a file, unless a single tensor is larger.
        on_file: called with the name of each completed file.

    Raises:
        CheckpointError: if a weight cannot be read.
        WeightsError: if a weight is too large for fp16, one to average is not finite, or the adapters' base model is
            missing.
        OSError: if the disk is full.
    """
    source = _mean([checkpoint, *others])
    if spec.lora is not None:
        source = _Merged(spec, spec.lora, _Rounded(spec, _base(spec, origin_of(checkpoint))), source)
    source = _AsHuggingFaceStores(source, spec)
    shapes = hugging_face_shapes(spec)
    itemsize = _DTYPES[_FORMAT_NAMES[dtype]].itemsize
    shards = list(_shards(shapes, shard_bytes // itemsize))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WHOLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, source, shard, dtype)
        weight_map |= dict.fromkeys(shard, file)
        on_file(file)
    if len(shards) > 1:
        total = itemsize * sum(torch.Size(shape).numel() for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@torch.no_grad()
def write_adapters(checkpoint: Path, spec: ModelSpec, folder: Path, *, dtype: str, others: Sequence[Path] = ()) -> None:
    """Write the adapters of a checkpoint as PEFT's safetensors file.

    Args:
        checkpoint: written by any number of ranks under any plan.
        spec: the model, with its adapters.
        folder: where the file goes.
        dtype: dtype of the file: bf16, fp16 or fp32.
        others: checkpoints of the same run to average it with.

    Raises:
        CheckpointError: if an adapter cannot be read.
        WeightsError: if a value is too large for fp16, or one to average is not finite.
        OSError: if the disk is full.
    """
    source = _mean([checkpoint, *others])
    assert spec.lora is not None
    if spec.lora.take_principal_part:
        source = _OverWhole(spec, spec.lora, _base(spec, origin_of(checkpoint)), source)
    names = {peft_name(name): name for name in spec.adapter_shapes}
    written = replace(spec, lora=spec.lora.in_folder).adapter_shapes
    shapes = {peft_name(name): shape for name, shape in written.items()}
    _write_file(folder / ADAPTERS, source, shapes, dtype, names)


def _write_file(
    file: Path,
    source: _Source,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    names: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file; ``names`` maps the names in the file to the source's, if these differ."""
    for name, view in _new_file(file, shapes, _FORMAT_NAMES[dtype]):
        source.read(names[name] if names else name, view)
        if dtype == "fp16" and any(math.isinf(extreme) for extreme in torch.aminmax(view)):
            raise WeightsError(f"{name} has values above 65504, which fp16 cannot hold; use --dtype bf16")


def _shards(shapes: Mapping[str, tuple[int, ...]], most: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the weights in order, in groups of at most ``most`` elements or of one larger weight."""
    shard: dict[str, tuple[int, ...]] = {}
    held = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        if shard and held + size > most:
            yield shard
            shard = {}
            held = 0
        shard[name] = shape
        held += size
    yield shard


def _new_file(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Write a safetensors file, yielding each of its tensors for the caller to fill."""
    beginning, places = new_header(shapes, dtype)
    sizes = {name: torch.Size(shape).numel() * _DTYPES[dtype].itemsize for name, shape in shapes.items()}
    total = len(beginning) + sum(sizes.values())
    with file.open("w+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, total)  # a full disk raises here; writing to the mapping would kill us
        opened.write(beginning)
        opened.flush()
        everything = torch.frombuffer(mmap.mmap(opened.fileno(), total), dtype=torch.uint8)
        for name, shape in shapes.items():
            yield name, everything[places[name] : places[name] + sizes[name]].view(_DTYPES[dtype]).view(shape)
        os.fsync(opened.fileno())
