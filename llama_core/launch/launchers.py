"""Starting a run's job where its configuration says, and finding it again from any process that sees the run directory.

Both ways go through submitit and end in the same ``Supervisor`` on every rank.
"""

import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from llama_core.artifacts import JobRecord, RunDirectory, read_json, write_json
from llama_core.config.run import RunConfig
from llama_core.errors import RunDirectoryError
from llama_core.launch.attempts import cancel_path
from llama_core.launch.jobs import WORKER, JobHandle, Part, Submission
from llama_core.launch.local import LocalJobHandle, start_local
from llama_core.launch.outcome import concluded
from llama_core.launch.scheduler import Ask, job_status
from llama_core.launch.slurm import SlurmJobHandle, find_unrecorded, start_slurm

_PRIVATE = 0o700  # what submitit starts from is a pickle: nobody else may write there


def submit(
    run: RunDirectory,
    config: RunConfig,
    num_ranks: int,
    only: Part | None = None,
    worker: tuple[str, ...] = WORKER,
) -> JobHandle:
    """Start a job on ``run`` and return at once.

    Args:
        run: the run directory, with its configuration and plan.
        config: the resolved configuration.
        num_ranks: worker processes in all.
        only: leave the other part of the work out.
        worker: the command line that every rank runs, with the run directory as its next argument.

    Raises:
        RunDirectoryError: if a job of this run is still alive, or others may write where its files go.
        EnvironmentMismatchError: if this machine or Slurm does not take the job.
    """
    submission = _submission(run, config, num_ranks, only, worker)
    run = submission.run
    with _only_one_submission(run.logs) as lock:
        _recover_unrecorded(run, config)
        _refuse_second_job(run)
        folder = _fresh_folder(run.logs)
        cancel_path(run).unlink(missing_ok=True)
        if config.launch.launcher == "slurm":
            start_slurm(folder, [submission], run.name)
        else:
            start_local(folder, submission, lock)
    return _handle(run, JobRecord(**read_json(run.job)))


def submit_array(
    folder: Path,
    runs: Sequence[tuple[RunDirectory, RunConfig]],
    num_ranks: int,
    only: Part | None = None,
    *,
    worker: tuple[str, ...] = WORKER,
    ask: Ask = job_status,
) -> list[JobHandle]:
    """Submit one Slurm job array with an element for each run, all asking Slurm for the same.

    Args:
        folder: the directory of the sweep, whose name the queue shows.
        runs: the run directories and their configurations, alike in ``launch`` and in the number of ranks.
        num_ranks: worker processes of each.
        only: leave the other part of the work out.
        worker: as for ``submit``.
        ask: how Slurm is asked about the elements.

    Raises:
        RunDirectoryError: if a job of one of the runs is still alive, or others may write where its files go.
        EnvironmentMismatchError: if Slurm does not take the job.
    """
    submissions = [_submission(run, config, num_ranks, only, worker) for run, config in runs]
    logs = folder.resolve() / "logs"
    with _only_one_submission(logs):
        for submission in submissions:
            _refuse_second_job(submission.run, ask)
            cancel_path(submission.run).unlink(missing_ok=True)
        start_slurm(_fresh_folder(logs), submissions, folder.name)
    return [_handle(s.run, JobRecord(**read_json(s.run.job)), ask) for s in submissions]


def attach(run: RunDirectory, ask: Ask = job_status) -> JobHandle | None:
    """Return the job at work on ``run``, whoever submitted it, or None if there is none.

    A job that ended while nobody waited is concluded on the way.

    Args:
        run: the run.
        ask: how Slurm is asked about its job.

    Raises:
        RunDirectoryError: if its job may still be at work where this machine cannot see it.
    """
    if not run.job.exists():
        return None
    record = JobRecord(**read_json(run.job))
    if not _is_visible(record):
        if concluded(run, record) is not None:
            return None
        raise RunDirectoryError(
            f"job {record.job_id} ({record.launcher}) of {run.path} was submitted on {record.host} and cannot be "
            f"seen from here; go on there, or delete {run.job} if it has ended"
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
    return Submission(run, config, num_ranks, command)


def _handle(run: RunDirectory, record: JobRecord, ask: Ask = job_status) -> JobHandle:
    return SlurmJobHandle(run, record, ask) if record.launcher == "slurm" else LocalJobHandle(run, record)


def _is_visible(record: JobRecord) -> bool:
    """Return whether this machine can tell if the job is at work."""
    if record.launcher == "slurm":
        return shutil.which("scontrol") is not None
    return record.host == socket.gethostname()


def _refuse_second_job(run: RunDirectory, ask: Ask = job_status) -> None:
    alive = attach(run, ask)
    if alive is not None:
        raise RunDirectoryError(
            f"job {alive.record.job_id} ({alive.record.launcher}) is still at work on {run.path}; "
            "wait for it, or cancel it first"
        )


def _recover_unrecorded(run: RunDirectory, config: RunConfig) -> None:
    """Record the job of a submitter that was killed between Slurm's answer and writing ``job.json``."""
    folders = submission_folders(run.logs)
    if config.launch.launcher != "slurm" or not folders or shutil.which("squeue") is None:
        return
    recorded = run.job.exists() and JobRecord(**read_json(run.job)).folder == str(folders[-1])
    found = None if recorded else find_unrecorded(folders[-1], run.name)
    if found is not None:
        write_json(run.job, found)


@contextmanager
def _only_one_submission(logs: Path) -> Iterator[IO[str]]:
    """Keep a second process that submits the same waiting until ``job.json`` is there for it to find."""
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "submit.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def submission_folders(logs: Path) -> list[Path]:
    """Return the folders that submitit was given, one for each submission, oldest first."""
    return sorted((logs / "submitit").glob("submission-*"))


def _fresh_folder(logs: Path) -> Path:
    """Make the folder of the next submission.

    submitit returns the old result of a job id it has seen before, and a fresh cluster counts ids from 1 again.

    Raises:
        RunDirectoryError: if somebody else could put a pickle of theirs there.
    """
    submissions = logs / "submitit"
    submissions.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    if submissions.stat().st_uid != os.getuid():
        raise RunDirectoryError(f"{submissions} belongs to another user; choose another --run-dir")
    for path in submissions.parents:
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise RunDirectoryError(
                f"every user may write to {path}, and so decide what a job below it runs; "
                "chmod o-w it, or choose another --run-dir"
            )
    folder = submissions / f"submission-{len(submission_folders(logs)):05d}"
    folder.mkdir(mode=_PRIVATE)
    return folder
