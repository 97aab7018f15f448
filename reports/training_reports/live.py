"""The pages of a run or a sweep that goes on, made again when its files have changed."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from llama_core.errors import RunDirectoryError
from llama_core.launch.attempts import attempt_path
from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.jobs.submission import attach
from llama_core.records.directory import RunDirectory
from llama_core.sweep.directory import SweepDirectory, read_record
from training_reports import page, sweep
from training_reports.files import MAX_LOGS, logs_of_ranks, outputs_of_ranks

MAX_SHARE = 0.1
"""Most of a processor's time that is spent on making a page: it may be the one that trains."""
PAUSE_SECONDS = 1.0
"""Least time between two looks at the files."""


@dataclass(frozen=True)
class LiveContent:
    """A page as a browser gets it."""

    content: bytes
    tag: str
    """Another one for another content."""

    @classmethod
    def of(cls, content: bytes) -> "LiveContent":
        """Return the content with its tag."""
        return cls(content, hashlib.sha256(content).hexdigest()[:32])


class LivePage:
    """The page of a run, or of a sweep if the directory holds one. It may be asked for by several threads.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._next_look = 0.0
        self._marks: object = None
        self._newest = LiveContent(b"", "")
        self._job: JobHandle | None = None
        self._job_marks: object = None

    @property
    def is_of_sweep(self) -> bool:
        """Whether it is about a sweep."""
        return SweepDirectory(self._path).record.exists()

    def newest(self) -> LiveContent:
        """Return the page, made again if something has changed since the last look at the files.

        Raises:
            RunDirectoryError: if the directory is gone.
            OSError: if it cannot be read.
        """
        with self._lock:
            if time.monotonic() >= self._next_look:
                began = time.process_time()  # on a busy machine, the time of the clock says little
                self._look()
                took = time.process_time() - began
                self._next_look = time.monotonic() + max(PAUSE_SECONDS, took / MAX_SHARE)
            return self._newest

    def _look(self) -> None:
        if not self._path.is_dir():
            raise RunDirectoryError(f"{str(self._path)!r} is gone: it has been deleted or moved")
        is_of_sweep = self.is_of_sweep
        job = "" if is_of_sweep else self._state_of_job(RunDirectory(self._path))
        # taken before the page is made, so that what is written meanwhile is seen at the next look
        marks = (job, tuple(_marks_of_sweep(self._path) if is_of_sweep else _marks_of_run(self._path)))
        if marks == self._marks:
            return
        if is_of_sweep:
            made = sweep.page_of(SweepDirectory(self._path))
        else:
            run = RunDirectory(self._path)
            made = page.page_of(run, job=job, outputs=outputs_of_ranks(run))
        self._newest = LiveContent.of(made.live())
        self._marks = marks

    def _state_of_job(self, run: RunDirectory) -> str:
        """Return what the job of the run is doing; empty if none is at work that can be seen from here."""
        marks = tuple(_marks(run.job))
        # A handle knows when its scheduler may be asked again; a job that has ended is not asked for again.
        if marks != self._job_marks or (self._job is not None and not self._job.is_running()):
            self._job_marks = marks
            self._job = None
            with suppress(RunDirectoryError):
                self._job = attach(run)
        return self._job.state if self._job is not None else ""


class LivePages:
    """The page of a run or a sweep, and those of the sweep's elements, by their address.

    Args:
        path: the directory of the run or the sweep.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first = LivePage(path)
        self._of_elements: dict[str, LivePage] = {}

    def find(self, address: str) -> LivePage | None:
        """Return the page at ``/`` or, for an element of a sweep, at ``/runs/<its name>/``; None for other addresses.

        Raises:
            RunDirectoryError: if the record of the sweep is damaged.
        """
        if address == "/":
            return self._first
        if self._first.is_of_sweep:
            watched = SweepDirectory(self._path)
            for element in read_record(watched).elements:
                if unquote(address) == f"/runs/{element.name}/":
                    page_of_element = LivePage(watched.run(element.name).path)
                    return self._of_elements.setdefault(element.name, page_of_element)
        return None


def refuse_others(path: Path) -> None:
    """Refuse a path that is no directory, or a directory of something else; one that is empty may become a run.

    Raises:
        RunDirectoryError: if it is refused.
    """
    run = RunDirectory(path)
    if not path.is_dir():
        raise RunDirectoryError(f"{str(path)!r} is not a directory; give the directory of a run or a sweep")
    known = (run.config, run.logs, run.metrics, SweepDirectory(path).record)
    if not any(one.exists() for one in known) and any(path.iterdir()):
        raise RunDirectoryError(f"{str(path)!r} holds neither a run nor a sweep; give the directory of one")


def _marks_of_sweep(path: Path) -> Iterator[object]:
    watched = SweepDirectory(path)
    yield from _marks(watched.record, watched.history)
    for element in read_record(watched).elements:
        yield from _marks_of_run(watched.run(element.name).path)


def _marks_of_run(path: Path) -> Iterator[object]:
    """Yield what changes with the files of a run: every step replaces one of the first, and folders get new files."""
    run = RunDirectory(path)
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        yield from _marks(*sorted(path / entry.name for entry in entries if entry.name != run.report.name))
    logs = logs_of_ranks(run)[:MAX_LOGS]
    yield from _marks(run.metrics_tail, run.activities, run.preflights, attempt_path(run), *logs)


def _marks(*paths: Path) -> Iterator[object]:
    for path in paths:
        with suppress(OSError):  # not there, or not any more
            found = os.lstat(path)
            yield path, found.st_size, found.st_mtime_ns
