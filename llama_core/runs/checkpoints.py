"""Find the checkpoints of a run that are asked for: of a step, the newest, the best, or several to average."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from llama_core.config.recorded import LENGTH, RECORDED, other_differences
from llama_core.config.run import RunConfig
from llama_core.errors import CheckpointError, ConfigError, RunDirectoryError
from llama_core.hugging_face.pretrained import refuse_damaged
from llama_core.records.checkpoints import (
    checkpoint_name,
    checkpoint_step,
    list_checkpoints,
    newest_intact_checkpoint,
    run_of,
)
from llama_core.records.data_changes import read_data_changes
from llama_core.records.directory import RunDirectory
from llama_core.records.retention import by_held_out_loss
from llama_core.runs.loading import load_config

Best = Literal["best"]
"""Stands for the step of the checkpoint with the lowest held-out loss."""


def find_checkpoint(
    run: RunDirectory, step: int | Best | None, tell: Callable[[str], None] = lambda text: None
) -> Path:
    """Return the directory of the checkpoint of ``step``, or of the newest intact one. Reads all of it.

    Args:
        run: the run.
        step: step of the checkpoint, or ``best`` for the one with the lowest held-out loss.
        tell: called with a line about each later one that is damaged.

    Raises:
        RunDirectoryError: if there is none; the message names those that exist.
        CheckpointError: if it is damaged, or all are, or if it is another run's.
    """
    if step is None:
        newest = newest_intact_checkpoint(run, tell)
        if newest is None:
            raise RunDirectoryError(f"{run.path} has no checkpoint; train the run until it saves one")
        refuse_checkpoint_of_another(newest)
        return newest
    found = list_checkpoints(run)
    wanted = _best_of(run, found) if step == "best" else run.checkpoints / checkpoint_name(step)
    if wanted not in found:
        raise RunDirectoryError(f"{run.path} has no checkpoint of step {step}; there are {_steps_of(found)}")
    refuse_damaged(wanted)
    refuse_checkpoint_of_another(wanted)
    return wanted


def refuse_checkpoint_of_another(checkpoint: Path) -> None:
    """Refuse a checkpoint that was saved with settings that the run in whose folder it is cannot have had.

    Args:
        checkpoint: the checkpoint; one that is in no run is accepted.

    Raises:
        CheckpointError: naming what differs.
        ConfigError: if the settings of the run or of the checkpoint cannot be read.
    """
    run = run_of(checkpoint)
    if not run.config.exists():
        return
    saved = RunConfig.load(checkpoint.absolute() / run.config.name, below=run.path)
    may_change_data = bool(read_data_changes(run).may_follow)
    changed = other_differences(saved, load_config(run), LENGTH | RECORDED, may_change_data=may_change_data)
    if changed:
        raise CheckpointError(
            f"{checkpoint} was saved with other settings than {run.path} has ({'; '.join(changed.values())}); move it "
            f"away if it is another run's, or restore {run.config.name} if that was edited"
        )


def _best_of(run: RunDirectory, checkpoints: Sequence[Path]) -> Path:
    by = load_config(run).training.keep_best_by
    ranked = by_held_out_loss(checkpoints, by)
    if not ranked:
        of = f" of {by}" if by else ""
        raise RunDirectoryError(
            f"{run.path} has no checkpoint with a held-out loss{of}, so none is the best; training.keep_best evaluates "
            f"after each step that is saved; there are checkpoints of steps {_steps_of(checkpoints)}"
        )
    return ranked[0]


def checkpoints_to_average(run: RunDirectory, which: str) -> list[Path]:
    """Return the directories of several checkpoints, oldest first. Reads all of them.

    Args:
        run: the run.
        which: ``last:5`` for the newest five, or steps, as in ``1000,1200,1400``.

    Raises:
        ConfigError: if ``which`` is something else, or names a step twice.
        RunDirectoryError: if there are not as many, or not of these steps; the message names those that exist.
        CheckpointError: if one of them is damaged, or another run's.
    """
    if not re.fullmatch(r"last:[0-9]{1,6}|[0-9]{1,18}(,[0-9]{1,18})*", which):
        raise ConfigError(f"average={which}: give last:5 for the newest five checkpoints, or steps, as in 1000,1200")
    if not which.startswith("last:"):
        steps = [int(step) for step in which.split(",")]
        if len(set(steps)) < len(steps):
            raise ConfigError(f"average={which} names a step twice; name each once")
        return [find_checkpoint(run, step) for step in sorted(steps)]
    number = int(which.removeprefix("last:"))
    found = list_checkpoints(run)
    if not 0 < number <= len(found):
        raise RunDirectoryError(
            f"average={which}: {run.path} has {len(found)} checkpoints (steps: {_steps_of(found)}); give 1 or more, "
            "but not more than there are, and keep more with training.keep_checkpoints"
        )
    for path in found[-number:]:
        refuse_damaged(path)
        refuse_checkpoint_of_another(path)
    return found[-number:]


def _steps_of(checkpoints: Sequence[Path]) -> str:
    """Return the steps of checkpoints in words."""
    return ", ".join(str(checkpoint_step(path)) for path in checkpoints) or "none"
