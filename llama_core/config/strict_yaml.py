"""YAML as people mean it, safe from any source: plain values, each key at most once, and a limit on their number."""

import re
from collections import Counter
from collections.abc import Hashable
from typing import Any

import yaml

from llama_core.errors import ConfigError
from llama_core.units import MIB

MOST_VALUES = 100_000
"""Most values of a document. An alias counts as all values that it stands for: a few lines cannot become billions."""

MOST_BYTES_OF_YAML = 4 * MIB
"""Most bytes of a YAML file; a parser takes seconds for each mebibyte."""


class _StrictLoader(yaml.SafeLoader):
    """YAML 1.1 as people mean it: 1e-4 is a number, 2026-01-31 and 1:30 are text, a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        times = Counter(key for key in keys if isinstance(key, Hashable))
        twice = sorted(str(key) for key in times if times[key] > 1)
        if twice:
            raise ConfigError(f"{node.start_mark.name}: key {twice[0]!r} is given twice")
        return super().construct_mapping(node, deep)


_StrictLoader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] not in {"binary", "omap", "pairs", "set", "timestamp"}
}
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
for _digit in "0123456789":  # the first pattern that matches counts; YAML 1.1 reads 1:30 as 90
    _StrictLoader.yaml_implicit_resolvers[_digit].insert(0, ("tag:yaml.org,2002:str", re.compile(r"^\d+(:\d+)+$")))


def parse_yaml(text: str, name: str) -> Any:
    """Return the YAML value in ``text``; errors call its source ``name``.

    Raises:
        ConfigError: if it is not YAML, holds a key twice, or stands for more than ``MOST_VALUES``.
    """
    try:
        loader = _StrictLoader(text)
        loader.name = name
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _refuse_endless(node, name)
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
        raise ConfigError(f"{name}: not valid YAML: {error}; correct the value, or remove its tag") from None


def _refuse_endless(node: yaml.Node, name: str) -> None:
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

    if size(node) > MOST_VALUES:
        raise ConfigError(f"{name}: more than {MOST_VALUES:,} values; write a configuration, with fewer aliases")
