"""A record as a file of any kind holds it."""

from collections.abc import Callable
from typing import NamedTuple

from llama_core.data.bad_lines import BadLineKind, UnusableRecordError


class RawRecord(NamedTuple):
    """A record in a file."""

    place: str
    """Where it is, as it follows the file's path: ``:12`` for line 12; empty if it is the whole file."""
    position: int
    """Bytes of the file read so far, to the end of this record or somewhat more."""
    read: Callable[[], object]
    """Returns the record, any JSON value.

    Raises ``UnusableRecordError`` or another ``ValueError``, ``ArithmeticError`` or ``RecursionError`` if it has none.
    """
    is_row: bool = False
    """Whether it is of a table, whose objects of one column all have the same keys, with null where one is missing."""
    unread: tuple[str, ...] = ()
    """Columns of that table that ``read`` does not return."""


def already_read(value: object) -> Callable[[], object]:
    """Return the ``read`` of a record that is known."""
    return lambda: value


def unusable(kind: BadLineKind, reason: str) -> Callable[[], object]:
    """Return the ``read`` of a record that cannot be used."""

    def read() -> object:
        raise UnusableRecordError(kind, reason)

    return read
