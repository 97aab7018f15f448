"""Configurations as YAML files: which may be read, and what must be in them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_core.config.strict_yaml import MAX_BYTES_OF_YAML, parse_yaml
from llama_core.errors import ConfigError
from llama_core.records.file_owners import who_else_may_replace, who_else_may_write
from llama_core.records.files import contents_of, open_file


@dataclass(frozen=True)
class YamlFile:
    """A YAML file as it was read, whatever its path leads to by now."""

    path: Path
    keys: dict[str, Any] | None
    """Its keys, nested; None if it is empty."""
    of_others: str
    """Which other user may have written it, as a clause after its path; empty if none."""


def read_yaml(path: Path, kind: str, below: Path | None = None) -> YamlFile:
    """Read the keys in a YAML file.

    Args:
        path: the file.
        kind: what the file describes, for errors.
        below: the folder below which no link is followed; None if the user names the file.

    Raises:
        ConfigError: if the file cannot be read, or is not a mapping.
    """
    try:
        with open_file(path, below) as file:
            text = contents_of(file, MAX_BYTES_OF_YAML).decode()
            of_others = who_else_may_write(file.fileno())
            if below is None:  # a run is somebody's as a whole
                of_others = of_others or who_else_may_replace(path, file.fileno())
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no name of a file
        raise ConfigError(f"cannot read {kind} {str(path)!r}: {error}") from None
    keys = parse_yaml(text, str(path))
    if keys is not None and not isinstance(keys, dict):
        raise ConfigError(f"{kind} {str(path)!r} is not a mapping of keys to values")
    return YamlFile(path, keys, of_others)
