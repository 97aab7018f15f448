"""PEFT's adapter folders: its names and shapes for our adapters, and its ``adapter_config.json``. No torch.

Both sides store the same weights, so conversion only renames them: a row of ``adapters`` has both names.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llama_core.adapters.lora import LORA
from llama_core.adapters.registry import adapter_of_json
from llama_core.adapters.traits import AdapterJson, AdapterType
from llama_core.config.model_types import LLAMA, ModelType
from llama_core.config.model_weights import adapter_weight, hugging_face_name
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import TARGETS, LoRA, adaptable
from llama_core.errors import WeightsError, as_clause
from llama_core.hub import at_revision, folder_of, repository_in_cache
from llama_core.hugging_face.weight_files import FLOAT_BYTES, INDEX, WHOLE, StoredTensor, read_header
from llama_core.hugging_face.weight_names import check_shapes
from llama_core.records.files import DAMAGE, read_file

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
    "runtime_config",
}
"""PEFT's keys that do not change the results of saved adapters, whatever their values."""


def is_adapter_folder(folder: Path) -> bool:
    """Return whether ``folder`` holds PEFT adapters and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not any((folder / name).exists() for name in (WHOLE, INDEX))


def peft_name(name: str, model_type: ModelType = LLAMA) -> str:
    """Return PEFT's name for the parameter of an adapter, such as ``'layers.0.attention.wq.lora_A.weight'``.

    Args:
        name: our name.
        model_type: the type of the model, by which its matrix is called.

    Raises:
        ValueError: if it is no adapter's.
    """
    of_adapter = adapter_weight(name)
    if of_adapter is None:
        raise ValueError(f"{name} belongs to no adapter")
    matrix, weight = of_adapter
    return f"{_PREFIX}{hugging_face_name(matrix, model_type).removesuffix('weight')}{weight.stored_name}"


def adapter_json(lora: LoRA, base: str) -> dict[str, Any]:
    """Return ``adapter_config.json`` for trained adapters, in inference mode.

    A folder in a cache of the Hub is named as its repository and commit, which other machines can have too.

    Args:
        lora: the adapters.
        base: the model that they were trained over: a folder, or a name.
    """
    repository = repository_in_cache(Path(base))
    lora = lora.in_folder
    spelling = lora.kind.json
    settings = {**spelling.settings, **spelling.of_training}
    return {
        **spelling.marks,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": repository or base,
        "revision": Path(base).name if repository else None,
        **{peft_key: lora.resolved(ours) for peft_key, ours in settings.items()},
        "target_modules": list(lora.target_modules),
        **spelling.written,
        "inference_mode": True,
    }


def base_of(folder: Path) -> Path:
    """Return the folder of the model that the adapters in ``folder`` were trained over.

    Raises:
        WeightsError: if ``adapter_config.json`` cannot be read, or names neither an existing folder nor a repository
            of the Hub.
        HubError: if that cannot be had.
    """
    _, config = read_adapter_config(folder)
    named = config.base_model_name_or_path or ""
    base = folder_of(at_revision(named, config.revision))
    if not (base.is_absolute() and base.is_dir()):  # a job may start in another directory
        raise WeightsError(
            f"{folder / ADAPTER_CONFIG} has base_model_name_or_path={named!r}, which is neither the absolute path of a "
            "folder here nor a name of the Hugging Face Hub; write the path of the model that the adapters were "
            "trained over"
        )
    return base


def adapter_weights(spec: ModelSpec, folder: Path) -> dict[str, StoredTensor]:
    """Return where a folder of PEFT stores each adapter of ``spec``, by our names.

    Raises:
        WeightsError: if the folder is incomplete, or its adapters are not supported or differ from those of ``spec``.
    """
    kind, config = read_adapter_config(folder)
    file = folder / ADAPTERS
    if not file.exists():
        if (folder / _PICKLED).exists():
            raise WeightsError(
                f"{folder} holds pickled adapters ({_PICKLED}), which can run code when they are read; if you trust "
                "them, convert them with save_pretrained(safe_serialization=True)"
            )
        raise WeightsError(f"{folder} holds no {ADAPTERS}; download it")
    tensors = read_header(file)
    check_same_adapters(spec, _as_lora(kind, config, tensors, folder), folder)
    names = {peft_name(name, spec.model_type): name for name in spec.adapter_shapes}
    check_shapes(
        {stored: spec.adapter_shapes[ours] for stored, ours in names.items()},
        {name: tensor.shape for name, tensor in tensors.items() if not name.endswith(_BASE)},
        wrong=f"the adapters in {folder} are not those of {spec.name}",
        remedy="choose the model they were trained over, or save them again",
    )
    for tensor in tensors.values():
        if tensor.dtype not in FLOAT_BYTES:
            raise WeightsError(f"{file} holds adapters in {tensor.dtype}; save them in one of {', '.join(FLOAT_BYTES)}")
    return {ours: tensors[stored] for stored, ours in names.items()}


def check_same_adapters(spec: ModelSpec, given: LoRA, source: Path) -> None:
    """Refuse adapters that differ in method, targets or a setting such as the rank from those that ``spec`` trains.

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
    given_values = _computed_by(replace(spec, lora=given).named_lora or given)
    ours = _computed_by(spec.named_lora or spec.lora)
    keys = ["method"] if given.kind is not spec.lora.kind else list(given_values)
    different = [key for key in keys if given_values[key] != ours[key]]
    if different:
        values = ", ".join(f"{key}={given_values[key]} instead of {ours[key]}" for key in different)
        settings = " ".join(f"lora.{key}={given_values[key]}" for key in different)
        raise WeightsError(f"the adapters in {source} have {values}; set {settings}")


