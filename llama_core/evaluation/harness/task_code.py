"""Find out whether an installed task of lm-evaluation-harness executes text, such as what a model writes.

The harness marks some such tasks (``unsafe_code``), not all: others hand answers to ``eval``, ``exec`` or a program.
"""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask, Task

INSTALLED = Path(lm_eval.tasks.__file__).resolve().parent
"""The folder of the harness's own tasks."""
_PACKAGE = lm_eval.tasks.__name__
_CALLS = {"eval", "exec", "compile", "parse_expr", "sympify"}
"""Functions that execute a text; the last two are sympy's."""
_MODULES = {"marshal", "pickle", "runpy", "subprocess"}
_OF_SYSTEM = ("exec", "popen", "posix_spawn", "spawn", "startfile", "system")


def executes_text(task: Task) -> str:
    """Return where the code of a task executes text or starts programs, as a file and a line; empty if it does not."""
    return executing_line(task.config if type(task) is ConfigurableTask else [task.config, *type(task).__mro__])


def executing_line(settings: object) -> str:
    """Return where functions among some settings execute text or start programs, as ``executes_text`` does.

    Looks at the modules below ``INSTALLED`` that have the functions, and at those that they import.
    """
    waiting = sorted(set(_modules(settings)))
    seen: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file in seen or not file.is_relative_to(INSTALLED):
            continue
        seen.add(file)
        tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if _executes(node):
                return f"{file.relative_to(INSTALLED.parent.parent)}, line {node.lineno}"  # type: ignore[attr-defined]
        waiting += _imported(tree, file)
    return ""


def _modules(settings: object) -> Iterator[Path]:
    """Yield the file of each function and class among settings."""
    waiting: list[Any] = [settings]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            waiting += (getattr(value, one.name) for one in dataclasses.fields(value))
        elif callable(value):
            module = inspect.getmodule(inspect.unwrap(getattr(value, "func", value)))
            if module is not None and getattr(module, "__file__", None):
                yield Path(module.__file__ or "").resolve()


def _executes(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr="parse_expr" | "sympify" as name)):
            return name in _CALLS
        case ast.Attribute(value=ast.Name(id="os"), attr=name):
            return name.startswith(_OF_SYSTEM)
        case ast.Import(names=names):
            return any(one.name.partition(".")[0] in _MODULES for one in names)
        case ast.ImportFrom(module=str(module), level=0):
            return module.partition(".")[0] in _MODULES
    return False


def _imported(tree: ast.Module, file: Path) -> Iterator[Path]:
    """Yield the files of the modules of installed tasks that a module may import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (_file_of(one.name) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = file.parents[node.level - 1].relative_to(INSTALLED).parts if node.level else ()
            module = ".".join((*((_PACKAGE, *package) if node.level else ()), *filter(None, (node.module,))))
            yield from (_file_of(module), *(_file_of(f"{module}.{one.name}") for one in node.names))


def _file_of(module: str) -> Path:
    """Return the file of a module of installed tasks; any other path for one of something else, or for a name in it."""
    inner = module.removeprefix(_PACKAGE).strip(".").replace(".", "/")
    if not module.startswith(f"{_PACKAGE}.") or not inner:
        return Path()
    files = (INSTALLED / f"{inner}.py", INSTALLED / inner / "__init__.py")
    return next(filter(Path.is_file, files), Path())
