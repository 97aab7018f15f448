"""Export a run's weights to a Hugging Face folder, or its adapters to a PEFT folder, on a machine without GPUs."""

import fcntl
import glob
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any
from uuid import uuid4

from llama_core.chain.runs import find_checkpoint, load_config
from llama_core.config.hugging_face import config_json
from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER, DataConfig
from llama_core.data.tokenizer import BYTES, load_tokenizer
from llama_core.errors import CheckpointError, DataError, WeightsError
from llama_core.imports import importing_torch
from llama_core.models.peft import ADAPTER_CONFIG, ADAPTERS, adapter_json
from llama_core.models.pretrained import check_pretrained, origin_of, refuse_damaged_base, saved_run
from llama_core.records.directory import RunDirectory
from llama_core.records.files import open_file, read_file, user_path

_BESIDE_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files that may accompany a ``tokenizer.json``."""
_WRITING = ".writing"
_ABANDONED_AFTER_SECONDS = 60
"""Age from which an unlocked folder is known to be left over, and not one that is about to be locked."""


def export_run(
    run: RunDirectory,
    out: Path,
    *,
    step: int | None = None,
    dtype: str = "fp32",
    merged: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a checkpoint's weights and tokenizer for transformers or PEFT, and return ``out``.

    A run that trains nothing but adapters becomes a PEFT folder, unless ``merged`` is set. Adapters of other runs are
    always merged. The folder appears only when it is complete. At most one weight is in memory at a time.

    Args:
        run: a run that trains a full model or adapters, under any plan.
        out: a folder that does not exist or is empty.
        step: step of the checkpoint; by default the newest intact one.
        dtype: one of ``hugging_face.DTYPES``; training keeps its weights in fp32.
        merged: add the adapters to the weights that the run started from, and write a full model.
        tell: called with a line for each thing written or left out.

    Raises:
        RunDirectoryError: if there is no such run or checkpoint.
        WeightsError: if ``out`` is not empty, the checkpoint holds neither a full model nor adapters, or there is
            nothing to merge.
        CheckpointError: if the weights are damaged or cannot be read, or ``out`` cannot be written.
    """
    load_config(run)
    checkpoint = find_checkpoint(run, step, tell)
    config = saved_run(checkpoint)
    _refuse(config, checkpoint, out, merged=merged)
    tell(f"{checkpoint} in {dtype}")
    try:
        with _new_folder_beside(out.absolute()) as writing:
            special = _write_tokenizer(config.data, writing, tell)
            if _is_for_peft(config.spec) and not merged:
                _write_adapters(checkpoint, config, writing, dtype=dtype, tell=tell)
            else:
                _write_model(checkpoint, config, writing, dtype=dtype, special=special, tell=tell)
            _refuse_files_in(out)  # another export may have come first
            writing.replace(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}; nothing is left there") from None
    return out


