"""Settings that every test shares."""

import gc
import os
import shlex
import subprocess

import pytest
from hypothesis import is_hypothesis_test, settings

# What is not a folder here may be a repository, and no test asks the Hub itself for one; see toy_hub.py.
os.environ["HF_HUB_OFFLINE"] = "1"
# No test asserts a wall-clock time, not even Hypothesis' own, and none depends on draws of an earlier run.
settings.register_profile("same draws", deadline=None, database=None, derandomize=True, max_examples=15)
settings.register_profile("new draws", deadline=None, database=None)

WIDE_FOLDERS = {"slurm"}


def pytest_configure(config):
    settings.load_profile("same draws" if config.getoption("--hypothesis-seed") is None else "new draws")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()  # nearly all that is made meanwhile stays
    try:
        return (yield)
    finally:
        gc.freeze()  # later collections need not go through the tests and the imported modules
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    seed = item.config.getoption("--hypothesis-seed")
    if report.failed and seed is not None and is_hypothesis_test(getattr(item, "obj", None)):
        test = shlex.quote(f"{item.location[0]}::{item.name}")
        report.sections.append(("Draw it again", f"python -m pytest {test} --hypothesis-seed={seed}"))
    return report


def pytest_collection_modifyitems(items):
    for item in items:
        if WIDE_FOLDERS & set(item.path.parts) or item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.wide)


@pytest.fixture
def disk_of(tmp_path):
    """Mount file systems of a given size, such as ``disk_of("1m")``."""
    mounted = []

    def mount(size):
        path = tmp_path / f"disk-of-{size}"
        path.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip(f"cannot mount a file system: {made.stderr.decode().strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", path], check=True)
