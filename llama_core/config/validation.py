"""From nested keys to a configuration, or to every problem in them, in the words of the user."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llama_core.config.names import keys_meant
from llama_core.config.section import Section
from llama_core.errors import ConfigError, Problem, as_clause, ask_for

LONGEST_SHOWN = 100
"""Characters of a wrong value that an error repeats."""

_BRINGING = ("model", "training.init_from")
"""Settings whose folders bring other settings, unless these are given."""
_OF_KEY = "[key]"
"""How Pydantic ends the location of a key of a mapping that is wrong itself."""

Model = TypeVar("Model", bound=Section)


def plain(mapping: Mapping[str, Any], file: str = "") -> dict[str, Any]:
    """Return a copy of nested keys whose values are as in a file; Python callers may pass paths.

    Args:
        mapping: the keys.
        file: the file that they are from, if any, for the error.

    Raises:
        ConfigError: if they are not.
    """
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(mapping), default=str))
    except (TypeError, ValueError, RecursionError) as error:
        text = f"the configuration is not a mapping of names to plain values: {error}"
        raise ConfigError(Problem(text, file=file)) from None
    return copy


def validate(model: type[Model], mapping: dict[str, Any]) -> tuple[Model | None, list[Problem]]:
    """Return the configuration that nested keys make, and their problems; None if the whole is wrong.

    Each round drops the keys already reported from ``mapping``, so that the settings they hid are checked as well.
    """
    problems: list[Problem] = []
    while True:
        try:
            return model.model_validate(mapping), problems
        except ValidationError as error:
            details = error.errors()
        before = json.dumps(mapping)
        for detail in details:
            problems.extend(_describe(detail, _causes(mapping, detail["loc"]), model))
        for detail in details:
            _drop(mapping, detail["loc"])
        # a problem of the whole, or of settings that the weights brought
        if any(detail["loc"] == () for detail in details) or json.dumps(mapping) == before:
            return None, problems


def _causes(mapping: dict[str, Any], location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the dotted key of a problem's location, and what may have brought the key if ``mapping`` has none."""
    key = _dotted(location)
    value: Any = mapping
    for part in location:
        if isinstance(value, dict) and part not in value:
            return (key, *_BRINGING)
        value = value[part] if isinstance(value, dict) else None
    return (key,) if location else ()


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location if part != _OF_KEY)


def _describe(detail: ErrorDetails, keys: tuple[str, ...], model: type[Section]) -> Iterator[Problem]:
    """Yield the problems in one of Pydantic's error details, which ``keys`` cause."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        section = _dotted(detail["loc"])
        yield from (one.within(section).about(*keys) for one in cause.records)
        return
    message = message_of(detail)
    value = _shown(detail["input"])
    if not keys:  # of a key that is no text
        yield Problem(f"{value}: {message}")
    elif detail["type"] == "extra_forbidden":
        known = [one.name for one in model.known_keys()]
        yield Problem(f"unknown key {keys[0]!r}{ask_for(keys_meant(keys[0], known))}", keys=keys)
    elif detail["type"] == "model_type":
        yield Problem(": this is a section of keys, not a value", keys[0], value, keys)
    elif _OF_KEY in detail["loc"]:
        yield Problem(f"{keys[0]}: {message}", keys=keys)
    else:
        yield Problem(f": {message}", keys[0], value, keys)


def message_of(detail: ErrorDetails) -> str:
    """Return what a value should be, in the words of someone who writes YAML."""
    if detail["type"] == "bool_type":
        return "input should be true or false"
    if detail["type"] == "string_type" and isinstance(detail["input"], int | float):
        return "input should be text; put it in quotes"
    if detail["type"] == "string_pattern_mismatch":  # our patterns are those of names that become files
        return "input should be letters, digits, '_', '-' and '.', and not begin with '-' or '.'"
    return as_clause(detail["msg"])


def _shown(value: object) -> str:
    given = repr(value)
    return given if len(given) <= LONGEST_SHOWN else f"{given[:LONGEST_SHOWN]}..."


def _drop(mapping: dict[str, Any], location: tuple[int | str, ...]) -> None:
    """Remove the setting that a problem was reported for; for an item of a list, remove the whole list."""
    match location:
        case (str() as key,):
            mapping.pop(key, None)
        case (str() as section, str() as key, *_) if isinstance(mapping.get(section), dict):
            mapping[section].pop(key, None)
        case (str() as section, *_):
            mapping.pop(section, None)
