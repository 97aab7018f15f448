"""The command ``sweep``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from llama_core.config.overrides import Override
from llama_core.errors import ConfigError
from training_infra.commands.command import FAIL_ON_REGRESSION, Argument, Command
from training_infra.flags import LAUNCHERS
from training_infra.lines import print_json
from training_infra.parser import SET
from training_infra.tables import print_comparison

if TYPE_CHECKING:
    from llama_core.sweep.grid import SweepConfig


def _sweep(options: argparse.Namespace) -> None:
    if options.predict:
        _predict(options)
    else:
        _run(options)


def _predict(options: argparse.Namespace) -> None:
    """Predict the elements by arithmetic, and write a page that compares them."""
    from llama_core.runs.console import say
    from llama_core.sweep.comparison import predict
    from llama_core.sweep.steps import SWEEPS
    from training_reports.prediction import write_prediction

    # A prediction reads neither --resume nor --objective.
    config = _config(options, resume=False, objective=None)
    comparison = predict(config)
    folder = options.sweep_dir or SWEEPS / f"{config.name}-predicted"
    page = write_prediction(folder / "predicted.html", config, comparison)
    if options.json:
        print_json(comparison.as_dict())
        return
    print_comparison(comparison)
    if best := comparison.fastest_predicted():
        say("best", best)
    say("report", str(page))


def _run(options: argparse.Namespace) -> None:
    """Prepare, rehearse, run and compare the elements."""
    from llama_core.runs.console import say
    from llama_core.sweep import steps
    from llama_core.sweep.chain import run_sweep
    from llama_core.sweep.judgement import read_judgement, refuse_regressions
    from training_infra.local import local_sweep_steps

    config = _config(options, resume=options.resume, objective=options.objective)
    with say.silenced(options.json):
        sweep = steps.prepare(config, options.sweep_dir, resume=options.resume)
        run_sweep(sweep, local_sweep_steps())
    if options.json:
        print_json(steps.records(sweep))
    if options.fail_on_regression:
        refuse_regressions(read_judgement(sweep))


def _config(options: argparse.Namespace, *, resume: bool, objective: str | None) -> "SweepConfig":
    """Return the sweep of a file, or else of the directory of a sweep to resume, with the settings of the flags."""
    from llama_core.sweep.directory import SweepDirectory, read_record
    from llama_core.sweep.grid import SweepConfig

    settings = {} if objective is None else {"objective": objective}
    flags = {"launch.launcher": options.launcher, "benchmark.history": options.history}
    overrides = [Override(key, value) for key, value in flags.items() if value is not None] + options.overrides
    if options.config is not None:
        return SweepConfig.load(options.config, overrides, **settings)
    if options.sweep_dir is None or not resume:
        raise ConfigError("no sweep given; add --config FILE, or --sweep-dir DIR --resume to continue one")
    return SweepConfig.from_mapping({**read_record(SweepDirectory(options.sweep_dir)).config, **settings}, overrides)


SWEEP = Command(
    "sweep",
    "run every combination of a grid of settings, and rank them in one report",
    _sweep,
    examples=(
        "--config configs/sweeps/tiny_llama3_50m_throughput.yaml",
        "--config configs/sweeps/llama3_8b_parallelism.yaml --predict",
        "--resume --sweep-dir sweeps/mine",
    ),
    arguments=(
        Argument(
            "--config",
            type=Path,
            metavar="sweep.yaml",
            help="the sweep: name, base, grid, exclude, include, objective, tokens",
        ),
        Argument(
            "--objective",
            metavar="loss",
            help="rank by throughput of timed steps (default), or after training by held-out loss, eval_loss/NAME or "
            "a score: evaluation/TASK/METRIC",
        ),
        Argument(
            "--sweep-dir", type=Path, metavar="sweeps/mine", help="the sweep's directory; default: sweeps/<name>-<date>"
        ),
        Argument("--resume", action="store_true", help="run only the unfinished elements of a sweep"),
        Argument(
            "--predict", action="store_true", help="compare the elements by arithmetic, without hardware; run nothing"
        ),
        Argument("--set", **SET),
        Argument("--launcher", metavar="slurm", help=f"launcher of all elements: {LAUNCHERS}"),
        Argument(
            "--history",
            metavar="/shared/history",
            help="folder that keeps the results for later comparisons; default: history, beside the sweep",
        ),
        FAIL_ON_REGRESSION,
        Argument("--json", action="store_true", help="print the result as JSON"),
    ),
)
