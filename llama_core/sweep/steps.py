"""The steps of a sweep on its directory, from its preparation to its evaluation or its end.

The elements of a sweep are ordinary runs, so these steps apply those of ``llama_core.chain`` to
many runs. An element that cannot run is recorded with the reason, and the others continue.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from llama_core.chain import steps
from llama_core.chain.announcements import say_environment
from llama_core.chain.prepare import prepare_run
from llama_core.config.settings import request_sections
from llama_core.errors import (
    ConfigError,
    EnvironmentMismatchError,
    PlanError,
    RunDirectoryError,
    StoppedError,
    TrainingFailedError,
)
from llama_core.launch.jobs import submission
from llama_core.launch.jobs.handle import WORKER, JobHandle, cancel_all
from llama_core.launch.outcome import read_outcome
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import refuse_foreign, refuse_links
from llama_core.records.files import read_json
from llama_core.records.job import Outcome, Part
from llama_core.records.measurements import TrainingSummary
from llama_core.redaction import shell_word
from llama_core.runs.console import say, watch
from llama_core.runs.continuing import is_finished
from llama_core.runs.loading import load_config, load_plan
from llama_core.sweep.best import best_lines
from llama_core.sweep.directory import (
    ElementRecord,
    SweepDirectory,
    SweepRecord,
    has_result,
    read_record,
    unfinished,
    write_record,
)
from llama_core.sweep.divergence import divergence_of
from llama_core.sweep.evaluations import ElementEvaluations, check_score, unevaluated
from llama_core.sweep.grid import Element, SweepConfig
from llama_core.sweep.history import check_folder, history_folder
from llama_core.sweep.lock import discard_new, lock, unlock
from llama_core.sweep.naming import ElementNames
from llama_core.sweep.objective import SweepObjective
from llama_core.trackers.registry import folders_with_links

SWEEPS = Path("sweeps")

CANCEL_GRACE_SECONDS = 15.0
"""Time to stop for jobs that only time steps, before they are killed; they have nothing to save."""
LOOK_SECONDS = 1.0
"""Time between two checks of the jobs; their scheduler is asked less often."""

_IMPOSSIBLE = (ConfigError, PlanError, EnvironmentMismatchError)
_FREE_TO_CHANGE = {
    *request_sections(),
    "collective_timeout_s",
    "hang_timeout_s",
    "preflight",
    "stragglers",
    "force",
    "dollars_per_gpu_hour",
}
"""Keys of the base's ``launch`` that a resumed sweep may change: no measurement depends on them."""


def prepare(
    config: SweepConfig,
    sweep_dir: Path | None = None,
    *,
    resume: bool = False,
) -> SweepDirectory:
    """Create the directories of a sweep and its runs, or find the sweep to resume.

    It then belongs to this process until ``run_sweep`` ends.

    Args:
        config: what to run. On resume, the values of the grid may have changed.
        sweep_dir: the sweep's directory; by default ``sweeps/<name>-<date>``.
        resume: continue the sweep in ``sweep_dir``, or the newest unfinished one of this name.

    Raises:
        RunDirectoryError: if the directory holds other files, or already holds a sweep and
            ``resume`` is not set, or another process works on it.
        ConfigError: if no element can run, with the reason for each, or no evaluation gives
            the score that ranks them.
    """
    sweep = _directory(config, sweep_dir, resume=resume)
    as_run = RunDirectory(sweep.path)
    refuse_foreign(as_run, "continue it")
    refuse_links(as_run, folders_with_links())
    lock(sweep)
    try:
        _prepare(sweep, config)
    except BaseException:
        discard_new(sweep)
        unlock(sweep)
        raise
    return sweep


def _prepare(sweep: SweepDirectory, config: SweepConfig) -> None:
    check_score(config)
    elements = config.elements()
    mapping = config.record()
    # first without what the preparation finds, so that an interrupted one can be resumed
    planned = [ElementRecord(element.name, element.settings) for element in elements]
    write_record(sweep, SweepRecord(mapping, tuple(planned)))
    prepared = [_prepare_element(sweep, element, config) for element in elements]
    record = SweepRecord(mapping, tuple(prepared))
    write_record(sweep, record)
    _refuse_empty(record)


