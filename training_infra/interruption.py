"""Ctrl-C during a run that somebody's script has launched."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from llama_core.errors import StoppedError
from training_infra.lines import print_line


class InterruptedRunError(StoppedError, KeyboardInterrupt):
    """A run that Ctrl-C has stopped: resume it.

    It is a ``KeyboardInterrupt`` too, for callers who handle those.
    """


@contextmanager
def one_line_if_interrupted() -> Iterator[None]:
    """Let an interrupt of the block, or of a decorated function, end the script with one line and exit code 130.

    Callers can catch it: ``sys.excepthook`` only sees what nobody has caught.

    Raises:
        InterruptedRunError: if the block's run was stopped.
        KeyboardInterrupt: if there was nothing to stop yet.
    """
    try:
        yield
    except StoppedError as error:
        interrupt = InterruptedRunError(*error.args)
        _end_in_one_line(interrupt)
        raise interrupt from None
    except KeyboardInterrupt as interrupt:
        _end_in_one_line(interrupt)
        raise


def _end_in_one_line(interrupt: BaseException) -> None:
    """Make this one exception end the interpreter in one line, if nobody catches it."""
    otherwise = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if error is not interrupt:
            otherwise(kind, error, where)
            return
        if os.environ.get("RANK", "0") == "0":  # torchrun's other processes would repeat it
            print_line(str(error) or "interrupted", file=sys.stderr)
        sys.exit(StoppedError.exit_code)

    sys.excepthook = hook
