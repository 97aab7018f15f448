"""Start a run's job, and find it again from any process that sees the run directory.

Every launcher runs the same ``Supervisor`` on every rank.
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from llama_core.config.commands import commands_in, refuse_commands_of_others
from llama_core.config.files import read_yaml
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, RunDirectoryError
from llama_core.launch.jobs.handle import EVALUATOR, WORKER, JobHandle, Submission
from llama_core.launch.jobs.launcher import Launcher, launcher_of
from llama_core.launch.outcome import concluded
from llama_core.launch.places import fresh_folder, submission_folders
from llama_core.launch.scheduler import Ask
from llama_core.launchers.registry import LAUNCHERS
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import other_owner, refuse_foreign, refuse_links
from llama_core.records.files import by_dotted_key, damaged, read_typed, write_json
from llama_core.records.job import JobRecord, Part
from llama_core.trackers.registry import folders_with_links


class Schedulers:
    """Asks the schedulers of many jobs, each of them once for all of its jobs if it can say so much at once."""

    def __init__(self) -> None:
        self._asking: dict[str, Ask] = {}

    def of(self, launcher: Launcher) -> Ask:
        """Return how to ask the scheduler of a launcher about its jobs."""
        if launcher.ask_once is None:
            return launcher.ask
        return self._asking.setdefault(launcher.kind.name, launcher.ask_once())


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
        EnvironmentMismatchError: if this machine or the scheduler refuses the job.
    """
    refuse_foreign(run, "continue it")
    submission = _submission(run, config, num_ranks, only, worker)
    run = submission.run
    with only_one_submission(run.logs) as lock:
        _recover_unrecorded(run, config)
        at_work = attach(run)
        if at_work is not None:
            return at_work
        launcher_of(config.launch.launcher).start(fresh_folder(run.logs), [submission], run.name, lock)
    return _handle(run, read_typed(run.job, JobRecord))


def submit_several(
    folder: Path,
    runs: Sequence[tuple[RunDirectory, RunConfig]],
    num_ranks: int,
    only: Part | None = None,
    *,
    worker: tuple[str, ...] = WORKER,
    schedulers: Schedulers | None = None,
) -> list[JobHandle]:
    """Submit a job for each of some runs, all with the same resources, to a launcher that has a queue.

    Args:
        folder: the directory of the sweep, whose name the queue shows.
        runs: the run directories and their configurations, with the same ``launch`` and the same number of ranks.
        num_ranks: worker processes of each run.
        only: do only this part of the work.
        worker: as for ``submit``.
        schedulers: asks for the status of a job.

    Raises:
        RunDirectoryError: if a job of one of the runs is still alive, or other users may write where its files go.
        EnvironmentMismatchError: if the scheduler refuses the jobs.
    """
    submissions = [_submission(run, config, num_ranks, only, worker) for run, config in runs]
    logs = folder.resolve() / "logs"
    launcher = launcher_of(runs[0][1].launch.launcher)
    with only_one_submission(logs) as lock:
        for submission in submissions:
            _refuse_second_job(submission.run, schedulers)
        launcher.start(fresh_folder(logs), submissions, folder.name, lock)
    return [_handle(s.run, read_typed(s.run.job, JobRecord), schedulers) for s in submissions]


def attach(run: RunDirectory, schedulers: Schedulers | None = None) -> JobHandle | None:
    """Return the job that is running on ``run``, whoever submitted it, or None if there is none.

    If the job ended while nobody waited for it, its outcome is recorded now, unless the run belongs to somebody else.

    Args:
        run: the run.
        schedulers: asks for the status of its job.

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
    handle = _handle(run, record, schedulers)
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


def _handle(run: RunDirectory, record: JobRecord, schedulers: Schedulers | None = None) -> JobHandle:
    launcher = _launcher(run, record)
    return launcher.handle(run, record, schedulers.of(launcher) if schedulers else launcher.ask)


def _launcher(run: RunDirectory, record: JobRecord) -> Launcher:
    if LAUNCHERS.find(record.launcher) is None:
        raise damaged(run.job, f"launcher {record.launcher!r} is none of {', '.join(LAUNCHERS.names())}")
    return launcher_of(record.launcher)


def _refuse_second_job(run: RunDirectory, schedulers: Schedulers | None) -> None:
    alive = attach(run, schedulers)
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
    found = launcher_of(config.launch.launcher).find_unrecorded(folders[-1], run.name, config)
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
