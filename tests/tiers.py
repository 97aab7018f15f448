"""Leaves cases of a law to a later tier: ``make test`` runs the cheapest, and ``make test-nightly`` the matrix."""

import pytest


def nightly(*values):
    """Return a test parameter that is left to ``make test-nightly``."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def wide(*values):
    """Return a test parameter that is left to ``make test-wide``."""
    return pytest.param(*values, marks=pytest.mark.wide)


def cases(table, *, narrow):
    """Return a test parameter for every entry of a table, named by its key; all but the ``narrow`` ones are nightly."""
    assert set(narrow) <= set(table)
    return [
        pytest.param(value, id=name, marks=[] if name in narrow else [pytest.mark.nightly])
        for name, value in table.items()
    ]
