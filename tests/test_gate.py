"""``make gate`` judges the last commit as CI does."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

GATE = Path(__file__).parents[1] / "scripts" / "gate"


@pytest.fixture
def gate(tmp_path):
    """Run the gate of a repository with this ``.ci/run``, and with a file that is not committed."""
    repository = tmp_path / "repository"
    (repository / "scripts").mkdir(parents=True)
    (repository / ".ci").mkdir()
    shutil.copy(GATE, repository / "scripts")

    def git(*arguments):
        author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        return subprocess.run(
            ["git", *author, *arguments], cwd=repository, capture_output=True, text=True, check=True
        ).stdout.strip()

    def run(script):
        (repository / ".ci" / "run").write_text(script)
        git("init", "--quiet")
        git("add", ".")
        git("commit", "--quiet", "--message", "all")
        (repository / "forgotten").touch()
        ended = subprocess.run(
            ["scripts/gate"],
            cwd=repository,
            env=os.environ | {"TMPDIR": str(tmp_path), "MAKEFLAGS": "-j9"},
            capture_output=True,
            text=True,
            check=False,
        )
        passed = repository / ".git" / "gate-passed"
        return ended, git("rev-parse", "HEAD"), passed.read_text() if passed.exists() else None

    return run


def test_a_commit_that_passes_is_written_down_and_its_clone_is_gone(gate, tmp_path):
    script = """set -e
cd $(dirname $0)/..
[ $CI = true ] && [ -z $MAKEFLAGS ] && [ ! -e forgotten ]
! read -t 1 line
[ $(stat --format %a ..) = 755 ]  # others can read it
"""
    ended, commit, passed = gate(script)
    assert (ended.returncode, passed) == (0, f"{commit}\n")
    assert re.search(rf"^gate: {commit[:12]} passed in 0 min \d+ s$", ended.stdout, re.MULTILINE)
    assert "what is not committed is left out" in ended.stderr
    assert not list(tmp_path.glob("gate.*"))


def test_one_that_fails_is_told_with_what_failed_and_the_command_that_repeats_it(gate, tmp_path):
    lines = ("noise", "failed twice; to repeat: python -m pytest a::b", "ci: failed at: make test")
    ended, commit, passed = gate("".join(f"echo '{line}'\n" for line in lines) + "exit 2")
    assert (ended.returncode, passed) == (2, None)
    told = ended.stdout[ended.stdout.index("gate: ") :]
    assert re.match(rf"gate: {commit[:12]} failed in 0 min \d+ s, at: make test\n", told)
    assert lines[1] in told
    (clone,) = tmp_path.glob("gate.*/clone")
    assert f"cd {clone}" in told
