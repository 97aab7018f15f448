"""The table of a sweep's elements, which a reader sorts and filters in the browser."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from llama_core.units import format_bytes

SortOrder = Literal["ascending", "descending"]
PREDICTED = "Step predicted"
PEAKS = {"estimated": "Memory estimated", "rehearsed": "Memory rehearsed", "measured": "Memory measured"}
"""The columns of the peaks of memory, by how they are known."""


class Cell(NamedTuple):
    """A cell of the table."""

    text: str | None
    """None for an unknown value."""
    value: float | None = None
    """The number to sort by; None in a column of text."""


UNKNOWN = Cell(None)


@dataclass(frozen=True)
class TableRow:
    """An element in the table."""

    name: str
    state: str
    style: str
    """The CSS class of the state."""
    cells: Sequence[Cell]
    """One for each column after name and state."""
    href: str | None = None
    """The address of its run directory, relative to the page."""
    is_best: bool = False


@dataclass(frozen=True)
class Table:
    """All elements, the best first."""

    title: str
    columns: Sequence[str]
    """After name and state; the first of them ranks the elements."""
    order: SortOrder
    """How the rows are sorted by that column."""
    rows: Sequence[TableRow]
    same: Mapping[str, str] = field(default_factory=dict)
    """The columns that are left out because all elements with a value have the same one, with the value."""

    @property
    def headers(self) -> list[str]:
        """The names of all columns."""
        return ["Element", "State", *self.columns]

    @property
    def states(self) -> dict[str, int]:
        """How many elements are in each state."""
        states = [row.state for row in self.rows]
        return {state: states.count(state) for state in dict.fromkeys(states)}


def same_in_all(cells: Mapping[str, Cell]) -> str | None:
    """Return the text of a column in which two elements or more have a value, all the same; None of any other."""
    texts = [cell.text for cell in cells.values() if cell.text is not None]
    return texts[0] if len(texts) > 1 and len(set(texts)) == 1 else None


def number(value: float | None, form: str) -> Cell:
    """Return the cell of a number, written as ``form`` says."""
    return UNKNOWN if value is None else Cell(form.format(value), value)


def bytes_cell(num_bytes: int | None) -> Cell:
    """Return the cell of a number of bytes."""
    return UNKNOWN if num_bytes is None else Cell(format_bytes(num_bytes), num_bytes)


def predicted_cell(predicted: float | None, measured: float | None) -> Cell:
    """Return the cell of predicted seconds, with their error if they have been measured."""
    error = "" if predicted is None or not measured else f" ({predicted / measured - 1:+.1%})"
    return number(predicted, f"{{:.3f}} s{error}")
