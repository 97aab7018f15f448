"""Settings that every test shares."""

import gc
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile

import pytest
from hypothesis import is_hypothesis_test, settings

from llama_core.imports import let_threads_sleep

pytest_plugins = ["unstable"]

# What is not a folder here may be a repository, and no test asks the Hub itself for one; see toy_hub.py.
os.environ["HF_HUB_OFFLINE"] = "1"
let_threads_sleep()  # tests import torch plainly, and several processes of them share the cores
# No test asserts a wall-clock time, not even Hypothesis' own, and none depends on draws of an earlier run.
settings.register_profile("same draws", deadline=None, database=None, derandomize=True, max_examples=15)
settings.register_profile("new draws", deadline=None, database=None)

WIDE_FOLDERS = {"slurm"}


def pytest_configure(config):
    # A script's background command ignores SIGINT, and would hand that down to every process of a test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):  # the processes of xdist inherit it
        caches = tempfile.TemporaryDirectory(prefix="caches-of-tests-")
        os.environ["XDG_CACHE_HOME"] = caches.name  # nothing of an earlier run, and nothing of the user's
        config.add_cleanup(caches.cleanup)
    settings.load_profile("same draws" if config.getoption("--hypothesis-seed") is None else "new draws")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()  # nearly all that is made meanwhile stays
    try:
        return (yield)
    finally:
        gc.freeze()  # later collections need not go through the tests and the imported modules
        gc.set_threshold(10_000)  # nor look as often as is fit for a small program
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup():
    """Let each test draw the same numbers, whichever tests ran before it in its process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    seed = item.config.getoption("--hypothesis-seed")
    if report.failed and seed is not None and is_hypothesis_test(getattr(item, "obj", None)):
        test = shlex.quote(f"{item.location[0]}::{item.name}")
        report.sections.append(("Draw it again", f"python -m pytest {test} --hypothesis-seed={seed}"))
    return report


def pytest_collection_modifyitems(items):
    """Leave tests of what a machine must be set up for, and of injected faults, to later tiers."""
    for item in items:
        if WIDE_FOLDERS & set(item.path.parts) or item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.wide)
        elif item.get_closest_marker("fault") and not item.get_closest_marker("wide"):
            item.add_marker(pytest.mark.nightly)


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
