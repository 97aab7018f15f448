"""PEFT's adapter folders: its names and shapes for our adapters, and its ``adapter_config.json``. No torch.

Both sides store the same two matrices, A [rank, columns] and B [rows, rank], so conversion only renames them.
The embedding's A has a column for each token.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llama_core.config.models import ModelSpec, hugging_face_name, matrix_name
from llama_core.config.strategy import EMBEDDING, TARGETS, LoRA
from llama_core.errors import WeightsError
from llama_core.models.hf import check_shapes
from llama_core.models.weight_files import FLOAT_BYTES, INDEX, WHOLE, StoredTensor, read_header
from llama_core.records.files import read_file, user_path

ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
_BASE = ".base_layer.weight"
"""The end of PEFT's name for a table with an adapter; PEFT saves that table although the base has it too."""
_WITHOUT_EFFECT = {
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
}
"""PEFT's keys that do not change the results of saved adapters, whatever their values."""


class _AdapterJson(BaseModel):
    """The keys that we read of PEFT's ``LoraConfig``; a ``Literal`` lists the values that we support."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    r: Annotated[int, Field(ge=1)] = 8
    lora_alpha: Annotated[float, Field(gt=0)] = 8.0
    lora_dropout: float = 0.0
    target_modules: list[str] | str
    bias: Literal["none"] = "none"
    fan_in_fan_out: Literal[False] = False
    init_lora_weights: Literal["gaussian", "orthogonal", "eva"] | bool | None = None
    """How they were initialised. The values left out change the base too, which then differs from its folder."""
    base_model_name_or_path: str | None = None


def is_adapter_folder(folder: Path) -> bool:
    """Return whether ``folder`` holds PEFT adapters and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not any((folder / name).exists() for name in (WHOLE, INDEX))


def peft_name(name: str) -> str:
    """Return PEFT's name for our parameter ``name``, such as ``'layers.0.attention.wq.lora_A.weight'``."""
    path, _, part = name.rpartition(".lora_")
    if matrix_name(path) == EMBEDDING:
        part = f"embedding_{part.removesuffix('.weight')}"
    return f"{_PREFIX}{hugging_face_name(f'{path}.weight').removesuffix('weight')}lora_{part}"


def adapter_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the shape of every A and B by our names; empty for a model without adapters."""
    shapes: dict[str, tuple[int, int]] = {}
    for name in spec.parameter_shapes:
        path = name.removesuffix(".weight")
        if spec.lora is not None and name in spec.adapted:
            columns, rows = spec.target_shapes[matrix_name(path)]
            shapes[f"{path}.lora_A.weight"] = (spec.lora.lora_rank, columns)
            shapes[f"{path}.lora_B.weight"] = (rows, spec.lora.lora_rank)
    return shapes


def adapter_json(lora: LoRA, base: str) -> dict[str, Any]:
    """Return ``adapter_config.json`` for trained adapters, in inference mode.

    Args:
        lora: the adapters.
        base: the model that they were trained over: a folder, or a name.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.lora_rank,
        "lora_alpha": _alpha(lora),
        "lora_dropout": lora.lora_dropout,
        "target_modules": list(lora.target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "inference_mode": True,
    }


def base_of(folder: Path) -> Path:
    """Return the folder of the model that the adapters in ``folder`` were trained over.

    Raises:
        WeightsError: if ``adapter_config.json`` cannot be read or does not name an existing folder.
    """
    named = _read_config(folder).base_model_name_or_path or ""
    base = user_path(named)
    if not (base.is_absolute() and base.is_dir()):  # a job may start in another directory
        raise WeightsError(
            f"{folder / ADAPTER_CONFIG} has base_model_name_or_path={named!r}, which is not the absolute path of a "
            "folder here; write the path of the model that the adapters were trained over"
        )
    return base


