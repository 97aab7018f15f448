"""A conversation in the terminal, or with the lines of a file."""

import io
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress

from llama_core.errors import DataError
from training_infra.lines import print_line, print_pieces

_YOUR_TURN = "> "


def converse(answer: Callable[[str], Generator[str, None, None]]) -> None:
    """Print the answer to each message from standard input, until that ends.

    In a terminal, Ctrl-C ends an answer, and the command between answers. A message that cannot be answered is one line
    on standard error.
    """
    # It means "stop" everywhere, and there is nothing to save; as Ctrl-C, it would only end an answer.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a message that is no UTF-8 is refused with a line
    for message in _typed() if is_terminal else _lines():
        try:
            with closing(answer(message)) as pieces:
                print_pieces(pieces)
        except DataError as error:
            print_line(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print_line()


def _typed() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - lets the user edit the line
    prompt = _YOUR_TURN if sys.stdout.isatty() else ""  # standard output holds only the answers
    with suppress(EOFError):
        while True:
            if message := input(prompt).strip():
                yield message
    print_line()


def _lines() -> Iterator[str]:
    for line in sys.stdin:
        if message := line.strip():
            yield message
