"""A name stands for one thing: no two classes of the product share one, so nobody need ask which is meant."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("llama_core", "reports", "tasks", "flows", "training_infra")
PUBLIC = {"Trainer", "TrainingConfig"}
"""Names that users of the Python API asked for, and that the engine has as well."""
OF_MODULES = {"Head"}
"""What a row of an objective finds in the module that it names."""


def test_no_two_classes_share_a_name():
    found = Counter()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        found.update(node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
    assert {name for name, count in found.items() if count > 1} == PUBLIC | OF_MODULES


def test_what_is_most_is_called_a_maximum():
    constants = {"MOST_", "LEAST_"}
    named = []
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        targets = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
        names = [target.id for node in targets for target in node.targets if isinstance(target, ast.Name)]
        named += [name for name in names if name.lstrip("_").startswith(tuple(constants))]
    assert named == []
