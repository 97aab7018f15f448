"""A run's own records in one file, for a run that goes on elsewhere: its settings, plan, data, metrics and changes."""

import io
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from llama_core.errors import StorageError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import open_file

RECORDS = "records.tar"
"""The file's name on a mirror."""
_SCORES = ("step-*.parquet", "jobs/step-*.json")
"""What checkpoints have scored, and which evaluations have ended, in the folder of evaluations."""
MAX_BYTES = 16 * 2**30
"""Most bytes of the records of a run: much more than any has."""


def _of_run(run: RunDirectory) -> tuple[Path, ...]:
    """Return the records that a run goes on with; those about a job, a machine or an ending are not among them."""
    return (
        run.config,
        run.plan,
        run.choice,
        run.estimate,
        run.generation_config,
        run.data,
        run.hub,
        run.base,
        run.reference,
        run.reference_values,
        run.length,
        run.checkpoint_interval,
        run.rollbacks,
        run.data_changes,
        run.settings_changes,
        run.repeated_steps,
        run.mirror,
    )


def pack_records(run: RunDirectory, into: Path) -> None:
    """Write the records of a run, as far as it has them, to one file.

    The metrics and the scores of checkpoints are among them. A step that becomes part of another file meanwhile may be
    missing or be there twice, as after a crash.

    Raises:
        OSError: if it cannot be written.
    """
    # the appended steps first: a part that is written meanwhile has them too
    metrics = [run.metrics_tail, *sorted(run.metrics.glob("part-*.parquet"))]
    scores = sorted(path for pattern in _SCORES for path in run.evaluations.glob(pattern))
    with tarfile.open(into, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in (*_of_run(run), *metrics, *scores):
            with suppress(FileNotFoundError), open_file(path, run.path) as file:
                content = file.read()  # of one moment: a file that grows would not fit what the archive says of it
                member = tarfile.TarInfo(str(path.relative_to(run.path)))
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def unpack_records(file: Path, run: RunDirectory) -> None:
    """Write the records of ``pack_records`` to a run's directory, in place of those that it has.

    Raises:
        StorageError: if the file is damaged, or holds anything else.
        OSError: if they cannot be written.
    """
    for old in run.metrics.glob("part-*.parquet"):  # its steps are in the new ones
        old.unlink()
    run.metrics_tail.unlink(missing_ok=True)
    try:
        with tarfile.open(file, "r:") as archive:
            for name, content in _members(archive, run):
                path = run.path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as target:
                    while block := content.read(2**20):
                        target.write(block)
    except tarfile.TarError as error:
        raise StorageError(f"{file.name} is damaged ({error}); take an earlier checkpoint") from None


def _members(archive: tarfile.TarFile, run: RunDirectory) -> Iterator[tuple[str, "io.BufferedReader"]]:
    """Yield the name and the contents of each record; nothing else is written, wherever a name leads."""
    known = {str(path.relative_to(run.path)) for path in (*_of_run(run), run.metrics_tail)}
    for member in archive:
        is_part = _is_of(member.name, run.metrics, "part-*.parquet")
        is_score = any(_is_of(member.name, run.evaluations, pattern) for pattern in _SCORES)
        content = archive.extractfile(member) if member.isreg() else None
        if content is None or not (member.name in known or is_part or is_score) or member.size > MAX_BYTES:
            raise StorageError(f"{RECORDS} holds {member.name!r}, which is no record of a run")
        yield member.name, content  # type: ignore[misc]


def _is_of(name: str, folder: Path, pattern: str) -> bool:
    """Return whether a name is one that a pattern of a run's folder gives, and no other place is meant by it."""
    return (
        ".." not in PurePosixPath(name).parts
        and fnmatchcase(name, f"{folder.name}/{pattern}")
        and (name.count("/") == pattern.count("/") + 1)
    )
