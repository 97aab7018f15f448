"""Picks the cases of a law that run in ``make test``; ``make test-wide`` runs the rest."""

import pytest


def wide(*values):
    """Return a test parameter that is left to ``make test-wide``."""
    return pytest.param(*values, marks=pytest.mark.wide)


def cases(table, *, narrow):
    """Return a test parameter for every entry of a table, named by its key; all but the ``narrow`` ones are wide."""
    assert set(narrow) <= set(table)
    return [
        pytest.param(value, id=name, marks=[] if name in narrow else [pytest.mark.wide])
        for name, value in table.items()
    ]