def adapter_weights(spec: ModelSpec, folder: Path) -> dict[str, StoredTensor]:
    """Return where a folder of PEFT stores each adapter of ``spec``, by our names.

    Raises:
        WeightsError: if the folder is incomplete, or its adapters are not supported or differ from those of ``spec``.
    """
    config = _read_config(folder)
    file = folder / ADAPTERS
    if not file.exists():
        if (folder / _PICKLED).exists():
            raise WeightsError(
                f"{folder} holds pickled adapters ({_PICKLED}), which can run code when they are read; if you trust "
                "them, convert them with save_pretrained(safe_serialization=True)"
            )
        raise WeightsError(f"{folder} holds no {ADAPTERS}; download it")
    tensors = read_header(file)
    check_same_adapters(spec, _as_lora(config, tensors, folder), folder)
    names = {peft_name(name): name for name in adapter_shapes(spec)}
    check_shapes(
        {theirs: adapter_shapes(spec)[ours] for theirs, ours in names.items()},
        {name: tensor.shape for name, tensor in tensors.items() if not name.endswith(_BASE)},
        wrong=f"the adapters in {folder} are not those of {spec.name}",
        remedy="choose the model they were trained over, or save them again",
    )
    for tensor in tensors.values():
        if tensor.dtype not in FLOAT_BYTES:
            raise WeightsError(f"{file} holds adapters in {tensor.dtype}; save them in one of {', '.join(FLOAT_BYTES)}")
    return {ours: tensors[theirs] for theirs, ours in names.items()}


def check_same_adapters(spec: ModelSpec, given: LoRA, source: Path) -> None:
    """Refuse adapters that differ in rank, alpha or targets from those that ``spec`` trains.

    Args:
        spec: the model.
        given: the given adapters; their dropout may differ.
        source: where they are, for the error.

    Raises:
        WeightsError: naming every difference, with both values.
    """
    if spec.lora is None:
        raise WeightsError(
            f"{source} holds adapters, which only strategy=lora and hybrid train; use one, or merge them into their "
            "model (export-hf --merged, or PEFT's merge_and_unload)"
        )
    theirs = _kind(given)
    ours = _kind(spec.lora)
    different = [key for key in theirs if theirs[key] != ours[key]]
    if different:
        values = ", ".join(f"{key}={theirs[key]} instead of {ours[key]}" for key in different)
        settings = " ".join(f"lora.{key}={theirs[key]}" for key in different)
        raise WeightsError(f"the adapters in {source} have {values}; set {settings}")


def _alpha(lora: LoRA) -> float:
    """Return alpha, from the scale if it is not set; an int if it is whole, as PEFT writes it."""
    alpha = lora.lora_alpha or lora.scale * lora.lora_rank
    return int(alpha) if alpha.is_integer() else alpha


def _kind(lora: LoRA) -> dict[str, str]:
    """Return the settings in which two sets of adapters must agree, by our keys, as written on a command line."""
    targets = [matrix for matrix in TARGETS if matrix in lora.target_modules]
    return {
        "lora_rank": str(lora.lora_rank),
        "lora_alpha": f"{_alpha(lora):g}",
        "target_modules": f"[{','.join(targets)}]",
    }


def _read_config(folder: Path) -> _AdapterJson:
    file = folder / ADAPTER_CONFIG
    try:
        config = _AdapterJson.model_validate_json(read_file(file))
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror or error}") from None
    except ValidationError as error:
        detail = error.errors()[0]
        key = next(iter(detail["loc"]), "")
        if detail["type"] == "missing":
            problem = f"has no {key}"
        elif key:
            problem = f"has {key}={detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
        else:
            problem = f"cannot be read ({detail['msg']})"
        raise WeightsError(f"{file} {problem}; save plain LoRA adapters of a causal language model") from None
    for key, value in (config.model_extra or {}).items():
        if value and key not in _WITHOUT_EFFECT:
            raise WeightsError(
                f"{file} has {key}={value!r}, which is not supported here; merge the adapters into their model with "
                "PEFT's merge_and_unload and use the merged model"
            )
    return config


def _as_lora(config: _AdapterJson, tensors: dict[str, StoredTensor], folder: Path) -> LoRA:
    """Return the adapters that a folder describes; if the targets are a pattern, the weights' names tell them."""
    targets = config.target_modules
    if isinstance(targets, str):
        targets = [name.rpartition(".lora_")[0] for name in tensors]
    matrices = list(dict.fromkeys(target.rpartition(".")[2] for target in targets))
    for matrix in matrices:
        if matrix not in TARGETS:
            raise WeightsError(
                f"the adapters in {folder} target {matrix}, which is not supported; only {', '.join(TARGETS)} are"
            )
    if not matrices:
        raise WeightsError(f"{folder / ADAPTER_CONFIG} names no target_modules; save the adapters again")
    return LoRA(lora_rank=config.r, lora_alpha=config.lora_alpha, target_modules=tuple(matrices))
