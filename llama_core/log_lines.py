"""Log records as lines that a terminal and a log can show, whatever the names of files in them hold."""

import copy
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from llama_core.errors import safe
from llama_core.redaction import printable, redacted


class LineFormatter(logging.Formatter):
    """Writes a record as one printable line without secrets, and its traceback as such lines after it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        own = copy.copy(record)
        own.exc_text = None  # where another formatter keeps the traceback as it is
        return super().format(own)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        """Return the line of a record."""
        return safe(super().formatMessage(record))

    def formatException(self, ei: "logging._SysExcInfoType") -> str:  # noqa: N802
        """Return the lines of a traceback."""
        return self.formatStack(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        """Return the lines of a stack."""
        return "\n".join(map(printable, redacted(stack_info).split("\n")))


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Show the engine's warnings on standard error inside the block, unless somebody has configured logging."""
    engine = logging.getLogger("llama_core")
    if engine.hasHandlers():
        yield
        return
    handler = _OnStandardError(logging.WARNING)
    handler.setFormatter(LineFormatter())
    engine.addHandler(handler)
    try:
        yield
    finally:
        engine.removeHandler(handler)


class _OnStandardError(logging.Handler):
    """Writes to ``sys.stderr`` as it is by then: a progress bar replaces it, to print lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)
