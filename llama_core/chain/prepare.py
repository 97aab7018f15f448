"""Prepare a run. Refuse everything that can be refused before writing its directory."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from llama_core.chain.downloads import INITIAL_WEIGHTS, record_sources, resolve
from llama_core.chain.paths import absolute, data_from_anywhere
from llama_core.chain.planned import PlannedRun, on_nodes, plan_run, planned_as, with_fewest, with_keys
from llama_core.chain.tokenize import refuse_long_wait
from llama_core.config.pretrained import settings_of_weights
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER, TrainingConfig, with_paths
from llama_core.data.check import check_data
from llama_core.data.datasets import load_datasets
from llama_core.data.end_tokens import end_of_learnt_turn, trains_on_conversations
from llama_core.data.statistics import DataStatistics, write_statistics
from llama_core.data.tokenizer import Tokenizer, difference, load_tokenizer, num_moved_tokens
from llama_core.errors import (
    ConfigError,
    DataError,
    DoesNotFitError,
    EnvironmentMismatchError,
    RunDirectoryError,
    WeightsError,
)
from llama_core.evaluation.plan import evaluating_device, evaluation_plan
from llama_core.evaluation.tasks import Asked, find_tasks
from llama_core.hugging_face.bases import record_base, refuse_other_base, refuse_other_base_of
from llama_core.hugging_face.generation_config import generation_config, with_ends
from llama_core.hugging_face.pretrained import (
    check_pretrained,
    origin_of,
    refuse_own_head,
    resolve_intact,
    resolve_pretrained,
    saved_run,
)
from llama_core.launch.jobs.submission import attach, only_one_submission
from llama_core.machine.detect import detect_machine
from llama_core.planning.before import spec_before_run, weights_before_run
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.records.checkpoints import data_digests, newest_checkpoint, newest_step
from llama_core.records.data_changes import allow_data_change as record_allowed_change
from llama_core.records.data_changes import read_data_changes
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import refuse_links
from llama_core.records.files import atomic_write, write_json
from llama_core.records.metrics import read_heartbeat
from llama_core.records.settings_changes import record_settings_change
from llama_core.runs.console import say
from llama_core.runs.continuing import (
    RUNS,
    existing_run,
    has_lost_its_end,
    new_run,
    settings_change,
    settings_to_continue,
    why_none_goes_on,
)
from llama_core.runs.loading import load_config, load_plan
from llama_core.trackers.registry import folders_with_links

_PATHS = {"source", "sources", "validation", "tokenizer", "chat_template", "cache_dir"}
_ALL_THE_SAME = "or run it anyway with --force (launch.force=true)"


def prepare_run(
    config: RunConfig, run_dir: Path | None = None, *, resume: bool = False, allow_data_change: bool = False
) -> RunDirectory:
    """Create a run's directory, or find the one to resume, and write its configuration and plan.

    A resumed run keeps its plan unless ``config.parallel`` has changed, because other microbatches round their sums
    differently.

    Args:
        config: what to run.
        run_dir: the run's directory; by default ``runs/<model>-<date>-<fingerprint>``.
        resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration; with
            ``training.steps``, a run that took fewer steps, too.
        allow_data_change: let the run in ``run_dir`` go on with other sources, weights or stages of its mixture, or
            with other documents; each source that is the same goes on where it was.

    Raises:
        RunDirectoryError: if the directory holds other files, has a name that is not UTF-8, or already holds this run
            and ``resume`` is not set.
        ConfigError, DataError, WeightsError, HubError, PlanError, EnvironmentMismatchError: if the request cannot be
            met, or is estimated not to fit the device and ``launch.force`` is not set. Nothing has been written then,
            except to the cache of the Hub.
    """
    _refuse_undecodable(run_dir or RUNS)
    if allow_data_change:
        _refuse_change_of_nothing(config, run_dir, resume=resume)
    asked = resolve(config)
    planned = plan_run(_seen_from_anywhere(asked.config))
    try:
        run = existing_run(planned.config, run_dir, resume=resume, allow_data_change=allow_data_change)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write run directory {str(run_dir)!r}: {error.strerror}; choose another --run-dir"
        ) from None
    if run is None:
        refuse_unfit_on_any_nodes(planned)  # rather than after a download
    for source in asked.sources:
        if source.setting != INITIAL_WEIGHTS or _needs_initial_weights(planned.config, run):
            source.fetch()
    check_initial_weights(planned.config, run)
    statistics = _check_data(asked.config, has_changed_data=allow_data_change or _has_changed_data(run))
    check_evaluation(planned.config)
    is_new = run is None
    if run is None:
        if resume and run_dir is None:
            say("note", f"nothing to resume: {why_none_goes_on(planned.config)}")
        run = new_run(planned.config, run_dir)
    elif run.plan.exists() and _divides_alike(load_config(run), planned.config):
        planned = _with_kept_plan(planned, run)
    refuse_unfit_on_any_nodes(planned)
    refuse_links(run, folders_with_links())
    run.create()
    with only_one_submission(run.logs):
        if is_new and run.config.exists():  # another process may have started a run here since we looked
            existing_run(planned.config, run.path, resume=resume)
        _write(run, planned, statistics, allow_data_change=allow_data_change)
        record_sources(run, asked)
    return run


def _divides_alike(before: RunConfig, now: RunConfig) -> bool:
    """Return whether a plan for one configuration is one for the other, too: stages may have changed the lengths."""
    return before.parallel == now.parallel and before.seq_lens == now.seq_lens


def _refuse_undecodable(folder: Path) -> None:
    """Refuse a folder whose path holds bytes that are not UTF-8: torch saves no checkpoint there."""
    path = str(folder.absolute())
    try:
        path.encode()
    except UnicodeEncodeError:
        raise RunDirectoryError(
            f"run directory {path!r} has a name that is not UTF-8, below which torch saves no checkpoint; "
            "choose another --run-dir"
        ) from None


def _write(
    run: RunDirectory, planned: PlannedRun, statistics: DataStatistics | None, *, allow_data_change: bool
) -> None:
    if allow_data_change:
        record_allowed_change(run, data_digests(run))  # before the run has settings that need it
    if newest_step(run):
        change = settings_change(run, planned.config)
        if change is not None and change.step:
            record_settings_change(run, change)
    if run.config.exists() and (_is_extended(run, planned.config.training) or has_lost_its_end(run)):
        for of_fewer_steps in (run.training, run.benchmark):
            of_fewer_steps.unlink(missing_ok=True)
    sizes = {"batch_size": planned.config.first_batch_size, "seq_len": planned.config.first_seq_len}
    with atomic_write(run.config) as temporary:
        temporary.write_text(with_keys(planned.config, training=sizes).to_yaml())
    write_json(run.plan, planned.plan.as_dict())
    write_json(run.estimate, planned.estimate.as_dict())
    _keep_generation_config(run, planned.config)
    record_base(run, planned.config)
    if planned.choice is not None:
        write_json(run.choice, planned.choice.as_dict())
    if statistics is not None:
        write_statistics(run, statistics, planned.config.data)


def _is_extended(run: RunDirectory, training: TrainingConfig) -> bool:
    """Return whether a run is to go on beyond its end: to another last step, or with other patience."""
    before = settings_to_continue(run).training
    if before.steps != training.steps:
        return True
    newest = read_heartbeat(run)
    ended_early = newest is not None and newest.step < newest.total_steps
    return ended_early and before.patience != training.patience


def _keep_generation_config(run: RunDirectory, config: RunConfig) -> None:
    """Write how the initial weights generate, for exports: once the run has a checkpoint, they may be gone."""
    if config.training.init_from is None or run.generation_config.exists():
        return
    source = Path(config.training.init_from)
    generation = with_ends(generation_config(source), _learnt_ends(source))
    tokenizers = _own_and_brought(config, source)
    if tokenizers is not None and num_moved_tokens(*tokenizers):  # its ids are other tokens now
        generation = {key: value for key, value in generation.items() if not key.endswith("_token_id")}
    if generation:
        write_json(run.generation_config, generation)


def _learnt_ends(source: Path) -> list[int]:
    """Return the token that ends a turn of the conversations that a checkpoint has learnt, which its export names."""
    if not trains_on_conversations(source):
        return []
    before = saved_run(source)
    try:
        ends = end_of_learnt_turn(source, before, load_tokenizer(before.data.tokenizer))
    except (DataError, EnvironmentMismatchError) as error:
        say("note", f"the end of the turns that {source} has learnt is unknown: {error}")
        return []
    return [end[0] for end in ends if len(end) == 1]


def _with_kept_plan(planned: PlannedRun, run: RunDirectory) -> PlannedRun:
    """Return ``planned`` with the plan that ``run`` has, unless that is for fewer nodes and no job uses it."""
    kept = load_plan(run)
    if kept == planned.plan:
        return planned
    config = planned.config
    machine = detect_machine()
    if kept.world_size == planned.plan.world_size:
        return with_fewest(planned_as(config, machine, plan=kept), planned.on_fewest_nodes)
    num_nodes, left = divmod(kept.world_size * config.num_nodes, planned.plan.world_size)
    if left or attach(run) is None:
        return planned
    return replace(planned_as(on_nodes(config, num_nodes), machine, plan=kept), config=config)


def check_initial_weights(config: RunConfig, run: RunDirectory | None = None) -> list[str]:
    """Refuse initial weights that do not belong to the model of ``config``.

    A run with a checkpoint no longer needs them, unless it trains adapters: checkpoints leave out frozen weights.

    Returns:
        A sentence for each setting, such as the rotary embedding, in which the model differs from the weights' own.

    Raises:
        WeightsError: if the weights are missing, incomplete or another model's, or their ``generation_config.json`` is
            damaged.
    """
    refuse_unfit_teacher(config, run)
    init_from = config.training.init_from
    if init_from is None or not _needs_initial_weights(config, run):
        return []
    source = Path(resolve_pretrained(init_from))
    generation_config(source)  # the run keeps it
    notes = check_pretrained(config.spec, source)
    origin = origin_of(source)
    refuse_own_head(config.spec, origin)
    refuse_other_base_of(origin)
    if run is not None and newest_step(run):
        refuse_other_base(run, origin)
    return notes


def refuse_unfit_teacher(config: RunConfig, run: RunDirectory | None = None) -> None:
    """Refuse a model to learn from that is no model, or has another tokenizer or vocabulary than the run.

    A run with a checkpoint no longer needs it.

    Raises:
        WeightsError: if its weights are missing, incomplete or another model's.
        ConfigError: if its tokens are others.
    """
    name = weights_before_run(config)
    if name is None or (run is not None and newest_step(run)):
        return
    source = Path(resolve_pretrained(name))
    if not settings_of_weights(str(source)):
        raise WeightsError(f"training.teacher={name} holds no model; name a Hugging Face folder, or a run")
    spec = spec_before_run(config)
    check_pretrained(spec, source)
    if spec.vocab_size != config.spec.vocab_size:
        raise ConfigError(
            f"training.teacher={name} has a vocabulary of {spec.vocab_size:,} tokens and {config.spec.name} one of "
            f"{config.spec.vocab_size:,}; choose a teacher with the same tokenizer"
        )
    tokenizers = _own_and_brought(config, source)
    if tokenizers is not None and (found := difference(*tokenizers)):
        raise ConfigError(
            f"training.teacher={name} has learnt with another tokenizer than data.tokenizer={config.data.tokenizer}: "
            f"{found}; choose a teacher with the same one"
        )


def other_tokenizer(config: RunConfig, run: RunDirectory | None = None) -> list[str]:
    """Return a sentence if a run gives the tokens of its initial weights, should it need them, other ids."""
    init_from = config.training.init_from
    if init_from is None or not _needs_initial_weights(config, run):
        return []
    source = Path(resolve_pretrained(init_from))
    tokenizers = _own_and_brought(config, source)
    if tokenizers is None or not (found := difference(*tokenizers)):
        return []
    if num_moved_tokens(*tokenizers):
        found += ", so its end tokens are not kept"
    own = tokenizers[1].name
    return [
        f"data.tokenizer={config.data.tokenizer} is not the tokenizer that {source} has learnt with: {found}; use "
        f"{'its own' if own == str(source) else own}, or ignore this if it is intended"
    ]


def _own_and_brought(config: RunConfig, source: Path) -> tuple[Tokenizer, Tokenizer] | None:
    """Return the tokenizers of a run and of its initial weights; None if they are one, or one of them is unknown."""
    brought = settings_of_weights(str(source)).get("data", {}).get("tokenizer")
    own = config.data.tokenizer
    if brought in {None, own} or config.data.source == DATALOADER:
        return None
    try:
        return load_tokenizer(own), load_tokenizer(brought)
    except (DataError, EnvironmentMismatchError):  # the run's own is refused where the data are read
        return None


def _needs_initial_weights(config: RunConfig, run: RunDirectory | None) -> bool:
    is_saved = run is not None and newest_checkpoint(run) is not None and config.spec.lora is None
    return config.training.init_from is not None and not is_saved


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
            raise DoesNotFitError(f"launch.min_nodes={fewest.config.num_nodes}: {error}") from None


def _refuse_change_of_nothing(config: RunConfig, run_dir: Path | None, *, resume: bool) -> None:
    """Refuse to change the data of a run that does not go on, or reads no mixture."""
    if not (resume and run_dir is not None and config.data.sources):
        raise ConfigError(
            "--allow-data-change is for a run on a mixture (data.sources) that goes on; name it with --resume --run-dir"
        )


def _has_changed_data(run: RunDirectory | None) -> bool:
    return run is not None and bool(read_data_changes(run).may_follow)


def _check_data(config: RunConfig, *, has_changed_data: bool) -> DataStatistics | None:
    """Refuse unusable data. For a run on this machine, also tokenise them now, where the user sees it.

    Args:
        config: the run.
        has_changed_data: whether it goes on from other data. What it reads of each source then depends on its
            checkpoint, so that its ranks check the epochs.
    """
    data = config.data
    if data.source == DATALOADER:
        return None
    if config.launch.is_here:
        datasets = load_datasets(
            data,
            config.spec,
            seq_len=config.first_seq_len,
            num_sequences=None if has_changed_data else config.num_sequences,
            stages=config.stages,
            objective=config.objective,
        )
        return datasets.statistics
    check_data(data, config.spec, reads=config.objective.reads)
    refuse_long_wait(config)
    return None


def check_evaluation(config: RunConfig) -> None:
    """Refuse data and tasks that the run's checkpoints could not be evaluated on.

    The first records of the data are read, and the data sets of tasks downloaded: the nodes may have no network.

    Raises:
        ConfigError: if data cannot be used, a task is unknown, or has code.
        ConfigError, PlanError, DoesNotFitError: if the devices of an evaluation cannot hold or divide the model.
        DataError, HubError, EnvironmentMismatchError: if a task's data or the harness cannot be had.
    """
    asked = config.evaluation
    if asked.is_asked_for:
        _check_evaluating_devices(config)
    how = Asked.of(asked)
    if asked.tasks:
        find_tasks(asked.tasks, asked.include_path, how, tell=partial(say, "note"))
    for name, source in asked.data.items():
        alone: dict[str, object] = {"source": source, "sources": {}, "stages": (), "validation": None}
        try:
            check_data(config.data.model_copy(update=alone), config.spec)
        except DataError as error:
            raise ConfigError(f"evaluation.data.{name}: {error}") from None


def _check_evaluating_devices(config: RunConfig) -> None:
    device = evaluating_device(config, while_training=True)
    if device == "auto":
        return
    shared = evaluation_plan(config, device)
    plan = shared.plan
    num_here = len(detect_machine().gpus)
    if config.launch.is_here and device == "cuda" and plan.world_size > num_here:
        raise EnvironmentMismatchError(
            f"evaluation.gpus={plan.world_size} are more than the {num_here} GPUs of this machine; use fewer, or "
            "evaluation.device=cpu"
        )
    asked = config.evaluation
    chosen = {"tp": plan.tp, "pp": plan.pp, "nodes": shared.nodes}
    larger = [f"evaluation.{key}={size}" for key, size in chosen.items() if size > 1 and getattr(asked, key) == "auto"]
    if larger:
        say("note", f"{', '.join(larger)}: fewer GPUs do not hold {config.spec.name} in {asked.dtype}")


def _seen_from_anywhere(config: RunConfig) -> RunConfig:
    """Return ``config`` with absolute paths: workers start, and runs are resumed, in other directories."""
    init_from = config.training.init_from
    training: dict[str, object] = {}
    if init_from is not None and config.launch.is_here:
        training["init_from"] = resolve_intact(init_from, partial(say, "warning"))
    elif init_from is not None:  # the ranks read it, side by side, and refuse it if it is damaged
        training["init_from"] = resolve_pretrained(init_from)
    teacher = weights_before_run(config)
    if teacher is not None:
        training["teacher"] = resolve_pretrained(teacher)
    data = data_from_anywhere(config.data).model_dump(include=_PATHS)
    asked = config.evaluation
    folder = None if asked.include_path is None else absolute(asked.include_path)
    evaluation = {
        "data": {name: with_paths(source, absolute) for name, source in asked.data.items()},
        "include_path": folder,
    }
    profile = config.launch.machine_profile
    launch = {"machine_profile": None if profile is None else absolute(profile)}
    sections = {"data": data, "training": training, "evaluation": evaluation, "launch": launch}
    return with_keys(config.self_contained(), **sections)
