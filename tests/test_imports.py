"""Python's collector while the engine is imported."""

import gc
import sys

import pytest

from llama_core.imports import importing_torch


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
