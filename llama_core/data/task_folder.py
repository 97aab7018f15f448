"""Check a folder of tasks of lm-evaluation-harness before the harness reads it. Needs no torch, and not the harness.

A task is a YAML file. It may name functions in Python files beside it, or run what a model writes as a program. Neither
happens unless the user has allowed it.
"""

from collections.abc import Iterator
from pathlib import Path

import yaml

from llama_core.config.strict_yaml import MOST_BYTES_OF_YAML
from llama_core.errors import ConfigError
from llama_core.records.files import read_file, user_path

ALLOW = "--allow-task-code"
_PLAIN = "tag:yaml.org,2002:"
_FALSE = {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF", "null", "~", ""}
"""Words that YAML 1.1 takes for false or nothing."""


def check_task_folder(folder: str | Path, *, allow_code: bool) -> Path:
    """Return a folder of tasks that the harness may read.

    Args:
        folder: the folder.
        allow_code: whether its tasks may execute code of their own.

    Raises:
        ConfigError: if there is no such folder, it has no tasks, a file is not YAML, or a task has code that is not
            allowed.
    """
    path = user_path(str(folder))
    if not path.is_dir():
        raise ConfigError(f"--include-path {str(folder)!r} is no folder; name one with the YAML files of tasks")
    files = sorted(path.rglob("*.yaml"))
    if not files:
        raise ConfigError(f"--include-path {str(folder)!r} holds no YAML file (*.yaml); name a folder of tasks")
    seen: set[Path] = set()
    while files:
        file = files.pop(0)
        if file not in seen:
            seen.add(file)
            files += _checked(file, allow_code=allow_code)
    return path


def _checked(file: Path, *, allow_code: bool) -> list[Path]:
    """Check a file, and return those that it includes."""
    included: list[Path] = []
    for name, code in _notable(file):
        if name == "include":
            included.append((file.parent / code).resolve())
        elif not allow_code:
            raise ConfigError(f"{file} has code that would be executed ({code}); read it, and allow it with {ALLOW}")
    return included


def _notable(file: Path) -> Iterator[tuple[str, str]]:
    """Yield what a file includes, and ``("code", what)`` for each way in which it would execute code."""
    try:
        root = yaml.compose(read_file(file, most_bytes=MOST_BYTES_OF_YAML), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}; remove it, or copy it again") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}; fix it or remove it") from None
    waiting = [] if root is None else [root]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if not node.tag.startswith(_PLAIN) or node.tag.startswith(f"{_PLAIN}python"):
            value = node.value if isinstance(node, yaml.ScalarNode) else ""
            yield "code", f"{node.tag} {value}".strip()
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                waiting += [key, value]
                yield from _of_entry(key, value)


def _of_entry(key: yaml.Node, value: yaml.Node) -> Iterator[tuple[str, str]]:
    match key.value:
        case "include":
            paths = value.value if isinstance(value, yaml.SequenceNode) else [value]
            yield from (("include", str(path.value)) for path in paths)
        case "class":
            yield "code", "class"
        case "unsafe_code" if value.value not in _FALSE:
            yield "code", "unsafe_code"
        case "dataset_path" if value.value == "pandas":
            yield "code", "dataset_path: pandas, which reads pickles"