@contextmanager
def _new_folder_beside(out: Path) -> Iterator[Path]:
    """Yield a new folder, which is removed at the end unless it has been renamed; remove what killed exports left."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.*{_WRITING}"):
        with suppress(OSError):  # another export holds the lock
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_SECONDS:
                with only_one(left):
                    shutil.rmtree(left)
    writing = out.with_name(f".{out.name}.{uuid4().hex}{_WRITING}")
    writing.mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, writing, ignore_errors=True)
        with suppress(OSError):  # a network file system may lock no folders, and then nobody removes any
            stack.enter_context(only_one(writing))
        yield writing


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock a folder for the block.

    Raises:
        OSError: if another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _refuse(config: RunConfig, checkpoint: Path, out: Path, *, merged: bool) -> None:
    if merged and config.spec.lora is None:
        raise WeightsError(
            f"{checkpoint} holds a full model (strategy={config.strategy}) and no adapters to merge; drop --merged"
        )
    spec = config.spec
    if spec.moe is not None and (spec.num_sparse_layers < spec.num_layers or spec.moe.gate_softmax != "chosen"):
        raise WeightsError(
            f"{checkpoint} holds experts that transformers' Mixtral cannot describe: it has experts in every layer "
            "(moe_layers) and gates over the chosen ones (gate_softmax=chosen)"
        )
    if spec.lora is not None and (merged or not _is_for_peft(spec)):
        check_pretrained(spec, checkpoint)
        refuse_damaged_base(checkpoint)
    _refuse_files_in(out)


def _refuse_files_in(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WeightsError(f"{out} exists and is not an empty folder; choose another --out")


def _is_for_peft(spec: ModelSpec) -> bool:
    """Return whether a PEFT folder can hold everything that is trained: adapters only."""
    return spec.lora is not None and not spec.trained_in_full


def _write_model(
    checkpoint: Path,
    config: RunConfig,
    folder: Path,
    *,
    dtype: str,
    special: dict[str, int],
    tell: Callable[[str], None],
) -> None:
    with importing_torch():
        from llama_core.training.weights import write_hugging_face

    if config.spec.lora is not None:
        tell(f"adapters added to {_base(checkpoint, config)}")
    _write_json(folder / "config.json", config_json(config.spec, dtype, **special))
    _write_json(folder / "generation_config.json", {_token(name, "_id"): index for name, index in special.items()})
    write_hugging_face(checkpoint, config.spec, folder, dtype=dtype, on_file=lambda name: tell(f"wrote {name}"))


def _write_adapters(
    checkpoint: Path, config: RunConfig, folder: Path, *, dtype: str, tell: Callable[[str], None]
) -> None:
    with importing_torch():
        from llama_core.training.weights import write_adapters

    base = origin_of(checkpoint).base
    tell(f"adapters over {_base(checkpoint, config)}")
    _write_json(folder / ADAPTER_CONFIG, adapter_json(config.lora, str(base or config.model)))
    write_adapters(checkpoint, config.spec, folder, dtype=dtype)
    tell(f"wrote {ADAPTERS}")


def _base(checkpoint: Path, config: RunConfig) -> str:
    """Return a name for the base weights of a checkpoint's adapters."""
    origin = origin_of(checkpoint)
    if origin.drawn_by is not None:
        return f"{config.model} as seed {origin.drawn_by.training.seed} draws it, which is in no file"
    return str(origin.base)


def _write_tokenizer(data: DataConfig, folder: Path, tell: Callable[[str], None]) -> dict[str, int]:
    """Copy the run's tokenizer to ``folder``, and return the ids of its special tokens, if they are known."""
    if data.source == DATALOADER:
        tell("no tokenizer: the run trained on a dataloader; add the tokenizer that made its tokens")
        return {}
    try:
        tokenizer = load_tokenizer(data.tokenizer)
    except DataError as error:
        tell(f"no tokenizer: {error}")
        return {}
    special = {"eos_id": tokenizer.eos_id} | ({} if tokenizer.bos_id is None else {"bos_id": tokenizer.bos_id})
    if data.tokenizer == BYTES:
        tell("no tokenizer: the run trained on bytes, for which transformers has no tokenizer")
        return special
    path = user_path(data.tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not _copy(file, folder / "tokenizer.json", tell):
        return special
    for beside in (file.with_name(name) for name in _BESIDE_TOKENIZER):
        if beside.exists():
            _copy(beside, folder / beside.name, tell)
    if not (folder / "tokenizer_config.json").exists():
        names = {token["id"]: token["content"] for token in json.loads(read_file(file))["added_tokens"]}
        tokens = {_token(name): names[index] for name, index in special.items() if index in names}
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens)
    return special


def _copy(file: Path, to: Path, tell: Callable[[str], None]) -> bool:
    """Copy a file of a tokenizer, and return whether it is one of the tokenizer's own."""
    try:
        with _open_own(file) as source, to.open("xb") as target:
            shutil.copyfileobj(source, target)
    except NotItsOwnError as error:
        tell(f"left out {file.name}: {error}; copy it there if it belongs to the tokenizer")
        return False
    return True


class NotItsOwnError(Exception):
    """A file that does not belong to a tokenizer although its name says so."""


def _open_own(file: Path) -> BufferedReader:
    """Open a file of a tokenizer; a link may stand for another file of its folder, or of Hugging Face's cache.

    People publish an export. A link made by somebody else could put any file into it.
    """
    folder = file.parent.resolve()
    target = file.resolve()
    own = {folder}
    if folder.parent.name == "snapshots":  # the cache, whose folders hold links to its files
        own.add(folder.parents[1] / "blobs")
    if target.parent not in own:
        raise NotItsOwnError(f"it is a link to {target}")
    try:
        return open_file(target, target.parent)
    except OSError as error:
        raise NotItsOwnError(str(error.strerror)) from None


def _token(name: str, suffix: str = "") -> str:
    """Return ``eos_token`` for ``eos_id``, and ``eos_token_id`` with that suffix."""
    return f"{name.removesuffix('_id')}_token{suffix}"


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