def _directory(config: SweepConfig, sweep_dir: Path | None, *, resume: bool) -> SweepDirectory:
    if sweep_dir is None:
        return (_newest_unfinished(config) if resume else None) or _new_directory(config)
    sweep = SweepDirectory(sweep_dir)
    if not sweep.record.exists():
        if sweep_dir.exists() and (not sweep_dir.is_dir() or any(sweep_dir.iterdir())):
            what = f"{sweep_dir} holds files that are not a sweep"
            raise RunDirectoryError(f"{what}; choose another --sweep-dir")
        return sweep
    if not resume:
        raise RunDirectoryError(f"{sweep_dir} already holds a sweep; add --resume to continue it")
    if not _continues(config, sweep):
        what = f"{sweep_dir} holds a sweep with another base, objective or other grid keys"
        raise RunDirectoryError(f"{what}; choose another --sweep-dir")
    return sweep


def _newest_unfinished(config: SweepConfig) -> SweepDirectory | None:
    records = list(SWEEPS.glob(f"{config.name}-*/sweep.json"))
    records.sort(key=lambda path: path.stat().st_mtime)
    for path in reversed(records):
        sweep = SweepDirectory(path.parent)
        if _continues(config, sweep) and _is_unfinished(sweep):
            return sweep
    return None


def _is_unfinished(sweep: SweepDirectory) -> bool:
    return any(unfinished(sweep)) or any(unevaluated(sweep))


def _continues(config: SweepConfig, sweep: SweepDirectory) -> bool:
    return _fixed(read_record(sweep).sweep_config) == _fixed(config)


def _fixed(config: SweepConfig) -> tuple[object, ...]:
    """Return what a resumed sweep may not change."""
    base = config.base.model_dump(
        exclude={
            "tracking": True,
            "launch": _FREE_TO_CHANGE,
            "benchmark": {"history"},
        }
    )
    return config.name, config.objective, config.tokens, base, list(config.grid)


def _new_directory(config: SweepConfig) -> SweepDirectory:
    name = f"{config.name}-{datetime.now(UTC):%Y%m%d}"
    path = SWEEPS / name
    for number in count(2):
        if not path.exists():
            break
        path = SWEEPS / f"{name}-{number}"
    return SweepDirectory(path)


def _prepare_element(sweep: SweepDirectory, element: Element, config: SweepConfig) -> ElementRecord:
    run = sweep.run(element.name)
    record = ElementRecord(element.name, element.settings)
    if has_result(run, config.ranking):
        return record
    try:
        requested = config.config_of(element)
        if requested.is_elastic:
            asked = {"min_nodes": requested.launch.min_nodes, "spare_nodes": requested.launch.spare_nodes}
            given = " and ".join(f"launch.{key}={value}" for key, value in asked.items() if value)
            raise ConfigError(f"{given}: elements are compared on equal nodes; leave that out")
        if not config.ranking.trains:
            steps.refuse_untimed(requested)
        prepare_run(requested, run.path, resume=run.config.exists())
        steps.read_estimate(run)
    except _IMPOSSIBLE as error:
        return replace(record, skipped=str(error))
    return record


def _refuse_empty(record: SweepRecord) -> None:
    if not record.runnable:
        names = record.names
        reasons = [f"{names[element.name]}: {element.skipped}" for element in record.elements]
        raise ConfigError(*reasons)


def validate(sweep: SweepDirectory) -> None:
    """Check this machine, and the launchers, once for each group of elements with the same needs.

    Raises:
        EnvironmentMismatchError: if a group cannot start here, with every reason.
    """
    record = read_record(sweep)
    trains = record.objective.trains
    if not trains:
        check_folder(history_folder(record.sweep_config.base, sweep.path))
    for runs in _groups(list(unfinished(sweep))):
        say_environment(steps.validate(runs[0], saves=trains))


def rehearse(sweep: SweepDirectory) -> None:
    """Run a step of every element on fake tensors; skip those that turn out not to fit.

    Raises:
        ConfigError: if no element is left, with the reason for each.
    """
    record = read_record(sweep)
    names = record.names
    for element in record.runnable:
        run = sweep.run(element.name)
        if run.dry_run.exists() or has_result(run, record.objective):
            continue
        try:
            rehearsed = steps.rehearse(run)
        except _IMPOSSIBLE as error:
            run.dry_run.unlink(missing_ok=True)  # a resumed sweep tries skipped elements again
            record = _with_skipped(record, element, str(error))
            write_record(sweep, record)
            say("dry-run", f"{names[element.name]}: skipped: {error}")
        else:
            result = rehearsed.summary() if rehearsed else steps.NOT_REHEARSED
            say("dry-run", f"{names[element.name]}: {result}")
    _refuse_empty(record)


