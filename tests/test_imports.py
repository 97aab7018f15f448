"""Python's collector while the engine is imported, and how threads wait for each other then."""

import gc
import os
import re
import subprocess
import sys

import pytest

from llama_core.imports import SPINS, importing_torch


@pytest.fixture
def collector():
    yield
    gc.unfreeze()
    gc.enable()


def test_what_is_imported_with_torch_is_collected_neither_then_nor_later(collector, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    frozen = gc.get_freeze_count()
    with importing_torch():
        assert not gc.isenabled()
        imported = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(imported)


@pytest.mark.parametrize("reason", ["torch has been imported", "the collector is off"])
def test_a_process_that_has_torch_or_no_collector_is_left_as_it_is(collector, monkeypatch, reason):
    if reason == "torch has been imported":
        monkeypatch.setitem(sys.modules, "torch", sys)
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        gc.disable()
    before = (gc.isenabled(), gc.get_freeze_count())
    with importing_torch():
        assert gc.isenabled() == before[0]
    assert (gc.isenabled(), gc.get_freeze_count()) == before


@pytest.mark.parametrize("chosen", [None, "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_threads_of_torch_sleep_rather_than_spin_unless_the_user_has_chosen(chosen):
    """In a process of its own: OpenMP says what it has read as soon as torch loads it."""
    kept = {name: value for name, value in os.environ.items() if name not in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}}
    given = {"GOMP_SPINCOUNT": "77", "OMP_WAIT_POLICY": "PASSIVE"}
    own = kept | ({chosen: given[chosen]} if chosen else {}) | {"OMP_DISPLAY_ENV": "VERBOSE"}
    code = "from llama_core.imports import importing_torch\nwith importing_torch():\n    import torch"
    said = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True).stderr
    count = re.search(r"GOMP_SPINCOUNT = '(\d+)'", said)
    if count is None:
        pytest.skip("this torch has another OpenMP than GNU's")
    expected = {None: SPINS, "GOMP_SPINCOUNT": "77", "OMP_WAIT_POLICY": "0"}
    assert count.group(1) == expected[chosen]
