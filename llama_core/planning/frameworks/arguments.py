"""Find the arguments of a program in a text: a shell script, a list of arguments, or YAML with ``--name: value``.

A script is read, never run: variables that it sets to plain values are put in, with their defaults (``${TP:-2}``) and
products of whole numbers (``$((GPUS * NODES))``); all else stays as it is written.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llama_core.config.strict_yaml import parse_yaml
from llama_core.errors import ConfigError

_ARGUMENT = re.compile(r"--[A-Za-z]")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(?!\()(.*)$")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^}]*))?\}|\$(\w+)")
_PRODUCT = re.compile(r"\$\(\(\s*([\w\s$*{}]+?)\s*\)\)")
_MAX_DEPTH = 8
"""Variables of variables that are put in."""
_MAX_VALUE = 200
"""Longest value of a variable that is put in: no number or name is longer, and values of values could grow forever."""
_MAX_WORD = 2_000
"""Longest word that variables are put into."""


def arguments_of(file: Path, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments in a text, and a sentence about each that is given twice with different values.

    They are named without the leading dashes; one without a value is True.

    Raises:
        ConfigError: if there is none, or a YAML file is damaged.
    """
    is_yaml = file.suffix in {".yaml", ".yml"}
    pairs = _of_yaml(parse_yaml(text, str(file))) if is_yaml else _of_script(text)
    found: dict[str, Any] = {}
    repeated: dict[str, str] = {}
    for name, value in pairs:
        if name in found and found[name] != value:
            repeated[name] = f"--{name} is given as {found[name]} and as {value}; the last one counts"
        found[name] = value
    if not found:
        raise ConfigError(f"{file} has no --arguments")
    return found, repeated


def _of_yaml(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a mapping and of those inside it."""
    if not isinstance(content, dict):
        return
    for key, value in content.items():
        if str(key).startswith("--"):
            yield _name(str(key)), value
        else:
            yield from _of_yaml(value)


def _of_script(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a script with their values; a value is on the line of its name."""
    for line in _lines(text):
        name = ""
        value: Any = True
        for word in line:
            bare = word.strip("()\"'")
            if _ARGUMENT.match(bare):
                if name:
                    yield name, value
                spelled, _, given = bare.partition("=")
                name = _name(spelled)
                value = given or True
            elif name and bare and value is True:
                value = bare
        if name:
            yield name, value


def _lines(text: str) -> Iterator[list[str]]:
    """Yield the words of every line of a script, with the variables that it set before them."""
    variables: dict[str, str] = {}
    joined = text.replace("\\\n", " ").replace("=(", "=( ")
    for line in joined.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that another line closes
            words = line.split()
        assigned = _ASSIGNMENT.match(line)
        if assigned and len(words) == 1:
            words = [_filled_in(words[0].partition("=")[2], variables)]
            if len(words[0]) <= _MAX_VALUE:
                variables[assigned[1]] = words[0]
        # one word in quotes may hold a name and its value, or a variable all arguments
        yield [piece for word in words for piece in _filled_in(word, variables).split()]


def _filled_in(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with the values of variables and products in it; what is unknown stays."""

    def value(match: re.Match[str]) -> str:
        default = match[2] if match[2] is not None else match[0]
        return variables.get(match[1] or match[3], default)

    def product(match: re.Match[str]) -> str:
        factors = [factor.strip(" ${}") for factor in match[1].split("*")]
        numbers = [variables.get(factor, factor) for factor in factors]
        if not all(number.isdigit() for number in numbers):
            return match[0]
        return str(math.prod(map(int, numbers)))

    for _ in range(_MAX_DEPTH):
        if len(text) > _MAX_WORD:
            break
        filled = _VARIABLE.sub(value, _PRODUCT.sub(product, text))
        if filled == text:
            break
        text = filled
    return text.strip("\"'")


def _name(word: str) -> str:
    return word.removeprefix("--").replace("_", "-")
