"""What the chain says about a run: each function prints its lines from the run's records, or returns one."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from llama_core.adapters.registry import ADAPTERS
from llama_core.chain.batch import batch_line
from llama_core.chain.steps import read_estimate
from llama_core.config.parameter_counts import counts_in_words
from llama_core.config.recorded import RECORDED, differences
from llama_core.config.run import RANDOM_BASE, RunConfig
from llama_core.config.settings import DATALOADER, SAMPLE
from llama_core.errors import RequestError, RunDirectoryError, TrainingInfraError
from llama_core.hugging_face.pretrained import origin_of
from llama_core.launch.jobs.launcher import launcher_of
from llama_core.launch.jobs.submission import attach
from llama_core.launchers.registry import LAUNCHERS
from llama_core.machine.validate import EnvironmentReport
from llama_core.objectives.registry import OBJECTIVES
from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.planning.kernels import attention_kernel
from llama_core.records.checkpoints import newest_step
from llama_core.records.directory import RunDirectory
from llama_core.records.files import intact, read_json, read_typed
from llama_core.records.goodput import read_goodput
from llama_core.records.hub import HubRecord
from llama_core.records.measurements import BenchmarkRecord
from llama_core.records.metrics import read_heartbeat, read_metrics
from llama_core.records.settings_changes import read_settings_changes
from llama_core.registry import Registry
from llama_core.runs.console import say
from llama_core.runs.continuing import continuing, is_finished, settings_to_continue, step_to_continue
from llama_core.runs.loading import load_config, load_plan
from llama_core.runs.step_parts import explained_step
from llama_core.schedules.registry import SCHEDULES
from llama_core.trackers.registry import TRACKERS
from llama_core.training.rates import learning_rate
from llama_core.units import format_count


def describe(run: RunDirectory) -> tuple[str, int]:
    """Return the run's path with whether it is new, continued, finished or already running, and its newest step.

    The newest step is that of the checkpoint from which the run goes on; 0 if it has none.

    Raises:
        CheckpointError: if it has checkpoints, but the ranks on this machine could read none.
    """
    if not any(path.exists() for path in (run.job, run.outcome, run.heartbeat)):
        return f"{run.path}, new", 0
    job = attach(run)
    if job is not None:
        return f"{run.path}: job {job.record.job_id} is already running; following it", newest_step(run)
    if is_finished(run):
        return f"{run.path}: already finished", newest_step(run)
    step = step_to_continue(run, partial(say, "warning"))
    unread = "" if step == 0 or load_config(run).launch.is_here else ", if the ranks find that checkpoint intact"
    return f"{run.path}: {continuing(step)}{unread}", step


def asked_memory(run: RunDirectory) -> str:
    """Return how much memory the run's job asks for by default, and why; empty if it does not do so."""
    config = load_config(run)
    return launcher_of(config.launch.launcher).asked_memory(config, read_estimate(run).host_bytes_to_ask_for)


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
    config = load_config(run)
    if plan.attention == "auto" and attention_kernel(config, plan).holds_scores:
        slow = "no fused kernel computes this model's attention: it holds all scores and is slow"
        say("note", f"{slow}; the estimate counts its memory but not its time")
    if config.is_elastic:
        free = f"as many as {config.launch.kind.title} has free"
        spares = f", and trains on up to {config.num_nodes} of them" if config.launch.spare_nodes else ""
        say("note", f"the job starts with {config.fewest_nodes} to {config.most_nodes} nodes, {free}{spares}")


def say_hub(run: RunDirectory) -> None:
    """Print what the run has from the Hub, with the commit of each repository, and notes on it."""
    if run.hub.exists():
        found = read_typed(run.hub, HubRecord)
        for source in found.sources:
            say("hub", f"{source.setting}: {source.name} at {source.commit}")
        for note in found.notes:
            say("note", note)


def say_model(run: RunDirectory) -> None:
    """Print the run's model, its size, and its tokenizer."""
    config = load_config(run)
    told = f"{config.model_in_words}: {format_count(config.spec.num_parameters)} parameters"
    if config.data.source != DATALOADER:  # its batches are tokens already
        told += f"; tokenizer: {config.data.tokenizer}"
    say("model", told)


def say_batch(run: RunDirectory) -> None:
    """Print what a step reads, and how many steps the run takes."""
    config = load_config(run)
    with intact(run.data):
        data = read_json(run.data) if run.data.exists() else {}
        line = batch_line(config, data)
    say("batch", line)


def say_packages(run: RunDirectory) -> None:
    """Print which parts of the run are of installed packages."""
    config = load_config(run)
    chosen: tuple[tuple[Registry[Any], str], ...] = (
        (OPTIMIZERS, config.training.optimizer),
        (OBJECTIVES, config.training.objective),
        (ADAPTERS, config.lora.method),
        (SCHEDULES, config.parallel.schedule),
        (LAUNCHERS, config.launch.launcher),
    )
    for registry, name in chosen:
        if package := registry.package_of(name):
            say("package", f"{registry.setting}={name} is of {package}")
    for asked in config.tracking.asked_trackers():
        if package := TRACKERS.package_of(asked.kind.name):
            say("package", f"{asked.setting} is of {package}")


