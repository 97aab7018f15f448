"""What a run has on its mirror: ``prefix/RUN_NAME``, with a folder for each checkpoint.

A folder ``step-00000100`` holds the files of the checkpoint, ``records.tar`` with the run's own records at that time,
and the checkpoint's manifest, which is written last and removed first. It has the size and the checksum of all of them.
A checkpoint without a manifest, or with files of other sizes, does not exist: its upload has not ended.

``run.json`` says whose checkpoints these are: which run, and which of its jobs was the last to begin. A job writes no
manifest once another one has begun.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llama_core.errors import RunDirectoryError, StorageError
from llama_core.records.checkpoints import MANIFEST, STATE, is_checkpoint_name
from llama_core.records.checksums import FileSum
from llama_core.records.files import DAMAGE, SCHEMA_VERSION, checked_record
from llama_core.storage.run_records import RECORDS
from llama_core.storage.stores import Store, said, store_at

CLAIM = "run.json"
_RECORDS_SUM = "records"
"""Where a manifest on a mirror has the sum of that file; a manifest of a run has no such key."""


@dataclass(frozen=True)
class Claim:
    """Whose checkpoints a mirror holds."""

    run_id: str
    fingerprint: str
    """Of the run's configuration when the job began, for people."""
    job: str
    """Tells a job of the run from the others: a random number."""
    host: str
    began_at: str

    def __str__(self) -> str:
        """Return whose they are, for people."""
        return f"fingerprint {self.fingerprint}, begun on {self.host} at {self.began_at}"


@dataclass(frozen=True)
class Mirrored:
    """A checkpoint on a mirror with all its files."""

    name: str
    sums: Mapping[str, FileSum]
    """Of the checkpoint's files, by their paths in it."""
    records: FileSum
    """Of ``records.tar``."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self.records.num_bytes + sum(one.num_bytes for one in self.sums.values())

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file but for the manifest, by name."""
        return {name: one.num_bytes for name, one in self.sums.items()} | {RECORDS: self.records.num_bytes}

    def manifest(self) -> bytes:
        """Return the manifest as it is on the mirror."""
        return _json({"files": self._files, _RECORDS_SUM: asdict(self.records)})

    def own_manifest(self) -> bytes:
        """Return the manifest as the run has written it, so that what was recorded about it still belongs to it."""
        return _json({"files": self._files})

    @property
    def _files(self) -> dict[str, Any]:
        return {name: asdict(self.sums[name]) for name in sorted(self.sums)}


@dataclass(frozen=True)
class Contents:
    """What a listing of a mirror has found."""

    whole: Mapping[str, Mirrored]
    """The checkpoints, by name, oldest first."""
    parts: Mapping[str, tuple[str, ...]]
    """The files of each checkpoint's folder, whole or not, by its name."""
    problems: Mapping[str, str]
    """What is wrong with a checkpoint that is not whole, by its name."""
    others: tuple[str, ...]
    """Names of files that are in no checkpoint's folder."""

    def with_one(self, mirrored: Mirrored) -> "Contents":
        """Return the same with a checkpoint that is whole now."""
        whole = {**self.whole, mirrored.name: mirrored}
        parts = {**self.parts, mirrored.name: (*mirrored.sizes, MANIFEST)}
        problems = {name: why for name, why in self.problems.items() if name != mirrored.name}
        return Contents({name: whole[name] for name in sorted(whole)}, parts, problems, self.others)

    def without(self, names: Collection[str]) -> "Contents":
        """Return the same without some checkpoints."""
        return Contents(
            {name: one for name, one in self.whole.items() if name not in names},
            {name: files for name, files in self.parts.items() if name not in names},
            {name: why for name, why in self.problems.items() if name not in names},
            self.others,
        )


