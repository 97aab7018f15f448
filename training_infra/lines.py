"""How the command line prints: what a record or a log says can neither begin a line nor command the terminal."""

import json
import sys
from collections.abc import Callable, Mapping
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


def for_standard_output() -> Callable[[str], str]:
    """Return how a text of several lines is written to standard output: as it is, but harmless on a terminal."""
    return _harmless if sys.stdout.isatty() else str


def _harmless(text: str) -> str:
    return "".join(c if c in "\n\t" else printable(c) for c in text)
