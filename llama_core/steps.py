"""The steps of the chain: prepare, validate, estimate, rehearse, train, benchmark; each over a run directory.

A step reads what earlier ones left in the run directory, adds its own record, and returns it. The command line calls
them in order; the Prefect flow calls the same functions as tasks. Each can be called again on its own.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_core.artifacts import (
    BenchmarkRecord,
    Outcome,
    RunDirectory,
    StepRecord,
    TrainingSummary,
    atomic_write,
    read_json,
    write_json,
)
from llama_core.config.hardware import DEFAULT_GPU_TYPE, gpu_spec
from llama_core.config.run import DATALOADER, SAMPLE, RunConfig
from llama_core.errors import (
    ConfigError,
    DoesNotFitError,
    EnvironmentMismatchError,
    RequestError,
    RunDirectoryError,
    StoppedError,
    TrainingFailedError,
)
from llama_core.launch import launchers
from llama_core.launch.environment import (
    EnvironmentReport,
    Machine,
    detect_machine,
    resolve_machine_defaults,
    validate_environment,
)
from llama_core.launch.jobs import JobHandle, Part
from llama_core.launch.outcome import read_outcome, record_outcome
from llama_core.launch.watch import say
from llama_core.planning.auto import choose_plan, search
from llama_core.planning.choice import Choice
from llama_core.planning.leanest import NothingFitsError
from llama_core.planning.memory import estimate_ranks
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.profile import MemoryEstimate
from llama_core.training.corpus import find_files
from llama_core.training.data import load_datasets
from llama_core.training.tokenizer import BYTES, check_fits, load_tokenizer

if TYPE_CHECKING:
    from llama_core.training.dry_run import DryRunResult
    from llama_core.training.twin import TwinResult

RUNS = Path("runs")
_ALL_THE_SAME = "or go on all the same with --force (launch.force=true)"
NOT_REHEARSED = "left out: DeepSpeed works with real ranks only"


@dataclass(frozen=True)
class PlannedRun:
    """A configuration with every default filled in, and the plan made for it."""

    config: RunConfig
    plan: ParallelPlan
    estimate: MemoryEstimate
    choices: tuple[str, ...]
    """One line for each default that was filled in from what the machine has."""
    choice: Choice | None = None
    """Why the plan is as it is, where it was searched for; None where it follows from rules, or was there before."""
    refusal: str = ""
    """By how much nothing fits, and what would; empty where something does. The plan is then the leanest one."""


def plan_run(config: RunConfig, machine: Machine | None = None) -> PlannedRun:
    """Resolve what ``config`` leaves to the machine, choose a plan and estimate its memory. Nothing is written.

    Raises:
        ConfigError, PlanError, EnvironmentMismatchError: if the request cannot be met here.
    """
    machine = machine or detect_machine()
    resolved = resolve_machine_defaults(config, machine)
    return _planned(resolved.config, machine, resolved.choices)


def plan_for_gpu(config: RunConfig) -> PlannedRun:
    """Plan as ``plan_run`` does, for GPUs that need not be here; for the CPU only where ``config`` names it."""
    machine = detect_machine()
    if config.launch.device == "cpu":
        return plan_run(config, machine)
    # Every GPU that is planned for computes bf16 natively.
    precision = "bf16" if config.training.precision == "auto" else config.training.precision
    here = machine.gpu_type
    gpu_type = config.launch.gpu_type or (here.name if here else DEFAULT_GPU_TYPE)
    choices = (
        ()
        if config.launch.gpu_type
        else (f"launch.gpu_type={gpu_type} ({'the device here' if here else 'no device here'})",)
    )
    return _planned(
        _with(config, launch={"device": "cuda", "gpu_type": gpu_type}, training={"precision": precision}),
        machine,
        choices,
    )


def _planned(
    config: RunConfig, machine: Machine, choices: tuple[str, ...], plan: ParallelPlan | None = None
) -> PlannedRun:
    gpu = None
    if config.launch.device == "cpu":
        label, usable = "this machine's memory", machine.memory_bytes // config.parallel.gpus
    else:
        gpu = gpu_spec(config.launch.gpu_type or DEFAULT_GPU_TYPE)
        label, usable = gpu.label, gpu.usable_bytes
    choice, refusal = None, ""
    if plan is None and gpu is not None and config.strategy == "standard":
        try:
            choice = search(config, usable, gpu)
            plan = choice.plan
        except NothingFitsError as error:
            plan, refusal = error.plan, str(error)
    elif plan is None:  # for what the speed of is not modelled
        plan = choose_plan(config, usable)
    ranks = estimate_ranks(
        config.spec,
        plan,
        seq_len=config.seq_len,
        precision=config.training.precision,
        document_mask=config.data.document_mask,
    )
    fullest = max(ranks, key=lambda profile: profile.peak_bytes)
    return PlannedRun(config, plan, MemoryEstimate(fullest, label, usable, ranks), choices, choice, refusal)


def _with(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """Return ``config`` with some keys of some sections changed, validated anew."""
    mapping = config.model_dump()
    for section, changes in sections.items():
        mapping[section] |= changes
    return RunConfig.from_mapping(mapping)


def prepare_run(config: RunConfig, run_dir: Path | None = None, *, resume: bool = False) -> RunDirectory:
    """Make the directory of a run, or find the one to resume, and write its configuration and plan.

    A resumed run keeps its plan unless ``config.parallel`` has changed, since cutting a batch into other microbatches
    rounds its sums differently.

    Args:
        config: what to run.
        run_dir: where; by default ``runs/<model>-<date>-<fingerprint>``.
        resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration.

    Raises:
        RunDirectoryError: if the directory holds something else, or this run already and ``resume`` is not set.
        ConfigError, DataError, PlanError, EnvironmentMismatchError: if the request cannot be met, or is estimated not
            to fit the device and ``launch.force`` is not set; nothing is written.
    """
    _refuse_untrainable(config)
    planned = plan_run(_with_absolute_paths(config))
    _check_data(config)
    try:
        run = _existing_run(planned.config, run_dir, resume=resume)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write run directory {str(run_dir)!r}: {error.strerror}; choose another --run-dir"
        ) from None
    plan = planned.plan
    if run is None:
        run = _new_run(planned.config, run_dir)
    elif run.plan.exists() and load_config(run).parallel == planned.config.parallel:
        plan = load_plan(run)
    if planned.refusal and plan == planned.plan and not planned.config.launch.force:
        raise DoesNotFitError(f"{planned.refusal}; {_ALL_THE_SAME}")
    _refuse_unfit(_planned(planned.config, detect_machine(), (), plan).estimate, planned.config, "estimated")
    run.create()
    sizes = {"batch_size": planned.config.batch_size, "seq_len": planned.config.seq_len}
    with atomic_write(run.config) as temporary:
        temporary.write_text(_with(planned.config, training=sizes).to_yaml())
    write_json(run.plan, plan.as_dict())
    if planned.choice is not None and plan == planned.plan:
        write_json(run.choice, planned.choice.as_dict())
    return run


def _refuse_untrainable(config: RunConfig) -> None:
    if config.strategy != "standard":
        raise ConfigError(
            f"strategy={config.strategy}: memory can be estimated (estimate-memory), but it cannot be trained or "
            "rehearsed; use strategy=standard"
        )


def _refuse_unfit(estimate: MemoryEstimate, config: RunConfig, how: str) -> None:
    if not estimate.fits and not config.launch.force:
        raise DoesNotFitError(f"{'; '.join(estimate.notes)} ({how}); {_ALL_THE_SAME}")


def _check_data(config: RunConfig) -> None:
    """Refuse data that cannot be trained on; for a run on this machine, tokenise them here, where a person sees it."""
    data = config.data
    if data.source == DATALOADER:
        return
    if config.launch.launcher == "local":
        load_datasets(data, seq_len=config.seq_len, vocab_size=config.spec.vocab_size, seed=config.training.seed)
        return
    for source in (data.source, data.validation):
        if source not in {SAMPLE, None}:
            find_files(source)
    check_fits(load_tokenizer(data.tokenizer), config.spec.vocab_size)


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return ``config`` with its paths as seen from anywhere: a run is resumed, and its worker starts, elsewhere."""
    by_name = {SAMPLE, DATALOADER, BYTES}
    paths = {
        key: str(Path(value).expanduser().absolute())
        for key, value in config.data.model_dump(include={"source", "validation", "tokenizer", "cache_dir"}).items()
        if value is not None and value not in by_name
    }
    return _with(config, data=paths)


