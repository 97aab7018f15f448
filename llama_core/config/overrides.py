"""Overrides: ``section.key=value``, as ``--set`` and the flags of the command line write them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from llama_core.config.strict_yaml import parse_yaml
from llama_core.errors import Problem

_NULLS = ("null", "Null", "NULL", "~")


def apply_override(mapping: dict[str, Any], override: str) -> Problem | None:
    """Set a key of nested settings as an override says, whose value is YAML. Return what is wrong with it.

    Raises:
        ConfigError: if the value is not YAML.
    """
    key, separator, text = override.partition("=")
    if not separator:
        return Problem(f"override {override!r} is not of the form section.key=value")
    *sections, last = key.strip().split(".")
    target = mapping
    for section in sections:
        if not isinstance(target.get(section), dict):
            target[section] = {}
        target = target[section]
    value = parse_yaml(text, f"override {key!r}")
    if value is None and text.strip() not in _NULLS:
        return Problem(f"{key.strip()}={text} has no value; write one, or null for the default")
    target[last] = value
    return None


def changed_keys(
    overrides: Iterable[str], before: Mapping[str, Any], after: Mapping[str, Any], defaults: Mapping[str, Any]
) -> set[str]:
    """Return the dotted keys to which overrides gave another value than they had; all settings are nested."""
    asked = {override.partition("=")[0].strip() for override in overrides}
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
