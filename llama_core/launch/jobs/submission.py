"""Start a run's job on this machine or in Slurm, and find it again from any process that sees the run directory.

Both launchers go through submitit and run the same ``Supervisor`` on every rank.
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from llama_core.config.files import read_yaml
from llama_core.config.run import RunConfig
from llama_core.config.slurm import commands_in, refuse_commands_of_others
from llama_core.errors import ConfigError, RunDirectoryError
from llama_core.launch.jobs.handle import EVALUATOR, WORKER, JobHandle, Submission
from llama_core.launch.jobs.launcher import Launcher
from llama_core.launch.jobs.local import LOCAL
from llama_core.launch.jobs.slurm import SLURM
from llama_core.launch.outcome import concluded
from llama_core.launch.places import fresh_folder, submission_folders
from llama_core.launch.scheduler import Ask, job_status
from llama_core.records.directory import RunDirectory
from llama_core.records.files import by_dotted_key, damaged, read_typed, write_json
from llama_core.records.job import JobRecord, Part
from llama_core.records.owners import other_owner, refuse_foreign, refuse_links
from llama_core.trackers.registry import folders_with_links

LAUNCHERS: dict[str, Launcher] = {launcher.name: launcher for launcher in (LOCAL, SLURM)}
"""Every launcher by its value of ``launch.launcher``."""


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
        RunDirectoryError: if the run belongs to somebody else, or a job of it may be running where this machine cannot
            see it.
        EnvironmentMismatchError: if this machine or Slurm refuses the job.
    """
    refuse_foreign(run, "continue it")
    submission = _submission(run, config, num_ranks, only, worker)
    run = submission.run
    with only_one_submission(run.logs) as lock:
        _recover_unrecorded(run, config)
        at_work = attach(run)
        if at_work is not None:
            return at_work
        LAUNCHERS[config.launch.launcher].start(fresh_folder(run.logs), [submission], run.name, lock)
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
        launcher.start(fresh_folder(logs), submissions, folder.name, lock)
    return [_handle(s.run, read_typed(s.run.job, JobRecord), ask) for s in submissions]


def attach(run: RunDirectory, ask: Ask = job_status) -> JobHandle | None:
    """Return the job that is running on ``run``, whoever submitted it, or None if there is none.

    If the job ended while nobody waited for it, its outcome is recorded now, unless the run belongs to somebody else.

    Args:
        run: the run.
        ask: asks Slurm for the status of its job.

    Raises:
        RunDirectoryError: if its job may still be running where this machine cannot see it.
    """
    if not run.job.exists():
        return None
    record = read_typed(run.job, JobRecord)
    if where := _launcher(run, record).out_of_sight(record):
        if concluded(run, record) is not None:
            return None
        raise RunDirectoryError(
            f"job {record.job_id} ({record.launcher}) of {run.path} was submitted {where} and cannot be "
            f"seen from here; continue there, or delete {run.job} if the job has ended"
        )
    handle = _handle(run, record, ask)
    if handle.is_running():
        return handle
    if other_owner(run) is None:
        handle.wait()
    return None


def _refuse_commands_of_others(run: RunDirectory, config: RunConfig) -> None:
    """Refuse programs that somebody else may have put into a run's settings, where they may write, before or now."""
    commands = commands_in(by_dotted_key(config.model_dump(mode="json")))
    if not commands:
        return
    file = read_yaml(run.config, "configuration", run.path)
    refuse_commands_of_others(run.config, commands, file.of_others)
    if commands_in(by_dotted_key(file.keys or {})) != commands:
        raise ConfigError(
            f"{run.config} has other {', '.join(commands)} now than when it was read; read it, and try again"
        )


def _submission(
    run: RunDirectory, config: RunConfig, num_ranks: int, only: Part | None, worker: tuple[str, ...]
) -> Submission:
    run = RunDirectory(run.path.resolve())
    refuse_links(run, folders_with_links())
    _refuse_commands_of_others(run, config)
    command = (*worker, str(run.path), *(("--only", only) if only else ()))
    trains = only != "benchmark"
    evaluates = trains and config.evaluation.is_asked_for
    return Submission(
        run,
        config,
        num_ranks,
        command,
        companion=(*EVALUATOR, str(run.path)) if evaluates else (),
        is_elastic=trains and config.is_elastic,
    )


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
