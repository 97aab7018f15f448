"""How the command line prints: what a record or a log says can neither begin a line nor command the terminal."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from llama_core.redaction import indented_line, printable


def print_line(text: object = "", file: TextIO | None = None) -> None:
    """Print one line of printable characters."""
    print(indented_line(str(text)), file=file, flush=True)


def print_text(text: str) -> None:
    """Print a text of several lines, or a piece of one, as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(record: Mapping[str, Any]) -> None:
    """Print a record for a program that reads it."""
    print_text(json.dumps(record, indent=2) + "\n")


def print_pieces(pieces: Iterable[str]) -> None:
    """Print the pieces of a text as they come, and end its last line."""
    shown = for_standard_output()
    for piece in pieces:
        print_text(shown(piece))
    print_line()


class ProgressLine:
    """A line about what is being done: redrawn in place on a terminal, else printed every half minute.

    Args:
        file: where it is shown, usually standard error.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_redrawn = file.isatty()
        self._seconds = 0.1 if self._is_redrawn else 30.0
        self._last = time.monotonic()
        self._is_shown = False

    def __call__(self, name: str, done: int, total: int) -> None:
        """Show how much of something is done, unless it was shown just now."""
        if time.monotonic() < self._last + self._seconds:
            return
        self._last = time.monotonic()
        text = printable(f"{name}: {done:,} of {total:,} requests")
        self._file.write(f"\r\x1b[K{text}" if self._is_redrawn else f"{text}\n")
        self._file.flush()
        self._is_shown = self._is_redrawn

    def clear(self) -> None:
        """Remove the line, so that another can be printed."""
        if self._is_shown:
            self._file.write("\r\x1b[K")
            self._file.flush()
            self._is_shown = False

    def tell(self, text: str) -> None:
        """Print another line instead."""
        self.clear()
        print_line(text, file=self._file)


def for_standard_output() -> Callable[[str], str]:
    """Return how a text of several lines is written to standard output: as it is, but harmless on a terminal."""
    return _harmless if sys.stdout.isatty() else str


def _harmless(text: str) -> str:
    return "".join(c if c in "\n\t" else printable(c) for c in text)
