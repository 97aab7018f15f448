"""The settings that a run was trained with: its newest checkpoint has a copy, whatever becomes of ``config.yaml``."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from llama_core.config.run import RunConfig
from llama_core.config.strict_yaml import MAX_BYTES_OF_YAML
from llama_core.errors import CheckpointError, ConfigError, Problem, RunDirectoryError
from llama_core.records.checkpoints import is_complete, list_checkpoints, recorded_sums
from llama_core.records.checksums import find_damage
from llama_core.records.data_changes import read_data_changes
from llama_core.records.directory import RunDirectory
from llama_core.records.files import by_dotted_key, read_file
from llama_core.records.settings_changes import SettingsChange, newest_values, read_settings_changes
from llama_core.redaction import shell_word

OR_ALLOW_DATA_CHANGE = (
    ", or let the sources that stay the same go on where they were, with --resume --allow-data-change"
)
OR_CHANGE_ON_RESUME = "; to change them on purpose, restore the file and give them beside --resume, as flags or --set"
LENGTH = {known.name for known in RunConfig.known_keys() if known.key.on_resume == "extend"}
"""The keys that a run may change when it is resumed with a number of steps."""
RECORDED = {known.name for known in RunConfig.known_keys() if known.key.on_resume == "record"}
"""The keys that a run may change when it is resumed, with a record of the change."""


def settings_file(run: RunDirectory) -> Path | None:
    """Return the newest intact copy of a run's settings in a checkpoint, or None."""
    for checkpoint in reversed(list_checkpoints(run)):
        copy = checkpoint / run.config.name
        try:
            sums = recorded_sums(checkpoint)
        except CheckpointError:
            continue
        own = {name: written for name, written in sums.items() if name == copy.name}
        if is_complete(checkpoint) and copy.exists() and not find_damage(checkpoint, own, below=run.path):
            return copy
    return None


def trained_settings(run: RunDirectory) -> RunConfig | None:
    """Return the settings that a run's newest checkpoint was trained with; None without one that can be read."""
    copy = settings_file(run)
    try:
        return None if copy is None else RunConfig.load(copy, below=run.path)
    except ConfigError:  # of another version
        return None


def load_recorded(run: RunDirectory) -> RunConfig:
    """Return the settings in a run's ``config.yaml``.

    The steps of a run hand each other its directory, so each asks for its settings. A text is validated once.

    Raises:
        ConfigError: naming the file, every problem in it, and how to get the settings back.
    """
    content = None
    with suppress(OSError):  # whoever reads it next says what is wrong
        content = read_file(run.config, run.path, MAX_BYTES_OF_YAML)
    try:
        return _validated(run.path, content)
    except ConfigError as error:
        *others, last = (Problem(f"{run.config} is empty"),) if _is_empty(run) else error.records
        raise ConfigError(*others, replace(last, remedy=how_to_restore(run))) from None


@lru_cache(maxsize=64)
def _validated(run_path: Path, content: bytes | None) -> RunConfig:
    """Return the settings of a run; by ``content``, a text is told from what it was before."""
    return RunConfig.load(RunDirectory(run_path).config, below=run_path)


def _is_empty(run: RunDirectory) -> bool:
    try:
        return not read_file(run.config, run.path).strip()
    except OSError:
        return False


def how_to_restore(run: RunDirectory) -> str:
    """Return what brings back the settings of a run, as a clause."""
    copy = settings_file(run)
    if copy is None:
        return f"restore {run.config} from a backup, or start a new run"
    return f"get the run's settings back with: cp {shell_word(copy)} {shell_word(run.config)}"


def differences(one: RunConfig, other: RunConfig) -> dict[str, str]:
    """Return each key in which what two runs train differs, with a clause that has both values."""
    return dict(_differences(one, other))


def _differences(one: RunConfig, other: RunConfig) -> Iterator[tuple[str, str]]:
    left = by_dotted_key(one.identity())
    right = by_dotted_key(other.identity())
    for key in sorted(left | right):
        if left.get(key) != right.get(key):
            there, here = (repr(side[key]) if key in side else "unset" for side in (left, right))
            yield key, f"{key} is {there} there, {here} here"


def values_of(config: RunConfig, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of some dotted keys."""
    values = by_dotted_key(config.model_dump(mode="json"))
    return {key: values[key] for key in sorted(keys)}


def changed_on_purpose(asked: Collection[str], config: RunConfig, changes: Sequence[SettingsChange]) -> set[str]:
    """Return the keys that a resumed run may have other values of than its newest checkpoint.

    Args:
        asked: the keys in which the request differs from ``config.yaml``; a value that was edited there is none.
        config: the request.
        changes: those that are recorded; no checkpoint may have been saved since.
    """
    newest = newest_values(changes)
    now = values_of(config, RECORDED)
    return {key for key in RECORDED if key in asked or (key in newest and newest[key] == now[key])}


def may_extend(config: RunConfig, changed: Iterable[str]) -> bool:
    """Return whether a run goes on although some keys differ: they are only its length, and ``config`` has steps."""
    return config.training.steps is not None and LENGTH.issuperset(changed)


def is_of_mixture(key: str) -> bool:
    """Return whether a key is one of the sources, the weights and the stages of a mixture."""
    return key.startswith(("data.sources.", "data.stages"))


def other_differences(
    one: RunConfig, other: RunConfig, may_differ: Collection[str], *, may_change_data: bool
) -> dict[str, str]:
    """Return ``differences`` but for some keys and, if data may change, those of the mixture."""
    return {
        key: clause
        for key, clause in differences(one, other).items()
        if key not in may_differ and not (may_change_data and is_of_mixture(key))
    }


def refuse_edited(
    run: RunDirectory,
    config: RunConfig,
    trained: RunConfig | None,
    *,
    may_change: Collection[str] = (),
    may_change_data: bool = False,
) -> None:
    """Refuse to go on with other settings than a run's newest checkpoint was trained with; it may get more steps.

    Args:
        run: the run.
        config: what its ``config.yaml`` holds now.
        trained: its ``trained_settings``.
        may_change: keys that may differ, of ``changed_on_purpose``.
        may_change_data: whether a mixture may get other sources, weights and stages.

    Raises:
        RunDirectoryError: naming what differs.
    """
    changed = {} if trained is None else other_differences(trained, config, may_change, may_change_data=may_change_data)
    if not changed or may_extend(config, changed):
        return
    raise RunDirectoryError(
        f"{run.config} has changed since {run.path} was trained ({'; '.join(changed.values())}); "
        f"{how_to_restore(run)}, or choose another --run-dir to train with other settings"
        f"{OR_CHANGE_ON_RESUME if RECORDED.issuperset(changed) else ''}"
        f"{OR_ALLOW_DATA_CHANGE if all(map(is_of_mixture, changed)) else ''}"
    )


def refuse_unrecorded_edits(run: RunDirectory, config: RunConfig) -> None:
    """Refuse a ``config.yaml`` that differs from a run's newest checkpoint in more than the changes on record.

    Raises:
        RunDirectoryError: as ``refuse_edited``, or if a record cannot be read.
    """
    may_change = changed_on_purpose((), config, read_settings_changes(run))
    may_change_data = bool(read_data_changes(run).may_follow)
    refuse_edited(run, config, trained_settings(run), may_change=may_change, may_change_data=may_change_data)
