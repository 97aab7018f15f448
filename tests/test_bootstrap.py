"""On a machine that lacks something, the README's two commands say so in one line."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Programs that answer the Makefile's questions as these interpreters would.
TOO_OLD = """case "$*" in *version_info*) exit 1;; --version) echo "Python 3.8.20";; esac"""
WITHOUT_VENV = """case "$*" in *ensurepip*) echo "No module named ensurepip" >&2; exit 1;; esac"""


@pytest.fixture
def make(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def run(target, interpreter):
        return subprocess.run(
            ["make", target, f"PYTHON={interpreter}"], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize("target", ["demo", "test", "check"])
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (TOO_OLD, "error: Python 3.8.20 is too old; install Python 3.11 or newer, or set PYTHON=..."),
        (WITHOUT_VENV, "has no venv module; on Debian and Ubuntu: apt install python3-venv"),
    ],
)
def test_an_unfit_interpreter_gives_one_line_and_makes_nothing(make, tmp_path, target, program, message):
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{program}\n")
    interpreter.chmod(0o755)
    ended = make(target, interpreter)
    assert ended.returncode == 2
    assert message in ended.stderr.splitlines()[0]
    assert not (tmp_path / ".venv").exists()


def test_a_missing_interpreter_gives_one_line(make):
    ended = make("demo", "python-that-is-not-here")
    assert ended.stderr.splitlines()[0].startswith("error: python-that-is-not-here not found; install Python 3.11")
