"""Export a run's weights to a Hugging Face folder, or its adapters to a PEFT folder, on a machine without GPUs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_core.chain.runs import find_checkpoint, load_config
from llama_core.config.models import ModelSpec
from llama_core.config.run import DATALOADER, DataConfig, RunConfig
from llama_core.data.tokenizer import BYTES, load_tokenizer
from llama_core.errors import CheckpointError, DataError, WeightsError
from llama_core.imports import importing_torch
from llama_core.models.hf import config_json
from llama_core.models.peft import ADAPTER_CONFIG, ADAPTERS, adapter_json
from llama_core.models.pretrained import check_pretrained, origin_of, saved_run
from llama_core.records.directory import RunDirectory

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
        step: step of the checkpoint; by default the newest complete one.
        dtype: one of ``hf.DTYPES``; training keeps its weights in fp32.
        merged: add the adapters to the weights that the run started from, and write a full model.
        tell: called with a line for each thing written or left out.

    Raises:
        RunDirectoryError: if there is no such run or checkpoint.
        WeightsError: if ``out`` is not empty, the checkpoint holds neither a full model nor adapters, or there is
            nothing to merge.
        CheckpointError: if the weights cannot be read, or ``out`` cannot be written.
    """
    load_config(run)
    checkpoint = find_checkpoint(run, step)
    config = saved_run(checkpoint)
    _refuse(config, checkpoint, out, merged=merged)
    tell(f"{checkpoint} in {dtype}")
    writing = out.absolute().with_name(f".{out.absolute().name}.writing")
    try:
        shutil.rmtree(writing, ignore_errors=True)  # left by a killed export
        writing.mkdir(parents=True)
        special = _write_tokenizer(config.data, writing, tell)
        if _is_for_peft(config.spec) and not merged:
            _write_adapters(checkpoint, config, writing, dtype=dtype, tell=tell)
        else:
            _write_model(checkpoint, config, writing, dtype=dtype, special=special, tell=tell)
        writing.replace(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}; nothing is left there") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return out


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
    path = Path(data.tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    shutil.copyfile(file, folder / "tokenizer.json")
    for beside in (file.with_name(name) for name in _BESIDE_TOKENIZER):
        if beside.exists():
            shutil.copyfile(beside, folder / beside.name)
    if not (folder / "tokenizer_config.json").exists():
        names = {token["id"]: token["content"] for token in json.loads(file.read_bytes())["added_tokens"]}
        tokens = {_token(name): names[index] for name, index in special.items() if index in names}
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens)
    return special


def _token(name: str, suffix: str = "") -> str:
    """Return ``eos_token`` for ``eos_id``, and ``eos_token_id`` with that suffix."""
    return f"{name.removesuffix('_id')}_token{suffix}"


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
