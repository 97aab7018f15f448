"""The steps of the chain on a prepared run.

A step reads the records of earlier steps from the run directory, adds its own and returns it. ``chain.run_chain``
calls the steps in order; each can be repeated on its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_core.chain.console import count_down, say, say_output, watch
from llama_core.chain.environment import validate_environment
from llama_core.chain.expected import expected_step
from llama_core.chain.prepare import refuse_unfit
from llama_core.chain.runs import is_finished, load_config, load_plan, resume_command, resume_point
from llama_core.config.run import RANDOM_BASE, SAMPLE, RunConfig
from llama_core.errors import (
    CancelledError,
    ConfigError,
    DoesNotFitError,
    EnvironmentMismatchError,
    RequestError,
    RunDirectoryError,
    StoppedError,
    TrainingFailedError,
)
from llama_core.imports import importing_torch
from llama_core.launch.jobs import submission
from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.jobs.slurm_request import memory_request
from llama_core.launch.outcome import read_outcome, record_refusal
from llama_core.machine.validate import EnvironmentReport
from llama_core.planning.memory.peaks import MemoryEstimate
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import newest_step
from llama_core.records.directory import RunDirectory
from llama_core.records.files import intact, read_json, read_typed, write_json
from llama_core.records.goodput import read_goodput
from llama_core.records.job import Outcome, Part
from llama_core.records.measurements import BenchmarkRecord, StepRecord, TrainingSummary
from llama_core.records.metrics import read_heartbeat
from llama_core.units import format_duration

if TYPE_CHECKING:
    from llama_core.rehearsal.dry_run import DryRunResult

NOT_REHEARSED = "skipped: DeepSpeed needs real ranks"


def reasons(run: RunDirectory) -> list[str]:
    """Return the reasons for the run's plan, a sentence for each choice; empty if no plan was searched for."""
    if not run.choice.exists():
        return []
    with intact(run.choice):
        return list(map(str, read_json(run.choice)["reasons"].values()))


def validate(run: RunDirectory, *, saves: bool = True) -> EnvironmentReport:
    """Check this machine against the run's needs and record the findings.

    Args:
        run: the run.
        saves: whether it saves checkpoints.

    Raises:
        EnvironmentMismatchError: if the run cannot start here, with every reason.
    """
    report = validate_environment(load_config(run), run.path, saves=saves)
    write_json(run.environment, report.as_dict())
    if report.errors:
        reason = "; ".join(report.errors)
        record_refusal(run, reason, "correct the request and start again")
        raise EnvironmentMismatchError(reason)
    return report


def estimate(run: RunDirectory) -> MemoryEstimate:
    """Return the memory estimate of a rank, made when the run was prepared."""
    with intact(run.estimate):
        return MemoryEstimate.from_dict(read_json(run.estimate))


def asked_memory(run: RunDirectory) -> str:
    """Return how much memory the run's Slurm job asks for by default, and why; empty if it does not do so."""
    config = load_config(run)
    if config.launch.is_here or config.launch.memory_gb_per_node is not None:
        return ""
    asked = memory_request(config, config.parallel.gpus, estimate(run).host_bytes_to_ask_for)
    if asked is None:
        return ""
    why = (
        "all of the nodes it has to itself"
        if asked == "0"
        else "the partition's default is too little for the estimate"
    )
    return f"the job asks for --mem={asked}: {why}; launch.slurm.memory_gb_per_node chooses another value"


def rehearse(run: RunDirectory) -> "DryRunResult | None":
    """Run a real step of every distinct rank on fake tensors, count every byte, and record the counts.

    Return None under DeepSpeed, which needs real ranks.

    Raises:
        PlanError: if the counted bytes do not fit the device and ``launch.force`` is not set. The directory may then
            be reused for another run.
    """
    config = load_config(run)
    run.dry_run.unlink(missing_ok=True)
    result = rehearse_plan(config, load_plan(run))
    if result is None:
        return None
    write_json(run.dry_run, result.as_dict())
    try:
        refuse_unfit(replace(estimate(run), profile=result.profile), config, "rehearsed")
    except DoesNotFitError as error:
        record_refusal(run, str(error), "change the plan, or add --force")
        raise
    return result


def rehearse_plan(config: RunConfig, plan: ParallelPlan) -> "DryRunResult | None":
    """Run a real step of every distinct rank of a plan on fake tensors, and count every byte.

    Return None under DeepSpeed, which needs real ranks.
    """
    if plan.zero_backend == "deepspeed":
        return None
    with importing_torch():
        from llama_core.rehearsal.dry_run import rehearse as rehearse_steps

    return rehearse_steps(config, plan)


def submit(run: RunDirectory, only: Part | None = None) -> JobHandle | None:
    """Start the run's job, or find the running one; None if the run is finished.

    Args:
        run: the run.
        only: run this part alone: training or the timed steps.

    Raises:
        RunDirectoryError, EnvironmentMismatchError: if the job cannot be started.
    """
    if only != "benchmark" and is_finished(run):
        return None
    config = load_config(run)
    return submission.submit(run, config, config.parallel.gpus, only)  # the plan may be that of fewer nodes