def _computed_by(lora: LoRA) -> dict[str, str]:
    """Return the settings in which two sets of adapters must agree, by our keys, as written on a command line."""
    targets = [matrix for matrix in TARGETS if matrix in lora.target_modules]
    return {
        "method": lora.method,
        **{setting: _in_words(lora.resolved(setting)) for setting in lora.kind.json.settings.values()},
        "initial_values": lora.initial_values,
        "target_modules": f"[{','.join(targets)}]",
    }


def _in_words(value: float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else f"{value:g}"


def read_adapter_config(folder: Path) -> tuple[AdapterType, AdapterJson]:
    """Return what a folder says of its adapters, and their kind; that of other kinds is refused as LoRA's.

    Raises:
        WeightsError: if ``adapter_config.json`` cannot be read, or says what is not supported.
    """
    file = folder / ADAPTER_CONFIG
    kind = LORA
    try:
        text = read_file(file)
        kind = _kind_of(text) or kind
        config = kind.json.model_validate_json(text)
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror or error}") from None
    except ValidationError as error:
        detail = error.errors()[0]
        key = next(iter(detail["loc"]), "")
        if detail["type"] == "missing":
            problem = f"has no {key}"
        elif key:
            problem = f"has {key}={detail['input']!r}: {as_clause(detail['msg'])}"
        else:
            problem = f"cannot be read ({detail['msg']})"
        raise WeightsError(f"{file} {problem}; save plain LoRA adapters of a causal language model") from None
    for key, value in (config.model_extra or {}).items():
        if value and key not in _WITHOUT_EFFECT:
            raise WeightsError(
                f"{file} has {key}={value!r}, which is not supported here; merge the adapters into their model with "
                "PEFT's merge_and_unload and use the merged model"
            )
    return kind, config


def _kind_of(text: bytes) -> AdapterType | None:
    """Return the kind of adapter that a folder's JSON describes; None if it is none of ours, or no JSON."""
    try:
        described = json.loads(text)
    except DAMAGE:
        return None
    return adapter_of_json(described) if isinstance(described, dict) else None


def _as_lora(kind: AdapterType, config: AdapterJson, tensors: dict[str, StoredTensor], folder: Path) -> LoRA:
    """Return the adapters that a folder describes; if the targets are a pattern, the weights' names tell them."""
    targets = config.target_modules
    if isinstance(targets, str):
        endings = [f".{weight.stored_name}" for weight in (*kind.weights, *kind.of_embedding)]
        targets = [name.removesuffix(end) for name in tensors for end in endings if name.endswith(end)]
    matrices = list(dict.fromkeys(target.rpartition(".")[2] for target in targets))
    possible = adaptable(kind)
    for matrix in matrices:
        if matrix not in possible:
            raise WeightsError(
                f"the adapters in {folder} target {matrix}, which is not supported; only {', '.join(possible)} are"
            )
    if not matrices:
        raise WeightsError(f"{folder / ADAPTER_CONFIG} names no target_modules; save the adapters again")
    settings = {ours: getattr(config, peft_key) for peft_key, ours in kind.json.settings.items()}
    return LoRA(method=kind.name, target_modules=tuple(matrices), **settings)
