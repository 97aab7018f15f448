"""What people call the elements of a sweep: the settings in which they differ, in words."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from llama_core.sweep.grid import GridValue

_SAY_IT_ALL = {"model", "strategy"}
"""Keys that need not be named beside their value."""
_MAX_LETTERS = 40
"""Most letters of a value; of a longer one, the start."""


class NamedElement(Protocol):
    """An element of a sweep."""

    @property
    def name(self) -> str:
        """Its name as a folder."""

    @property
    def settings(self) -> Mapping[str, GridValue]:
        """Its value for each key of the grid."""


@dataclass(frozen=True)
class ElementNames:
    """The names of all elements of a sweep on pages, in tables and on the console."""

    shown: Mapping[str, str]
    """The name of each element, such as ``large, learning rate 0.01``, by its name as a folder."""
    shared: tuple[str, ...]
    """The settings that all elements share, in words; the names leave them out."""

    def __getitem__(self, folder: str) -> str:
        """Return the name of an element; that of a folder which is none is its own."""
        return self.shown.get(folder, folder)


class SettingWords:
    """The settings of a sweep's elements in words; of a path, as much as tells it from the other values of its key.

    Args:
        settings: the settings of all elements.
    """

    def __init__(self, settings: Sequence[Mapping[str, GridValue]]) -> None:
        values: dict[str, dict[str, GridValue]] = {}
        for own in settings:
            for key, value in own.items():
                values.setdefault(key, {})[_text(value)] = value
        self.values = {
            key: dict(zip(by_text, values_in_words(by_text.values()), strict=True)) for key, by_text in values.items()
        }
        self.keys = {key: key_in_words(key, values) for key in values}

    def value(self, key: str, value: GridValue) -> str:
        """Return a value of a key."""
        return self.values[key][_text(value)]

    def setting(self, key: str, value: GridValue) -> str:
        """Return a key and its value, such as ``learning rate 0.01``; of a model, its name alone."""
        return self.value(key, value) if key in _SAY_IT_ALL else f"{self.keys[key]} {self.value(key, value)}"

    def settings(self, own: Mapping[str, GridValue], keys: Iterable[str]) -> str:
        """Return the values of some keys of an element."""
        return ", ".join(self.setting(key, own[key]) for key in keys if key in own)


def element_names(elements: Iterable[NamedElement]) -> ElementNames:
    """Return the names of a sweep's elements: the settings in which they differ."""
    settings = {element.name: element.settings for element in elements}
    words = SettingWords(list(settings.values()))
    first = next(iter(settings.values()), {})
    # a single element, or one that is run several times, has its whole name
    named = differing_keys(list(settings.values())) or list(first)
    shown = {}
    runs: dict[str, count[int]] = {}
    for folder, own in settings.items():
        name = words.settings(own, named)
        number = next(runs.setdefault(json.dumps(own), count(1)))
        shown[folder] = name if number == 1 else f"{name}, run {number}"
    if len(set(shown.values())) < len(shown):  # such as 1 and 1.0, or values that hold a comma
        return ElementNames({folder: folder for folder in shown}, ())
    return ElementNames(
        shown, tuple(f"{words.keys[key]} {words.value(key, first[key])}" for key in first if key not in named)
    )


def differing_keys(settings: Sequence[Mapping[str, GridValue]]) -> list[str]:
    """Return the keys for which not all elements have the same value, in the order of the grid."""
    values: dict[str, set[str]] = {}
    for own in settings:
        for key, value in own.items():
            values.setdefault(key, set()).add(_text(value))
    return [key for key, different in values.items() if len(different) > 1]


def key_in_words(key: str, keys: Iterable[str] = ()) -> str:
    """Return a key of the configuration in words, with its section if another of ``keys`` ends like it."""
    endings = Counter(other.rpartition(".")[2] for other in keys)
    ending = key.rpartition(".")[2]
    return (ending if endings[ending] < 2 else key).replace("_", " ").replace(".", " ")


def value_in_words(value: GridValue) -> str:
    """Return a value of a grid as people write it: ``0.01``, ``1e-5``, ``on``, ``default``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "default"
    if isinstance(value, float) and math.isfinite(value):
        digits, e, exponent = repr(value).removesuffix(".0").partition("e")
        return f"{digits}e{int(exponent)}" if e else digits
    return str(value)


def values_in_words(values: Iterable[GridValue]) -> list[str]:
    """Return values of one key in words; of a path, the shortest end that no other value has."""
    parts = [value_in_words(value).rstrip("/").split("/") for value in values]
    ends = [_shortest_end(own, [other for other in parts if other != own]) for own in parts]
    return [end if len(end) <= _MAX_LETTERS else f"{end[: _MAX_LETTERS - 1]}…" for end in ends]


def _shortest_end(own: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    for length in range(1, len(own)):
        end = own[-length:]
        if end[0] not in {"", ".", ".."} and all(other[-length:] != end for other in others):
            return "/".join(end)
    return "/".join(own)


def _text(value: GridValue) -> str:
    """Return a text that differs for other values, also for those that are equal in Python, such as 1 and true."""
    return json.dumps(value)
