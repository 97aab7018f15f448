"""The documentation names files and tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = (ROOT, *(ROOT / name for name in ("llama_core", "llama_core/planning", "reports/training_reports", "tests")))
"""A page may name a file from any of these, or by its name alone."""
SOURCES = {path for folder in ROOT.iterdir() if folder.name[0] != "." for path in folder.rglob("*.py")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_file_that_a_page_names_exists(page):
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text()))
    anywhere = {path.name for path in SOURCES}
    assert [name for name in named - anywhere if not any((folder / name).exists() for folder in FOLDERS)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page):
    named = set(re.findall(r"\btest_\w+(?!\.py)\b", page.read_text()))
    tests = [path for path in SOURCES if path.is_relative_to(ROOT / "tests")]
    defined = {name for path in tests for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert named - defined - {path.stem for path in tests} == set()


def test_the_promises_of_security_name_each_test_that_holds_them():
    named = set(re.findall(r"security/(test_\w+\.py)", (ROOT / "SECURITY.md").read_text()))
    assert named == {path.name for path in (ROOT / "tests" / "security").glob("test_*.py")}


def test_every_run_that_a_command_of_the_readme_reads_is_made_by_a_command_before_it():
    made = set()
    for command in re.findall(
        r"\| `((?:train|logs|compare|evaluate|generate|export-hf) .*?)` \|", PAGES[0].read_text()
    ):
        new = set(re.findall(r"--run-dir (runs/\w+)", command)) if "--resume" not in command else set()
        read = set(re.findall(r"runs/\w+", command)) - new
        assert read <= made, command
        made |= new
    assert len(made) >= 4
