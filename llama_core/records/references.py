"""What the reference of an objective makes of all rows of a run, and what that belongs to."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_core.errors import RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import atomic_write, open_file, read_typed, unreadable, write_json

Values = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ReferenceRecord:
    """What the values under the reference belong to."""

    weights: str
    """The weights that computed them."""
    rows: Mapping[str, str]
    """The digest of the rows of each source: documents, template, tokenizer and length of the rows."""
    shapes: Mapping[str, tuple[int, int]]
    """How many entries each source has, in the order of the file, and how many numbers are in each: of pairs of
    answers, their two log-probabilities; of labelled answers, their own and that after another prompt."""
    sha256: str
    """Of the file."""


@contextmanager
def writing_reference(
    run: RunDirectory, *, weights: str, rows: Mapping[str, str], shapes: Mapping[str, tuple[int, int]]
) -> Iterator[Callable[[bytes], None]]:
    """Yield what appends to the file of values, as ``RunDirectory.reference_values`` describes it.

    The file and its record appear when the block ends without an error.
    """
    digest = hashlib.sha256()
    with atomic_write(run.reference_values) as path, path.open("wb") as file:

        def append(content: bytes) -> None:
            digest.update(content)
            file.write(content)

        yield append
    write_json(run.reference, ReferenceRecord(weights, rows, shapes, digest.hexdigest()))


def read_reference(run: RunDirectory) -> ReferenceRecord:
    """Return the record of a run's reference, after comparing every byte of its values with it.

    Raises:
        RunDirectoryError: if one of them is missing, or damaged.
    """
    record = read_typed(run.reference, ReferenceRecord)
    try:
        with open_file(run.reference_values, run.path) as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise unreadable(run.reference_values, error) from None
    if digest.hexdigest() != record.sha256:
        raise RunDirectoryError(f"{run.reference_values} is damaged")
    return record


def mapped_reference(run: RunDirectory, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Values]:
    """Return the values of each source, [entries, numbers], which are read from the disk when they are used.

    Raises:
        RunDirectoryError: if their file is missing, or too short.
    """
    values: dict[str, Values] = {}
    begin = 0
    try:
        with open_file(run.reference_values, run.path) as file:
            whole: Any = np.empty(0, np.float32)
            if any(map(prod, shapes.values())):  # an empty file cannot be mapped
                whole = np.memmap(file, np.float32, mode="r")
            for name, shape in shapes.items():
                end = begin + prod(shape)
                values[name] = whole[begin:end].reshape(shape)
                begin = end
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"cannot read {run.reference_values}: {error}") from None
    return values
