"""Overrides: settings that take precedence over a file's, from the command line or a sweep."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from llama_core.config.strict_yaml import parse_yaml
from llama_core.errors import ConfigError, Problem

_NULLS = ("null", "Null", "NULL", "~")


@dataclass(frozen=True)
class Override:
    """A setting and its value."""

    key: str
    """Its dotted key, such as ``training.steps``."""
    value: Any
    """As YAML or JSON would give it; a text is never read as YAML."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the override that ``section.key=value`` stands for, with its value in YAML.

        Raises:
            ConfigError: if it has another form, the value is not YAML, or there is none.
        """
        name, separator, written = text.partition("=")
        key = name.strip()
        if not separator:
            raise ConfigError(f"override {text!r} is not of the form section.key=value")
        value = parse_yaml(written, f"override {key!r}")
        if value is None and written.strip() not in _NULLS:
            raise ConfigError(Problem(f"{key}={written} has no value; write one, or null for the default", keys=(key,)))
        return cls(key, value)

    def apply(self, mapping: dict[str, Any]) -> None:
        """Set the key in nested settings."""
        *sections, last = self.key.split(".")
        target = mapping
        for section in sections:
            if not isinstance(target.get(section), dict):
                target[section] = {}
            target = target[section]
        target[last] = self.value


def parsed_overrides(overrides: Iterable[Override | str]) -> tuple[list[Override], list[Problem]]:
    """Return overrides, of which some may be ``section.key=value``, and what is wrong with the others."""
    parsed = []
    problems: list[Problem] = []
    for override in overrides:
        try:
            parsed.append(Override.parse(override) if isinstance(override, str) else override)
        except ConfigError as error:
            problems.extend(error.records)
    return parsed, problems


def changed_keys(
    overrides: Iterable[Override], before: Mapping[str, Any], after: Mapping[str, Any], defaults: Mapping[str, Any]
) -> set[str]:
    """Return the dotted keys to which overrides gave another value than they had; all settings are nested."""
    asked = {override.key for override in overrides}
    return {key for key in asked if _value(after, key) != _value(before, key, _value(defaults, key))}


def _value(nested: Mapping[str, Any], key: str, default: str = "") -> str:
    """Return the value of a dotted key as JSON, in which 1 and true differ."""
    value: Any = nested
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return json.dumps(value)


def causes(changed: Iterable[str], keys: Iterable[str]) -> bool:
    """Return whether one of the changed keys is, holds, or is in one of some others."""
    keys = list(keys)
    return any(_is_within(one, key) or _is_within(key, one) for one in changed for key in keys)


def _is_within(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")
