"""The configuration that a command line asks for."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from llama_core.config.recorded import load_recorded
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER
from llama_core.errors import ConfigError
from llama_core.records.directory import RunDirectory
from training_infra.flags import LONG_NAMES, Flag


def requested_config(options: argparse.Namespace) -> RunConfig:
    """Return the configuration of a run: the file, overridden by the flags, and both by ``--set``.

    Raises:
        ConfigError: if it is wrong, with every problem.
    """
    flags = dict(_flags_given(options))
    overrides = [*(f"{flag.key}={LONG_NAMES.get(value, value)}" for flag, value in flags.items()), *options.overrides]
    file = _file(options)
    config = RunConfig.load(file, overrides) if file else RunConfig.from_mapping({}, overrides)
    if config.launch.is_here:
        for flag in flags:
            if flag.key.startswith("launch.slurm."):
                raise ConfigError(
                    f"{flag.name} is for Slurm jobs, and this run stays on this machine; add --launcher slurm"
                )
    if config.data.source == DATALOADER:
        raise ConfigError(
            "this run trains on a dataloader; continue it from Python, with launch_training(..., resume=True)"
        )
    return config


def _flags_given(options: argparse.Namespace) -> Iterator[tuple[Flag, str]]:
    for flag in options.command.flags:
        value = getattr(options, flag.key)
        if value is not None:
            yield flag, value


def _file(options: argparse.Namespace) -> Path | None:
    """Return the file of ``--config``, or else that of the run that is resumed; None if there is neither."""
    config: Path | None = options.config
    run_dir: Path | None = getattr(options, "run_dir", None)
    if config is not None or run_dir is None or not options.resume:
        return config
    run = RunDirectory(run_dir)
    if not run.config.exists():
        return None
    load_recorded(run)  # an error says how to get its settings back
    return run.config
