"""YAML as people mean it, safe from any source: plain values, each key at most once, and a limit on their number.

Which words are numbers, true, false or null is nearly as in YAML 1.2's core schema, not as in YAML 1.1, which takes
``010`` for 8, ``1:30`` for 90, and ``no`` for false.

Source: https://yaml.org/spec/1.2.2, section 10.3.2. Beyond it, digits may be grouped, as in 1_000.
"""

import re
from collections import Counter
from collections.abc import Hashable
from typing import Any

import yaml

from llama_core.errors import ConfigError, why_unreadable
from llama_core.units import MIB

MAX_VALUES = 100_000
"""Most values of a document. An alias counts as all values that it stands for: a few lines cannot become billions."""

MAX_BYTES_OF_YAML = 4 * MIB
"""Most bytes of a YAML file; a parser takes seconds for each mebibyte."""


_INTEGER = r"[-+]?(?:0x[0-9a-fA-F_]+|0b[01_]+|[0-9][0-9_]*)"
_FLOAT = (
    r"[-+]?(?:(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
_SCALARS = (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", _INTEGER, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", "<<", ["<"]),
)
"""The words that are no text, each with its first characters; the first pattern that matches counts."""
_NOT_PLAIN = {"binary", "omap", "pairs", "set", "timestamp"}


class _StrictLoader(yaml.SafeLoader):
    """Reads 1e-4 as a number, and 010 as 10; 2026-01-31, 1:30, yes and off are text; a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        times = Counter(key for key in keys if isinstance(key, Hashable))
        twice = sorted(str(key) for key in times if times[key] > 1)
        if twice:
            raise ConfigError(f"{node.start_mark.name}: key {twice[0]!r} is given twice")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        digits = self.construct_scalar(node).replace("_", "")
        return int(digits, 0 if re.search("0[xb]", digits) else 10)


class _StrictDumper(yaml.SafeDumper):
    """Quotes the texts that ``_StrictLoader``, or a reader of YAML 1.1, would not read as text."""


_StrictLoader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] not in _NOT_PLAIN
}
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)
_StrictLoader.yaml_implicit_resolvers = {}
for _side in (_StrictLoader, _StrictDumper):
    for _name, _pattern, _firsts in _SCALARS:
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _firsts)


def parse_yaml(text: str, name: str) -> Any:
    """Return the YAML value in ``text``; errors call its source ``name``.

    Raises:
        ConfigError: if it is not YAML, holds a key twice, or stands for more than ``MAX_VALUES``.
    """
    try:
        loader = _StrictLoader(text)
        loader.name = name
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            refuse_endless(node, name)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{name}: values are nested too deeply; write it flatter") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # such as !!int of a word
        raise ConfigError(
            f"{name}: not valid YAML: {why_unreadable(error)}; correct the value, or remove its tag"
        ) from None


def refuse_endless(node: yaml.Node, name: str) -> None:
    """Refuse a document that stands for too many values, or holds itself."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in open_nodes:
            raise ConfigError(f"{name}: an alias stands for something that holds it; write the values out")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            inner = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
            sizes[id(node)] = 1 + sum(map(size, inner))
            open_nodes.remove(id(node))
        return sizes[id(node)]

    if size(node) > MAX_VALUES:
        raise ConfigError(f"{name}: more than {MAX_VALUES:,} values; write a configuration, with fewer aliases")


def write_yaml(mapping: dict[str, Any]) -> str:
    """Return nested keys as YAML, in their order, for ``parse_yaml``."""
    return yaml.dump(mapping, Dumper=_StrictDumper, sort_keys=False)
