"""The steps of the chain: prepare, validate, estimate, rehearse, train, benchmark; each over a run directory.

A step reads what earlier ones left in the run directory, adds its own record, and returns it. The command line calls
them in order; the Prefect flow calls the same functions as tasks. Each can be called again on its own.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llama_core.artifacts import (
    BenchmarkRecord,
    Outcome,
    RunDirectory,
    StepRecord,
    TrainingSummary,
    read_json,
    write_json,
)
from llama_core.config.run import DATALOADER, RunConfig
from llama_core.errors import (
    ConfigError,
    DoesNotFitError,
    EnvironmentMismatchError,
    RequestError,
    StoppedError,
    TrainingFailedError,
)
from llama_core.launch import launchers
from llama_core.launch.environment import (
    EnvironmentReport,
    detect_machine,
    validate_environment,
)
from llama_core.launch.jobs import JobHandle, Part
from llama_core.launch.outcome import read_outcome, record_outcome
from llama_core.launch.watch import say
from llama_core.planned import PlannedRun, plan_for_gpu, plan_run, planned_as
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.profile import MemoryEstimate
from llama_core.prepare import prepare_loader_run, prepare_run, refuse_unfit, refuse_untrainable
from llama_core.runs import RUNS, is_finished, load_config, load_plan

if TYPE_CHECKING:
    from llama_core.training.dry_run import DryRunResult
    from llama_core.training.twin import TwinResult

__all__ = [
    "NOT_REHEARSED",
    "RUNS",
    "PlannedRun",
    "attach",
    "benchmark",
    "cancel",
    "check_environment",
    "check_outcome",
    "describe",
    "estimate",
    "is_finished",
    "load_config",
    "load_plan",
    "plan_for_gpu",
    "plan_run",
    "prepare_loader_run",
    "prepare_run",
    "reasons",
    "records",
    "rehearse",
    "rehearse_plan",
    "run_twin",
    "stopped",
    "stopping_on_interrupt",
    "submit",
    "train_here",
    "training_summary",
    "validate",
    "wait",
]

NOT_REHEARSED = "left out: DeepSpeed works with real ranks only"


def reasons(run: RunDirectory) -> list[str]:
    """Return why the run's plan is as it is, a sentence for each choice; none for a plan that follows from rules."""
    return list(read_json(run.choice)["reasons"].values()) if run.choice.exists() else []


def validate(run: RunDirectory) -> EnvironmentReport:
    """Check this machine against the run and record what was found.

    Raises:
        EnvironmentMismatchError: naming everything that keeps the run from starting.
    """
    report = validate_environment(load_config(run), run.path)
    write_json(run.environment, report.as_dict())
    return _ready(report)


def check_environment(config: RunConfig) -> EnvironmentReport:
    """Check this machine against a configuration that has no run directory yet.

    Raises:
        EnvironmentMismatchError: naming everything that keeps the run from starting.
    """
    return _ready(validate_environment(config))


def _ready(report: EnvironmentReport) -> EnvironmentReport:
    if report.errors:
        raise EnvironmentMismatchError("; ".join(report.errors))
    return report


def estimate(run: RunDirectory) -> MemoryEstimate:
    """Estimate the bytes of a rank by category, without torch, and record them."""
    estimated = planned_as(load_config(run), detect_machine(), plan=load_plan(run)).estimate
    write_json(run.estimate, estimated.as_dict())
    return estimated


def rehearse(run: RunDirectory) -> "DryRunResult | None":
    """Take a real step of every distinct rank on fake tensors, counting every byte, and record the counts.

    None where DeepSpeed divides the model: it works with real ranks only.

    Raises:
        PlanError: if what was counted does not fit the device and ``launch.force`` is not set. The directory may then
            be used for another run.
    """
    config, plan = load_config(run), load_plan(run)
    run.dry_run.unlink(missing_ok=True)
    if plan.zero_backend == "deepspeed":
        return None
    result = rehearse_plan(config, plan)
    write_json(run.dry_run, result.as_dict())
    estimate = planned_as(config, detect_machine(), plan=plan).estimate
    try:
        refuse_unfit(replace(estimate, profile=result.profile), config, "rehearsed")
    except DoesNotFitError as error:
        record_outcome(run, "bad-config", reason=str(error), next_action="change the plan, or add --force")
        raise
    return result


def rehearse_plan(config: RunConfig, plan: ParallelPlan) -> "DryRunResult":
    """Take a real step of every distinct rank of a plan on fake tensors, counting every byte.

    Raises:
        PlanError: if the plan cannot be rehearsed.
    """
    from llama_core.training.dry_run import rehearse as rehearse_steps

    refuse_untrainable(config)
    return rehearse_steps(config, plan)


def run_twin(config: RunConfig, plan: ParallelPlan) -> "TwinResult":
    """Train a tiny model under ``plan`` on processes of this machine, and compare with one process.

    Raises:
        PlanError, TrainingFailedError: if the twin cannot be made, or fails.
    """
    from llama_core.training.twin import twin

    refuse_untrainable(config)
    return twin(config, plan)


def submit(run: RunDirectory, only: Part | None = None) -> JobHandle | None:
    """Start the run's job, or find the one already at work; None if the run is finished.

    Args:
        run: the run.
        only: leave training or the timed steps out.

    Raises:
        RunDirectoryError, EnvironmentMismatchError: if the job cannot be started.
    """
    if only != "benchmark" and is_finished(run):
        return None
    return launchers.submit(run, load_config(run), load_plan(run).world_size, only)


def attach(run: RunDirectory) -> JobHandle | None:
    """Return the job at work on the run, whoever submitted it, or None."""
    return launchers.attach(run)


