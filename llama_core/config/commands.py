"""Which settings run programs as this user, and whose they may be."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_core.config.settings import request_sections
from llama_core.errors import ConfigError


def commands_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that run programs as this user, of some by their dotted keys."""
    return {key: value for key, value in settings.items() if value not in (None, [], (), {}) and _runs_programs(key)}


def refuse_commands_of_others(path: Path, settings: Mapping[str, Any], of_others: str) -> None:
    """Refuse a configuration that runs programs as this user, if somebody else may have written it.

    Args:
        path: its file.
        settings: its values by dotted key.
        of_others: by ``YamlFile.of_others``.

    Raises:
        ConfigError: naming the keys that run programs.
    """
    found = commands_in(settings)
    if found and of_others:
        raise ConfigError(
            f"{path} {of_others}, and its {', '.join(found)} runs programs as you; read it, and copy the file to use it"
        )


def _runs_programs(key: str) -> bool:
    if key == "notify.command":
        return True
    launch, _, rest = key.partition(".")
    section, _, name = rest.partition(".")
    request = request_sections().get(section) if launch == "launch" else None
    return request is not None and request.runs_programs(name)
