"""Why a run ended, written even if its disk is full: the run keeps some room for that."""

import os
from contextlib import suppress
from pathlib import Path

from llama_core.records.directory import RunDirectory
from llama_core.records.files import is_disk_full, write_json
from llama_core.units import KIB

RESERVED_BYTES = 64 * KIB
"""Much more than an outcome takes."""


def reserve_room(run: RunDirectory) -> None:
    """Make a file that is deleted when there is no other room for the reason of the run's end."""
    with suppress(OSError):  # a disk that is full already
        if not run.reserve.exists() or run.reserve.stat().st_size < RESERVED_BYTES:
            run.reserve.write_bytes(os.urandom(RESERVED_BYTES))  # zeros would take no room on some disks


def write_even_on_full_disk(run: RunDirectory, path: Path, record: object) -> None:
    """Write a record as ``write_json`` does; if the disk is full, in the room that was reserved."""
    try:
        write_json(path, record)
    except OSError as error:
        if not is_disk_full(error):
            raise
        run.reserve.unlink(missing_ok=True)
        write_json(path, record)
