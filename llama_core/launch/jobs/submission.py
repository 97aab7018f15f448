"""Start a run's job on this machine or in Slurm, and find it again from any process that sees the run directory.

Both launchers go through submitit and run the same ``Supervisor`` on every rank.
"""

import fcntl
import grp
import hashlib
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from llama_core.config.run import RunConfig
from llama_core.errors import RunDirectoryError
from llama_core.launch.jobs.handle import WORKER, JobHandle, Submission
from llama_core.launch.jobs.launcher import Launcher
from llama_core.launch.jobs.local import LOCAL
from llama_core.launch.jobs.slurm import SLURM
from llama_core.launch.outcome import concluded
from llama_core.launch.scheduler import Ask, job_status
from llama_core.records.directory import RunDirectory
from llama_core.records.files import damaged, read_typed, write_json
from llama_core.records.job import JobRecord, Part

LAUNCHERS: dict[str, Launcher] = {launcher.name: launcher for launcher in (LOCAL, SLURM)}
"""Every launcher by its value of ``launch.launcher``."""

_PRIVATE = 0o700  # submitit starts a job from a pickle, so nobody else may write there


def submit(
    run: RunDirectory,
    config: RunConfig,
    num_ranks: int,
    only: Part | None = None,
    worker: tuple[str, ...] = WORKER,
) -> JobHandle:
    """Start a job on ``run``, or find the one that is running, and return at once.

    Args:
        run: the run directory, with its configuration and plan.
        config: the resolved configuration.
        num_ranks: total number of worker processes.
        only: do only this part of the work.
        worker: the command line that every rank runs, with the run directory as its next argument.

    Raises:
        RunDirectoryError: if a job of this run may be running where this machine cannot see it.
        EnvironmentMismatchError: if this machine or Slurm refuses the job.
    """
    submission = _submission(run, config, num_ranks, only, worker)
    run = submission.run
    with only_one_submission(run.logs) as lock:
        _recover_unrecorded(run, config)
        at_work = attach(run)
        if at_work is not None:
            return at_work
        LAUNCHERS[config.launch.launcher].start(_fresh_folder(run.logs), [submission], run.name, lock)
    return _handle(run, read_typed(run.job, JobRecord))


def submit_array(
    folder: Path,
    runs: Sequence[tuple[RunDirectory, RunConfig]],
    num_ranks: int,
    only: Part | None = None,
    *,
    worker: tuple[str, ...] = WORKER,
    ask: Ask = job_status,
) -> list[JobHandle]:
    """Submit one Slurm job array with an element for each run, all with the same resources.

    Args:
        folder: the directory of the sweep, whose name the queue shows.
        runs: the run directories and their configurations, with the same ``launch`` and the same number of ranks.
        num_ranks: worker processes of each run.
        only: do only this part of the work.
        worker: as for ``submit``.
        ask: asks Slurm for the status of an element.

    Raises:
        RunDirectoryError: if a job of one of the runs is still alive, or other users may write where its files go.
        EnvironmentMismatchError: if Slurm refuses the job.
    """
    submissions = [_submission(run, config, num_ranks, only, worker) for run, config in runs]
    logs = folder.resolve() / "logs"
    launcher = LAUNCHERS[runs[0][1].launch.launcher]
    with only_one_submission(logs) as lock:
        for submission in submissions:
            _refuse_second_job(submission.run, ask)
        launcher.start(_fresh_folder(logs), submissions, folder.name, lock)
    return [_handle(s.run, read_typed(s.run.job, JobRecord), ask) for s in submissions]


def attach(run: RunDirectory, ask: Ask = job_status) -> JobHandle | None:
    """Return the job that is running on ``run``, whoever submitted it, or None if there is none.

    If the job ended while nobody waited for it, its outcome is recorded now.

    Args:
        run: the run.
        ask: asks Slurm for the status of its job.

    Raises:
        RunDirectoryError: if its job may still be running where this machine cannot see it.
    """
    if not run.job.exists():
        return None
    record = read_typed(run.job, JobRecord)
    if not _launcher(run, record).can_see(record):
        if concluded(run, record) is not None:
            return None
        raise RunDirectoryError(
            f"job {record.job_id} ({record.launcher}) of {run.path} was submitted on {record.host} and cannot be "
            f"seen from here; continue there, or delete {run.job} if the job has ended"
        )
    handle = _handle(run, record, ask)
    if handle.is_running():
        return handle
    handle.wait()
    return None


