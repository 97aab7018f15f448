"""Which files of a data set are for training, by their paths, and which of them are its data at all.

Folders that Hugging Face's datasets library has saved say themselves which files are theirs; what it computed from them
lies beside them.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from llama_core.errors import DataError

_HELD_OUT = {"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"}
"""Words in the path of a file that say that it is not for training."""
_SPLITS = "dataset_dict.json"
_STATE = "state.json"
_INFO = "dataset_info.json"
OF_DATASETS = (_INFO, "dataset_infos.json", _SPLITS, _STATE)
"""Files in which Hugging Face's datasets library describes the others."""
_COMPUTED = re.compile(r"cache-[0-9a-f]{16}.*\.arrow")
"""What ``map`` and ``filter`` of that library call their results."""
_MAX_BYTES = 2**24
"""Most bytes of a description; that of a data set of 100,000 files has 5 MB."""


def is_held_out(path: str) -> bool:
    """Return whether a path in a data set says that the file is for validation or tests."""
    return not _HELD_OUT.isdisjoint(re.findall("[a-z]+", path.lower()))


def not_of_data_sets(files: Iterable[Path], top: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files that are no part of the saved data sets in whose folders they are, each with the reason.

    Args:
        files: the files found.
        top: the folder in which they were found; what lies above it is not looked at.

    Raises:
        DataError: if a file that a data set lists is missing, or a data set is a choice of the rows of its files.
    """
    by_folder: dict[Path, list[Path]] = {}
    for file in files:
        if file.suffix == ".arrow":  # of other kinds, nobody computes others beside them
            by_folder.setdefault(file.parent, []).append(file)
    splits = {folder.parent: _splits(folder.parent) for folder in by_folder if folder != top}
    for folder, inside in by_folder.items():
        named = None if folder == top else splits[folder.parent]
        if named is not None and folder.name not in named:
            yield from ((file, f"not among the splits of {_SPLITS}") for file in inside)
        else:
            yield from _unlisted(folder, inside)


def _splits(folder: Path) -> list[str] | None:
    """Return the names of the splits that a folder says it has; None if it does not say."""
    described = _described(folder / _SPLITS)
    names = described.get("splits")
    return names if isinstance(names, list) else None


def _unlisted(folder: Path, inside: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the files of one folder that its data set does not list."""
    state = _described(folder / _STATE)
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder} was saved as a choice of the rows of its files; save it again with a newer datasets library"
        )
    listed = state.get("_data_files")
    files = listed if isinstance(listed, list) else []
    names = [file.get("filename") for file in files if isinstance(file, dict)]
    present = {file.name for file in inside}
    for name in names:
        if not isinstance(name, str) or not (name in present or (folder / name).exists()):
            raise DataError(f"{folder / _STATE} lists {name!r}, which is missing; copy it again")
    known = set(names)
    for file in inside:
        if known and file.name not in known:
            yield file, f"that {_STATE} does not list"
        elif not known and _COMPUTED.fullmatch(file.name) and (folder / _INFO).exists():
            yield file, "that datasets has computed from the others"


def _described(path: Path) -> dict[str, object]:
    """Return what a file of the datasets library says; empty if there is none, or it is somebody else's."""
    if not path.is_file():  # reading a pipe would wait
        return {}
    with path.open("rb") as file:
        text = file.read(_MAX_BYTES)
    try:
        described = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return described if isinstance(described, dict) else {}
