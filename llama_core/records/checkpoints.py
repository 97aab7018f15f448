"""List a run's checkpoints on disk and check that they are complete, or intact too. Needs no torch.

Every checkpoint has a manifest with the size and the checksum of each of its files. Complete means that all are there
with their sizes, which costs nothing; intact means that every byte is as it was written.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama_core.errors import CheckpointError, RunDirectoryError
from llama_core.records.checksums import FileSum, file_sum, find_damage
from llama_core.records.directory import CHECKPOINTS, RunDirectory
from llama_core.records.files import checked_record, is_folder_itself, read_json, write_json

PREFIX = "step-"
_NAME = re.compile(rf"{PREFIX}[0-9]{{8,18}}")
STATE = "state.json"
MANIFEST = "manifest.json"
"""File with the size and the checksum of all others."""
LATEST = "latest"
LAYOUT = "deepspeed.json"
"""File in DeepSpeed's checkpoints with the ranks, ZeRO stage and dtype of the run; others have none."""


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of ``step``."""
    return f"{PREFIX}{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Return whether a directory of this name is a checkpoint."""
    return _NAME.fullmatch(name) is not None


def list_checkpoints(run: RunDirectory) -> list[Path]:
    """Return the directories of all checkpoints, oldest first, complete or not."""
    named = (path for path in run.checkpoints.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name))
    return sorted(path for path in named if is_folder_itself(path, run.path))


def newest_checkpoint(run: RunDirectory) -> Path | None:
    """Return the directory of the newest complete checkpoint, or None."""
    return next((path for path in reversed(list_checkpoints(run)) if is_complete(path)), None)


def newest_intact_checkpoint(run: RunDirectory, tell: Callable[[str], None]) -> Path | None:
    """Return the directory of the newest intact checkpoint; None if there is no checkpoint. Reads all of it.

    Args:
        run: the run.
        tell: called with a line about each later one that is damaged.

    Raises:
        CheckpointError: if all are damaged.
    """
    problems: list[str] = []
    found = list_checkpoints(run)
    for path in reversed(found):
        problem = find_problem(path)
        if not problem:
            return path
        problems.append(f"{path.name}: {problem}")
        if path != found[0]:
            tell(f"checkpoint {path.name} is damaged ({problem}); trying the one before")
    if problems:
        raise CheckpointError(
            f"none of the {len(problems)} checkpoints in {run.checkpoints} can be read ({'; '.join(problems)}); "
            "restore one from a backup"
        )
    return None


def checkpoint_step(path: Path) -> int:
    """Return the step of the checkpoint in ``path``."""
    return int(path.name.removeprefix(PREFIX))


def newest_step(run: RunDirectory) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    newest = newest_checkpoint(run)
    return checkpoint_step(newest) if newest else 0


def data_digest(path: Path) -> str | None:
    """Return the digest of the data that the checkpoint in ``path`` was trained on; None if it has none.

    Raises:
        CheckpointError: if the checkpoint is not complete.
    """
    position = complete_state(path).get("data")
    digest = position.get("dataset") if isinstance(position, dict) else None
    return digest if isinstance(digest, str) else None


def data_digests(run: RunDirectory) -> list[str]:
    """Return the digest of the data that each complete checkpoint was trained on, each once."""
    digests = []
    for path in list_checkpoints(run):
        with suppress(CheckpointError):
            digests.append(data_digest(path))
    return [digest for digest in dict.fromkeys(digests) if digest is not None]


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
    state = recorded_counters(path)
    if damage := find_damage(path, recorded_sums(path), below=place_of(path), read=False):
        raise CheckpointError(damage)
    return state


def recorded_counters(path: Path) -> dict[str, Any]:
    """Return the counters of the checkpoint in ``path``, whatever has become of its other files.

    Raises:
        CheckpointError: if they cannot be read.
    """
    return _record(path / STATE)


def recorded_sums(path: Path) -> dict[str, FileSum]:
    """Return the recorded size and checksum of each file of the checkpoint in ``path``, by its path in it.

    Raises:
        CheckpointError: if they cannot be read.
    """
    manifest = path / MANIFEST
    try:
        return checked_record(_record(manifest).get("files"), dict[str, FileSum], manifest)
    except RunDirectoryError as error:
        raise CheckpointError(str(error)) from None


def find_problem(path: Path, *, read: bool = True) -> str:
    """Return what is wrong with the checkpoint in ``path``, as a clause; "" if it is intact.

    Args:
        path: the checkpoint.
        read: read all of it and compare the checksums; otherwise only see whether it is complete.
    """
    try:
        complete_state(path)
        return find_damage(path, recorded_sums(path), below=place_of(path), read=read)
    except CheckpointError as error:
        return str(error)


def place_of(path: Path) -> Path:
    """Return the folder below which the checkpoint in ``path`` has no links: its run, if it is in one."""
    in_run = _NAME.fullmatch(path.name) is not None and path.parent.name == CHECKPOINTS
    return path.parent.parent if in_run else path


def run_of(path: Path) -> RunDirectory:
    """Return the run that the checkpoint in ``path`` is in; one that is in none is taken for its own."""
    return RunDirectory(place_of(path.absolute()))


def write_manifest(path: Path, sums: Mapping[str, FileSum]) -> None:
    """Write the manifest of the checkpoint in ``path``, once its other files are there.

    Args:
        path: the checkpoint.
        sums: known sums of its files, by their path in it; the other files are read.
    """
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} | set(sums)
    files = {name: asdict(sums.get(name) or file_sum(path / name)) for name in sorted(names - {MANIFEST})}
    write_json(path / MANIFEST, {"files": files})


def _record(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path.name} is missing")
    try:
        return read_json(path, place_of(path.parent))
    except RunDirectoryError as error:
        raise CheckpointError(str(error)) from None
