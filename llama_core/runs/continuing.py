"""Run directories: find the one to continue, say how it is continued, and name a new one."""

import glob
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import NoReturn

from llama_core.config.recorded import (
    LENGTH,
    OR_ALLOW_DATA_CHANGE,
    RECORDED,
    changed_on_purpose,
    differences,
    is_of_mixture,
    may_extend,
    refuse_edited,
    trained_settings,
    values_of,
)
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER, DataSource
from llama_core.errors import CheckpointError, ConfigError, RunDirectoryError
from llama_core.launch.jobs.submission import attach
from llama_core.launch.outcome import concluded, read_outcome
from llama_core.records.checkpoints import (
    checkpoint_step,
    list_checkpoints,
    newest_intact_checkpoint,
    newest_step,
)
from llama_core.records.data_changes import read_data_changes
from llama_core.records.directory import RunDirectory, command_to_resume
from llama_core.records.file_owners import other_owner, refuse_foreign
from llama_core.records.files import read_typed
from llama_core.records.job import JobRecord
from llama_core.records.settings_changes import SettingsChange, read_settings_changes
from llama_core.redaction import shell_word
from llama_core.runs.loading import load_config
from llama_core.storage.copies import run_from_mirror

RUNS = Path("runs")
_MAX_NAMED = 3
"""Most settings that a sentence names."""


def resume_command(run: RunDirectory, source: DataSource | None) -> str:
    """Return the command that continues a run.

    Args:
        run: the run.
        source: its data source; a run on a caller's dataloader is continued from Python.
    """
    return command_to_resume(run, from_python=source == DATALOADER)


def resume_point(run: RunDirectory) -> str:
    """Return where ``run`` goes on when it is resumed, as the end of a sentence about it."""
    return continuing(newest_step(run))


def continuing(step: int) -> str:
    """Return where a run with a newest checkpoint of ``step`` goes on, as the end of a sentence about it."""
    return f"continues after step {step}" if step else "starts over, since there is no checkpoint yet"


def step_to_continue(run: RunDirectory, tell: Callable[[str], None]) -> int:
    """Return the step after which ``run`` goes on; 0 if it has no checkpoint.

    If its ranks run on this machine, the newest checkpoint is read here, all of it, as they will do. Ranks elsewhere
    read it side by side; until then only the sizes of its files are known.

    Args:
        run: the run.
        tell: called with a line about each later checkpoint that is damaged.

    Raises:
        CheckpointError: if there are checkpoints, but all are damaged.
    """
    config = load_config(run)
    if not config.launch.is_here:
        return newest_step(run)
    try:
        intact = newest_intact_checkpoint(run, tell)
    except CheckpointError as error:
        again = resume_command(run, config.data.source)
        raise CheckpointError(f"{error}, or move them away to start over, and continue with: {again}") from None
    return checkpoint_step(intact) if intact else 0


def is_finished(run: RunDirectory) -> bool:
    """Return whether the run has reached its last step."""
    # A job that only timed steps also ends as finished, but writes no training summary.
    return run.training.exists() and run.outcome.exists() and read_outcome(run).status == "finished"


def has_lost_its_end(run: RunDirectory) -> bool:
    """Return whether a finished run has checkpoints, but no complete one of its last step any more."""
    return is_finished(run) and 0 < newest_step(run) < read_outcome(run).step


def existing_run(
    config: RunConfig, run_dir: Path | None, *, resume: bool, allow_data_change: bool = False
) -> RunDirectory | None:
    """Return the run that a request continues, or None if it starts a new one.

    Args:
        config: the request, with its defaults filled in.
        run_dir: the requested directory; None looks through ``RUNS``.
        resume: whether to continue a run: the newest unfinished one of this configuration, or else, with
            ``training.steps``, the newest that took fewer steps and differs in nothing else, finished or not.
        allow_data_change: whether the run in ``run_dir`` may go on with other sources, weights and stages of its
            mixture.

    Raises:
        RunDirectoryError: if the directory holds other files, or somebody else's run, or already holds this run and
            ``resume`` is not set, or ``config`` asks for fewer steps than the run has taken, or differs from what its
            newest checkpoint was trained with.
    """
    if run_dir is None:
        return _newest_to_continue(config) if resume else None
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
    refuse_foreign(run, "continue it")
    recorded = load_config(run)
    trained = trained_settings(run)
    may_change_data = allow_data_change or _keeps_changed_data(run, recorded, config)
    changed = _changed(recorded, trained, config, may_change_data=may_change_data)
    asked = differences(recorded, config)
    may_change = changed_on_purpose(asked, config, read_settings_changes(run)) if resume else set()
    changed = {key: clause for key, clause in changed.items() if key not in may_change}
    if changed and not (resume and may_extend(config, changed)):
        _refuse_other_settings(run, recorded, trained, config, resume=resume)
    refuse_edited(run, config, trained, may_change=may_change, may_change_data=may_change_data)
    _refuse_change_of_running_job(run, asked)
    if changed:
        _check_extension(run, config.training.steps)
    elif (trained or recorded).training.steps != config.training.steps:  # by hand, in config.yaml
        _refuse_fewer_steps(run, config.training.steps)
    if not resume:
        _refuse_second_start(run)
    return run


