"""The chain of a run, shared by the command line, the Prefect flow and ``launch_training``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llama_core.chain.announcements import (
    asked_memory,
    describe,
    say_data,
    say_environment,
    say_extension,
    say_goodput,
    say_hub,
    say_metrics,
    say_packages,
    say_plan,
    say_weights,
)
from llama_core.chain.console import say
from llama_core.chain.expected import expected_time, record_expected_step
from llama_core.chain.samples import say_next, say_samples
from llama_core.chain.steps import NOT_REHEARSED
from llama_core.chain.stopping import stopping_on_interrupt
from llama_core.errors import StoppedError, TrainingInfraError
from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.outcome import record_interruption
from llama_core.machine.validate import EnvironmentReport
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import Score
from llama_core.records.measurements import BenchmarkRecord, TrainingSummary

if TYPE_CHECKING:
    from llama_core.rehearsal.dry_run import DryRunResult


@dataclass(frozen=True)
class Steps:
    """The functions that carry out the steps of one run: plain functions or Prefect tasks."""

    prepare: Callable[[], RunDirectory]
    """Create the run's directory with its plan and estimate, or find the one to continue."""
    validate: Callable[[RunDirectory], EnvironmentReport]
    """Check this machine, and Slurm, against the run."""
    estimate: Callable[[RunDirectory], MemoryEstimate]
    """Return the memory estimate of a rank."""
    rehearse: "Callable[[RunDirectory], DryRunResult | None]"
    """Count the bytes of a step on fake tensors; None under DeepSpeed, which needs real ranks."""
    submit: Callable[[RunDirectory], JobHandle | None]
    """Start the run's job, or find the running one; None if there is no job to wait for."""
    train: Callable[[RunDirectory], TrainingSummary | None]
    """Follow the run to its end; None if it only times steps."""
    evaluate: Callable[[RunDirectory], Sequence[Score]]
    """Evaluate the checkpoints that still wait for it; return the scores of all, none if nothing is asked for."""
    benchmark: Callable[[RunDirectory], BenchmarkRecord | None]
    """Return the steps timed at the end of the run; None if it times none."""
    report: Callable[[RunDirectory], Path]
    """Write the report."""


def run_chain(steps: Steps) -> RunDirectory:
    """Prepare, validate, estimate, rehearse, submit, train, evaluate, benchmark and report a run, with a line for each.

    From submission on, an interrupt (Ctrl-C) stops the job, and the report is written however the run ends. If both the
    run and the report fail, the run's error is raised. A new run that is interrupted before that leaves its directory
    free.

    Raises:
        TrainingInfraError: if a step fails.
    """
    run = steps.prepare()
    try:
        return _run_prepared(run, steps)
    except KeyboardInterrupt:
        if record_interruption(run):
            raise StoppedError("stopped before the run began; the same command starts it") from None
        raise


def _run_prepared(run: RunDirectory, steps: Steps) -> RunDirectory:
    say_hub(run)
    say_packages(run)
    say_weights(run)
    say("run", describe(run))
    say_extension(run)
    say_environment(steps.validate(run))
    say_data(run)
    say_plan(run)
    say("estimate", steps.estimate(run).summary())
    rehearsed = steps.rehearse(run)
    say("dry-run", rehearsed.summary() if rehearsed else NOT_REHEARSED)
    if rehearsed and rehearsed.order:
        say("order", rehearsed.order.summary())
    if memory := asked_memory(run):
        say("memory", memory)
    record_expected_step(run)
    if slow := expected_time(run):
        say("expect", slow)
    with _reported(run, steps.report), stopping_on_interrupt(run):
        if (job := steps.submit(run)) is not None:
            say("submit", job.describe())
        if (trained := steps.train(run)) is not None:
            say("train", trained.summary())
            steps.evaluate(run)
        timed = steps.benchmark(run)
        say("benchmark", timed.summary() if timed else "skipped: benchmark.steps=0")
        if trained is not None:
            say_samples(run, trained)
    if trained is not None:
        say_next(run, trained)
    return run


@contextmanager
def _reported(run: RunDirectory, write: Callable[[RunDirectory], Path]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        say_goodput(run)
        say_metrics(run)
        try:
            say("report", str(write(run)))
        except TrainingInfraError as error:
            say("report", str(error))
        raise
    say_goodput(run)
    say_metrics(run)
    say("report", str(write(run)))
