"""A failing test is asked once more; what that says of a whole run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
HEAD = """
import os, pathlib, pytest
HERE = pathlib.Path(__file__).parent

def fails_first(name):
    mark = HERE / name
    if not mark.exists():
        mark.touch()
        raise ValueError(f"{name} is shaky")

@pytest.fixture(scope="module")
def shared():
    fails_first("shared")
"""
SHAKY = "def test_{0}(): fails_first('{0}')"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run some tests as ``make test`` does; return the exit code and the last lines."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.delenv("UNSTABLE_TESTS", raising=False)

    def start(*tests, processes=0):
        (tmp_path / "test_it.py").write_text("\n".join((HEAD, *tests)))
        command = [sys.executable, "-m", "pytest", "-p", "unstable", "-p", "no:cacheprovider", "--ask-again"]
        command += ["-n", str(processes), "--dist", "loadgroup"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        summary, _, last = ended.stdout.rpartition("once more, alone:\n")
        assert "short test summary" in summary or not summary, "these lines are the last"
        return ended.returncode, last

    return start


def test_one_test_that_passes_alone_is_named_and_passes_the_run(run):
    shaky = "@pytest.mark.xdist_group('a group')\n@pytest.mark.parametrize('what', ['a b@c'])\n"
    shaky += "def test_shaky(what): fails_first(what)"
    code, last = run("def test_firm(): pass", shaky, processes=2)
    assert code == 0
    assert last == "unstable: 'test_it.py::test_shaky[a b@c]' passed alone. First it said: ValueError: a b@c is shaky\n"


def test_a_second_failure_fails_the_run_and_its_command_repeats_it(run):
    code, last = run(SHAKY.format("shaky"), "def test_broken(): assert 'one' == 'two'")
    assert code == 1
    assert last.count("E   AssertionError: assert 'one' == 'two'") == 1
    assert "failed twice; to repeat: python -m pytest test_it.py::test_broken\n" in last
    assert "unstable: test_it.py::test_shaky passed alone" in last


def test_two_unstable_tests_fail_the_run(run):
    code, last = run(SHAKY.format("one"), SHAKY.format("another"))
    assert (code, last.count("passed alone")) == (1, 2)
    assert last.endswith("two unstable tests in one run fail it\n")


def test_an_unstable_test_of_an_earlier_run_counts_too(run, tmp_path, monkeypatch):
    monkeypatch.setenv("UNSTABLE_TESTS", str(tmp_path / "unstable"))
    assert run(SHAKY.format("one"))[0] == 0
    assert (tmp_path / "unstable").read_text().startswith("unstable: test_it.py::test_one passed alone")
    assert run("def test_firm(): pass")[0] == 0
    assert run(SHAKY.format("another"))[0] == 1


def test_tests_that_a_shared_fixture_fails_count_as_one(run):
    code, last = run(*(f"def test_{n}(shared): pass" for n in range(6)))
    assert code == 0
    assert last == "unstable: test_it.py::test_0 passed alone. First it said: ValueError: shared is shaky\n"


def test_a_test_whose_process_dies_is_asked_too(run):
    code, last = run(
        "def test_dies():\n    if not (HERE / 'died').exists(): (HERE / 'died').touch(); os._exit(9)", processes=1
    )
    assert code == 0
    assert last.startswith("unstable: test_it.py::test_dies passed alone. First it said: worker 'gw")


def test_many_failures_are_not_asked_again(run):
    code, told = run(*(SHAKY.format(n) for n in range(5)))
    assert code == 1
    assert told.endswith("5 failures are no accident: none is asked again\n")


def test_what_cannot_be_collected_fails_the_run(run):
    code, told = run(SHAKY.format("shaky"), "import nothing_of_this_name")
    assert code != 0
    assert "unstable" not in told
