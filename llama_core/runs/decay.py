"""Branch a run off the stable phase of another: from one of its checkpoints on, the learning rate decays."""

import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from llama_core.config.overrides import Override
from llama_core.config.recorded import RECORDED, differences, values_of
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER
from llama_core.errors import CheckpointError, ConfigError, RunDirectoryError
from llama_core.records.checkpoints import (
    LATEST,
    MANIFEST,
    checkpoint_step,
    recorded_sums,
    write_manifest,
)
from llama_core.records.checksums import FileSum
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import refuse_foreign, refuse_links
from llama_core.records.metrics import copy_metrics, read_metrics
from llama_core.records.settings_changes import read_settings_changes, record_settings_change
from llama_core.runs.checkpoints import Best, find_checkpoint
from llama_core.runs.export import refuse_files_in, staging_folder
from llama_core.runs.loading import load_config
from llama_core.trackers.registry import folders_with_links
from llama_core.training.rates import learning_rate, warmup_steps


def branch_off(
    run: RunDirectory,
    out: Path,
    *,
    num_steps: int,
    step: int | Best | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> RunDirectory:
    """Make a run that has come to a checkpoint of another, and is to decay from there; return its directory.

    It has the weights, the optimizer's states, the position in the data, the plan, the metrics and the reference of the
    other run, and refuses another base, tokenizer or template as that one does. Once it is resumed, it takes
    ``num_steps`` steps, which are the decay of the wsd schedule, and no fewer. The checkpoint's files are linked, not
    copied, where the disk allows it; the other run may go on, and delete them.

    Args:
        run: a run on the schedule wsd or constant.
        out: a folder that does not exist or is empty.
        num_steps: steps of the decay.
        step: step of a checkpoint in the stable phase, or ``best``; by default the newest intact one.
        tell: called with a line about each later checkpoint that is damaged.

    Raises:
        RunDirectoryError: if there is no such run or checkpoint, or the run is somebody else's.
        WeightsError: if ``out`` is not empty.
        ConfigError: if the learning rate of the checkpoint's step is not that of the stable phase, or ``num_steps`` is
            below 1.
        CheckpointError: if the checkpoint is damaged, or ``out`` cannot be written.
    """
    config = load_config(run)
    refuse_foreign(run, "branch off it")
    refuse_links(run, folders_with_links())
    refuse_files_in(out)
    if config.data.source == DATALOADER:
        raise ConfigError(f"{run.path} trains on your own dataloader, which no branch can go on reading")
    checkpoint = find_checkpoint(run, step, tell)
    sums = recorded_sums(checkpoint)
    at = checkpoint_step(checkpoint)
    decaying = _decaying(run, _as_trained(config, checkpoint, run), at, num_steps)
    try:
        with staging_folder(out.absolute()) as writing:
            branch = RunDirectory(writing)
            branch.create()
            _adopt(checkpoint, sums, branch, decaying)
            for record in (run.plan, run.rollbacks, run.data_changes, run.generation_config, *_guards(run)):
                if record.exists():
                    shutil.copyfile(record, branch.path / record.name)
            for change in read_settings_changes(run):
                if change.step < at:
                    record_settings_change(branch, change)
            copy_metrics(run, branch, at)
            branch.config.write_text(decaying.to_yaml())
            refuse_files_in(out)  # another branch may have come first
            writing.replace(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}; nothing is left there") from None
    return RunDirectory(out)


def _guards(run: RunDirectory) -> tuple[Path, ...]:
    """Return what tells the base, the tokenizer, the template and the reference of a run from others."""
    return run.base, run.data, run.reference, run.reference_values


def _as_trained(config: RunConfig, checkpoint: Path, run: RunDirectory) -> RunConfig:
    """Return ``config`` with the settings that the run had when it saved a checkpoint, if it has changed some since."""
    before = RunConfig.load(checkpoint / run.config.name, below=run.path)
    changed = RECORDED.intersection(differences(before, config))
    return config.with_overrides(*(Override(key, value) for key, value in values_of(before, changed).items()))


def _decaying(run: RunDirectory, config: RunConfig, step: int, num_steps: int) -> RunConfig:
    """Return the settings of a branch after ``step``."""
    if num_steps < 1:
        raise ConfigError(f"steps={num_steps}: a decay takes at least 1")
    training = config.training
    if training.lr_schedule == "cosine":
        raise ConfigError(
            f"training.lr_schedule=cosine of {run.path} has no stable phase to branch off; train with wsd or constant"
        )
    rows = {row["step"]: row for row in read_metrics(run).select(["step", "total_steps"]).to_pylist()}
    if step not in rows:
        raise RunDirectoryError(f"{run.metrics} has no record of step {step}; choose a checkpoint of another step")
    total = rows[step]["total_steps"]
    rate = learning_rate(step, training, total)
    if not math.isclose(rate, training.learning_rate):
        phase = "warm-up" if step < warmup_steps(training, total) else "decay"
        raise ConfigError(
            f"step {step} of {run.path} is in the {phase}, with a learning rate of {rate:.2e} instead of "
            f"{training.learning_rate:.2e}; choose a checkpoint of the stable phase with --step"
        )
    changed = {
        "steps": step + num_steps,
        "lr_schedule": "wsd",
        "decay_fraction": num_steps / (step + num_steps),
        "warmup_steps": warmup_steps(training, total),
        "patience": 0,  # it may have run out already, and a decay is worth its whole length
    }
    return config.with_overrides(*(Override(f"training.{key}", value) for key, value in changed.items()))


def _adopt(checkpoint: Path, sums: Mapping[str, FileSum], branch: RunDirectory, settings: RunConfig) -> None:
    """Give a branch a checkpoint of another run, with the branch's settings."""
    copy = branch.checkpoints / checkpoint.name
    replaced = {MANIFEST, branch.config.name}
    files = [str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file()]
    kept = [name for name in files if name not in replaced]
    for name in kept:
        _link_or_copy(checkpoint / name, copy / name)
    (copy / branch.config.name).write_text(settings.to_yaml())
    write_manifest(copy, {name: sums[name] for name in kept if name in sums})
    (branch.checkpoints / LATEST).write_text(f"{copy.name}\n")


def _link_or_copy(file: Path, to: Path) -> None:
    """Give a file that is never changed another name, or copy it to another disk."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, to, follow_symlinks=False)
    except OSError:
        shutil.copyfile(file, to, follow_symlinks=False)
