"""One process at a time works on a sweep: a second would time its elements beside it and mix their records."""

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from llama_core.errors import RunDirectoryError
from llama_core.sweep.directory import SweepDirectory

_held: dict[Path, IO[str]] = {}
"""The lock files that this process holds."""


def lock(sweep: SweepDirectory) -> None:
    """Keep other processes off a sweep until ``unlock``, or until this process ends in any way.

    Raises:
        RunDirectoryError: if another process works on it, or its file system has no locks.
    """
    path = sweep.lock.resolve()
    if path in _held:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path} ({error.strerror}); choose another --sweep-dir") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read() or "another process"
        file.close()
        raise RunDirectoryError(f"{sweep.path}: {holder} works on this sweep; wait for it, or stop it first") from None
    except OSError as error:
        file.close()
        raise RunDirectoryError(
            f"cannot lock {path} ({error.strerror}); mount its file system with locks (Lustre: -o flock), or choose "
            "another --sweep-dir"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _held[path] = file


def unlock(sweep: SweepDirectory) -> None:
    """Let other processes work on a sweep."""
    file = _held.pop(sweep.lock.resolve(), None)
    if file is not None:
        file.close()
