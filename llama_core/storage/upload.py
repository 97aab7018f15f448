"""Copy finished checkpoints to the mirror while the run trains: one thread of rank 0, which reads them from disk.

The thread copies the newest checkpoint that is complete here and not yet whole on the mirror, then the next newest, and
removes there what the run's retention does not keep. After an error it tries again, less and less often, for as long
as the run lasts. A checkpoint that it copies stays on disk until it has.
"""

import logging
import shutil
import time
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory
from threading import Condition, Event, Thread
from uuid import uuid4

from llama_core.errors import CheckpointError, RunDirectoryError, StorageError
from llama_core.records.checkpoints import (
    MANIFEST,
    STATE,
    is_complete,
    list_checkpoints,
    newest_checkpoint,
    recorded_sums,
)
from llama_core.records.checksums import FileSum, file_sum
from llama_core.records.directory import RunDirectory
from llama_core.records.files import atomic_write, now, read_file, read_typed, write_json
from llama_core.records.retention import Retention
from llama_core.storage.mirror import CLAIM, Claim, Contents, Mirror, Mirrored, mirror_url
from llama_core.storage.run_records import RECORDS, pack_records
from llama_core.storage.stores import said

FIRST_WAIT_SECONDS = 2.0
"""After the first error; each further one doubles it."""
LONGEST_WAIT_SECONDS = 120.0
SETTLING_SECONDS = 1.0
"""After a run has claimed a new mirror, before it looks whether another has done so at the same moment."""
CLAIM_SECONDS = 20.0
"""How long the start of a run waits to learn whether the mirror is its own."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MirrorRecord:
    """What a run remembers of its mirror."""

    run_id: str
    """Tells the run from every other; a run that was taken from a mirror has that of the mirror."""


def run_id_of(run: RunDirectory) -> str | None:
    """Return what tells a run from every other; None if it has never been mirrored."""
    return read_typed(run.mirror, MirrorRecord, run.path).run_id if run.mirror.exists() else None


def refuse_foreign_mirror(mirror: Mirror, run: RunDirectory) -> Contents:
    """Refuse a mirror that holds the checkpoints of another run, or other files; return what it holds.

    Raises:
        RunDirectoryError: saying whose they are.
        OSError, StorageError: if the store does not answer, or ``run.json`` there is damaged.
    """
    claim = mirror.claim()
    contents = mirror.contents()
    choose = "choose another training.checkpoint_mirror, or another name of the run's directory"
    if claim is None:
        found = (*contents.others, *contents.parts)
        if found:
            raise RunDirectoryError(f"{mirror} holds files that no run has written ({found[0]}); {choose}")
    elif claim.run_id != run_id_of(run):
        raise RunDirectoryError(
            f"{mirror} holds the checkpoints of another run ({claim}); {choose}; to go on with that run, use: "
            f"training-infra train --resume --run-dir {mirror}"
        )
    return contents


def newer_than_here(contents: Contents, run: RunDirectory) -> str:
    """Return the newest checkpoint on a mirror, if it is newer than all that the run has here; else empty."""
    newest = max(contents.whole, default="")
    here = newest_checkpoint(run)
    return newest if here is None or newest > here.name else ""


class MirrorLostError(Exception):
    """Another job of the run, or another run, writes to the mirror now."""


class Uploads:
    """Copies a run's checkpoints to its mirror in a thread, from ``start`` to ``stop``.

    Args:
        run: the run.
        mirror: its mirror.
        fingerprint: of its configuration.
        keep: which checkpoints stay on the mirror.
    """

    def __init__(self, run: RunDirectory, mirror: Mirror, *, fingerprint: str, keep: Retention) -> None:
        self.run = run
        self.mirror = mirror
        self.keep = keep
        self._fingerprint = fingerprint
        self._job = uuid4().hex
        self._is_claimed = False
        self._contents: Contents | None = None
        self._changed = Condition()
        self._uploading: str | None = None
        self._told_late: str | None = None
        self._sent: dict[str, FileSum] = {}
        """What this job has already sent of the checkpoint whose copy has failed, by its address."""
        self._has_work = True
        self._is_busy = False
        self._is_stopping = False
        self._is_lost = False
        self._refusal: RunDirectoryError | StorageError | None = None
        self._answered = Event()
        self._is_late = False
        self._thread = Thread(target=self._work, name="checkpoint-mirror", daemon=True)

    def claim(self) -> None:
        """Make the mirror this job's, and learn what it holds.

        Raises:
            RunDirectoryError: if it holds another run's checkpoints.
            OSError, StorageError: if the store does not answer, or does not let us write.
        """
        self._contents = contents = refuse_foreign_mirror(self.mirror, self.run)
        run_id = run_id_of(self.run)
        if run_id is None:
            run_id = uuid4().hex
            write_json(self.run.mirror, MirrorRecord(run_id))
        is_new = CLAIM not in contents.others
        self.mirror.write_claim(Claim(run_id, self._fingerprint, self._job, gethostname(), now()))
        if is_new:
            time.sleep(SETTLING_SECONDS)
            refuse_foreign_mirror(self.mirror, self.run)
        self._is_claimed = True
        self._tell_of_newer(contents)

    def _tell_of_newer(self, contents: Contents) -> None:
        if newer := newer_than_here(contents, self.run):
            logger.warning(
                "%s has %s, which is newer than what %s goes on from; to go on from there, stop this run and use: "
                "training-infra train --resume --run-dir %s",
                self.mirror,
                newer,
                self.run.path,
                self.mirror,
            )

    def start(self) -> RunDirectoryError | StorageError | None:
        """Make the mirror this job's, and begin with what is missing there; return why that is refused, if it is.

        A store that has not answered by then, or does not answer, may do so before the first checkpoint.
        """
        self._thread.start()
        if not self._answered.wait(CLAIM_SECONDS):
            self._is_late = True
            logger.warning("%s has not answered within %g s; the run goes on without it", self.mirror, CLAIM_SECONDS)
        return self._refusal

    def wake(self) -> None:
        """Look for a new checkpoint; tell if the one before is still being copied."""
        with self._changed:
            self._has_work = True
            self._changed.notify_all()
            late = self._uploading
        if late is not None and late != self._told_late:
            self._told_late = late
            logger.warning(
                "%s falls behind: %s is still being copied, and a newer checkpoint waits for it", self.mirror, late
            )

    def holds(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint is being copied, and so must stay on disk."""
        return self._uploading == checkpoint.name

    @property
    def is_done(self) -> bool:
        """Whether all that is here is on the mirror, or nothing more will be copied."""
        return not self._thread.is_alive() or self._is_lost or not (self._has_work or self._is_busy)

    @property
    def has_all(self) -> bool:
        """Return whether all that is here is on the mirror."""
        return not (self._is_lost or self._has_work or self._is_busy)

    def wait(self, seconds: float) -> bool:
        """Return ``is_done``, after at most some seconds."""
        until = time.monotonic() + seconds
        with self._changed:
            while not self.is_done and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(left, 1.0))
        return self.is_done

    def stop(self) -> None:
        """Copy no further checkpoint. One that is being copied goes on until the process ends."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def copy_all(self) -> list[str]:
        """Copy in this thread what is missing, once; return the names of the checkpoints.

        Raises:
            RunDirectoryError: if the mirror is another run's.
            StorageError: if it cannot be copied.
        """
        try:
            return self._copy_missing()
        except OSError as error:
            raise self.mirror.explained(error) from None

    def _claim_first(self) -> None:
        """Claim the mirror, while whoever has started the thread waits for an answer."""
        try:
            self.claim()
        except (RunDirectoryError, StorageError) as error:
            self._refusal = error
        except (FileNotFoundError, PermissionError) as error:
            self._refusal = self.mirror.explained(error)
        except OSError as error:
            logger.warning("the mirror does not answer (%s); checkpoints are copied once it does", said(error))
        self._answered.set()
        if self._refusal is not None:
            self._is_lost = True
            if self._is_late:
                logger.error("no checkpoint is copied: %s", self._refusal)

    def _work(self) -> None:
        self._claim_first()
        if self._is_lost:
            return
        wait = FIRST_WAIT_SECONDS
        while True:
            with self._changed:
                while not self._has_work and not self._is_stopping:
                    self._changed.wait()
                if self._is_stopping:
                    return
                self._has_work = False
                self._is_busy = True
            try:
                self._copy_missing()
                wait = FIRST_WAIT_SECONDS
            except (MirrorLostError, RunDirectoryError) as error:
                logger.error("no further checkpoint is copied to %s: %s", self.mirror, error)
                self._is_lost = True
                return
            except Exception as error:  # whatever it is, the run goes on
                reason = said(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                logger.warning("copying to the mirror failed (%s); trying again in %g s", reason, wait)
                self._contents = None  # what the mirror holds is not known any more
                with self._changed:
                    self._has_work = True
                    self._changed.wait_for(lambda: self._is_stopping, wait)
                wait = min(2 * wait, LONGEST_WAIT_SECONDS)
            finally:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _copy_missing(self) -> list[str]:
        """Copy all that is here and not there, the newest first, and remove there what the run does not keep.

        Raises:
            MirrorLostError: if another job has taken the mirror over.
            OSError: of the store, or of the disk.
        """
        if not self._is_claimed:
            self.claim()
        if self._contents is None:
            self._contents = self.mirror.contents()
        copied = []
        while (path := self._next()) is not None:
            self._uploading = path.name
            began = time.monotonic()
            try:
                mirrored = self._copy(path)
            except FileNotFoundError as error:
                if path.exists() or error.errno != ENOENT:
                    raise
                continue  # the run has removed it since
            finally:
                self._uploading = None
            self._contents = self._contents.with_one(mirrored)
            copied.append(path.name)
            seconds = time.monotonic() - began
            logger.info("copied %s to %s in %.1f s", path.name, self.mirror, seconds)
        self._remove_others()
        return copied

    def _next(self) -> Path | None:
        """Return the newest checkpoint that the run keeps, that is complete here and not there."""
        assert self._contents is not None
        if self._is_stopping:
            return None
        for path in sorted(self._kept_here(), reverse=True):
            try:
                if not is_complete(path):
                    continue
                there = self._contents.whole.get(path.name)
                if there is None or dict(there.sums) != recorded_sums(path):
                    return path
            except CheckpointError:  # it was removed meanwhile, or is damaged
                continue
        return None

    def _kept_here(self) -> set[Path]:
        return self.keep.kept(list_checkpoints(self.run))

    def _copy(self, path: Path) -> Mirrored:
        """Copy a checkpoint: its files, the run's records, and at last its manifest."""
        assert self._contents is not None
        sums = recorded_sums(path)
        there = self._contents.parts.get(path.name, ())
        if MANIFEST in there:  # of another attempt at this step, or of files that are lost
            self._refuse_lost()
            self.mirror.store.remove([f"{path.name}/{MANIFEST}"])
        folder = self.mirror.store / path.name
        self._sent = {sent: one for sent, one in self._sent.items() if sent.startswith(f"{folder}/")}
        for name, one in sums.items():
            if self._sent.get(f"{folder}/{name}") != one:
                folder.put(path / name, name)
                self._sent[f"{folder}/{name}"] = one
        with TemporaryDirectory(prefix="mirror-") as temporary:
            packed = Path(temporary) / RECORDS
            pack_records(self.run, packed)
            mirrored = Mirrored(path.name, sums, file_sum(packed))
            folder.put(packed, RECORDS)
        found = folder.find()
        wrong = [name for name, size in mirrored.sizes.items() if found.get(name) != size]
        if wrong:
            self._sent = {}
            raise OSError(f"{folder}/{wrong[0]} has {found.get(wrong[0], 0)} bytes after it was copied")
        self._refuse_lost()
        folder.write(MANIFEST, mirrored.manifest())
        self._sent = {}
        self._remember(mirrored, read_file(path / STATE, self.run.path))
        return mirrored

    def _refuse_lost(self) -> None:
        claim = self.mirror.claim()
        if claim is None:
            raise MirrorLostError(f"{CLAIM} is gone")
        if claim.job != self._job:
            raise MirrorLostError(f"another job has taken it over ({claim})")

    def _remove_others(self) -> None:
        """Remove what the run keeps no longer, but nothing newer than the newest whole checkpoint there."""
        contents = self._contents
        assert contents is not None
        newest = max(contents.whole, default="")
        kept = {path.name for path in self.keep.kept([self._counters(one) for one in contents.whole.values()])}
        kept |= {path.name for path in self._kept_here()}
        gone = [name for name in contents.parts if name < newest and name not in kept]
        if gone:
            self._refuse_lost()
        for name in gone:
            self.mirror.remove(name, contents.parts[name])
            shutil.rmtree(self.run.mirrored / name, ignore_errors=True)
        self._contents = contents.without(gone)

    def _counters(self, one: Mirrored) -> Path:
        """Return a folder with the counters and the manifest of a checkpoint on the mirror, for the retention."""
        folder = self.run.mirrored / one.name
        if not (folder / MANIFEST).exists() or recorded_sums(folder) != dict(one.sums):
            self._remember(one, (self.mirror.store / one.name).read(STATE))
        return folder

    def _remember(self, one: Mirrored, state: bytes) -> None:
        for file, content in ((STATE, state), (MANIFEST, one.own_manifest())):
            with atomic_write(self.run.mirrored / one.name / file, durable=False) as temporary:
                temporary.write_bytes(content)


def upload_missing(run: RunDirectory, prefix: str, *, fingerprint: str, keep: Retention) -> list[str]:
    """Copy now what a run has and its mirror lacks, as after a run that ended before its last upload.

    Args:
        run: a run without a job.
        prefix: ``training.checkpoint_mirror``.
        fingerprint: of its configuration.
        keep: which checkpoints stay on the mirror.

    Returns:
        The names of the checkpoints that were missing.

    Raises:
        RunDirectoryError: if the mirror is another run's.
        StorageError: if it cannot be copied.
    """
    uploads = Uploads(run, Mirror(mirror_url(prefix, run.name)), fingerprint=fingerprint, keep=keep)
    try:
        return uploads.copy_all()
    except MirrorLostError as error:
        raise StorageError(f"{uploads.mirror}: {error}; try again when that job has ended") from None
