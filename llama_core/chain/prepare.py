"""Prepare a run. Refuse everything that can be refused before writing its directory."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from llama_core.chain.console import say
from llama_core.chain.planned import PlannedRun, on_nodes, plan_run, planned_as, with_fewest, with_keys
from llama_core.chain.runs import (
    existing_run,
    load_config,
    load_plan,
    new_run,
    settings_to_continue,
    why_none_goes_on,
)
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER, SAMPLE
from llama_core.data.chat_template import BUILT_IN
from llama_core.data.check import check_data
from llama_core.data.datasets import DataStatistics, load_datasets
from llama_core.data.tokenizer import BYTES
from llama_core.errors import DoesNotFitError, RunDirectoryError
from llama_core.launch.jobs.submission import attach, only_one_submission
from llama_core.machine.detect import detect_machine
from llama_core.models.pretrained import check_pretrained, resolve_intact, resolve_pretrained
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.records.checkpoints import newest_checkpoint
from llama_core.records.directory import RunDirectory
from llama_core.records.files import atomic_write, user_path, write_json
from llama_core.records.owners import refuse_links

_ALL_THE_SAME = "or run it anyway with --force (launch.force=true)"


def prepare_run(config: RunConfig, run_dir: Path | None = None, *, resume: bool = False) -> RunDirectory:
    """Create a run's directory, or find the one to resume, and write its configuration and plan.

    A resumed run keeps its plan unless ``config.parallel`` has changed, because other microbatches round their sums
    differently.

    Args:
        config: what to run.
        run_dir: the run's directory; by default ``runs/<model>-<date>-<fingerprint>``.
        resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration; with
            ``training.steps``, a run that took fewer steps, too.

    Raises:
        RunDirectoryError: if the directory holds other files, or already holds this run and ``resume`` is not set.
        ConfigError, DataError, WeightsError, PlanError, EnvironmentMismatchError: if the request cannot be met, or is
            estimated not to fit the device and ``launch.force`` is not set. Nothing has been written then.
    """
    planned = plan_run(_seen_from_anywhere(config))
    try:
        run = existing_run(planned.config, run_dir, resume=resume)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write run directory {str(run_dir)!r}: {error.strerror}; choose another --run-dir"
        ) from None
    check_initial_weights(planned.config, run)
    statistics = _check_data(config)
    is_new = run is None
    if run is None:
        if resume and run_dir is None:
            say("note", f"nothing to resume: {why_none_goes_on(planned.config)}")
        run = new_run(planned.config, run_dir)
    elif run.plan.exists() and load_config(run).parallel == planned.config.parallel:
        planned = _with_kept_plan(planned, run)
    refuse_unfit_on_any_nodes(planned)
    refuse_links(run)
    run.create()
    with only_one_submission(run.logs):
        if is_new and run.config.exists():  # another process may have started a run here since we looked
            existing_run(planned.config, run.path, resume=resume)
        _write(run, planned, statistics)
    return run


def _write(run: RunDirectory, planned: PlannedRun, statistics: DataStatistics | None) -> None:
    if run.config.exists() and settings_to_continue(run).training.steps != planned.config.training.steps:
        for of_fewer_steps in (run.training, run.benchmark):
            of_fewer_steps.unlink(missing_ok=True)
    sizes = {"batch_size": planned.config.batch_size, "seq_len": planned.config.seq_len}
    with atomic_write(run.config) as temporary:
        temporary.write_text(with_keys(planned.config, training=sizes).to_yaml())
    write_json(run.plan, planned.plan.as_dict())
    write_json(run.estimate, planned.estimate.as_dict())
    if planned.choice is not None:
        write_json(run.choice, planned.choice.as_dict())
    if statistics is not None:
        write_json(run.data, statistics.as_dict())


def _with_kept_plan(planned: PlannedRun, run: RunDirectory) -> PlannedRun:
    """Return ``planned`` with the plan that ``run`` has, unless that is for fewer nodes and no job uses it."""
    kept = load_plan(run)
    if kept == planned.plan:
        return planned
    config = planned.config
    machine = detect_machine()
    if kept.world_size == planned.plan.world_size:
        return with_fewest(planned_as(config, machine, plan=kept), planned.on_fewest_nodes)
    num_nodes, left = divmod(kept.world_size * config.launch.nodes, planned.plan.world_size)
    if left or attach(run) is None:
        return planned
    return replace(planned_as(on_nodes(config, num_nodes), machine, plan=kept), config=config)


def check_initial_weights(config: RunConfig, run: RunDirectory | None = None) -> list[str]:
    """Refuse initial weights that do not belong to the model of ``config``.

    A run with a checkpoint no longer needs them, unless it trains adapters: checkpoints leave out frozen weights.

    Returns:
        A sentence for each setting, such as the rotary embedding, in which the model differs from the weights' own.

    Raises:
        WeightsError: if the weights are missing, incomplete or another model's.
    """
    init_from = config.training.init_from
    is_saved = run is not None and newest_checkpoint(run) is not None and config.spec.lora is None
    if init_from is None or is_saved:
        return []
    return check_pretrained(config.spec, Path(resolve_pretrained(init_from)))


def refuse_unfit(estimate: MemoryEstimate, config: RunConfig, how: str) -> None:
    """Refuse a run that does not fit its device, unless ``launch.force`` is set.

    Args:
        estimate: the bytes of a rank.
        config: the run.
        how: how the bytes are known: ``estimated`` or ``rehearsed``.

    Raises:
        DoesNotFitError: if it does not fit; says by how much, and what to change.
    """
    if not estimate.fits and not config.launch.force:
        how = f" ({how})" if not estimate.refusal else ""  # a refusal is always an estimate
        raise DoesNotFitError(f"{'; '.join(estimate.notes)}{how}; {_ALL_THE_SAME}")


def refuse_unfit_on_any_nodes(planned: PlannedRun) -> None:
    """Refuse a run that does not fit its nodes, or the fewest of them (``launch.min_nodes``); see ``refuse_unfit``."""
    refuse_unfit(planned.estimate, planned.config, "estimated")
    if (fewest := planned.on_fewest_nodes) is not None:
        try:
            refuse_unfit(fewest.estimate, fewest.config, "estimated")
        except DoesNotFitError as error:
            raise DoesNotFitError(f"launch.min_nodes={fewest.config.launch.nodes}: {error}") from None


def _check_data(config: RunConfig) -> DataStatistics | None:
    """Refuse unusable data. For a run on this machine, also tokenise them now, where the user sees it."""
    data = config.data
    if data.source == DATALOADER:
        return None
    if config.launch.is_here:
        datasets = load_datasets(data, config.spec, seq_len=config.seq_len, seed=config.training.seed)
        return datasets.statistics
    check_data(data, config.spec)
    return None


def _seen_from_anywhere(config: RunConfig) -> RunConfig:
    """Return ``config`` with absolute paths: workers start, and runs are resumed, in other directories."""
    by_name = {SAMPLE, DATALOADER, BYTES, *BUILT_IN}
    keys = {"source", "validation", "tokenizer", "chat_template", "cache_dir"}
    paths = {
        key: str(user_path(value).absolute())
        for key, value in config.data.model_dump(include=keys).items()
        if value is not None and value not in by_name
    }
    init_from = config.training.init_from
    if init_from is None:
        training = {}
    elif config.launch.is_here:
        training = {"init_from": resolve_intact(init_from, partial(say, "warning"))}
    else:  # the ranks read it, side by side, and refuse it if it is damaged
        training = {"init_from": resolve_pretrained(init_from)}
    return with_keys(config.self_contained(), data=paths, training=training)