def _existing_run(config: RunConfig, run_dir: Path | None, *, resume: bool) -> RunDirectory | None:
    if run_dir is None:
        return _newest_unfinished(config) if resume else None
    run = RunDirectory(run_dir)
    if _never_began(run):
        return None
    if not run.config.exists():
        if resume:
            raise RunDirectoryError(
                f"{run_dir} holds no run to continue (no config.yaml); drop --resume to start one there"
            )
        if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
            raise RunDirectoryError(f"{run_dir} holds files that are not a run; choose another --run-dir")
        return None
    there = RunConfig.load(run.config)
    if there.fingerprint() != config.fingerprint():
        differences = "; ".join(_differences(there, config))
        raise RunDirectoryError(
            f"{run_dir} holds a run of another configuration ({differences}); choose another --run-dir"
        )
    if not resume:
        raise RunDirectoryError(f"{run_dir} already holds this run; add --resume to continue it")
    return run


def _newest_unfinished(config: RunConfig) -> RunDirectory | None:
    fingerprint = config.fingerprint()
    candidates = sorted(
        RUNS.glob(f"{config.model}-*-{fingerprint[:4]}*/config.yaml"), key=lambda path: path.stat().st_mtime
    )
    for path in reversed(candidates):
        run = RunDirectory(path.parent)
        if RunConfig.load(path).fingerprint() == fingerprint and not is_finished(run):
            return run
    return None