def _with_skipped(record: SweepRecord, element: ElementRecord, reason: str) -> SweepRecord:
    skipped = replace(element, skipped=reason)
    return replace(record, elements=tuple(skipped if e == element else e for e in record.elements))


def submit(sweep: SweepDirectory, worker: tuple[str, ...] = WORKER) -> list[JobHandle]:
    """Submit the elements without a result or a running job, those with the same needs at once.

    If nothing queues their jobs, as on this machine, ``follow`` runs them one after the other.

    Args:
        sweep: the sweep.
        worker: the command line that every rank runs.

    Returns:
        All queued and running jobs of the sweep, earlier ones included.

    Raises:
        RunDirectoryError, EnvironmentMismatchError: if a job cannot be started.
    """
    schedulers = submission.Schedulers()
    jobs = attach(sweep, schedulers)
    at_work = {job.run.name for job in jobs}
    # attach has recorded the outcome of jobs that ended while nobody waited.
    waiting = [run for run in unfinished(sweep) if run.name not in at_work and _is_queued(run)]
    part = _part(read_record(sweep).objective)
    for runs in _groups(waiting):
        with_configs = [(run, load_config(run)) for run in runs]
        num_ranks = load_plan(runs[0]).world_size
        jobs += submission.submit_several(
            sweep.path, with_configs, num_ranks, part, worker=worker, schedulers=schedulers
        )
    return jobs


def _part(objective: SweepObjective) -> Part:
    """Return the part of its work that the run of an element does."""
    return "train" if objective.trains else "benchmark"


def attach(
    sweep: SweepDirectory,
    schedulers: submission.Schedulers | None = None,
) -> list[JobHandle]:
    """Return the queued and running jobs of the sweep, whoever submitted them."""
    schedulers = schedulers or submission.Schedulers()
    found = (submission.attach(run, schedulers) for run in unfinished(sweep))
    return [job for job in found if job is not None]


def follow(sweep: SweepDirectory, jobs: Sequence[JobHandle]) -> None:
    """Follow the queued jobs to their end, run the other elements, and wait for all evaluations.

    An element that fails, or that cannot be evaluated, does not stop the sweep. An interrupt
    (Ctrl-C) stops all jobs first.

    Args:
        sweep: the sweep.
        jobs: its jobs, as ``submit`` returns them.

    Raises:
        TrainingFailedError: if no element has a result, with the reasons.
        StoppedError: if the sweep was interrupted, or one of its jobs was cancelled.
    """
    try:
        _run_and_evaluate(sweep, jobs)
    except KeyboardInterrupt:
        say("stopping", "every job of the sweep")
        cancel(sweep)
        _say_best(sweep)
        raise stopped(sweep) from None
    _say_best(sweep)
    _check_ends(sweep)


def _run_and_evaluate(sweep: SweepDirectory, jobs: Sequence[JobHandle]) -> None:
    """Follow the jobs, run the elements that no queue takes, and evaluate what all of them leave.

    What earlier ones have left is evaluated too.
    """
    names = read_record(sweep).names
    evaluations = ElementEvaluations(names)
    left = list(unevaluated(sweep))
    try:
        for run in left:
            if _is_queued(run):
                evaluations.add(run)
        _wait(jobs, names, evaluations)
        for run in left:
            if not _is_queued(run):
                evaluations.add(run)
                evaluations.wait()  # one after the other, as they train
        _run_in_turn(sweep, evaluations)
        evaluations.wait()
    finally:
        evaluations.stop()


def _run_in_turn(sweep: SweepDirectory, evaluations: ElementEvaluations) -> None:
    """Train or time the elements that no queue takes, one after the other.

    Each that trains has a progress bar.
    """
    record = read_record(sweep)
    runs = [run for run in unfinished(sweep) if not _is_queued(run)]
    for number, run in enumerate(runs, start=1):
        job = steps.submit(run, only=_part(record.objective))
        if job is None:
            continue
        name = record.names[run.name]
        say("element", f"{name}: {number} of {len(runs)}")
        with watch(run) as show:
            outcome = job.wait(show)
        _say_end(name, run, outcome)
        if outcome.status == "cancelled":
            break
        if is_finished(run):
            evaluations.add(run)
            evaluations.wait()  # before the next one takes the machine


