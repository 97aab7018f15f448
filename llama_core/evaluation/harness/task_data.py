"""Data sets of tasks, as lm-evaluation-harness loads them: none of the current folder by chance, and no objects."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets

from llama_core.errors import ConfigError
from llama_core.evaluation.harness.task_folder import ALLOW, READERS
from llama_core.replacing import replaced

_PLAIN = (
    *(datasets.Value, datasets.ClassLabel, datasets.Translation, datasets.TranslationVariableLanguages),
    *(datasets.Array2D, datasets.Array3D, datasets.Array4D, datasets.Array5D),
    getattr(datasets, "Json", datasets.Value),  # newer ones have it
)
"""Features whose values are text, numbers and arrays; others become objects, by libraries and programs."""
_INSTRUCTIONS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files of a folder that tell ``datasets`` what to read, also at other addresses."""


@contextmanager
def checked_data(*, allow_code: bool) -> Iterator[None]:
    """Inside the block, ``datasets.load_dataset`` refuses what nobody has asked for.

    A name of the Hub is never a folder that happens to be in the current one. Without ``allow_code``, folders hold data
    alone, and data sets hold no images, sound or other values that are decoded: Pillow starts programs for some.
    """
    load = datasets.load_dataset

    def load_checked(path: str, *args: Any, **settings: Any) -> Any:
        _refuse_current_folder(path)
        if not allow_code:
            _refuse_instructions(path)
        found = load(path, *args, **settings)
        if not allow_code:
            for split in found.values() if isinstance(found, dict) else (found,):
                for name, feature in (split.features or {}).items():
                    _refuse_objects(path, name, feature)
        return found

    with replaced(datasets, "load_dataset", load_checked):
        yield


def _refuse_current_folder(path: str) -> None:
    is_name = path not in READERS and not Path(path).is_absolute() and not path.startswith(".")
    if is_name and Path(path).exists():
        raise ConfigError(
            f"data set {path!r}: the current folder holds {path}, which would be read in place of the Hub's; run the "
            f"command in another folder, or write ./{path}"
        )


def _refuse_instructions(path: str) -> None:
    for name in _INSTRUCTIONS if Path(path).is_dir() else ():
        file = Path(path, name)
        if file.exists() or file.is_symlink():
            raise ConfigError(
                f"data set {path!r}: {name} may have other files read; read it, and name the data as "
                f"dataset_kwargs.data_files, or allow it with {ALLOW}"
            )


def _refuse_objects(path: str, name: str, feature: Any) -> None:
    if isinstance(feature, dict):
        for inner in feature.values():
            _refuse_objects(path, name, inner)
    elif isinstance(feature, list | tuple):
        for inner in feature:
            _refuse_objects(path, name, inner)
    elif isinstance(feature, datasets.List | datasets.LargeList):
        _refuse_objects(path, name, feature.feature)
    elif not isinstance(feature, _PLAIN):
        raise ConfigError(
            f"data set {path!r}: {name!r} is {type(feature).__name__}, which the model cannot read and libraries would "
            f"decode; choose another, or allow it with {ALLOW}"
        )
