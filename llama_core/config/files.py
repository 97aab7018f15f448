"""Configurations as YAML files: which may be read, and what must be in them."""

from pathlib import Path
from typing import Any

from llama_core.config.strict_yaml import MOST_BYTES_OF_YAML, parse_yaml
from llama_core.errors import ConfigError
from llama_core.records.files import read_file


def read_mapping(path: Path, kind: str, below: Path | None = None) -> dict[str, Any] | None:
    """Return the keys in a YAML file, nested; None if the file is empty.

    Args:
        path: the file.
        kind: what the file describes, for errors.
        below: the folder below which no link is followed; None if the user names the file.

    Raises:
        ConfigError: if the file cannot be read, or is not a mapping.
    """
    try:
        text = read_file(path, below, MOST_BYTES_OF_YAML).decode()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no name of a file
        raise ConfigError(f"cannot read {kind} {str(path)!r}: {error}") from None
    mapping = parse_yaml(text, str(path))
    if mapping is not None and not isinstance(mapping, dict):
        raise ConfigError(f"{kind} {str(path)!r} is not a mapping of keys to values")
    return mapping