def _new_run(config: RunConfig, run_dir: Path | None) -> RunDirectory:
    if run_dir is not None:
        return RunDirectory(run_dir)
    name = f"{config.model}-{datetime.now(UTC):%Y%m%d}-{config.fingerprint()[:4]}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    runs = (RunDirectory(RUNS / name) for name in names)
    return next(run for run in runs if not run.path.exists() or _never_began(run))


def _never_began(run: RunDirectory) -> bool:
    """Return whether the run's request was refused before its first step: its directory may be used again."""
    return run.outcome.exists() and read_outcome(run).status == "bad-config" and not run.progress.exists()


def _differences(one: RunConfig, other: RunConfig) -> Iterable[str]:
    """Yield what tells two runs apart, one key at a time."""
    left, right = _flat(one.identity()), _flat(other.identity())
    for key in sorted(left | right):
        if left.get(key) != right.get(key):
            there, here = (repr(side[key]) if key in side else "unset" for side in (left, right))
            yield f"{key} is {there} there, {here} here"


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def load_config(run: RunDirectory) -> RunConfig:
    """Return the resolved configuration of ``run``.

    Raises:
        RunDirectoryError: if the directory holds no run.
    """
    if not run.config.exists():
        raise RunDirectoryError(f"{run.path} holds no run (no {run.config.name})")
    return RunConfig.load(run.config)


def load_plan(run: RunDirectory) -> ParallelPlan:
    """Return the plan of ``run``."""
    return ParallelPlan.from_dict(read_json(run.plan))


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
    estimated = _planned(load_config(run), detect_machine(), (), load_plan(run)).estimate
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
    estimate = _planned(config, detect_machine(), (), plan).estimate
    try:
        _refuse_unfit(replace(estimate, profile=result.profile), config, "rehearsed")
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

    _refuse_untrainable(config)
    return rehearse_steps(config, plan)


def run_twin(config: RunConfig, plan: ParallelPlan) -> "TwinResult":
    """Train a tiny model under ``plan`` on processes of this machine, and compare with one process.

    Raises:
        PlanError, TrainingFailedError: if the twin cannot be made, or fails.
    """
    from llama_core.training.twin import twin

    _refuse_untrainable(config)
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
    config = load_config(run)
    return attach(run) or launchers.submit(run, config, load_plan(run).world_size, only)


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
        return check_outcome(handle.wait(on_progress, on_output))
    except KeyboardInterrupt:
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


def is_finished(run: RunDirectory) -> bool:
    """Return whether the run has reached its last step."""
    # A job that only timed steps finishes too, but leaves no summary of the training.
    return run.training.exists() and run.outcome.exists() and read_outcome(run).status == "finished"


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


def prepare_loader_run(
    config: RunConfig,
    loader: Iterable[Any],
    validation_loader: Iterable[Any] | None = None,
    run_dir: Path | None = None,
    *,
    resume: bool = False,
) -> RunDirectory:
    """Make the directory of a run on batches that the caller's loader gives; see ``prepare_run``.

    The sizes of the loader's first batch are the run's batch size and sequence length; its length, if it has one, is
    an epoch's.

    Raises:
        DataError, ConfigError: if the first batch is none, the number of steps cannot be known, or the run needs
            more than this process.
    """
    from llama_core.training.loaders import LoaderBatches

    if config.parallel.gpus > 1:
        raise ConfigError(
            f"parallel.gpus={config.parallel.gpus}: a dataloader feeds the one process it lives in; set data.source "
            "to train on several devices"
        )
    if validation_loader is not None:  # looked at before training, rather than after
        LoaderBatches(validation_loader, config.spec.vocab_size).next_batch()
    num_sequences, seq_len = LoaderBatches(loader, config.spec.vocab_size).next_batch().tokens_BS.shape
    steps = config.training.steps
    if steps is None:
        steps = max(1, round(config.training.epochs * _length(loader)))
    sizes = {"batch_size": num_sequences, "seq_len": seq_len, "steps": steps}
    return prepare_run(
        _with(config, training=sizes, data={"source": DATALOADER, "document_mask": False}), run_dir, resume=resume
    )


def _length(loader: Iterable[Any]) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # also from a DataLoader over an iterable dataset
        raise ConfigError("the dataloader has no length; set training.steps: configure(steps=...)") from None


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
