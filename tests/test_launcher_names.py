"""Nobody but a launcher's own files asks for its name: others ask its facts (``llama_core/launchers/traits.py``)."""

import ast
from pathlib import Path

import pytest

from llama_core.launchers.registry import LAUNCHERS

ROOT = Path(__file__).parents[1]
ROOMS = ("llama_core", "training_infra", "reports", "tasks", "flows")
NAMES = {launcher.name for launcher in LAUNCHERS.built_in()}
SAYS = {
    "llama_core/config/names.py": "what settings are called in other software",
    "training_infra/commands/planning.py": "examples of command lines",
    "training_infra/commands/sweep.py": "examples of command lines",
    "training_infra/commands/tokenize.py": "examples of command lines",
    "training_infra/commands/train.py": "examples of command lines",
    "training_infra/flags.py": "flags",
}
"""Files that may say the name of a launcher with nodes, and why."""
IMPORTS = {
    "llama_core/config/evaluation.py": "types of settings that the section has too",
    "llama_core/config/settings.py": "the section",
    "llama_core/launch/jobs/controller.py": "the process that starts the ranks of this machine's jobs",
    "llama_core/launchers/registry.py": "the row",
}
"""Files that may import a launcher's own, and why."""


def is_own(module):
    """Return whether a file, by its path or its dotted name, is one of a launcher's own."""
    parts = module.removesuffix(".py").replace("/", ".").split(".")
    is_of_a_room = len(parts) > 2 and parts[1] in {"config", "launch", "launchers"}
    return is_of_a_room and parts[-1].partition("_")[0] in NAMES


def trees():
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not is_own(name):
                yield name, ast.parse(path.read_text())


@pytest.fixture(scope="module")
def others():
    """The syntax of all files that are no launcher's own."""
    return dict(trees())


def names_in(nodes):
    return {node.value for top in nodes for node in ast.walk(top) if isinstance(node, ast.Constant)} & NAMES


def decisions(tree):
    """Yield the lines in which the name of a launcher decides something."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=comparators):
                decided = [left, *comparators]
            case ast.MatchValue(value=value):
                decided = [value]
            case ast.Dict(keys=keys):
                decided = [key for key in keys if key is not None]
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith" | "find" | "get"), args=arguments):
                decided = arguments
            case ast.Subscript(slice=index):
                decided = [index]
            case _:
                continue
        if names_in(decided):
            yield node.lineno if hasattr(node, "lineno") else node.value.lineno


def texts(tree):
    """Yield the texts of a file that are no docstrings."""
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize(
    "line",
    [
        'job.cluster == "slurm"',
        '"local" != launcher',
        'launcher in {"slurm", "depot"}',
        '{"local": start}',
        'starts["slurm"]',
        'match launcher:\n    case "slurm": pass',
    ],
)
def test_a_decision_by_a_name_is_found(line):
    assert list(decisions(ast.parse(line)))


def test_no_name_of_a_launcher_decides_anything_outside_its_own_files(others):
    assert {name: lines for name, tree in others.items() if (lines := list(decisions(tree)))} == {}


def test_only_flags_and_sections_say_the_name_of_a_launcher_with_nodes(others):
    with_nodes = [launcher.name for launcher in LAUNCHERS.built_in() if not launcher.is_here]
    said = {
        name
        for name, tree in others.items()
        if any(word in text.lower() for text in texts(tree) for word in with_nodes)
    }
    assert said == set(SAYS)


def test_only_the_registry_and_the_settings_import_what_is_a_launchers_own(others):
    assert {name for name, tree in others.items() if any(map(is_own, imported(tree)))} == set(IMPORTS)
