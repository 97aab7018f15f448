"""Hugging Face's ``generation_config.json``: how a model generates, such as the tokens that end its texts. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_core.errors import WeightsError
from llama_core.models.peft import base_of, is_adapter_folder
from llama_core.models.pretrained import is_checkpoint
from llama_core.records.checkpoints import place_of
from llama_core.records.directory import RunDirectory
from llama_core.records.files import DAMAGE, own_file, read_file, read_json

GENERATION_CONFIG = "generation_config.json"


def generation_config(source: Path) -> dict[str, Any]:
    """Return how the model behind ``source`` generates; empty if nothing says so.

    Args:
        source: a Hugging Face or PEFT folder, or a checkpoint of a run, which keeps that of the weights it began with.

    Raises:
        WeightsError: if the file of a folder cannot be read, or the ends in it are no tokens.
        RunDirectoryError: if that of a run cannot be read.
    """
    if is_adapter_folder(source):
        return generation_config(base_of(source))
    if is_checkpoint(source):
        run = RunDirectory(place_of(source))
        file = run.generation_config
        config = read_json(file, run.path) if file.exists() else {}
    else:
        file = source / GENERATION_CONFIG
        config = _read(file) if file.is_file() else {}
    try:
        end_tokens(config)
    except WeightsError as error:
        raise WeightsError(f"{file}: {error}") from None
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        own = own_file(file)
        return dict(json.loads(read_file(own, own.parent)))
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror}; put a copy there, or remove it") from None
    except DAMAGE as error:
        raise WeightsError(f"cannot read {file}: {error}; download it again, or remove it") from None


def end_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text: ``eos_token_id``, which is one id, several or null.

    Raises:
        WeightsError: if it is something else.
    """
    ends = config.get("eos_token_id")
    several = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int for end in several):
        raise WeightsError(f"eos_token_id={ends!r} is neither a token's id nor a list of them; correct it")
    return tuple(several)


def with_special_tokens(config: Mapping[str, Any], special: Mapping[str, int]) -> dict[str, Any]:
    """Return ``config``, in which a tokenizer's ``eos_id`` ends a text too; ``bos_id`` counts if it names none."""
    ends = end_tokens(config)
    if "eos_id" in special and special["eos_id"] not in ends:
        ends = (*ends, special["eos_id"])
    whole = ({"bos_token_id": special["bos_id"]} if "bos_id" in special else {}) | dict(config)
    if ends:
        whole["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    return whole