def _submission(
    run: RunDirectory, config: RunConfig, num_ranks: int, only: Part | None, worker: tuple[str, ...]
) -> Submission:
    run = RunDirectory(run.path.resolve())
    command = (*worker, str(run.path), *(("--only", only) if only else ()))
    return Submission(run, config, num_ranks, command, config.launch.is_elastic and only != "benchmark")


def _handle(run: RunDirectory, record: JobRecord, ask: Ask = job_status) -> JobHandle:
    return _launcher(run, record).handle(run, record, ask)


def _launcher(run: RunDirectory, record: JobRecord) -> Launcher:
    try:
        return LAUNCHERS[record.launcher]
    except KeyError:
        raise damaged(run.job, f"launcher {record.launcher!r} is none of {', '.join(LAUNCHERS)}") from None


def _refuse_second_job(run: RunDirectory, ask: Ask = job_status) -> None:
    alive = attach(run, ask)
    if alive is not None:
        raise RunDirectoryError(
            f"job {alive.record.job_id} ({alive.record.launcher}) is still running on {run.path}; "
            "wait for it, or cancel it first"
        )


def _recover_unrecorded(run: RunDirectory, config: RunConfig) -> None:
    """Record the job of a submitter that was killed between the scheduler's answer and writing ``job.json``."""
    folders = submission_folders(run.logs)
    if not folders or (run.job.exists() and read_typed(run.job, JobRecord).folder == str(folders[-1])):
        return
    found = LAUNCHERS[config.launch.launcher].find_unrecorded(folders[-1], run.name, config)
    if found is not None:
        write_json(run.job, found)


@contextmanager
def only_one_submission(logs: Path) -> Iterator[IO[str]]:
    """Make a second process that prepares or submits the same run wait until it finds the first one's records."""
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "submit.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot lock {lock.name} ({error.strerror}); mount its file system with locks (Lustre: -o flock), "
                "or choose another --run-dir"
            ) from None
        yield lock


def private_place(logs: Path) -> Path:
    """Return a folder for the pickles that the ranks of a run load, which nobody else may open.

    Raises:
        RunDirectoryError: if there is none.
    """
    place = _place_of_submissions(logs)
    place.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    place.chmod(_PRIVATE)
    return place


def submission_folders(logs: Path) -> list[Path]:
    """Return the folders given to submitit, one for each submission, oldest first."""
    return sorted(_place_of_submissions(logs).glob("submission-*"))


def _fresh_folder(logs: Path) -> Path:
    """Make the folder of the next submission.

    submitit returns the old result of a job id it has seen before, and a fresh cluster counts ids from 1 again.
    """
    folder = private_place(logs) / f"submission-{len(submission_folders(logs)):05d}"
    folder.mkdir(mode=_PRIVATE)
    return folder


def _place_of_submissions(logs: Path) -> Path:
    """Return where submitit keeps its files: beside the run or, if others may write there, in the user's home.

    A job starts from a pickle, and anyone who can replace it decides what the job runs.

    Raises:
        RunDirectoryError: if others may write to both.
    """
    digest = hashlib.sha256(os.fsencode(logs)).hexdigest()[:16]
    home = Path.home() / ".local" / "state" / "llama-training-infra" / f"submissions-{digest}"
    for place in (logs / "submitit", home):
        if all(map(_is_private, (place, *place.parents))):
            return place
    raise RunDirectoryError(
        f"other users may write to {logs} and to {home.parent}, or above, and could change what a job runs; "
        "chmod go-w them, or choose another --run-dir"
    )


def _is_private(path: Path) -> bool:
    """Return whether only this user and the administrator can replace ``path``."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return True
    if found.st_uid not in {os.getuid(), 0}:
        return False
    others = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_group_of_one(found.st_gid))
    return not others or bool(found.st_mode & stat.S_ISVTX)


def _is_group_of_one(group: int) -> bool:
    """Return whether a group is the user's private group, which many systems create for every user."""
    user = pwd.getpwuid(os.getuid())
    try:
        found = grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
