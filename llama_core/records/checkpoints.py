"""List a run's checkpoints on disk and check that they are complete. Reads no weights and needs no torch."""

import re
from pathlib import Path
from typing import Any

from llama_core.errors import CheckpointError, RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import checked_record, read_json

BYTES_PER_TRAINED_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""
PREFIX = "step-"
_NAME = re.compile(rf"{PREFIX}[0-9]{{8,18}}")
STATE = "state.json"
LATEST = "latest"
LAYOUT = "deepspeed.json"
"""File in DeepSpeed's checkpoints with the ranks, ZeRO stage and dtype of the run; others have none."""


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of ``step``."""
    return f"{PREFIX}{step:08d}"


def list_checkpoints(run: RunDirectory) -> list[Path]:
    """Return the directories of all checkpoints, oldest first, complete or not."""
    found = (path for path in run.checkpoints.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir())
    return sorted(found)


def newest_checkpoint(run: RunDirectory) -> Path | None:
    """Return the directory of the newest complete checkpoint, or None."""
    return next((path for path in reversed(list_checkpoints(run)) if is_complete(path)), None)


def checkpoint_step(path: Path) -> int:
    """Return the step of the checkpoint in ``path``."""
    return int(path.name.removeprefix(PREFIX))


def newest_step(run: RunDirectory) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    newest = newest_checkpoint(run)
    return checkpoint_step(newest) if newest else 0


def is_complete(path: Path) -> bool:
    """Return whether every file of the checkpoint in ``path`` exists with its recorded size."""
    try:
        complete_state(path)
    except CheckpointError:
        return False
    return True


def complete_state(path: Path) -> dict[str, Any]:
    """Return the counters of the checkpoint in ``path`` after checking that its files exist with their recorded sizes.

    Raises:
        CheckpointError: naming the file that is missing or truncated.
    """
    try:
        state = read_json(path / STATE)
        files = checked_record(state.pop("files", None), dict[str, int], path / STATE)
    except RunDirectoryError as error:
        raise CheckpointError(str(error)) from None
    for name, size in files.items():
        try:
            found = (path / name).stat().st_size
        except (OSError, ValueError):  # ValueError: no name of a file
            raise CheckpointError(f"{name} is missing") from None
        if found != size:
            raise CheckpointError(f"{name} has {found} of {size} bytes")
    return state