def attach(run: RunDirectory) -> JobHandle | None:
    """Return the run's queued or running job, whoever submitted it, or None."""
    return submission.attach(run)


def follow(run: RunDirectory, on_step: Callable[[StepRecord], None] | None = None) -> TrainingSummary | None:
    """Follow the run's job to its end with a progress bar, and return its training summary; None if it did not train.

    Args:
        run: the run.
        on_step: also called with each newest step.

    Raises:
        RequestError, TrainingFailedError: like ``wait``.
        StoppedError: if Ctrl-C stops the job.
    """
    handle = attach(run)
    with stopping_on_interrupt(run), watch(run) as show:

        def on_progress(record: StepRecord) -> None:
            show(record)
            if on_step is not None:
                on_step(record)

        wait(run, handle, on_progress, say_output)
    return training_summary(run) if run.training.exists() else None


def wait(
    run: RunDirectory,
    handle: JobHandle | None,
    on_progress: Callable[[StepRecord], None] | None = None,
    on_output: Callable[[int, str], None] | None = None,
) -> Outcome:
    """Wait for the job's end and return its outcome.

    Args:
        run: the run.
        handle: its job, from ``submit`` or ``attach``; None if the job has already ended.
        on_progress: called with each newest step.
        on_output: called with the rank and the line of each warning and error that a rank prints.

    Raises:
        RequestError: if the job refused the request.
        TrainingFailedError: if the job ended without finishing, with the reason and what to try.
    """
    if handle is None:
        return check_outcome(read_outcome(run))
    say_waiting = partial(say, "waiting")
    return check_outcome(handle.wait(on_progress, on_output, say_waiting, lambda: expected_step(run)))


@contextmanager
def stopping_on_interrupt(run: RunDirectory) -> Iterator[None]:
    """Stop the run's job if Ctrl-C interrupts the block; a second Ctrl-C kills the job.

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
    try:
        with count_down(_what_stopping_takes(run, handle)) as on_second:
            outcome = handle.cancel(on_second=on_second)
    except KeyboardInterrupt:
        outcome = _stop_at_once(handle)
    if outcome.status == "cancelled":
        raise stopped(run, outcome) from None
    return check_outcome(outcome)  # the job had ended by itself


def _stop_at_once(handle: JobHandle) -> Outcome:
    say("stopping", "at once")
    try:
        return handle.cancel(grace_seconds=0)
    except KeyboardInterrupt:
        raise StoppedError(
            f"{handle.kind} {handle.record.job_id} may still run; look with {handle.listed_by}"
        ) from None


def _what_stopping_takes(run: RunDirectory, handle: JobHandle) -> str:
    """Return what an interrupt waits for, for how long at most, and what a second one would lose."""
    if handle.waits_for:
        return "taking the job out of the queue"
    newest = read_heartbeat(run)
    step = f"step {newest.step + 1} (the last took {format_duration(newest.step_seconds)})" if newest else "a step"
    if newest is not None and newest.step == newest.total_steps:
        step = f"the work after step {newest.step}"
    return (
        f"waiting for the end of {step} and a checkpoint, at most {handle.record.grace_seconds:g} s; "
        f"Ctrl-C again stops at once: then --resume {resume_point(run)}"
    )


def cancel(run: RunDirectory) -> Outcome | None:
    """Let the run's job finish its step and save a checkpoint, then end it; None if no job is running.

    Raises:
        RunDirectoryError: if the directory holds no run, or its job cannot be reached from here.
    """
    load_config(run)
    handle = attach(run)
    return handle.cancel() if handle else None


def stopped(run: RunDirectory, outcome: Outcome) -> StoppedError:
    """Return the error for a stopped run, with the command that continues it."""
    again = resume_command(run, load_config(run).data.source)
    where = f"after step {outcome.step}" if outcome.step else "before the first step"
    match newest_step(run):
        case 0:
            return StoppedError(f"stopped {where}, with no checkpoint yet; start over with: {again}")
        case saved if saved < outcome.step:
            return StoppedError(f"stopped {where}; continue after step {saved}, the newest checkpoint, with: {again}")
    return StoppedError(f"stopped {where}; continue with: {again}")


def check_outcome(outcome: Outcome) -> Outcome:
    """Return ``outcome`` if the run finished.

    Raises:
        RequestError: if the request was wrong.
        TrainingFailedError: if the run ended in any other way.
    """
    match outcome.status:
        case "finished":
            return outcome
        case "bad-config":
            raise RequestError(outcome.reason)
        case status:
            error = CancelledError if status == "cancelled" else TrainingFailedError
            raise error(f"{status} after step {outcome.step}: {outcome.reason}; {outcome.next_action}")


def benchmark(run: RunDirectory) -> BenchmarkRecord:
    """Return the steps timed at the end of the run's job, in the same allocation."""
    return read_typed(run.benchmark, BenchmarkRecord)


