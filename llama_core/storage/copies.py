"""Runs on a mirror as run directories here: the address of a run, ``prefix/RUN_NAME``, may stand where a path does.

Each checkpoint is compared with the sums in its manifest when it has been copied. One that is not whole, or that is
damaged, is passed over with a line.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from uuid import uuid4

from llama_core.errors import CheckpointError, RunDirectoryError, StorageError
from llama_core.records.checkpoints import (
    LATEST,
    MANIFEST,
    STATE,
    checkpoint_name,
    is_complete,
    list_checkpoints,
    recorded_sums,
)
from llama_core.records.checksums import find_damage
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import own_folder
from llama_core.records.files import atomic_write, cache_directory, no_room, write_json
from llama_core.storage.mirror import Contents, Mirror, Mirrored
from llama_core.storage.run_records import RECORDS, unpack_records
from llama_core.storage.upload import MirrorRecord, run_id_of
from llama_core.units import format_bytes

CONFIG = "config.yaml"
Tell = Callable[[str], None]


class RemoteRun:
    """A run on a mirror.

    Args:
        url: its address.
        tell: called with a line about each checkpoint that is copied or passed over.

    Raises:
        StorageError: if the address cannot be used, or there is no run.
    """

    def __init__(self, url: str, tell: Tell) -> None:
        self.mirror = Mirror(url)
        self.tell = tell
        try:
            claim = self.mirror.claim()
            if claim is None:
                self.mirror.store.require_bucket()
                raise StorageError(f"{self.mirror} holds no run; name PREFIX/RUN_NAME, where run.json is")
            self.contents: Contents = self.mirror.contents()
        except OSError as error:
            raise self.mirror.explained(error) from None
        self.run_id = claim.run_id
        self._told: set[str] = set()

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.mirror.store.name

    def newest(self) -> Mirrored:
        """Return the newest whole checkpoint.

        Raises:
            StorageError: if there is none.
        """
        newest = max(self.contents.whole, default="")
        for name, why in self.contents.problems.items():
            if name > newest and newest:
                self._pass_over(name, why)
        if not newest:
            problems = "; ".join(f"{name}: {why}" for name, why in self.contents.problems.items())
            raise StorageError(f"{self.mirror} holds no whole checkpoint{f' ({problems})' if problems else ''}")
        return self.contents.whole[newest]

    def _pass_over(self, name: str, why: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self.tell(f"{self.mirror}/{name} is not whole ({why}); taking the one before")

    def of_step(self, step: int) -> Mirrored:
        """Return the checkpoint of a step.

        Raises:
            StorageError: if it is not there, or not whole.
        """
        name = checkpoint_name(step)
        if name in self.contents.problems:
            raise StorageError(f"{self.mirror}/{name} is not whole ({self.contents.problems[name]}); choose another")
        if name not in self.contents.whole:
            there = ", ".join(str(int(one.rpartition("-")[2])) for one in self.contents.whole) or "none"
            raise StorageError(f"{self.mirror} has no checkpoint of step {step}; there are {there}")
        return self.contents.whole[name]

    def copy_newest(self, run: RunDirectory) -> Mirrored:
        """Copy the newest intact checkpoint into a run's directory, and the records of that time.

        Raises:
            StorageError: if none is intact.
        """
        while True:
            newest = self.newest()
            problem = self.copy(newest, run)
            if not problem:
                return newest
            self._pass_over(newest.name, problem)
            self._give_up(newest.name, problem)

    def copy_those(self, wanted: Iterable[Mirrored], run: RunDirectory) -> None:
        """Copy some checkpoints into a run's directory, with the records of the last of them.

        Raises:
            StorageError: if one is damaged.
        """
        for one in wanted:
            if problem := self.copy(one, run):
                raise StorageError(f"{self.mirror}/{one.name} is damaged ({problem}); choose another checkpoint")

    def describe(self, one: Mirrored, run: RunDirectory) -> None:
        """Copy what says what a checkpoint is, and the run's records, but no weights.

        Raises:
            StorageError: if the records are damaged.
        """
        folder = run.checkpoints / one.name
        with self._records(one, run) as (packed, problem):
            if problem:
                raise StorageError(f"{self.mirror}/{one.name} is damaged ({problem}); choose another checkpoint")
            if not (folder / CONFIG).exists():
                folder.mkdir(parents=True, exist_ok=True)
                self._get(one, [STATE, CONFIG], folder)
                (folder / MANIFEST).write_bytes(one.own_manifest())
            self._unpack(packed, run)

    def copy(self, one: Mirrored, run: RunDirectory) -> str:
        """Copy a checkpoint into a run's directory, and the records of that time; return what is wrong, or ""."""
        with self._records(one, run) as (packed, problem):
            is_here = _is_same(run.checkpoints / one.name, one)
            found = problem or ("" if is_here else self._copy_files(one, run))
            if not found:
                self._unpack(packed, run)
        return found

    def _copy_files(self, one: Mirrored, run: RunDirectory) -> str:
        final = run.checkpoints / one.name
        writing = run.checkpoints / f".{one.name}.{uuid4().hex}.writing"
        replaced = run.checkpoints / f".{one.name}.{uuid4().hex}.replaced.writing"
        writing.mkdir(parents=True)
        try:
            if shutil.disk_usage(writing).free < one.num_bytes:
                raise StorageError(f"cannot copy {self.mirror}/{one.name}: {no_room(writing, one.num_bytes)}")
            self.tell(f"copying {self.mirror}/{one.name}, {format_bytes(one.num_bytes)}, to {run.path}")
            self._get(one, one.sums, writing)
            if problem := find_damage(writing, one.sums, below=writing):
                return problem
            (writing / MANIFEST).write_bytes(one.own_manifest())
            if final.exists():
                final.replace(replaced)
            writing.replace(final)
        finally:
            for left in (writing, replaced):
                shutil.rmtree(left, ignore_errors=True)
        return ""

    @contextmanager
    def _records(self, one: Mirrored, run: RunDirectory) -> Iterator[tuple[Path, str]]:
        """Yield a copy of the file of records, and what is wrong with it, or ""."""
        run.create()
        packed = run.path / f".{RECORDS}.{uuid4().hex}.tmp"
        try:
            self._get_file(f"{one.name}/{RECORDS}", packed)
            yield (
                packed,
                find_damage(run.path, {packed.name: one.records}, below=run.path).replace(packed.name, RECORDS),
            )
        finally:
            packed.unlink(missing_ok=True)

    def _unpack(self, packed: Path, run: RunDirectory) -> None:
        unpack_records(packed, run)
        write_json(run.mirror, MirrorRecord(self.run_id))

    def _get(self, one: Mirrored, names: Iterable[str], folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._get_file(f"{one.name}/{name}", folder / name)

    def _get_file(self, name: str, file: Path) -> None:
        try:
            self.mirror.store.get(name, file)
        except OSError as error:
            raise self.mirror.explained(error) from None

    def _give_up(self, name: str, problem: str) -> None:
        without = self.contents.without([name])
        self.contents = Contents(
            without.whole, self.contents.parts, {**without.problems, name: problem}, self.contents.others
        )


def run_from_mirror(url: str, runs: Path, tell: Tell) -> Path:
    """Return the directory below ``runs`` in which the run of an address goes on, with its newest checkpoint.

    If the directory exists already and is this run's, it gets what is newer on the mirror, and else stays as it is.

    Raises:
        StorageError: if there is no such run, or it has no intact checkpoint.
        RunDirectoryError: if the directory holds another run.
    """
    remote = RemoteRun(url, tell)
    run = RunDirectory(runs / remote.name)
    if run.path.exists() and any(run.path.iterdir()):
        if not run.config.exists() or run_id_of(run) != remote.run_id:
            raise RunDirectoryError(
                f"{run.path} holds another run than {remote.mirror}; move it away to go on with the one on the mirror"
            )
        here = max((path.name for path in list_checkpoints(run) if is_complete(path)), default="")
        if here >= remote.newest().name:
            tell(f"{run.path} is here already, with {here}; it goes on from there")
            return run.path
        tell(f"{run.path} is here already, with {here or 'no checkpoint'}; its records become those of the mirror")
    newest = remote.copy_newest(run)
    with atomic_write(run.checkpoints / LATEST) as temporary:
        temporary.write_text(f"{newest.name}\n")
    return run.path


def copy_of_run(url: str, tell: Tell, step: int | None = None, *, every: bool = False) -> Path:
    """Return the directory of a copy, in the cache, of the run of an address.

    Args:
        url: the address.
        tell: called with a line about each checkpoint that is copied or passed over.
        step: the step of the checkpoint to copy; None for the newest.
        every: copy all checkpoints that the mirror has, for a choice among them.

    Raises:
        StorageError: if there is no such run or checkpoint.
    """
    remote = RemoteRun(url, tell)
    run = _in_cache(remote)
    for path in list_checkpoints(run):  # the run has gone back, or keeps it no longer
        if path.name not in remote.contents.whole:
            shutil.rmtree(path, ignore_errors=True)
    if every:
        remote.newest()
        remote.copy_those(remote.contents.whole.values(), run)
    elif step is not None:
        remote.copy_those([remote.of_step(step)], run)
    else:
        newest = remote.copy_newest(run)
        for path in list_checkpoints(run):  # a later one is damaged there, so it is none here
            if path.name > newest.name:
                shutil.rmtree(path, ignore_errors=True)
    return run.path


@cache
def described_checkpoint(url: str) -> Path:
    """Return where the newest checkpoint of a run will be, in the cache; what says what it is, is there already.

    In one process an address stands for one checkpoint, even if the run goes on meanwhile.

    Raises:
        StorageError: if there is no such run, or it has no whole checkpoint.
    """
    remote = RemoteRun(url, lambda line: None)
    run = _in_cache(remote)
    newest = remote.newest()
    remote.describe(newest, run)
    return run.checkpoints / newest.name


def fetch_described(url: str, tell: Tell) -> Path:
    """Copy the files of ``described_checkpoint``, as far as they are not here.

    Raises:
        StorageError: if they cannot be copied, or are damaged.
    """
    path = described_checkpoint(url)
    if not is_complete(path):
        remote = RemoteRun(url, tell)
        remote.copy_those([remote.of_step(int(path.name.rpartition("-")[2]))], RunDirectory(path.parents[1]))
    return path


def _in_cache(remote: RemoteRun) -> RunDirectory:
    digest = hashlib.sha256(f"{remote.mirror} {remote.run_id}".encode()).hexdigest()[:12]
    try:
        return RunDirectory(own_folder(cache_directory(None)) / "mirrors" / digest / remote.name)
    except OSError as error:
        raise StorageError(f"no copy of {remote.mirror} can be kept: {error.filename}: {error.strerror}") from None


def _is_same(path: Path, one: Mirrored) -> bool:
    try:
        return is_complete(path) and recorded_sums(path) == dict(one.sums)
    except CheckpointError:
        return False
