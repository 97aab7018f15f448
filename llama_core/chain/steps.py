"""The steps of the chain on a prepared run.

A step reads the records of earlier steps from the run directory, adds its own and returns it. ``chain.run_chain``
calls the steps in order; each can be repeated on its own.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_core.chain.environment import validate_environment
from llama_core.chain.expected import expected_step
from llama_core.chain.prepare import refuse_unfit
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, DeadlockError, DoesNotFitError, EnvironmentMismatchError, RequestError
from llama_core.evaluation.evaluator import Evaluator
from llama_core.evaluation.jobs import evaluations_of
from llama_core.imports import importing_torch
from llama_core.launch.jobs import submission
from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.outcome import read_outcome, record_refusal
from llama_core.machine.validate import EnvironmentReport
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import Score, read_scores
from llama_core.records.files import intact, read_json, read_typed, write_json
from llama_core.records.goodput import read_goodput
from llama_core.records.job import Outcome, Part
from llama_core.records.measurements import BenchmarkRecord, StepRecord, TrainingSummary
from llama_core.runs.console import say, say_output, watch
from llama_core.runs.continuing import is_finished
from llama_core.runs.loading import load_config, load_plan
from llama_core.runs.stopping import check_outcome, stopping_on_interrupt
from llama_core.storage.mirror import mirror_url
from llama_core.storage.upload import upload_missing

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


def read_estimate(run: RunDirectory) -> MemoryEstimate:
    """Return the memory estimate of a rank, made when the run was prepared."""
    with intact(run.estimate):
        return MemoryEstimate.from_dict(read_json(run.estimate))


def rehearse(run: RunDirectory) -> "DryRunResult | None":
    """Run a real step of every distinct rank on fake tensors, count every byte, and record the counts.

    Return None under DeepSpeed, which needs real ranks.

    Raises:
        DeadlockError: if ranks would wait for each other forever.
        DoesNotFitError: if the counted bytes do not fit the device and ``launch.force`` is not set. After either, the
            directory may be reused for another run.
    """
    config = load_config(run)
    run.dry_run.unlink(missing_ok=True)
    try:
        result = rehearse_plan(config, load_plan(run))
    except DeadlockError as error:
        record_refusal(run, str(error), "use another plan")
        raise
    if result is None:
        return None
    write_json(run.dry_run, result.as_dict())
    try:
        refuse_unfit(replace(read_estimate(run), profile=result.profile), config, "rehearsed")
    except DoesNotFitError as error:
        record_refusal(run, str(error), "change the plan, or add --force")
        raise
    return result


def rehearse_plan(config: RunConfig, plan: ParallelPlan) -> "DryRunResult | None":
    """Run a real step of every distinct rank of a plan on fake tensors, count every byte, and check the communications.

    Return None under DeepSpeed, which needs real ranks.

    Raises:
        DeadlockError: if ranks would wait for each other forever.
    """
    if plan.zero_backend == "deepspeed":
        return None
    with importing_torch():
        from llama_core.rehearsal.communications import check_order
        from llama_core.rehearsal.dry_run import rehearse as rehearse_steps

    order = check_order(config, plan)
    return replace(rehearse_steps(config, plan), order=order)


def submit(run: RunDirectory, only: Part | None = None) -> JobHandle | None:
    """Start the run's job, or find the running one; None if the run is finished.

    Args:
        run: the run.
        only: run this part alone: training or the timed steps.

    Raises:
        RunDirectoryError, EnvironmentMismatchError: if the job cannot be started.
    """
    config = load_config(run)
    if only != "benchmark" and is_finished(run):
        _complete_mirror(run, config)
        return None
    return submission.submit(run, config, config.parallel.gpus, only)  # the plan may be that of fewer nodes


def _complete_mirror(run: RunDirectory, config: RunConfig) -> None:
    """Copy what the mirror of a finished run lacks; the run is finished even if that fails."""
    prefix = config.training.checkpoint_mirror
    if prefix is None:
        return
    try:
        copied = upload_missing(run, prefix, fingerprint=config.fingerprint(), keep=config.retention)
    except RequestError as error:
        say("mirror", str(error))
    else:
        if copied:
            say("mirror", f"copied {', '.join(copied)} to {mirror_url(prefix, run.name)}")


def follow(run: RunDirectory, on_step: Callable[[StepRecord], None] | None = None) -> TrainingSummary | None:
    """Follow the run's job to its end with a progress bar, and return its training summary; None if it did not train.

    Args:
        run: the run.
        on_step: also called with each newest step.

    Raises:
        RequestError, TrainingFailedError: like ``wait``.
        StoppedError: if Ctrl-C stops the job.
    """
    handle = submission.attach(run)
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
        handle: its job, from ``submission``; None if the job has already ended.
        on_progress: called with each newest step.
        on_output: called with the rank and the line of each warning and error that a rank prints.

    Raises:
        RequestError: if the job refused the request.
        TrainingFailedError: if the job ended without finishing, with the reason and what to try.
    """
    if handle is None:
        return check_outcome(read_outcome(run))
    outcome = handle.wait(on_progress, on_output, partial(say, "waiting"), lambda: expected_step(run))
    return check_outcome(outcome)


def read_benchmark(run: RunDirectory) -> BenchmarkRecord:
    """Return the steps timed at the end of the run's job, in the same allocation."""
    return read_typed(run.benchmark, BenchmarkRecord)


def evaluator_of(run: RunDirectory, tell: Callable[[str], None]) -> Evaluator | None:
    """Return what evaluates the checkpoints of a run that has trained; None if its configuration asks for nothing.

    Args:
        run: the run.
        tell: called with a line about each evaluation that has ended.
    """
    config = load_config(run)
    if not config.evaluation.is_asked_for:
        return None
    here = RunDirectory(run.path.resolve())
    return Evaluator(here, config, evaluations_of(here, config, while_training=False), tell)


def evaluate(run: RunDirectory) -> list[Score]:
    """Evaluate the checkpoints that still wait for it, a line for each, and return the scores of all.

    A run has trained all the same if they cannot be evaluated.

    Raises:
        RunDirectoryError: if earlier scores are damaged.
        StoppedError: if Ctrl-C stops it.
    """
    evaluator = evaluator_of(run, partial(say, "evaluate"))
    if evaluator is None:
        return []
    try:
        evaluator.wait()
    except EnvironmentMismatchError as error:
        say("evaluate", str(error))
    finally:
        evaluator.stop()
    return read_scores(run)


def timed_steps(run: RunDirectory) -> BenchmarkRecord | None:
    """Return the steps timed at the end of the run's job; None if the run times none."""
    return read_benchmark(run) if load_config(run).benchmark.steps else None


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
    paths = (
        run.plan,
        run.choice,
        run.data,
        run.hub,
        run.environment,
        run.estimate,
        run.dry_run,
        run.training,
        run.checkpoint_interval,
        run.length,
        run.expected,
        run.samples,
        run.benchmark,
        run.outcome,
    )
    found: dict[str, Any] = {"run_dir": str(run.path)}
    found |= {path.stem: read_json(path) for path in paths if path.exists()}
    scores = read_scores(run)
    if scores:
        found["evaluations"] = [asdict(score) for score in scores]
    goodput = read_goodput(run)
    if goodput is not None:
        found["goodput"] = goodput.as_dict()
    return found