def timed_steps(run: RunDirectory) -> BenchmarkRecord | None:
    """Return the steps timed at the end of the run's job; None if the run times none."""
    return benchmark(run) if load_config(run).benchmark.steps else None


def refuse_untimed(config: RunConfig) -> None:
    """Refuse a benchmark without timed steps.

    Raises:
        ConfigError: if the configuration times none.
    """
    if not config.benchmark.steps:
        raise ConfigError("benchmark.steps=0 leaves nothing to time; give at least 1")


def training_summary(run: RunDirectory) -> TrainingSummary:
    """Return the summary of the run's training.

    Raises:
        RunDirectoryError: if training has not finished.
    """
    return read_typed(run.training, TrainingSummary)


def records(run: RunDirectory) -> dict[str, Any]:
    """Return everything the run's steps have recorded so far, by file."""
    before = (run.plan, run.choice, run.data, run.environment, run.estimate, run.dry_run)
    paths = (*before, run.training, run.checkpoint_interval, run.benchmark, run.outcome)
    found = {path.stem: read_json(path) for path in paths if path.exists()}
    goodput = read_goodput(run)
    return {"run_dir": str(run.path)} | found | ({"goodput": goodput.as_dict()} if goodput else {})


def say_environment(report: EnvironmentReport) -> None:
    """Print what was found on this machine, and every warning."""
    say("validate", report.summary())
    for warning in report.warnings:
        say("warning", warning)


def say_plan(run: RunDirectory) -> None:
    """Print the run's plan and its notes."""
    plan = load_plan(run)
    say("plan", plan.summary())
    for note in plan.notes:
        say("note", note)
    launch = load_config(run).launch
    if launch.is_elastic:
        say("note", f"the job starts with {launch.fewest_nodes} to {launch.nodes} nodes, as many as Slurm has free")


def say_weights(run: RunDirectory) -> None:
    """Print where the run's initial weights come from, and the defaults for fine-tuning."""
    config = load_config(run)
    if config.has_random_base:
        say("weights", RANDOM_BASE)
    elif config.training.init_from is not None:
        say("weights", f"of {config.training.init_from}")
    if config.spec.lora:
        say("weights", config.spec.parameter_counts)
    for key, value in config.fine_tuning_defaults.items():
        say("default", f"training.{key}={value:g} (fine-tuning)")


def say_data(run: RunDirectory) -> None:
    """Print what is known of the run's data: their statistics, or the check of their first records."""
    if run.data.exists():
        if load_config(run).data.source == SAMPLE:
            say("data", "no data was given: this trains on the sample, the source of Python's standard library")
        with intact(run.data):
            data = read_json(run.data)
            summary, notes = str(data["summary"]), list(map(str, data["notes"]))
        say("data", summary)
        for note in notes:
            say("note", note)
        return
    with intact(run.environment):
        facts = dict(read_json(run.environment)["facts"])
    if "data" in facts:
        say("data", str(facts["data"]))


def say_extension(run: RunDirectory) -> None:
    """Print what a new number of steps means for the learning rate of a run that goes on."""
    newest, training = read_heartbeat(run), load_config(run).training
    if newest is None or training.steps in {None, newest.total_steps}:
        return
    from llama_core.training.optimizer import learning_rate

    step, total = newest_step(run), training.steps
    before, after = learning_rate(step, training, newest.total_steps), learning_rate(step + 1, training, total)
    change = f"{before:.2e} at step {step}, {after:.2e} at step {step + 1}" if step else f"{after:.2e} at step 1"
    instead = f"{total} steps instead of {newest.total_steps}"
    say("note", f"{instead}; learning rate on the {training.lr_schedule} schedule of {total} steps: {change}")


def say_goodput(run: RunDirectory) -> None:
    """Print the share of the run's wall time that became progress, where the rest went, and when it saved and why."""
    with suppress(RunDirectoryError):  # damaged metrics; the report says so
        if (goodput := read_goodput(run)) is not None:
            say("goodput", goodput.summary())
    if run.checkpoint_interval.exists() and load_config(run).training.checkpoint_every == "auto":
        say("note", read_json(run.checkpoint_interval)["reason"])


def say_metrics(run: RunDirectory) -> None:
    """Print how to look at the run's metrics elsewhere than in its report."""
    if run.tensorboard.exists():
        say("metrics", f"tensorboard --logdir {run.tensorboard}")
    if any(run.wandb.glob("offline-run-*")):
        say("metrics", f"wandb sync {run.wandb}/offline-run-*")
    elif run.wandb.exists():
        project = load_config(run).tracking.wandb_project
        say("metrics", f"Weights & Biases, project {project}; local files in {run.wandb}")


def describe(run: RunDirectory) -> str:
    """Return the run's path, and whether it is new, continued, finished or already running."""
    if not any(path.exists() for path in (run.job, run.outcome, run.heartbeat)):
        return f"{run.path}, new"
    job = attach(run)
    if job is not None:
        return f"{run.path}: job {job.record.job_id} is already running; following it"
    return f"{run.path}: {'already finished' if is_finished(run) else resume_point(run)}"
