"""The base of adapters, which is in no checkpoint of a run: it may be damaged, or replaced behind the run's back."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from llama_core.config.run import RunConfig
from llama_core.errors import WeightsError
from llama_core.hugging_face.pretrained import Origin, checkpoints_behind, is_checkpoint, origin_of, refuse_damaged
from llama_core.hugging_face.weight_files import ELEMENT_BYTES, StoredTensor, read_tensors
from llama_core.records.checkpoints import MANIFEST, STATE, newest_step, run_of
from llama_core.records.directory import RunDirectory
from llama_core.records.files import open_file, read_file, read_typed, write_json

_BLOCK_BYTES = 4096
_NUM_BLOCKS = 16
"""Blocks that are compared of each tensor: other weights differ in nearly all of their bytes."""


@dataclass(frozen=True)
class BaseRecord:
    """The weights over which a run trains adapters."""

    path: str
    digest: str
    """By ``base_digest``."""


def base_digest(base: Path) -> str:
    """Return a digest of the weights of a base: of a checkpoint's checksums, or of some bytes of each of its tensors.

    Of a folder, at most 64 KiB of each tensor are read, spread over it, and all of a smaller one. It does not depend on
    how the tensors are ordered or divided into files. Any change of an eighth of a tensor in one piece is found; one of
    some rows or single numbers of a larger tensor may be missed.

    Args:
        base: a checkpoint, or a Hugging Face folder.

    Raises:
        WeightsError: if the folder holds no model, or a file cannot be read.
    """
    try:
        return _digest(base)
    except OSError as error:
        raise WeightsError(f"cannot read the base {base}: {error.strerror or error}") from None


def _digest(base: Path) -> str:
    if is_checkpoint(base):
        described = base / MANIFEST
        return hashlib.sha256(read_file(described if described.exists() else base / STATE)).hexdigest()
    digest = hashlib.sha256()
    for name, stored in sorted(read_tensors(base).items()):
        digest.update(f"{name} {stored.dtype} {stored.shape} ".encode())
        with open_file(stored.file) as file:
            for offset, length in _blocks(name, stored):
                file.seek(stored.start + offset)
                digest.update(file.read(length))
    return digest.hexdigest()


def _blocks(name: str, stored: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield the offset in a tensor and the length of each block that is compared: one, drawn, in each equal part."""
    num_bytes = math.prod(stored.shape) * ELEMENT_BYTES.get(stored.dtype, 0)  # no model is read from other dtypes
    if num_bytes <= _NUM_BLOCKS * _BLOCK_BYTES:
        yield 0, num_bytes
        return
    for begin, end in pairwise(num_bytes * part // _NUM_BLOCKS for part in range(_NUM_BLOCKS + 1)):
        drawn = hashlib.blake2b(f"{name} {stored.shape} {begin}".encode(), digest_size=8).digest()
        yield begin + int.from_bytes(drawn) % (end - begin - _BLOCK_BYTES + 1), _BLOCK_BYTES


def record_base(run: RunDirectory, config: RunConfig) -> None:
    """Record the base of a run that trains adapters, unless it has a checkpoint already.

    Raises:
        WeightsError: if there is no such base, or it cannot be read.
    """
    init_from = config.training.init_from
    if config.spec.lora is None or init_from is None or newest_step(run):
        return
    if (base := origin_of(Path(init_from)).base) is not None:
        write_json(run.base, BaseRecord(str(base), base_digest(base)))


def refuse_other_base(run: RunDirectory, origin: Origin) -> None:
    """Refuse a base that is not the one over which a run has trained its adapters.

    Args:
        run: the run; one without a record of its base accepts any.
        origin: where its weights come from.

    Raises:
        WeightsError: if the weights are others, or cannot be read.
        RunDirectoryError: if the record is damaged.
    """
    if origin.base is None or not run.base.exists():
        return
    if base_digest(origin.base) != read_typed(run.base, BaseRecord, run.path).digest:
        raise WeightsError(
            f"{origin.base} holds other weights than those over which {run.path} has trained its adapters; restore them"
        )


def refuse_unfit_base(source: Path) -> None:
    """Refuse the base of the adapters in ``source``, if it is a damaged checkpoint, or not that of their run.

    Args:
        source: a checkpoint or a folder; one without adapters has no base.

    Raises:
        CheckpointError: if the base is damaged. Every byte of a checkpoint is compared.
        WeightsError: if it is another one.
    """
    for checkpoint in checkpoints_behind(source):
        if checkpoint != source:
            refuse_damaged(checkpoint)
    refuse_other_base_of(origin_of(source))


def refuse_other_base_of(origin: Origin) -> None:
    """Do the second part: refuse another base than that of the run whose checkpoint of adapters the weights are."""
    if origin.adapters is not None and is_checkpoint(origin.adapters):
        refuse_other_base(run_of(origin.adapters), origin)
