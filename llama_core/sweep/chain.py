"""The chain of a sweep, shared by the command line and the Prefect flow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_core.errors import ConfigError, TrainingInfraError
from llama_core.launch.jobs.handle import JobHandle
from llama_core.runs.console import say
from llama_core.sweep.directory import SweepDirectory, read_record
from llama_core.sweep.judgement import Judgement
from llama_core.sweep.lock import discard_new, unlock


@dataclass(frozen=True)
class SweepSteps:
    """The functions that carry out the steps of one sweep: plain functions or Prefect tasks."""

    validate: Callable[[SweepDirectory], None]
    """Check this machine, and the launchers, for all elements."""
    rehearse: Callable[[SweepDirectory], None]
    """Count the bytes of each element on fake tensors; skip those that do not fit."""
    submit: Callable[[SweepDirectory], list[JobHandle]]
    """Submit the elements whose jobs a queue takes; return all running jobs."""
    follow: Callable[[SweepDirectory, Sequence[JobHandle]], None]
    """Follow the jobs to their end, and run the local elements."""
    remember: Callable[[SweepDirectory], Judgement | None]
    """Keep the timed elements in the history, and compare them with it; None if none was timed."""
    report: Callable[[SweepDirectory], Path]
    """Write the report."""


def run_sweep(sweep: SweepDirectory, steps: SweepSteps, *, keeps_skipped: bool = False) -> Path:
    """Validate, rehearse, run and compare the elements of a prepared sweep, and return the path of its report.

    A new sweep that cannot start leaves nothing behind. From submission on, the report is written however the sweep
    ends. Other processes may then work on the sweep.

    Args:
        sweep: the sweep.
        steps: its steps.
        keeps_skipped: keep the record of a sweep whose elements are all skipped, which says why.

    Raises:
        TrainingInfraError: if a step fails.
    """
    try:
        _start(sweep, steps, keeps_skipped=keeps_skipped)
        return _run(sweep, steps)
    finally:
        unlock(sweep)


def _start(sweep: SweepDirectory, steps: SweepSteps, *, keeps_skipped: bool) -> None:
    record = read_record(sweep)
    say("sweep", f"{sweep.path}: {len(record.runnable)} of {len(record.elements)} elements can be run")
    try:
        steps.validate(sweep)
        steps.rehearse(sweep)
    except TrainingInfraError as error:
        if not (keeps_skipped and isinstance(error, ConfigError)):
            discard_new(sweep)
        raise


def _run(sweep: SweepDirectory, steps: SweepSteps) -> Path:
    try:
        steps.follow(sweep, steps.submit(sweep))
    finally:
        try:
            steps.remember(sweep)
        finally:
            report = steps.report(sweep)
            say("report", str(report))
    return report
