"""Read the architecture that a folder's ``config.json`` describes, or say all that is wrong with it.

A missing key has the default of transformers' configuration. A key that changes the function that
the weights compute is refused unless we have the trait. Other keys are ignored:
``attention_dropout``, ``initializer_range`` and ``router_jitter_noise`` are training settings,
``use_cache`` is a generation setting, and ``pretraining_tp`` only splits a product into slices that
are added up again.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llama_core.config.config_json.families import FAMILIES
from llama_core.config.config_json.llama import LlamaJson
from llama_core.config.config_json.rope import ROPE_TYPES, UNKNOWN_ROPE_TYPE, Rope, rope_type
from llama_core.config.models import LONGEST_DEFAULT, ModelSpec, model_names
from llama_core.errors import ConfigError, as_clause, why_unreadable
from llama_core.hub import folder_of, repository_in_cache
from llama_core.records.files import read_file

_CONFIG = "config.json"
_ADAPTERS = "adapter_config.json"
_MISSING = " is missing"
_NONE_IF_NULL = frozenset({"sliding_window", "attention_chunk_size", "q_lora_rank"})
"""The keys of which null is none, as in Mistral-7B-Instruct-v0.2, whose type has a window by default."""


def is_folder(model: str) -> bool:
    """Return whether ``model`` is a path or a name of the Hub, and not a variant's name.

    A path has a separator, or holds a ``config.json``.
    """
    if os.sep in model or model in model_names():
        return os.sep in model
    try:
        return (Path(model) / _CONFIG).is_file()
    except OSError:  # the name is too long, or the folder is not accessible
        return False


def folder_name(model: str) -> str:
    """Return the name of the model in a folder: of its repository on the Hub, or of the folder."""
    folder = folder_of(model).resolve()
    return (repository_in_cache(folder) or folder.name).rpartition("/")[2]


def absolute_path(model: str) -> str:
    """Return the absolute path of a folder."""
    return str(folder_of(model).absolute())


def read_folder(model: str) -> ModelSpec:
    """Return the architecture that a folder's ``config.json`` describes.

    Args:
        model: the folder, where ``~`` is the home directory, or a name of the Hub.

    Raises:
        ConfigError: naming every key that is missing, wrong or unlike Llama, or saying why the folder holds no model.
        HubError: if a name stands for no folder.
    """
    folder = folder_of(model)
    _refuse_other_folders(folder, model)
    config = _read_config(folder / _CONFIG)
    return ModelSpec(
        folder_name(model),
        "llama",
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.width_of_head,
        ffn_size=config.width_of_feed_forward,
        vocab_size=config.vocab_size,
        rope_theta=config.theta,
        norm_eps=config.rms_norm_eps,
        # as written, even with linear scaling, where some authors write the length before scaling,
        # as in vicuna-7b-v1.5-16k, and some the one after, as in deepseek-coder-6.7b-base: no key
        # tells them apart
        max_context=config.max_position_embeddings,
        default_seq_len=min(config.max_position_embeddings, LONGEST_DEFAULT),
        tied_embeddings=config.tie_word_embeddings,
        rope_scaling=config.rope.scaling,
        instruct=_has_chat_template(folder),
        moe=config.moe,
        **config.traits,
    )


def ignored_settings(model: str) -> list[str]:
    """Return a sentence on a folder's ignored settings of the rotary embedding; none without any.

    Args:
        model: a model's name, or a folder that ``read_folder`` reads.
    """
    if not is_folder(model):
        return []
    file = folder_of(model) / _CONFIG
    ignored = {}
    for mapping, rope in _read_config(file).rope.mappings.items():
        for key, value in (rope.model_extra or {}).items():
            ignored[f"{mapping}.{json.dumps(key)[1:-1]}"] = json.dumps(value)
    if not ignored:
        return []
    said = ", ".join(f"{key}={value}" for key, value in ignored.items())
    return [
        f"{file}: {said}: ignored, as in transformers; if the model was trained with it, set "
        "architecture.rope_scaling, such as its attention_factor"
    ]


def _has_chat_template(folder: Path) -> bool:
    """Return whether a model's tokenizer has a chat template.

    If so, the model counts as trained on conversations, since ``config.json`` does not say.
    """
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"  # where older versions of transformers write it
    return file.is_file() and bool(_read_json(file).get("chat_template"))


def _refuse_other_folders(folder: Path, model: str) -> None:
    try:
        problem = _what_is_wrong(folder)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        raise ConfigError(
            f"model={model!r} {problem}; give a folder with a {_CONFIG}, or a name that `training-infra models` lists"
        )


def _what_is_wrong(folder: Path) -> str:
    """Return why a folder holds no model; empty if it holds one."""
    if (folder / _CONFIG).is_file():
        return ""
    if not folder.exists():
        return "is not a folder here"
    if not folder.is_dir():
        return "is a file"
    if not (folder / _ADAPTERS).is_file():
        return f"has no {_CONFIG}"
    base = _read_json(folder / _ADAPTERS).get("base_model_name_or_path") or "another model"
    return f"holds adapters for {base} ({_ADAPTERS}), but no model"


def _read_config(file: Path) -> LlamaJson:
    """Return what a ``config.json`` describes.

    Raises:
        ConfigError: as ``read_folder``.
    """
    # null is the default, as `"rope_scaling": null` of Llama-2-7b-hf
    stated = _read_json(file)
    given = {key: value for key, value in stated.items() if value not in (None, {}) or key in _NONE_IF_NULL}
    model_type = str(given.get("model_type", "llama"))
    text = given.get("text_config")
    if model_type not in FAMILIES and isinstance(text, dict) and text.get("model_type") in FAMILIES:
        raise ConfigError(
            f'{file}: model_type="{model_type}" is a {text["model_type"]} with more beside it, such as images; save '
            "the text model alone as docs/models.md says, and give its folder"
        )
    family = FAMILIES.get(model_type, LlamaJson)
    try:
        return family.model_validate(given)
    except ValidationError as error:
        problems: list[str] = []
        for detail in error.errors():
            problems += _describe(detail, family)
        if model_type not in FAMILIES:  # other models name their sizes differently
            problems = [problem for problem in problems if not problem.endswith(_MISSING)]
        raise ConfigError(*(f"{file}: {problem}" for problem in problems)) from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_file(file))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8
        raise ConfigError(f"{file} is not JSON: {why_unreadable(error)}; copy it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not a mapping of keys to values; copy it again")
    return value


def _describe(detail: ErrorDetails, family: type[LlamaJson]) -> Iterator[str]:
    """Yield the problems in one of Pydantic's error details, with keys spelled as in the file."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        yield from cause.problems
        return
    # Pydantic's path also has the place in a list, and which type of rotary embedding it chose
    path = [part for part in detail["loc"] if isinstance(part, str) and part not in ROPE_TYPES]
    key = ".".join(path)
    value = detail["input"]
    if detail["type"] == "missing":
        yield f"{key}{_MISSING}"
        return
    message = detail["msg"]
    if detail["type"] == UNKNOWN_ROPE_TYPE and not isinstance(value, dict):
        message = "is not a mapping of keys to values"
    elif detail["type"] == UNKNOWN_ROPE_TYPE:
        key = f"{key}.rope_type"
        value = rope_type(value)
        if value == "dynamic":
            message = f"a text's length would change all its frequencies, those of cached keys too; {message}"
    elif key == "model_type":
        message = f"only {', '.join(FAMILIES)} can be trained"
    else:
        owner = Rope if len(path) > 1 else family
        field = owner.model_fields.get(path[-1])
        message = (field and field.description) or as_clause(message)
    shown = "" if isinstance(value, dict | list) else f"={json.dumps(value)}"
    yield f"{key}{shown}: {message}"
