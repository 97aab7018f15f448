"""The configuration that a command line asks for."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from llama_core.config.overrides import Override, parsed_overrides
from llama_core.config.recorded import load_recorded
from llama_core.config.run import RunConfig
from llama_core.config.section import whole_count
from llama_core.config.settings import DATALOADER
from llama_core.errors import ConfigError
from llama_core.launchers.registry import LAUNCHERS
from llama_core.records.directory import RunDirectory
from training_infra.flags import Flag
from training_infra.lines import print_line

FlagValue = str | int | float | list[str]


def requested_config(options: argparse.Namespace) -> RunConfig:
    """Return the configuration of a run: the file, overridden by the flags, and both by ``--set``.

    Raises:
        ConfigError: if it is wrong, with every problem.
    """
    flags = dict(_flags_given(options))
    overrides = [*(Override(flag.key, value) for flag, value in flags.items()), *options.overrides]
    file = _file(options)
    config = RunConfig.load(file, overrides) if file else RunConfig.from_mapping({}, overrides)
    _say_counts(overrides)
    for flag in flags:
        _refuse_of_another_launcher(flag, config)
    if config.data.source == DATALOADER:
        raise ConfigError(
            "this run trains on a dataloader; continue it from Python, with launch_training(..., resume=True)"
        )
    return config


def _refuse_of_another_launcher(flag: Flag, config: RunConfig) -> None:
    """Refuse a flag that sets what the jobs of another launcher ask for."""
    own = config.launch.kind
    for launcher in LAUNCHERS.values():
        is_of_it = launcher.prefix and flag.key.startswith(launcher.prefix)
        if is_of_it and launcher.section != own.section:
            stays = "stays on this machine" if own.is_here else f"is one of {own.title}"
            raise ConfigError(
                f"{flag.name} is for {launcher.title} jobs, and this run {stays}; add --launcher {launcher.name}"
            )


def _flags_given(options: argparse.Namespace) -> Iterator[tuple[Flag, FlagValue]]:
    """Yield each flag that was given with its value; only ``--set`` is YAML.

    Raises:
        ConfigError: if one has an empty value, as from a variable of the shell that is not set.
    """
    known = {key.name: key for key in RunConfig.known_keys()}
    for flag in options.command.flags:
        given = getattr(options, flag.key)
        words = given if isinstance(given, list) else [given]
        if any(isinstance(word, str) and not word.strip() for word in words):
            raise ConfigError(f"{flag.name} has no value; write one, or leave the flag out for the default")
        if isinstance(given, str):
            yield flag, known[flag.key].value_of(flag.long_names.get(given, given))
        elif given is not None:  # texts, or the constant of a flag without a value
            yield flag, given


def _say_counts(overrides: Iterable[Override | str]) -> None:
    """Print the number that a suffix stands for: people mean 1,000 or 1,024 by k."""
    known = {key.name: key for key in RunConfig.known_keys()}
    for override in parsed_overrides(overrides)[0]:
        written = override.value
        key = known.get(override.key)
        if key is None or not key.is_count or not isinstance(written, str):
            continue
        if isinstance(number := whole_count(written), int):  # not auto
            print_line(f"note: {override.key}={written} is {number:,}; k is 1,000 and Ki is 1,024", file=sys.stderr)


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