def say_weights(run: RunDirectory) -> None:
    """Print where the run's initial weights come from, and the defaults for fine-tuning."""
    config = load_config(run)
    if config.has_random_base:
        say("weights", RANDOM_BASE)
    elif config.training.init_from is not None:
        say("weights", f"of {config.training.init_from}{_continued_as(config)}")
    if config.spec.lora:
        say("weights", counts_in_words(config.spec))
    for key, value in config.fine_tuning_defaults.items():
        say("default", f"training.{key}={value:g} (fine-tuning)")


def say_timed(run: RunDirectory, timed: BenchmarkRecord | None) -> None:
    """Print the speed of the timed steps, or that of training if other work had the cores meanwhile."""
    if timed is None:
        say("benchmark", "skipped: benchmark.steps=0")
        return
    rates = read_metrics(run)["tokens_per_second"].to_pylist() if timed.disturbance else []
    if rates:
        say("benchmark", f"{median(rates):,.0f} tokens/s in the median of {len(rates)} training steps")
        say("note", f"while steps were timed, {timed.disturbance}; they reached {timed.summary()}")
    else:
        say("benchmark", timed.summary())
        if timed.disturbance:
            say("note", f"in the timed steps, {timed.disturbance}")


def say_step(run: RunDirectory) -> None:
    """Print how a step's time differs from its prediction, and what part explains most; nothing without both."""
    try:
        explained = explained_step(run)
    except TrainingInfraError as error:  # the run itself has ended well
        say("step", f"not compared with its prediction: {error}")
        return
    for sentence in explained.sentences() if explained else ():
        say("step", sentence)


def _continued_as(config: RunConfig) -> str:
    """Return what initial weights with adapters mean for a run, for the end of a line; empty if it trains none."""
    if config.spec.lora is None or config.training.init_from is None:
        return ""
    adapters = origin_of(Path(config.training.init_from)).adapters
    return "" if adapters is None else f", whose adapters are trained on (strategy={config.strategy})"


def say_data(run: RunDirectory) -> None:
    """Print what is known of the run's data: their statistics, or the check of their first records."""
    if not run.data.exists():
        _say_first_records(run)
        return
    if load_config(run).data.source == SAMPLE:
        say("data", "no data was given: this trains on the sample, the source of Python's standard library")
    with intact(run.data):
        data = read_json(run.data)
        summary = str(data["summary"])
        notes = [str(note) for note in data["notes"]]
    say("data", summary)
    for note in notes:
        say("note", note)


def _say_first_records(run: RunDirectory) -> None:
    with intact(run.environment):
        facts = dict(read_json(run.environment)["facts"])
    if "data" in facts:
        say("data", str(facts["data"]))


def say_extension(run: RunDirectory, step: int) -> None:
    """Print what a new number of steps means for the learning rate of a run that goes on after ``step``."""
    newest = read_heartbeat(run)
    training = load_config(run).training
    total = training.steps
    if newest is None or total is None or total == newest.total_steps:
        return
    after = f"{learning_rate(step + 1, training, total):.2e} at step {step + 1}"
    change = after
    if step:
        before = settings_to_continue(run).training
        change = f"{learning_rate(step, before, newest.total_steps):.2e} at step {step}, {after}"
    instead = f"{total} steps instead of {newest.total_steps}"
    say("note", f"{instead}; learning rate on the {training.lr_schedule} schedule of {total} steps: {change}")


def say_changed_settings(run: RunDirectory) -> None:
    """Print with which other settings a run goes on, unless a checkpoint has been trained with them."""
    changes = read_settings_changes(run)
    if changes and RECORDED.intersection(differences(settings_to_continue(run), load_config(run))):
        say("note", f"{changes[-1]}, as {run.settings_changes.name} records")


def say_goodput(run: RunDirectory) -> None:
    """Print the share of the run's wall time that became progress, where the rest went, and when it saved and why."""
    with suppress(RunDirectoryError):  # damaged metrics; the report says so
        goodput = read_goodput(run)
        if goodput is not None:
            say("goodput", goodput.summary())
    if run.checkpoint_interval.exists() and load_config(run).training.checkpoint_every == "auto":
        say("note", read_json(run.checkpoint_interval)["reason"])


def say_metrics(run: RunDirectory) -> None:
    """Print how to look at the run's metrics elsewhere than in its report."""
    settings = {}
    with suppress(RequestError):  # of a config.yaml that was edited meanwhile; the report says so
        settings = {asked.kind.name: asked.settings for asked in load_config(run).tracking.asked_trackers()}
    for kind in TRACKERS.values():
        if where := kind.where(run, settings.get(kind.name)):
            say("metrics", where)