def wait(
    run: RunDirectory,
    handle: JobHandle | None,
    on_progress: Callable[[StepRecord], None] | None = None,
    on_output: Callable[[int, str], None] | None = None,
) -> Outcome:
    """Wait for the job's end and return its outcome; an interrupt (Ctrl-C) stops the job first.

    Args:
        run: the run.
        handle: its job, as ``submit`` or ``attach`` returned it; None where none is at work any more.
        on_progress: told of each newest step.
        on_output: told of each warning and error that a rank prints, with the rank.

    Raises:
        TrainingFailedError: if it ended without finishing, with the reason and what to try.
        StoppedError: if it was interrupted, with the command that resumes it.
    """
    if handle is None:
        return check_outcome(read_outcome(run))
    try:
        return check_outcome(handle.wait(on_progress, on_output, lambda reason: say("waiting", f"for {reason}")))
    except KeyboardInterrupt:
        return _stop(run, handle)


@contextmanager
def stopping_on_interrupt(run: RunDirectory) -> Iterator[None]:
    """Stop the run's job if the block is interrupted (Ctrl-C) where nobody waits for it.

    Raises:
        StoppedError: with the command that resumes the run.
    """
    try:
        yield
    except KeyboardInterrupt:
        handle = attach(run)
        if handle is None:
            raise
        _stop(run, handle)


def _stop(run: RunDirectory, handle: JobHandle) -> Outcome:
    say("stopping", "after this step, with a checkpoint")
    outcome = handle.cancel()
    if outcome.status == "cancelled":
        raise stopped(run, outcome) from None
    return check_outcome(outcome)  # it came to its own end first


def cancel(run: RunDirectory) -> Outcome | None:
    """Have the run's job finish its step, save a checkpoint and end; None if no job is at work.

    Raises:
        RunDirectoryError: if the directory holds no run, or its job cannot be reached from here.
    """
    load_config(run)
    handle = attach(run)
    return handle.cancel() if handle else None


def stopped(run: RunDirectory, outcome: Outcome) -> StoppedError:
    """Return the error that says how a run was stopped and how it goes on."""
    again = f"training-infra train --run-dir {run.path} --resume"
    if load_config(run).data.source == DATALOADER:
        again = f"launch_training(..., run_dir={str(run.path)!r}, resume=True)"
    return StoppedError(f"stopped after step {outcome.step}; continue with: {again}")


def check_outcome(outcome: Outcome) -> Outcome:
    """Return ``outcome`` if it is a finished run's.

    Raises:
        TrainingFailedError: otherwise; RequestError where the request was wrong.
    """
    match outcome.status:
        case "finished":
            return outcome
        case "bad-config":
            raise RequestError(outcome.reason)
        case status:
            raise TrainingFailedError(f"{status} after step {outcome.step}: {outcome.reason}; {outcome.next_action}")


def benchmark(run: RunDirectory) -> BenchmarkRecord:
    """Return the steps that were timed at the end of the run's job, inside the same allocation."""
    record = read_json(run.benchmark)
    return BenchmarkRecord(**record | {"step_seconds": tuple(record["step_seconds"])})


def training_summary(run: RunDirectory) -> TrainingSummary:
    """Return what training reached.

    Raises:
        RunDirectoryError: if it has not come to its end.
    """
    return TrainingSummary(**read_json(run.training))


def records(run: RunDirectory) -> dict[str, Any]:
    """Return everything the run's steps have recorded so far, by file."""
    paths = (run.plan, run.choice, run.environment, run.estimate, run.dry_run, run.training, run.benchmark, run.outcome)
    return {"run_dir": str(run.path)} | {path.stem: read_json(path) for path in paths if path.exists()}


def train_here(
    run: RunDirectory,
    loader: Iterable[Any],
    validation_loader: Iterable[Any] | None,
    on_progress: Callable[[StepRecord], None],
) -> Outcome:
    """Train in this process on the caller's batches; Ctrl-C saves a checkpoint and stops.

    Raises:
        TrainingFailedError: if the run ended without finishing; StoppedError if it was interrupted.
    """
    from llama_core.launch.worker import run_to_end
    from llama_core.training.loaders import LoaderBatches, as_batch
    from llama_core.training.trainer import Trainer

    config, plan = load_config(run), load_plan(run)
    total_steps = config.training.steps
    if total_steps is None:
        raise ConfigError(f"{run.config} names no training.steps; prepare the run with prepare_loader_run")
    if is_finished(run):
        return read_outcome(run)

    def held_out() -> Iterator[Any]:
        for item in () if validation_loader is None else validation_loader:
            yield from as_batch(item, config.spec.vocab_size).split(plan.microbatch_size)

    def build(should_stop: Callable[[], bool]) -> tuple[Trainer, None]:
        trainer = Trainer(
            run,
            config,
            plan,
            batches=LoaderBatches(loader, config.spec.vocab_size),
            validation=None if validation_loader is None else held_out,
            total_steps=total_steps,
            should_stop=should_stop,
            on_step=on_progress,
        )
        return trainer, None

    outcome = run_to_end(run, build)
    if outcome.status == "cancelled":
        raise stopped(run, outcome)
    return check_outcome(outcome)


def describe(run: RunDirectory) -> str:
    """Return where the run is, and whether it is new, goes on, or is at work already."""
    if not run.job.exists():
        return f"{run.path}, new"
    job = attach(run)
    if job is not None:
        return f"{run.path}: job {job.record.job_id} is at work on it, following that"
    return f"{run.path}: {'finished already' if is_finished(run) else 'continues from its newest checkpoint'}"
