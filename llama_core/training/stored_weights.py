"""Read weights into any part of a model, each rank its own slices; write them in Hugging Face's and PEFT's formats.

``weight_sources`` knows where they are read from.
"""

import json
import logging
import math
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from llama_core.config.models import ModelSpec
from llama_core.errors import WeightsError
from llama_core.hugging_face.peft import ADAPTERS, peft_name
from llama_core.hugging_face.pretrained import (
    check_pretrained,
    names_with_adapters,
    origin_of,
    resolve_intact,
    stored_model,
)
from llama_core.hugging_face.weight_files import INDEX, WHOLE, new_header
from llama_core.hugging_face.weight_names import dense_name, hugging_face_names, hugging_face_shapes
from llama_core.models import nf4
from llama_core.models.layers import local_part
from llama_core.models.llama import (
    Llama,
    begin_with_principal_parts,
    initialize_parameter,
    named_weights,
    pack_matrices,
    takes_principal_part,
    with_adapters,
)
from llama_core.parallel.ranks import is_first_rank
from llama_core.training.weight_sources import (
    DTYPES,
    FORMAT_NAMES,
    AsHuggingFaceStores,
    Copied,
    Merged,
    OverWhole,
    Rounded,
    WeightSource,
    adapter_source,
    base_source,
    mean_source,
    packed_matrix,
)
from llama_core.units import format_bytes, format_duration

logger = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000
"""Largest size of a written file, unless a single tensor is larger."""
SECONDS_BETWEEN_LINES = 10.0
"""How often rank 0 logs the progress of reading."""


class Pretrained:
    """Initial weights for the part of a model that a rank holds.

    Adapters that the source lacks are drawn at random, as in a run from scratch. If the source is a dense model and
    ``spec`` has experts, each expert begins as a copy of its layer's feed-forward, and routers are drawn. Balance
    biases that the source lacks begin at zero.

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
        base = base_source(stored, origin)
        self._sources: dict[str, WeightSource] = {}
        for name in spec.weight_shapes:
            if name in stored.weight_shapes:
                self._sources[name] = base
            elif dense_name(name) in stored.weight_shapes:
                self._sources[name] = Copied(base)
        if origin.adapters is not None:
            self._sources |= dict.fromkeys(names_with_adapters(spec, origin), adapter_source(spec, origin.adapters))
        self._progress = _Progress(source)

    @torch.no_grad()
    def fill(self, model: Llama) -> None:
        """Read every weight of ``model``, or this rank's part of it, converted to the weight's dtype."""
        for name, parameter in named_weights(model):
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
        return packed_matrix(self._sources[name], name, torch.empty(self._spec.parameter_shapes[name], device=device))

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
    compute_dtype = DTYPES[FORMAT_NAMES[dtype]]
    with torch.device("meta"):
        model = with_adapters(Llama(spec, compute_dtype=compute_dtype, layers=layers).to(compute_dtype))
    divide(model)
    if source is not None:
        found = Path(resolve_intact(str(source), partial(logger.warning, "%s")))
        Pretrained(spec, found).fill(model.to_empty(device=device))
    return model


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
    source = mean_source([checkpoint, *others])
    if spec.lora is not None:
        source = Merged(spec, spec.lora, Rounded(spec, base_source(spec, origin_of(checkpoint))), source)
    source = AsHuggingFaceStores(source, spec)
    shapes = hugging_face_shapes(spec)
    dtypes = dict.fromkeys(shapes, FORMAT_NAMES[dtype])
    for name in spec.buffer_shapes:  # a step changes a balance bias by less than 16 bits can tell
        dtypes |= dict.fromkeys(hugging_face_names(name, spec), FORMAT_NAMES["fp32"])
    itemsize = DTYPES[FORMAT_NAMES[dtype]].itemsize
    shards = list(_shards(shapes, shard_bytes // itemsize))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WHOLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, source, shard, dtypes)
        weight_map |= dict.fromkeys(shard, file)
        on_file(file)
    if len(shards) > 1:
        total = sum(torch.Size(shape).numel() * DTYPES[dtypes[name]].itemsize for name, shape in shapes.items())
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
    source = mean_source([checkpoint, *others])
    assert spec.lora is not None
    if spec.lora.take_principal_part:
        source = OverWhole(spec, spec.lora, base_source(spec, origin_of(checkpoint)), source)
    names = {peft_name(name, spec.model_type): name for name in spec.adapter_shapes}
    written = replace(spec, lora=spec.lora.in_folder).adapter_shapes
    shapes = {peft_name(name, spec.model_type): shape for name, shape in written.items()}
    _write_file(folder / ADAPTERS, source, shapes, dict.fromkeys(shapes, FORMAT_NAMES[dtype]), names)


def _write_file(
    file: Path,
    source: WeightSource,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    names: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file.

    Args:
        file: the file.
        source: has the weights.
        shapes: their shapes, by their names in the file.
        dtypes: the format's names for their dtypes.
        names: the source's names for them, if these differ.
    """
    for name, view in _new_file(file, shapes, dtypes):
        source.read(names[name] if names else name, view)
        if view.dtype == torch.float16 and any(math.isinf(extreme) for extreme in torch.aminmax(view)):
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


def _new_file(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Write a safetensors file, yielding each of its tensors for the caller to fill."""
    # the widest first, so that each begins at a multiple of its elements' bytes
    shapes = dict(sorted(shapes.items(), key=lambda item: -DTYPES[dtypes[item[0]]].itemsize))
    beginning, places = new_header(shapes, dtypes)
    sizes = {name: torch.Size(shape).numel() * DTYPES[dtypes[name]].itemsize for name, shape in shapes.items()}
    total = len(beginning) + sum(sizes.values())
    with file.open("w+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, total)  # a full disk raises here; writing to the mapping would kill us
        opened.write(beginning)
        opened.flush()
        everything = torch.frombuffer(mmap.mmap(opened.fileno(), total), dtype=torch.uint8)
        for name, shape in shapes.items():
            yield name, everything[places[name] : places[name] + sizes[name]].view(DTYPES[dtypes[name]]).view(shape)
        os.fsync(opened.fileno())
