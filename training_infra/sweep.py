"""The command ``training-infra sweep``: a whole sweep from one terminal."""

from pathlib import Path
from typing import Any

from llama_core.chain.console import say
from llama_core.errors import ConfigError
from llama_core.sweep import steps as sweeps
from llama_core.sweep.chain import run_sweep
from llama_core.sweep.directory import SweepDirectory, read_record
from llama_core.sweep.grid import SweepConfig
from training_infra.local import local_sweep_steps


def sweep_from_terminal(
    file: Path | None, sweep_dir: Path | None, *, resume: bool, launcher: str | None, quiet: bool
) -> dict[str, Any]:
    """Prepare, rehearse, run and compare the elements of a sweep, and return what is known of them.

    Args:
        file: the sweep's configuration; may be left out where ``sweep_dir`` is resumed.
        sweep_dir: the sweep's directory; by default ``sweeps/<name>-<date>``.
        resume: continue the sweep in ``sweep_dir``, or the newest unfinished one of this name.
        launcher: where it runs, in place of what the configuration says.
        quiet: announce nothing.

    Raises:
        TrainingInfraError: as the steps of a sweep do.
    """
    config = _config(file, sweep_dir, resume=resume)
    if launcher is not None:
        config = config.model_copy(update={"base": config.base.with_overrides(f"launch.launcher={launcher}")})
    with say.silenced(quiet):
        sweep = sweeps.prepare(config, sweep_dir, resume=resume)
        run_sweep(sweep, local_sweep_steps())
    return sweeps.records(sweep)


def _config(file: Path | None, sweep_dir: Path | None, *, resume: bool) -> SweepConfig:
    if file is not None:
        return SweepConfig.load(file)
    if sweep_dir is None or not resume:
        raise ConfigError("which sweep? give --config FILE, or --sweep-dir DIR --resume to continue one")
    return read_record(SweepDirectory(sweep_dir)).sweep_config
