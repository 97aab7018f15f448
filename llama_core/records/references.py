"""The log-probabilities of answers under the model that a run on preferences began with, and what they belong to."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from llama_core.errors import RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import atomic_write, read_file, read_typed, unreadable, write_json


@dataclass(frozen=True)
class ReferenceRecord:
    """What the log-probabilities under the reference belong to."""

    weights: str
    """The weights that the run began with."""
    rows: Mapping[str, str]
    """The digest of the rows of each source: documents, template, tokenizer and length of the rows."""
    num_pairs: Mapping[str, int]
    """The pairs of each source, in the order of the file: two numbers each. Or its labelled answers, each with its own
    log-probability and that after another prompt."""
    sha256: str
    """Of the file."""


def write_reference(
    run: RunDirectory, content: bytes, *, weights: str, rows: Mapping[str, str], num_pairs: Mapping[str, int]
) -> None:
    """Keep the log-probabilities, as ``RunDirectory.reference_values`` describes them, and their record."""
    with atomic_write(run.reference_values) as path:
        path.write_bytes(content)
    write_json(run.reference, ReferenceRecord(weights, rows, num_pairs, hashlib.sha256(content).hexdigest()))


def read_reference(run: RunDirectory) -> tuple[ReferenceRecord, bytes]:
    """Return the record of a run's reference, and the content of the file of its log-probabilities.

    Raises:
        RunDirectoryError: if one of them is missing, or damaged.
    """
    record = read_typed(run.reference, ReferenceRecord)
    most_bytes = 8 * sum(record.num_pairs.values())
    try:
        content = read_file(run.reference_values, run.path, most_bytes=most_bytes)
    except OSError as error:
        raise unreadable(run.reference_values, error) from None
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise RunDirectoryError(f"{run.reference_values} is damaged")
    return record, content
