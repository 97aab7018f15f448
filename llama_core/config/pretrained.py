"""Settings that a run takes over from its initial weights, unless it sets them itself."""

import json
from pathlib import Path
from typing import Any

from llama_core.adapters.registry import adapter_of_json
from llama_core.config.config_json.reading import is_folder, read_folder
from llama_core.config.models import model_spec
from llama_core.config.section import Section
from llama_core.config.strategy import PARTS
from llama_core.config.strict_yaml import MAX_BYTES_OF_YAML, parse_yaml
from llama_core.errors import ConfigError
from llama_core.hub import at_revision, folder_of
from llama_core.records.files import DAMAGE, read_file

_PARTS = {part for parts in PARTS.values() for part in parts}


def settings_of_weights(path: str) -> dict[str, Any]:
    """Return the model, tokenizer, format of conversations, and strategy of weights, as nested keys of a configuration.

    Weights with adapters or experts name their strategy and its settings, so that a run goes on as what they are.

    The result is empty if the files cannot be read; the later check of the weights reports why.

    Args:
        path: a Hugging Face folder, a folder of PEFT's adapters, a run's directory or one of its checkpoints, or a name
            of the Hub.

    Raises:
        HubError: if a name stands for no folder.
    """
    folder = folder_of(path).absolute()
    try:
        if (folder / "config.yaml").is_file():
            text = read_file(folder / "config.yaml", folder, MAX_BYTES_OF_YAML).decode()
            return _of_run(parse_yaml(text, "config.yaml"))
        if (folder / "config.json").is_file():
            return {"model": str(folder)} | _tokenizer(folder)
        if (folder / "adapter_config.json").is_file():
            return _of_adapters(folder, json.loads(read_file(folder / "adapter_config.json")))
    except (OSError, *DAMAGE):
        pass  # a damaged file, or not a mapping
    return {}


def with_settings_of_weights(given: dict[str, Any], init_from: str) -> dict[str, Any]:
    """Return ``given``, the nested keys of a run, with the settings of its weights where it sets none.

    Keys of ``architecture`` change the model of the weights, unless the run names another model.
    """
    brought = settings_of_weights(init_from)
    if "model" in given:
        brought = {key: value for key, value in brought.items() if key not in {"model", "architecture"}}
    parts = PARTS.get(str(given.get("strategy", brought.get("strategy"))), ())
    brought = {key: value for key, value in brought.items() if key not in _PARTS or key in parts}
    for section in brought.keys() & given.keys():
        own = given[section]
        own = own.given() if isinstance(own, Section) else own
        brought[section] = brought[section] | own if isinstance(own, dict) else own
    return given | brought


def _of_run(config: dict[str, Any]) -> dict[str, Any]:
    settings = {"model": config["model"], "architecture": config["architecture"]}
    data = config["data"]
    settings["data"] = {"tokenizer": data["tokenizer"]}
    for key in ("chat_template", "add_bos_token"):
        if data.get(key) is not None:
            settings["data"][key] = data[key]
    parts = PARTS[config["strategy"]]
    if parts:
        settings["strategy"] = config["strategy"]
    return settings | {part: config[part] for part in parts if part in config}


def _of_adapters(folder: Path, adapters: dict[str, Any]) -> dict[str, Any]:
    base = settings_of_weights(at_revision(adapters["base_model_name_or_path"], adapters.get("revision")))
    kind = adapter_of_json(adapters)
    if kind is None:
        return base | _tokenizer(folder)
    names = {**kind.json.settings, "target_modules": "target_modules"}
    lora = {ours: adapters[key] for key, ours in names.items() if isinstance(adapters.get(key), int | float | list)}
    has_experts = "moe" in PARTS[with_experts_of_model(base).get("strategy", "standard")]
    strategy = "hybrid" if has_experts else "lora"
    return base | _tokenizer(folder) | {"strategy": strategy, "lora": lora | {"method": kind.name}}


def _tokenizer(folder: Path) -> dict[str, Any]:
    has_one = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return {"data": {"tokenizer": str(folder)}} if has_one else {}


def with_experts_of_model(given: dict[str, Any]) -> dict[str, Any]:
    """Return ``given``, the nested keys of a run, with the experts of its model if that is a mixture.

    A run has recorded them, so its folder is not opened again.
    """
    model = given.get("model")
    architecture = given.get("architecture")
    own = given.get("moe", {})
    recorded = isinstance(architecture, dict) and architecture.get("recorded_from")
    if recorded or not isinstance(model, str) or not isinstance(own, dict):
        return given
    strategy = given.get("strategy", "moe")
    if "moe" not in PARTS.get(str(strategy), ()):
        return given
    try:
        spec = read_folder(model) if is_folder(model) else model_spec(model)
        num_layers = architecture.get("num_layers") if isinstance(architecture, dict) else None
        moe = spec.shortened(num_layers).moe or spec.moe  # experts that no layer is left for are refused later
    except ConfigError:
        return given  # it is refused where its sizes are read
    if moe is None:
        return given
    return given | {"strategy": strategy, "moe": moe.model_dump(exclude_defaults=True) | own}
