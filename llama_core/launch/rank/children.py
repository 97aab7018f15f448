"""Processes that a supervisor starts besides its worker, and their tie to it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from llama_core.records.directory import RunDirectory

COMPANION_LOG = "evaluations.log"
END_SECONDS = 5
"""How long a companion may take to end once its input has ended."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return a function that makes the process that calls it die with ``parent``.

    It has an effect on Linux only. Call ``die_with_parent`` before forking, since it loads the C library.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the tie
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


@contextmanager
def companion(command: Sequence[str], run: RunDirectory) -> Iterator[None]:
    """Run a program inside the block. Its standard input ends with the block; what becomes of it harms nobody.

    Args:
        command: its command line; empty for none.
        run: the run, in whose logs its output goes.
    """
    if not command:
        yield
        return
    with (run.logs / COMPANION_LOG).open("ab", buffering=0) as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 (a supervisor has one thread)
            )
        except OSError as error:  # no memory, or too many processes: the ranks do without it
            log.write(f"cannot start {command}: {error.strerror}\n".encode())
            yield
            return
    try:
        yield
    finally:
        with suppress(subprocess.TimeoutExpired, OSError):
            process.communicate(timeout=END_SECONDS)  # closes its input
        process.kill()
        process.wait()
