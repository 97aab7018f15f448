"""The commands that time steps: ``benchmark`` and ``profile``."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama_core.config.overrides import Override
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import atomic_write
from training_infra.commands.command import FAIL_ON_REGRESSION, NEW_RUN_DIR, RESUME, Argument, Command, whole_number
from training_infra.commands.configuration import requested_config
from training_infra.flags import FLAGS
from training_infra.lines import print_json
from training_infra.tables import print_comparison

_TIMED_FLAGS = [flag for flag in FLAGS if flag.name != "--no-benchmark"]


def _benchmark(options: argparse.Namespace) -> None:
    if options.batch_sizes or options.save_results:
        _compare_batch_sizes(options)
    else:
        _time_steps(options)


def _compare_batch_sizes(options: argparse.Namespace) -> None:
    from llama_core.runs.console import say
    from llama_core.sweep.judgement import read_judgement, refuse_regressions
    from training_infra.benchmarking import compare_batch_sizes

    config = requested_config(options)
    batch_sizes = options.batch_sizes or [config.first_batch_size]
    with say.silenced(options.json):
        comparison = compare_batch_sizes(config, batch_sizes, options.run_dir, resume=options.resume)
        record = {"model": config.model, "gpus": config.parallel.gpus} | comparison.as_dict()
        if options.save_results is not None:
            _save(options.save_results, record)
            say("results", str(options.save_results))
    if options.json:
        print_json(record)
    else:
        print_comparison(comparison)
    if options.fail_on_regression and comparison.sweep is not None:
        refuse_regressions(read_judgement(comparison.sweep))


def _save(file: Path, record: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n")


def _time_steps(options: argparse.Namespace) -> None:
    from llama_core.chain import steps
    from llama_core.chain.chain import run_chain
    from llama_core.runs.console import say
    from llama_core.runs.continuing import RUNS
    from llama_core.sweep.history import check_folder, history_folder
    from llama_core.sweep.judgement import refuse_regressions, remember_run
    from training_infra.local import local_steps

    config = requested_config(options)
    # A new run's directory is beside the others, in RUNS.
    check_folder(history_folder(config, options.run_dir or RUNS / "new"))
    with say.silenced(options.json):
        run = run_chain(local_steps(config, options.run_dir, resume=options.resume, only="benchmark"))
        judgement = remember_run(run)
    if options.json:
        print_json({"run_dir": str(run.path)} | asdict(steps.read_benchmark(run)) | {"history": asdict(judgement)})
    if options.fail_on_regression:
        refuse_regressions(judgement)


BENCHMARK = Command(
    "benchmark",
    "time optimizer steps on this machine or the cluster, or predict them",
    _benchmark,
    examples=("--model tiny_llama3_50m --device cpu", "--model llama2_7b --gpus 4 --batch-sizes 1 2 4 8"),
    arguments=(
        NEW_RUN_DIR,
        RESUME,
        Argument(
            "--batch-sizes",
            type=whole_number,
            nargs="+",
            metavar="8",
            help="compare these: measured if this machine or the cluster has the devices, else predicted; --run-dir is "
            "then a sweep's directory",
        ),
        FAIL_ON_REGRESSION,
        Argument("--save-results", type=Path, metavar="times.json", help="write the comparison as JSON"),
    ),
    flags=_TIMED_FLAGS,
)


def _profile(options: argparse.Namespace) -> None:
    from llama_core.chain.chain import run_chain
    from llama_core.records.profiles import read_profiles
    from llama_core.runs.console import say
    from training_infra.local import local_steps

    config = _profiled_config(options)
    with say.silenced(options.json):
        run = run_chain(local_steps(config, options.run_dir, resume=False, only="benchmark"))
        profiles = read_profiles(run)
        for profile in profiles:
            for kind, seconds, share in profile.rows():
                say("profile", f"rank {profile.rank}  {seconds:>9}  {share:>6}  {kind}")
        say("profile", f"every operator: {run.trace}/rank-*.json.gz, for https://ui.perfetto.dev")
        if any(run.trace.glob("*.pickle")):
            say("profile", f"CUDA's memory: {run.trace}/rank-*.pickle, for https://pytorch.org/memory_viz")
    if options.json:
        print_json({"run_dir": str(run.path), "profiles": [asdict(one) for one in profiles]})


def _profiled_config(options: argparse.Namespace) -> RunConfig:
    """Return the configuration of an earlier run, or of the flags, with a profile of its timed steps."""
    from llama_core.runs.loading import load_config

    options.resume = False  # a profile is a new run
    if options.like is not None:
        if options.config is not None:
            raise ConfigError(f"give {options.like} or --config {options.config}, not both")
        earlier = RunDirectory(options.like)
        load_config(earlier)  # refuses a directory without a run
        options.config = earlier.config
    asked = requested_config(options)
    name = options.like.resolve().name if options.like else asked.spec.name
    # a new list: the one that is there may be the parser's default
    profiled = [Override("benchmark.profile", True), Override("tracking.run_name", f"profile-{name}")]
    options.overrides = [*options.overrides, *profiled]
    if not asked.benchmark.steps:  # the run that this one is like times none
        options.overrides.append(Override("benchmark.steps", 3))
    return requested_config(options)


PROFILE = Command(
    "profile",
    "run some steps under torch's profiler, and say where their time goes",
    _profile,
    examples=("runs/mine", "--model tiny_llama3_50m --device cpu"),
    arguments=(
        Argument(
            "like",
            type=Path,
            nargs="?",
            metavar="RUN_DIR",
            help="an earlier run, whose configuration the new run takes",
        ),
        Argument(
            "--run-dir",
            type=Path,
            metavar="runs/mine",
            help="the new run's directory; default: runs/profile-<model>-...",
        ),
    ),
    flags=_TIMED_FLAGS,
)
