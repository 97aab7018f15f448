"""The chain of a run, shared by the command line, the Prefect flow and ``launch_training``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llama_core.chain.announcements import (
    asked_memory,
    describe,
    say_batch,
    say_changed_settings,
    say_data,
    say_environment,
    say_extension,
    say_goodput,
    say_hub,
    say_metrics,
    say_model,
    say_packages,
    say_plan,
    say_step,
    say_timed,
    say_weights,
)
from llama_core.chain.expected import expected_time, record_expected_step
from llama_core.chain.report import say_report
from llama_core.chain.samples import say_next, say_samples
from llama_core.chain.steps import NOT_REHEARSED
from llama_core.errors import StoppedError, TrainingInfraError
from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.outcome import record_interruption
from llama_core.machine.validate import EnvironmentReport
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.records.directory import RunDirectory, command_to_resume
from llama_core.records.evaluations import Score
from llama_core.records.measurements import BenchmarkRecord, TrainingSummary
from llama_core.redaction import shell_word
from llama_core.runs.console import say
from llama_core.runs.stopping import stopping_on_interrupt

if TYPE_CHECKING:
    from llama_core.rehearsal.dry_run import DryRunResult


@dataclass(frozen=True)
class Steps:
    """The functions that carry out the steps of one run: plain functions or Prefect tasks."""

    prepare: Callable[[], RunDirectory]
    """Create the run's directory with its plan and estimate, or find the one to continue."""
    validate: Callable[[RunDirectory], EnvironmentReport]
    """Check this machine, and the launcher, against the run."""
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


def run_chain(steps: Steps, *, detach: bool = False) -> RunDirectory:
    """Prepare, validate, estimate, rehearse, submit, train, evaluate, benchmark and report a run, with a line for each.

    From submission on, an interrupt (Ctrl-C) stops the job, and the report is written however the run ends. If both the
    run and the report fail, the run's error is raised. A new run that is interrupted before that leaves its directory
    free.

    Args:
        steps: the steps.
        detach: leave the run to its job once that is submitted, and say how to follow it.

    Raises:
        TrainingInfraError: if a step fails.
    """
    run = steps.prepare()
    try:
        return _run_prepared(run, steps, detach=detach)
    except KeyboardInterrupt:
        if record_interruption(run):
            raise StoppedError("stopped before the run began; the same command starts it") from None
        raise


def _run_prepared(run: RunDirectory, steps: Steps, *, detach: bool) -> RunDirectory:
    say_hub(run)
    say_packages(run)
    say_weights(run)
    described, step = describe(run)
    say("run", described)
    say_extension(run, step)
    say_changed_settings(run)
    say_model(run)
    say_environment(steps.validate(run))
    say_data(run)
    say_batch(run)
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
    if detach:
        _leave(run, steps)
        return run
    with _reported(run, steps.report), stopping_on_interrupt(run):
        if (job := steps.submit(run)) is not None:
            ways_out = "Ctrl-C stops it after the step in progress, a closed terminal leaves it running"
            say("submit", f"{job.describe()}; {ways_out}")
        if (trained := steps.train(run)) is not None:
            say("train", trained.summary())
            steps.evaluate(run)
        say_timed(run, steps.benchmark(run))
        say_step(run)
        if trained is not None:
            say_samples(run, trained)
    if trained is not None:
        say_next(run, trained)
    return run


def _leave(run: RunDirectory, steps: Steps) -> None:
    """Submit the job of a run, and say which commands follow it, stop it and report on it."""
    with stopping_on_interrupt(run):
        job = steps.submit(run)
    if job is None:
        say("submit", "nothing: the run is finished")
        return
    say("submit", f"{job.describe()}; training-infra cancel {shell_word(run.path)} stops it with a checkpoint")
    say("next", f"{command_to_resume(run)}   # follows it to its end, and writes its report")


@contextmanager
def _reported(run: RunDirectory, write: Callable[[RunDirectory], Path]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        say_goodput(run)
        say_metrics(run)
        try:
            say_report(run, write(run))
        except TrainingInfraError as error:
            say("report", str(error))
        raise
    say_goodput(run)
    say_metrics(run)
    say_report(run, write(run))