class Mirror:
    """The folder of one run on a store. Errors are those of ``Store``.

    Args:
        url: the address of the run: prefix/RUN_NAME.

    Raises:
        StorageError: if the address cannot be used.
    """

    def __init__(self, url: str) -> None:
        self.store: Store = store_at(url)

    def __str__(self) -> str:
        """Return the address."""
        return self.store.url

    def claim(self) -> Claim | None:
        """Return whose checkpoints these are; None if there are none.

        Raises:
            StorageError: if the file that says so is damaged.
        """
        try:
            content = self.store.read(CLAIM)
        except FileNotFoundError:
            return None
        try:
            return checked_record(_parsed(content), Claim, Path(CLAIM))
        except (*DAMAGE, RunDirectoryError):
            raise StorageError(f"{self}/{CLAIM} is damaged; restore it, or choose another address") from None

    def write_claim(self, claim: Claim) -> None:
        """Say whose checkpoints these are."""
        self.store.write(CLAIM, _json(asdict(claim)))

    def contents(self) -> Contents:
        """List the mirror, and read the manifests."""
        parts: dict[str, list[str]] = {}
        sizes: dict[str, dict[str, int]] = {}
        others = []
        for path, num_bytes in sorted(self.store.find().items()):
            folder, slash, name = path.partition("/")
            if slash and is_checkpoint_name(folder):
                parts.setdefault(folder, []).append(name)
                sizes.setdefault(folder, {})[name] = num_bytes
            else:
                others.append(path)
        whole: dict[str, Mirrored] = {}
        problems: dict[str, str] = {}
        for name, found in sizes.items():
            try:
                whole[name] = self._whole(name, found)
            except StorageError as error:
                problems[name] = str(error)
        return Contents(whole, {name: tuple(files) for name, files in parts.items()}, problems, tuple(others))

    def _whole(self, name: str, sizes: Mapping[str, int]) -> Mirrored:
        """Return a checkpoint whose files are all there.

        Raises:
            StorageError: if they are not, with the reason as a clause.
        """
        if MANIFEST not in sizes:
            raise StorageError("it has no manifest: its upload did not end")
        try:
            payload = _parsed(self.store.read(f"{name}/{MANIFEST}"))
            where = Path(MANIFEST)
            sums = checked_record(payload["files"], dict[str, FileSum], where)
            mirrored = Mirrored(name, sums, checked_record(payload[_RECORDS_SUM], FileSum, where))
        except (*DAMAGE, FileNotFoundError, RunDirectoryError):
            raise StorageError(f"its {MANIFEST} is damaged") from None
        for file, num_bytes in mirrored.sizes.items():
            if file not in sizes:
                raise StorageError(f"{file} is missing")
            if sizes[file] != num_bytes:
                raise StorageError(f"{file} has {sizes[file]} of {num_bytes} bytes")
        if STATE not in sums or any(Path(file).is_absolute() or ".." in Path(file).parts for file in sums):
            raise StorageError(f"its {MANIFEST} names other files than a checkpoint has")
        return mirrored

    def remove(self, name: str, files: tuple[str, ...]) -> None:
        """Delete a checkpoint, its manifest first."""
        first = [file for file in files if file == MANIFEST]
        self.store.remove([f"{name}/{file}" for file in (*first, *(file for file in files if file != MANIFEST))])

    def explained(self, error: OSError) -> StorageError:
        """Return an error of the store for a user, with what to do."""
        return explained(self.store.url, error)


def explained(url: str, error: OSError) -> StorageError:
    """Return an error of a store for a user, with what to do."""
    if isinstance(error, FileNotFoundError):
        remedy = "make the bucket, or correct the address"
    elif isinstance(error, PermissionError):
        remedy = "give credentials that allow it, as the store's own tools take them"
    else:
        remedy = "check the network and the store's endpoint, and try again"
    return StorageError(f"{said(error) if error.filename else f'{url}: {said(error)}'}; {remedy}")


def mirror_url(prefix: str, run_name: str) -> str:
    """Return the address of a run below ``training.checkpoint_mirror``."""
    return f"{prefix}/{run_name}"


def _json(payload: Mapping[str, Any]) -> bytes:
    return (json.dumps({"schema_version": SCHEMA_VERSION, **payload}, indent=2) + "\n").encode()


def _parsed(content: bytes) -> dict[str, Any]:
    payload = json.loads(content)
    if payload.pop("schema_version") != SCHEMA_VERSION:
        raise ValueError("it was written by another version of this software")
    return dict(payload)
