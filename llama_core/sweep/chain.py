"""The chain of a sweep, written once: the command line and the Prefect flow walk it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_core.chain.console import say
from llama_core.launch.jobs.handle import JobHandle
from llama_core.sweep.directory import SweepDirectory, read_record


@dataclass(frozen=True)
class SweepSteps:
    """The functions that take the steps of one sweep: this process's own, or Prefect's tasks."""

    validate: Callable[[SweepDirectory], None]
    """Check this machine, and Slurm, for all elements."""
    rehearse: Callable[[SweepDirectory], None]
    """Count what each element holds on fake tensors; what does not fit is skipped."""
    submit: Callable[[SweepDirectory], list[JobHandle]]
    """Hand to Slurm what is its to run; return the jobs at work."""
    follow: Callable[[SweepDirectory, Sequence[JobHandle]], None]
    """Follow the jobs, and run here what is this machine's to run, to the end."""
    report: Callable[[SweepDirectory], Path]
    """Write the report."""


def run_sweep(sweep: SweepDirectory, steps: SweepSteps) -> Path:
    """Validate, rehearse, run and compare the elements of a prepared sweep, and return the path of its report.

    From the submission on, the report is written however the sweep ends.

    Raises:
        TrainingInfraError: as the steps do.
    """
    record = read_record(sweep)
    say("sweep", f"{sweep.path}: {len(record.runnable)} of {len(record.elements)} elements can be run")
    steps.validate(sweep)
    steps.rehearse(sweep)
    try:
        steps.follow(sweep, steps.submit(sweep))
    finally:
        report = steps.report(sweep)
        say("report", str(report))
    return report
