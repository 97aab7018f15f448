"""The chain of a run, written once: the command line, the Prefect flow and ``launch_training`` walk it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llama_core.chain.console import say
from llama_core.chain.steps import NOT_REHEARSED, describe, say_data, say_plan, say_weights, stopping_on_interrupt
from llama_core.launch.jobs.handle import JobHandle
from llama_core.machine.validate import EnvironmentReport
from llama_core.planning.memory.peaks import MemoryEstimate
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import BenchmarkRecord, TrainingSummary

if TYPE_CHECKING:
    from llama_core.rehearsal.dry_run import DryRunResult


@dataclass(frozen=True)
class Steps:
    """The functions that take the steps of one run: this process's own, or Prefect's tasks."""

    prepare: Callable[[], RunDirectory]
    """Make the run's directory with its plan and estimate, or find the one to go on with."""
    validate: Callable[[RunDirectory], EnvironmentReport]
    """Check this machine, and Slurm, against the run."""
    estimate: Callable[[RunDirectory], MemoryEstimate]
    """Say what a rank holds, by arithmetic."""
    rehearse: "Callable[[RunDirectory], DryRunResult | None]"
    """Count what a rank holds on fake tensors; None where that cannot be done."""
    submit: Callable[[RunDirectory], JobHandle | None]
    """Start the run's job, or find it at work; None where there is none to wait for."""
    train: Callable[[RunDirectory], TrainingSummary | None]
    """Follow the run to its end; None if it only times steps."""
    benchmark: Callable[[RunDirectory], BenchmarkRecord]
    """Read the steps that were timed at the run's end."""
    report: Callable[[RunDirectory], Path]
    """Write the report."""


def run_chain(steps: Steps) -> RunDirectory:
    """Prepare, validate, estimate, rehearse, submit, train, benchmark and report one run, a line of text for each.

    From the submission on, an interrupt (Ctrl-C) stops the job, and the report is written however the run ends.

    Raises:
        TrainingInfraError: as the steps do.
    """
    run = steps.prepare()
    say_weights(run)
    say("run", describe(run))
    say("validate", steps.validate(run).summary())
    say_data(run)
    say_plan(run)
    say("estimate", steps.estimate(run).summary())
    rehearsed = steps.rehearse(run)
    say("dry-run", rehearsed.summary() if rehearsed else NOT_REHEARSED)
    try:
        with stopping_on_interrupt(run):
            if (job := steps.submit(run)) is not None:
                say("submit", job.describe())
            if (trained := steps.train(run)) is not None:
                say("train", trained.summary())
            say("benchmark", steps.benchmark(run).summary())
    finally:
        say("report", str(steps.report(run)))
    return run