def _refuse_second_start(run: RunDirectory) -> NoReturn:
    job = attach(run)
    if job is None:
        raise RunDirectoryError(f"{run.path} already holds this run; add --resume to continue it")
    path = shell_word(run.path)
    raise RunDirectoryError(
        f"{run.path} already holds this run, and its job is running ({job.kind} {job.record.job_id}); follow it with: "
        f"training-infra logs {path} --follow, or stop it first with: training-infra cancel {path}"
    )


def _keeps_changed_data(run: RunDirectory, recorded: RunConfig, config: RunConfig) -> bool:
    """Return whether a run whose data were allowed to change goes on with those of its ``config.yaml``.

    That has them from then on, but a checkpoint only once they have been trained on.
    """
    return bool(read_data_changes(run).may_follow) and not any(map(is_of_mixture, differences(recorded, config)))


def _refuse_other_settings(
    run: RunDirectory, recorded: RunConfig, trained: RunConfig | None, config: RunConfig, *, resume: bool
) -> NoReturn:
    may_change = changed_on_purpose((), recorded, read_settings_changes(run))
    may_change_data = bool(read_data_changes(run).may_follow)
    refuse_edited(run, recorded, trained, may_change=may_change, may_change_data=may_change_data)
    changed = _changed(recorded, trained, config)
    if resume:
        changed = {key: clause for key, clause in changed.items() if key not in RECORDED}
    others = _changed(recorded, trained, config, may_change_data=True)
    is_allowed_without = len(others) < len(changed) and (not others or may_extend(config, others))
    remedy = OR_ALLOW_DATA_CHANGE if is_allowed_without else ""
    if not resume and RECORDED.issuperset(changed):
        remedy = ", or add --resume to go on with it, which records the change"
    refused = [key for key in changed if key not in LENGTH]
    why = f"{', '.join(refused)} cannot change on resume, as docs/runs.md says; " if resume and refused else ""
    raise RunDirectoryError(
        f"{run.path} holds a run of another configuration ({'; '.join(changed.values())}); {why}choose another "
        f"--run-dir{remedy}"
    )


def _refuse_change_of_running_job(run: RunDirectory, asked: Collection[str]) -> None:
    """Refuse to change settings of a run, by their keys, while its job trains with those that it has."""
    whose = "its data" if any(map(is_of_mixture, asked)) else ", ".join(sorted(RECORDED.intersection(asked)))
    if whose and attach(run) is not None:
        raise RunDirectoryError(f"{run.path}: its job is running; cancel it, or wait for it, to change {whose}")


def settings_change(run: RunDirectory, config: RunConfig) -> SettingsChange | None:
    """Return how the settings with which a run goes on differ from those of its newest checkpoint.

    None if they do not, and every checkpoint was saved after the changes that are recorded: only otherwise is the
    checkpoint read to find out after which step it goes on.
    """
    before = settings_to_continue(run)
    keys = RECORDED.intersection(differences(before, config))
    oldest = min(map(checkpoint_step, list_checkpoints(run)), default=0)
    if not keys and all(change.step < oldest for change in read_settings_changes(run)):
        return None
    return SettingsChange(step_to_continue(run, lambda line: None), values_of(before, keys), values_of(config, keys))


def settings_to_continue(run: RunDirectory) -> RunConfig:
    """Return the settings that a run goes on with: its newest checkpoint's, or those of ``config.yaml`` without one."""
    return trained_settings(run) or load_config(run)


def _changed(
    recorded: RunConfig, trained: RunConfig | None, config: RunConfig, *, may_change_data: bool = False
) -> dict[str, str]:
    """Return how ``config`` differs from what a run trained with so far, and from the length that it was asked for.

    Args:
        recorded: the run's ``config.yaml``.
        trained: the settings of its newest checkpoint.
        config: what is asked for.
        may_change_data: leave out the sources, weights and stages of a mixture.
    """
    so_far = differences(trained or recorded, config)
    asked = differences(recorded, config)
    changed = {key: clause for key, clause in so_far.items() if key not in LENGTH} | {
        key: clause for key, clause in asked.items() if key in LENGTH
    }
    if may_change_data:
        return {key: clause for key, clause in changed.items() if not is_of_mixture(key)}
    return changed


