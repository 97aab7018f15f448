"""An exported folder, as far as servers differ on it: a model, or adapters and their base."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llama_core.adapters.traits import AdapterJson, AdapterType
from llama_core.config.config_json.reading import read_folder
from llama_core.config.models import ModelSpec
from llama_core.errors import HubError, WeightsError, why_unreadable
from llama_core.hugging_face.peft import base_of, read_adapter_config
from llama_core.records.files import DAMAGE, own_file, read_file

_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SENTENCEPIECE = "tokenizer.model"


@dataclass(frozen=True)
class ExportedModel:
    """A Hugging Face folder, as far as servers differ on it."""

    folder: Path
    spec: ModelSpec
    config: Mapping[str, Any]
    """Its ``config.json``."""

    @property
    def model_type(self) -> str:
        """Its ``model_type``."""
        return str(self.config["model_type"])

    @cached_property
    def tokenizer(self) -> Mapping[str, Any]:
        """Its ``tokenizer.json``; empty without one."""
        file = self.folder / _TOKENIZER
        return _read(file) if file.is_file() else {}

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """Its ``tokenizer_config.json``; empty without one."""
        file = self.folder / _TOKENIZER_CONFIG
        return _read(file) if file.is_file() else {}

    @property
    def has_sentencepiece(self) -> bool:
        """Whether it has the SentencePiece model of its tokenizer."""
        return (self.folder / _SENTENCEPIECE).is_file()

    @property
    def has_window(self) -> bool:
        """Whether a layer has a window that a text can be longer than."""
        return 0 < self.spec.sliding_window < self.spec.max_context

    @property
    def windowed(self) -> list[bool]:
        """Whether each layer has a window."""
        return [self.spec.window(layer) > 0 for layer in range(self.spec.num_layers)]


@dataclass(frozen=True)
class ExportedAdapters:
    """A PEFT folder, as far as servers differ on it."""

    folder: Path
    kind: AdapterType
    config: AdapterJson
    """Its ``adapter_config.json``."""
    base: ExportedModel | None
    """The model below; None if that is no Hugging Face folder on this machine."""

    @property
    def named_base(self) -> str:
        """What it calls the model below."""
        return str(self.base.folder) if self.base else self.config.base_model_name_or_path or "BASE"

    @property
    def base_is_elsewhere(self) -> bool:
        """Whether the model below may be a folder of another machine, or on the Hub."""
        named = Path(self.named_base)
        return self.base is None and not named.is_dir() and len(named.parts) > 1

    @property
    def rank(self) -> int:
        """The rank of its matrices."""
        return int(getattr(self.config, "r", 0))

    @property
    def has_rslora(self) -> bool:
        """Whether the adapters are scaled by the root of the rank."""
        return bool(getattr(self.config, "use_rslora", False))

    def targets(self, *matrices: str) -> bool:
        """Return whether one of some matrices is adapted."""
        return any(matrix in self.config.target_modules for matrix in matrices)


def read_model(folder: Path) -> ExportedModel:
    """Return the model of a Hugging Face folder.

    Raises:
        ConfigError: if its ``config.json`` describes no model that we have.
        WeightsError: if that cannot be read.
    """
    spec = read_folder(str(folder.absolute()))
    return ExportedModel(folder, spec, _read(folder / _CONFIG))


def read_adapters(folder: Path) -> ExportedAdapters:
    """Return the adapters of a PEFT folder, with their base if that is a Hugging Face folder on this machine.

    Raises:
        ConfigError: if the base's ``config.json`` describes no model that we have.
        WeightsError: if a file cannot be read.
    """
    kind, config = read_adapter_config(folder)
    try:
        base = base_of(folder)
    except (HubError, WeightsError):
        return ExportedAdapters(folder, kind, config, None)
    return ExportedAdapters(folder, kind, config, read_model(base) if (base / _CONFIG).is_file() else None)


def _read(file: Path) -> dict[str, Any]:
    try:
        own = own_file(file)
        content = json.loads(read_file(own, own.parent))
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror or error}; export the folder again") from None
    except DAMAGE as error:
        raise WeightsError(f"cannot read {file}: {why_unreadable(error)}; export the folder again") from None
    if not isinstance(content, dict):
        raise WeightsError(f"cannot read {file}: it is not a mapping of keys to values; export the folder again")
    return content