def _wait(jobs: Sequence[JobHandle], names: ElementNames, evaluations: ElementEvaluations) -> None:
    while jobs:
        alive = [job for job in jobs if job.is_running()]
        for job in jobs:
            if job not in alive:
                _say_end(names[job.run.name], job.run, job.wait())
                if is_finished(job.run):
                    evaluations.add(job.run)
        evaluations.look()
        jobs = alive
        if jobs:
            time.sleep(LOOK_SECONDS)


def _say_end(name: str, run: RunDirectory, outcome: Outcome) -> None:
    if outcome.status != "finished":
        result = f"{outcome.status}, {outcome.reason}"
    elif is_finished(run):
        summary = steps.training_summary(run)
        result = "; ".join(filter(None, (_diverged(run, summary), summary.summary())))
    else:
        result = steps.read_benchmark(run).summary()
    say("element", f"{name}: {result}")


def _diverged(run: RunDirectory, summary: TrainingSummary) -> str:
    how = divergence_of(run, summary)
    return f"diverged, {how}" if how else ""


def _check_ends(sweep: SweepDirectory) -> None:
    left = {run.name: read_outcome(run) for run in unfinished(sweep) if run.outcome.exists()}
    if any(outcome.status == "cancelled" for outcome in left.values()):
        raise stopped(sweep)
    record = read_record(sweep)
    if len(left) == len(record.runnable):
        ends: list[str] = []
        for folder, outcome in left.items():
            name = record.names[folder]
            ends.append(f"{name}: {outcome.status}, {outcome.reason}")
        raise TrainingFailedError(f"no element could be {record.objective.done}; {'; '.join(ends)}")


def _say_best(sweep: SweepDirectory) -> None:
    for word, text in best_lines(sweep):
        say(word, text)


def cancel(sweep: SweepDirectory) -> int:
    """Cancel every job of the sweep and return their number.

    Elements keep their results and checkpoints.
    """
    grace_seconds = None if read_record(sweep).objective.trains else CANCEL_GRACE_SECONDS
    return len(cancel_all(attach(sweep), grace_seconds))


def records(sweep: SweepDirectory) -> dict[str, Any]:
    """Return a record of each element: settings, why it was skipped, the records of its run."""
    elements: list[dict[str, Any]] = []
    for element in read_record(sweep).elements:
        # a skipped element has no run
        of_run = {} if element.skipped else steps.records(sweep.run(element.name))
        elements.append(asdict(element) | of_run)
    compared = {"history": read_json(sweep.history)} if sweep.history.exists() else {}
    return {"sweep_dir": str(sweep.path), "elements": elements} | compared


def stopped(sweep: SweepDirectory, again: str | None = None) -> StoppedError:
    """Return the error for a stopped sweep, with the command that continues it.

    By default that is ``sweep --resume``.
    """
    again = again or f"training-infra sweep --sweep-dir {shell_word(sweep.path)} --resume"
    record = read_record(sweep)
    done = record.objective.done
    num_elements = len(record.runnable)
    num_done = num_elements - len(list(unfinished(sweep)))
    num_left = len(list(unevaluated(sweep)))
    if num_done == num_elements and num_left:
        return StoppedError(
            f"stopped with the last checkpoints of {num_left} of {num_elements} elements not "
            f"evaluated; continue with: {again}"
        )
    if num_done == num_elements:
        return StoppedError(f"stopped after all {num_elements} elements were {done}")
    counted = f"stopped with {num_done} of {num_elements} elements {done}"
    return StoppedError(f"{counted}; continue with: {again}")


def _is_queued(run: RunDirectory) -> bool:
    """Return whether the job of a run may be submitted beside others."""
    return load_config(run).launch.kind.has_queue


def _groups(runs: Sequence[RunDirectory]) -> list[list[RunDirectory]]:
    """Return the runs grouped by the machines that they ask for."""
    groups: dict[tuple[str, int], list[RunDirectory]] = {}
    for run in runs:
        key = (load_config(run).launch.model_dump_json(), load_plan(run).world_size)
        groups.setdefault(key, []).append(run)
    return list(groups.values())