def _refuse_fewer_steps(run: RunDirectory, num_steps: int | None) -> None:
    step = newest_step(run)
    if num_steps is not None and num_steps <= step:
        raise RunDirectoryError(
            f"training.steps={num_steps}: {run.path} has already taken {step} steps; ask for more, or choose another "
            "--run-dir"
        )


def _check_extension(run: RunDirectory, num_steps: int | None) -> None:
    _refuse_fewer_steps(run, num_steps)
    if attach(run) is not None:
        raise RunDirectoryError(f"{run.path}: its job is running; cancel it, or wait for it, to change training.steps")


def run_here(url: str, *, resume: bool, tell: Callable[[str], None]) -> Path:
    """Return the directory below ``RUNS`` in which the run of an address, on a mirror, goes on.

    Args:
        url: the address.
        resume: whether it is to go on.
        tell: called with a line about each checkpoint that is copied or passed over.

    Raises:
        RunDirectoryError: unless ``resume`` is set, or if another run has the directory.
        StorageError: if there is no such run, or it has no intact checkpoint.
    """
    if not resume:
        raise RunDirectoryError(
            f"{url} is an address, and a run trains in a directory here; add --resume to go on with the run that is "
            "there, or set training.checkpoint_mirror to have the checkpoints of a new one copied"
        )
    return run_from_mirror(url, RUNS, tell)


def new_run(config: RunConfig, run_dir: Path | None) -> RunDirectory:
    """Return the directory of a new run: ``run_dir``, or a free name below ``RUNS``."""
    if run_dir is not None:
        return RunDirectory(run_dir)
    name = f"{_name(config)}-{datetime.now(UTC):%Y%m%d}-{config.fingerprint()[:4]}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    runs = (RunDirectory(RUNS / name) for name in names)
    return next(run for run in runs if not run.path.exists() or _never_began(run))


def _name(config: RunConfig) -> str:
    return config.tracking.run_name or config.spec.name


def _newest_to_continue(config: RunConfig) -> RunDirectory | None:
    shorter = None
    num_steps = config.training.steps or 0
    for run, changed in _newest_first(config):
        if not changed and not _is_seen_to_its_end(run):
            return run
        if shorter is None and may_extend(config, changed) and 0 < newest_step(run) < num_steps:
            shorter = run
    if shorter is not None:
        _check_extension(shorter, config.training.steps)
    return shorter


def why_none_goes_on(config: RunConfig) -> str:
    """Return why ``RUNS`` holds no run that ``--resume`` would continue, as a clause about the run most like it."""
    found = list(_newest_first(config))
    if not found:
        return f"{RUNS} holds no run of {_name(config)}"
    run, changed = min(found, key=lambda pair: len(pair[1]))
    if not changed or may_extend(config, changed):
        taken = newest_step(run)
        return f"{run.path} " + (
            f"has already taken {taken} steps; ask for more to extend it" if taken else "has no checkpoint"
        )
    on_purpose = f"; to go on with it so, add --run-dir {shell_word(run.path)}" if RECORDED.issuperset(changed) else ""
    return f"{run.path} differs: {'; '.join(list(changed.values())[:_MAX_NAMED])}{on_purpose}"


def _is_seen_to_its_end(run: RunDirectory) -> bool:
    return is_finished(run) and run.report.exists()


def _newest_first(config: RunConfig) -> Iterator[tuple[RunDirectory, dict[str, str]]]:
    """Yield the runs in ``RUNS`` of this name, the last configured first, and how they differ from ``config``."""
    pattern = f"{glob.escape(_name(config))}-*/config.yaml"
    for path in sorted(RUNS.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True):
        run = RunDirectory(path.parent)
        if other_owner(run) is not None:
            continue
        try:
            yield run, _changed(load_config(run), trained_settings(run), config)
        except ConfigError:  # of another version
            continue


def _never_began(run: RunDirectory) -> bool:
    """Return whether a run of ours was refused or cancelled before its first step: its directory may be reused."""
    if run.heartbeat.exists() or not run.outcome.exists() or list_checkpoints(run) or other_owner(run) is not None:
        return False
    if run.job.exists() and concluded(run, read_typed(run.job, JobRecord)) is None:  # it has been started again
        return False
    return read_outcome(run).status in {"bad-config", "cancelled"}
