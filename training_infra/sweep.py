"""The command ``training-infra sweep``: run a whole sweep from one terminal."""

from collections.abc import Mapping
from pathlib import Path

from llama_core.chain.console import say
from llama_core.errors import ConfigError
from llama_core.sweep import steps as sweeps
from llama_core.sweep.chain import run_sweep
from llama_core.sweep.comparison import Comparison, predict
from llama_core.sweep.directory import SweepDirectory, read_record
from llama_core.sweep.grid import SweepConfig
from training_infra.local import local_sweep_steps
from training_infra.tables import print_comparison
from training_reports import prediction


def sweep_from_terminal(
    file: Path | None,
    sweep_dir: Path | None,
    *,
    resume: bool,
    launcher: str | None,
    objective: str | None,
    history: str | None,
    quiet: bool,
) -> SweepDirectory:
    """Prepare, rehearse, run and compare the elements of a sweep.

    Args:
        file: the sweep's configuration; not needed to resume ``sweep_dir``.
        sweep_dir: the sweep's directory; by default ``sweeps/<name>-<date>``.
        resume: continue the sweep in ``sweep_dir``, or the newest unfinished one of this name.
        launcher: overrides the launcher of the configuration.
        objective: overrides the objective that ranks the elements.
        history: overrides the folder of the history.
        quiet: print nothing.

    Raises:
        TrainingInfraError: if a step of the sweep fails.
    """
    settings = {} if objective is None else {"objective": objective}
    config = _config(file, sweep_dir, resume=resume, settings=settings)
    overrides = {"launch.launcher": launcher, "benchmark.history": history}
    given = [f"{key}={value}" for key, value in overrides.items() if value is not None]
    if given:
        config = config.model_copy(update={"base": config.base.with_overrides(*given)})
    with say.silenced(quiet):
        sweep = sweeps.prepare(config, sweep_dir, resume=resume)
        run_sweep(sweep, local_sweep_steps())
    return sweep


def predict_from_terminal(file: Path | None, sweep_dir: Path | None, *, quiet: bool) -> Comparison:
    """Predict the elements of a sweep by arithmetic, and write a page that compares them; nothing runs.

    Args:
        file: the sweep's configuration.
        sweep_dir: where ``predicted.html`` goes; by default ``sweeps/<name>-predicted``.
        quiet: print nothing.

    Raises:
        TrainingInfraError: if no element has a valid plan, or the page cannot be written.
    """
    config = _config(file, sweep_dir, resume=False, settings={})
    comparison = predict(config)
    folder = sweep_dir or sweeps.SWEEPS / f"{config.name}-predicted"
    page = prediction.write_prediction(folder / "predicted.html", config, comparison)
    if not quiet:
        print_comparison(comparison)
        if best := comparison.fastest_predicted():
            say("best", best)
        say("report", str(page))
    return comparison


def _config(file: Path | None, sweep_dir: Path | None, *, resume: bool, settings: Mapping[str, object]) -> SweepConfig:
    if file is not None:
        return SweepConfig.load(file, **settings)
    if sweep_dir is None or not resume:
        raise ConfigError("no sweep given; add --config FILE, or --sweep-dir DIR --resume to continue one")
    return SweepConfig.from_mapping({**read_record(SweepDirectory(sweep_dir)).config, **settings})
