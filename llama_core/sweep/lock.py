"""One process at a time works on a sweep: a second would time its elements beside it and mix their records."""

import fcntl
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from llama_core.errors import RunDirectoryError
from llama_core.sweep.directory import SweepDirectory


@dataclass(frozen=True)
class _Held:
    file: IO[str]
    is_new: bool
    """Whether there was nothing in the sweep's directory before."""
    created: tuple[Path, ...]
    """The directories that were made for it, the innermost first."""


_held: dict[Path, _Held] = {}
"""The lock files that this process holds."""


def lock(sweep: SweepDirectory) -> None:
    """Keep other processes off a sweep until ``unlock``, or until this process ends in any way.

    Raises:
        RunDirectoryError: if another process works on it, or its file system has no locks.
    """
    path = sweep.lock.resolve()
    if path in _held:
        return
    created = tuple(folder for folder in path.parents if not folder.exists())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not any(path.parent.iterdir())
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
    _held[path] = _Held(file, is_new, created)


def unlock(sweep: SweepDirectory) -> None:
    """Let other processes work on a sweep."""
    held = _held.pop(sweep.lock.resolve(), None)
    if held is not None:
        held.file.close()


def discard_new(sweep: SweepDirectory) -> None:
    """Remove all that is in the directory of a sweep that could not start, if this process began the sweep.

    The corrected command can then begin it again in the same directory.
    """
    held = _held.get(sweep.lock.resolve())
    if held is None or not held.is_new:
        return
    for path in sweep.path.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for folder in held.created:
        with suppress(OSError):  # somebody else uses it by now
            folder.rmdir()
