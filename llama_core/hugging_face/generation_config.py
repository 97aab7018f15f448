"""Hugging Face's ``generation_config.json``: how a model generates, such as the tokens that end its texts. No torch."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llama_core.errors import WeightsError, why_unreadable
from llama_core.hugging_face.peft import base_of, is_adapter_folder
from llama_core.hugging_face.pretrained import is_checkpoint
from llama_core.records.checkpoints import place_of
from llama_core.records.directory import RunDirectory
from llama_core.records.files import DAMAGE, own_file, read_file, read_json

GENERATION_CONFIG = "generation_config.json"


def generation_config(source: Path) -> dict[str, Any]:
    """Return how the model behind ``source`` generates, with all tokens that end its texts; empty if nothing says so.

    A folder names these tokens in ``generation_config.json``, in ``config.json``, or in both.

    Args:
        source: a Hugging Face or PEFT folder, or a checkpoint of a run, which keeps that of the weights it began with.

    Raises:
        WeightsError: if a file of a folder cannot be read, or the ends in it are no tokens.
        RunDirectoryError: if that of a run cannot be read.
    """
    file = source / GENERATION_CONFIG
    if is_checkpoint(source):
        run = RunDirectory(place_of(source))
        file = run.generation_config
        config = read_json(file, run.path) if file.exists() else {}
    elif is_adapter_folder(source) and not file.is_file():
        return generation_config(base_of(source))
    else:
        config = _read(file) if file.is_file() else {}
    _ends_in(config, file)
    described = source / "config.json"
    if is_checkpoint(source) or not described.is_file():
        return config
    architecture = _read(described)
    more = _ends_in(architecture, described)
    if not end_tokens(config):
        return config | ({"eos_token_id": architecture["eos_token_id"]} if more else {})
    return with_ends(config, more)


def _read(file: Path) -> dict[str, Any]:
    try:
        own = own_file(file)
        return dict(json.loads(read_file(own, own.parent)))
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror}; put a copy there, or remove it") from None
    except DAMAGE as error:
        raise WeightsError(f"cannot read {file}: {why_unreadable(error)}; download it again, or remove it") from None


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


def _ends_in(config: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    try:
        return end_tokens(config)
    except WeightsError as error:
        raise WeightsError(f"{file}: {error}") from None


def with_ends(config: Mapping[str, Any], more: Iterable[int]) -> dict[str, Any]:
    """Return ``config`` with ``more`` end tokens after its own. A list stays a list."""
    ends = list(dict.fromkeys((*end_tokens(config), *more)))
    if not ends:
        return dict(config)
    is_one = len(ends) == 1 and not isinstance(config.get("eos_token_id"), list)
    return dict(config) | {"eos_token_id": ends[0] if is_one else ends}
