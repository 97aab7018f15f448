"""The command line: ``training-infra`` or ``python -m training_infra.cli``.

The flags of a run, and the configuration keys they set, are a table in ``flags.py``. Nothing here imports torch; the
commands import what they need.
"""

import argparse
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from llama_core.config.hardware import DEFAULT_GPU_TYPE, gpu_spec
from llama_core.config.run import DATALOADER, SAMPLE, RunConfig
from llama_core.errors import (
    ConfigError,
    DoesNotFitError,
    EnvironmentMismatchError,
    RequestError,
    StoppedError,
    TrainingInfraError,
    safe,
)
from llama_core.models.hf import DTYPES
from llama_core.records.directory import RunDirectory
from llama_core.records.files import is_disk_full
from llama_core.records.job import Outcome
from llama_core.units import parse_count
from training_infra.flags import FLAGS, LAUNCHERS, Flag
from training_infra.parser import Parser
from training_infra.tables import (
    print_choice,
    print_cost,
    print_diagnosis,
    print_environment,
    print_host,
    print_plan,
    print_profile,
    print_ranks,
    print_runs,
    print_variants,
)

FOLLOW_SECONDS = 0.5
"""Time between two polls of ``logs --follow``."""

_LONG_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}
"""Long names of dtypes, also accepted by ``--mixed-precision`` and ``--dtype``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see ``training-infra --help``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold bytes that are not text
    options = _parser().parse_args(arguments)
    # Treat SIGTERM like Ctrl-C: stop the job with a checkpoint instead of leaving it behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return int(options.command(options) or 0)
    except TrainingInfraError as error:
        if options.debug:
            raise
        for problem in error.problems if isinstance(error, ConfigError) else (str(error),):
            print(f"error: {problem}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return StoppedError.exit_code
    except BrokenPipeError:  # the reader of our output (head, less) has closed it
        sys.stderr.close()
        return 0
    except OSError as error:  # such as a full disk, which a traceback would not explain
        if options.debug:
            raise
        print(f"error: {_explained(error)}", file=sys.stderr)
        return RequestError.exit_code if isinstance(error, PermissionError) else 1


def _explained(error: OSError) -> str:
    """Return one line with the problem of a file or a disk, and its remedy."""
    if is_disk_full(error):
        return f"a disk is full{safe(f' writing {error.filename}') if error.filename else ''}; free some space"
    if isinstance(error, PermissionError) and error.filename:  # somebody else's run, for example
        return safe(f"{error.filename}: permission denied; use one of your own, or ask its owner")
    if str(error.strerror).startswith("No usable temporary directory"):  # Python's, with the folders that it has tried
        return safe(f"{error.strerror}; free some space in one of them, or set TMPDIR to a folder with room")
    return safe(str(error))


def _parser() -> Parser:
    parser = Parser(
        prog="training-infra",
        description="Train LLaMA models: validate, estimate, rehearse, train, benchmark, report.",
        epilog="exit codes: 0 success, 1 the run failed or has a problem, 2 invalid request, 3 does not fit, "
        "4 slower than before, 130 interrupted",
        examples=("train --help", "train --model tiny_llama3_50m --device cpu --steps 20"),
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def command(
        name: str,
        run: Callable[[argparse.Namespace], int | None],
        when: str,
        help_text: str,
        *examples: str,
        flags: Sequence[Flag] = (),
    ) -> Parser:
        parser.tables.setdefault(when, []).append((name, help_text))
        sentence = f"{help_text[0].upper()}{help_text[1:]}."
        added = commands.add_parser(name, description=sentence, examples=examples, flags=flags)
        added.set_defaults(command=run, parser=added, flags=flags)
        if flags:
            added.add_argument("--json", action="store_true", help="print the result as JSON")
        added.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show a traceback with an error"
        )
        return added

    _add_planning_commands(command)
    _add_running_commands(command)
    _add_commands_on_runs(command)
    return parser


def _add_planning_commands(command: Callable[..., Parser]) -> None:
    when = "before a run"
    models = command(
        "models",
        _models,
        when,
        "list the model variants, with the fewest GPUs that can train each",
        "--gpu-type h200",
    )
    models.add_argument("--gpu-type", metavar="h200", default=DEFAULT_GPU_TYPE, help=f"default: {DEFAULT_GPU_TYPE}")
    models.add_argument("--markdown", action="store_true", help="print the README's table")
    models.add_argument("--json", action="store_true", help="print JSON")

    estimate = command(
        "estimate-memory",
        _estimate_memory,
        when,
        "find the fastest plan that fits, and estimate bytes per rank and category; needs no GPU",
        "--model llama3_8b --gpus 8",
        "--model llama3_70b --gpus 64 --gpu-type h200 --microbatches 8 --activation-checkpointing",
        "--model llama3_70b --strategy lora --gpus 8 --gpu-type a100_80gb --tokens 1B --price 2.10",
        flags=FLAGS,
    )
    _add_tokens(estimate)

    dry_run = command(
        "dry-run",
        _dry_run,
        when,
        "run a real step on fake tensors and count every byte; needs no GPU",
        "--model llama3_8b --gpus 8 --gpu-type h200",
        "--model tiny_llama3_50m --gpus 4 --tensor-parallel 2 --pipeline-parallel 2 --device cpu --twin",
        flags=FLAGS,
    )
    _add_tokens(dry_run)
    dry_run.add_argument(
        "--twin",
        action="store_true",
        help="also train a tiny twin of the plan on real processes and compare it with one process",
    )

    command(
        "validate-environment",
        _validate_environment,
        when,
        "check whether a run can start on this machine",
        "",
        "--launcher slurm --gpus 16 --nodes 2 --partition gpu",
        flags=FLAGS,
    )


def _add_running_commands(command: Callable[..., Parser]) -> None:
    when = "run"
    train = command(
        "train",
        _train,
        when,
        "run the whole chain: validate, estimate, rehearse, train, benchmark, report",
        "--model tiny_llama3_150m --data texts.jsonl --batch-size 32",
        "--init-from ~/Llama-3.2-1B --strategy lora --data chats.jsonl",
        "--model llama3_8b --gpus 16 --nodes 2 --launcher slurm --partition gpu --time 12:00:00",
        "--resume --run-dir runs/mine",
        flags=FLAGS,
    )
    _add_run_dir_flags(train)
    train.add_argument("--dry-run", action="store_true", help="only plan and rehearse; train nothing")
    train.add_argument("--print-sbatch", action="store_true", help="print the Slurm script of the job; submit nothing")
    train.add_argument("--flow", action="store_true", help="run the steps as a Prefect flow")

    bench = command(
        "benchmark",
        _benchmark,
        when,
        "time optimizer steps on this machine or the cluster, or predict them",
        "--model tiny_llama3_50m --device cpu",
        "--model llama2_7b --gpus 4 --batch-sizes 1 2 4 8",
        flags=[flag for flag in FLAGS if flag.name != "--no-benchmark"],
    )
    _add_run_dir_flags(bench)
    bench.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        metavar="8",
        help="compare these: measured if this machine or Slurm has the devices, else predicted; --run-dir is then a "
        "sweep's directory",
    )
    _add_fail_on_regression(bench)
    bench.add_argument("--save-results", type=Path, metavar="times.json", help="write the comparison as JSON")

    profile = command(
        "profile",
        _profile,
        when,
        "run some steps under torch's profiler, and say where their time goes",
        "runs/mine",
        "--model tiny_llama3_50m --device cpu",
        flags=[flag for flag in FLAGS if flag.name != "--no-benchmark"],
    )
    profile.add_argument(
        "like", type=Path, nargs="?", metavar="RUN_DIR", help="an earlier run, whose configuration the new run takes"
    )
    profile.add_argument(
        "--run-dir", type=Path, metavar="runs/mine", help="the new run's directory; default: runs/profile-<model>-..."
    )

    sweep = command(
        "sweep",
        _sweep,
        when,
        "run every combination of a grid of settings, and rank them in one report",
        "--config configs/sweeps/tiny_llama3_50m_throughput.yaml",
        "--config configs/sweeps/llama3_8b_parallelism.yaml --predict",
        "--resume --sweep-dir sweeps/mine",
    )
    sweep.add_argument(
        "--config",
        type=Path,
        metavar="sweep.yaml",
        help="the sweep: name, base, grid, exclude, include, objective, tokens",
    )
    sweep.add_argument(
        "--objective",
        metavar="loss",
        help="rank by throughput of timed steps (default), or by held-out loss after training",
    )
    sweep.add_argument(
        "--sweep-dir", type=Path, metavar="sweeps/mine", help="the sweep's directory; default: sweeps/<name>-<date>"
    )
    sweep.add_argument("--resume", action="store_true", help="run only the unfinished elements of a sweep")
    sweep.add_argument(
        "--predict", action="store_true", help="compare the elements by arithmetic, without hardware; run nothing"
    )
    sweep.add_argument("--launcher", metavar="slurm", help=f"launcher of all elements: {LAUNCHERS}")
    sweep.add_argument(
        "--history",
        metavar="/shared/history",
        help="folder that keeps the results for later comparisons; default: history, beside the sweep",
    )
    _add_fail_on_regression(sweep)
    sweep.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_commands_on_runs(command: Callable[..., Parser]) -> None:
    when = "follow a run, and use it"
    logs = command("logs", _logs, when, "show the output of a run's ranks", "runs/mine --follow", "runs/mine --rank 3")
    _add_run_dir(logs)
    logs.add_argument("--follow", action="store_true", help="keep printing until the run's job ends")
    logs.add_argument("--rank", type=int, metavar="3", help="only this rank")
    logs.add_argument(
        "--lines", type=int, default=10, metavar="50", help="start with each rank's last lines; default: 10"
    )

    cancel = command(
        "cancel",
        _cancel,
        when,
        "end a run's job after its current step, with a checkpoint, wherever it runs",
        "runs/mine",
    )
    _add_run_dir(cancel)

    doctor = command(
        "doctor",
        _doctor,
        when,
        "show a run's state, how its attempts ended, which checkpoints are good, and how to continue",
        "runs/mine",
        "runs/mine --sizes-only --json",
    )
    _add_run_dir(doctor)
    doctor.add_argument(
        "--sizes-only", action="store_true", help="compare only the sizes of checkpoint files; read none of them"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")

    report = command("report", _report, when, "write report.html of a run, finished or not", "runs/mine")
    _add_run_dir(report)

    compare = command(
        "compare",
        _compare,
        when,
        "compare runs on the terminal and on one page: settings, loss, speed, memory, cost",
        "runs/first runs/second",
        "runs/first runs/second runs/third --out first-three.html",
    )
    compare.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the directories of the runs")
    compare.add_argument(
        "--out", type=Path, metavar="mine.html", default=Path("comparison.html"), help="default: comparison.html"
    )
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON; write no page")

    generate = command(
        "generate",
        _generate,
        when,
        "continue a prompt, to look at what a model has learnt",
        'runs/mine --prompt "Once upon a time"',
        'runs/mine --prompt "Capital of France?" --chat --temperature 0.8 --top-p 0.95',
    )
    _add_generate_flags(generate)

    export = command(
        "export-hf",
        _export_hf,
        when,
        "write a run's weights and tokenizer for transformers or PEFT",
        "runs/mine --out ~/my-llama --dtype bf16",
        "runs/mine --out ~/merged --merged",
    )
    _add_run_dir(export)
    export.add_argument("--out", type=Path, metavar="~/my-llama", required=True, help="the folder; new or empty")
    _add_weights_flags(export)
    export.add_argument(
        "--merged",
        action="store_true",
        help="for a run with adapters: write the full model instead of a PEFT folder",
    )


def _add_fail_on_regression(parser: Parser) -> None:
    parser.add_argument(
        "--fail-on-regression",
        action="store_true",
        help="exit with 4 if a result is slower than earlier ones of the same work on this kind of machine",
    )


def _add_run_dir(parser: Parser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")


def _add_tokens(parser: Parser) -> None:
    parser.add_argument(
        "--tokens",
        type=_count,
        metavar="15T",
        help="tokens to train on, for the days and the price; default: those of --steps or --data",
    )


def _count(text: str) -> float:
    try:
        return parse_count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, such as 15T, 200B or 1e9") from None


def _add_weights_flags(parser: Parser) -> None:
    parser.add_argument(
        "--step", type=int, metavar="400", help="the checkpoint's step; default: the newest complete one"
    )
    parser.add_argument(
        "--dtype",
        type=lambda name: _LONG_NAMES.get(name, name),
        choices=tuple(DTYPES),
        metavar="bf16",
        default="fp32",
        help=f"dtype of the weights: {', '.join(DTYPES)}; default: fp32, as in training",
    )


def _add_generate_flags(parser: Parser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN_DIR|FOLDER", help="a run, or a Hugging Face or PEFT folder")
    parser.add_argument(
        "--prompt", metavar='"Once upon"', required=True, help="the text to continue; - reads standard input"
    )
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message; use the chat template")
    parser.add_argument("--max-new-tokens", type=int, metavar="64", default=128, help="most new tokens; default: 128")
    parser.add_argument(
        "--temperature", type=float, metavar="0.8", default=0.0, help="draw tokens if above 0; default: 0"
    )
    parser.add_argument("--top-k", type=int, metavar="50", help="draw from this many of the likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="0.95", help="draw from the likeliest tokens that together have this probability"
    )
    parser.add_argument("--seed", type=int, metavar="1", help="draw the same each time; default: draw anew")
    parser.add_argument("--tokenizer", metavar="bytes", help="'bytes' or a path; default: the run's or the folder's")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), metavar="cpu", help="cpu or cuda; default: cuda if present"
    )
    _add_weights_flags(parser)


def _add_run_dir_flags(parser: Parser) -> None:
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="runs/mine",
        help="the run's directory; default: runs/<model>-<date>-<fingerprint>",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --run-dir, or else the newest unfinished run of this configuration, or with --steps "
        "the newest that took fewer",
    )


def _config(options: argparse.Namespace) -> RunConfig:
    """Build the run configuration from the file, then the flags, then ``--set``."""
    file: Path | None = options.config
    run_dir: Path | None = getattr(options, "run_dir", None)
    if file is None and run_dir is not None and options.resume and (run_dir / "config.yaml").exists():
        file = run_dir / "config.yaml"
    overrides = [
        f"{flag.key}={_LONG_NAMES.get(value, value)}"
        for flag in options.flags
        if (value := getattr(options, flag.key)) is not None
    ]
    overrides += options.overrides
    config = RunConfig.load(file, overrides) if file else RunConfig.from_mapping({}, overrides)
    for flag in options.flags:
        if flag.key.startswith("launch.slurm.") and getattr(options, flag.key) is not None and config.launch.is_here:
            raise ConfigError(
                f"{flag.name} is for Slurm jobs, and this run stays on this machine; add --launcher slurm"
            )
    if config.data.source == DATALOADER:
        raise ConfigError(
            "this run trains on a dataloader; continue it from Python, with launch_training(..., resume=True)"
        )
    return config


def _train(options: argparse.Namespace) -> int:
    config = _config(options)
    if options.dry_run:
        return _preview(config, here=True, as_json=options.json)
    if options.print_sbatch:
        from llama_core.chain.preview import preview_sbatch

        print(preview_sbatch(config, options.run_dir), end="")
        return 0
    if options.flow:
        _run_flow(config, options)
    else:
        _run_chain(config, options)
    return 0


def _run_flow(config: RunConfig, options: argparse.Namespace) -> None:
    """Run the steps under Prefect, on the server of PREFECT_API_URL or on one that stops with the run."""
    defaults = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",  # the server answers this while its database is away
    }
    if not options.debug:  # errors reach the user as one line, from main
        defaults |= dict.fromkeys(("PREFECT_LOGGING_LEVEL", "PREFECT_LOGGING_SERVER_LEVEL"), "CRITICAL")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Flows live in the repository, not in the installed package.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    try:
        from flows.terminal import train_through_the_flow
    except ImportError:
        raise EnvironmentMismatchError(
            "--flow needs the repository's flows/ folder; install with pip install -e ."
        ) from None
    train_through_the_flow(config, options.run_dir, resume=options.resume)


def _run_chain(config: RunConfig, options: argparse.Namespace) -> None:
    from llama_core.chain import steps
    from llama_core.chain.chain import run_chain
    from llama_core.chain.console import say
    from training_infra.local import local_steps

    with say.silenced(options.json):
        run = run_chain(local_steps(config, options.run_dir, resume=options.resume))
    if options.json:
        _print_json(steps.records(run))


def _estimate_memory(options: argparse.Namespace) -> int:
    from llama_core.chain.planned import plan_for_gpu
    from llama_core.data.check import check_data

    planned = plan_for_gpu(_config(options))
    data = planned.config.data
    checked = None if data.source == SAMPLE else check_data(data, planned.config.spec)
    cost = planned.cost(options.tokens, checked)
    code = 0 if planned.estimate.fits else DoesNotFitError.exit_code
    if options.json:
        choice = planned.choice.as_dict() if planned.choice else {}
        resolved = {"config": planned.config.model_dump(mode="json"), "plan": planned.plan.as_dict()}
        _print_json(choice | planned.estimate.as_dict() | resolved | {"cost": cost and cost.as_dict()})
        return code
    print_plan(planned)
    print_profile(planned.estimate.profile)
    print_ranks(planned, planned.estimate.ranks)
    print_choice(planned)
    print_cost(planned, cost)
    if planned.step is None and planned.config.launch.device == "cpu":
        print("time: unknown until something runs; dry-run with the same flags measures this CPU and predicts it")
    print(planned.estimate.summary())
    print_host(planned.estimate)
    for note in planned.estimate.notes:
        print(f"note: {note}")
    return code


def _dry_run(options: argparse.Namespace) -> int:
    return _preview(_config(options), here=False, twin=options.twin, tokens=options.tokens, as_json=options.json)


def _preview(config: RunConfig, *, here: bool, twin: bool = False, tokens: float | None = None, as_json: bool) -> int:
    from llama_core.chain.preview import preview

    shown = preview(config, here=here, twin=twin, tokens=tokens)
    if as_json:
        _print_json(shown.as_dict())
        return shown.exit_code
    planned, rehearsed = shown.planned, shown.rehearsed
    print_plan(planned)
    print_profile(shown.verdict.profile)
    print_ranks(planned, [rank.profile for rank in rehearsed.ranks] if rehearsed else planned.estimate.ranks)
    print(f"estimate: {planned.estimate.summary()}")
    if rehearsed is not None:
        print(f"dry run:  {rehearsed.summary()}")
        if rehearsed.device_overhead is not None:
            print(f"the device adds to that: {rehearsed.device_overhead.summary()}")
    if shown.twin is not None:
        print(f"twin:     {shown.twin.summary()}")
    print_host(shown.verdict)
    print_cost(planned, shown.cost)
    if expected := shown.expected:
        print(f"expect:   {expected}")
    print(f"verdict:  {shown.verdict.summary()}")
    for note in shown.notes:
        print(f"note: {note}")
    return shown.exit_code


def _benchmark(options: argparse.Namespace) -> None:
    if options.batch_sizes or options.save_results:
        _compare_batch_sizes(options)
    else:
        _time_steps(options)


def _compare_batch_sizes(options: argparse.Namespace) -> None:
    from llama_core.sweep.directory import SweepDirectory
    from llama_core.sweep.judgement import Judgement, refuse_regressions
    from training_infra.benchmarking import benchmark_from_terminal

    config = _config(options)
    record = benchmark_from_terminal(
        config,
        options.batch_sizes or [config.batch_size],
        options.run_dir,
        resume=options.resume,
        results=options.save_results,
        as_json=options.json,
    )
    if options.json:
        _print_json(record)
    if options.fail_on_regression and record["sweep_dir"] is not None:
        refuse_regressions(Judgement.read(SweepDirectory(Path(record["sweep_dir"])).history))


def _time_steps(options: argparse.Namespace) -> None:
    from llama_core.chain import steps
    from llama_core.chain.chain import run_chain
    from llama_core.chain.console import say
    from llama_core.chain.runs import RUNS
    from llama_core.sweep.history import check_folder, history_folder
    from llama_core.sweep.judgement import refuse_regressions, remember_run
    from training_infra.local import local_steps

    config = _config(options)
    # A new run's directory is beside the others, in RUNS.
    check_folder(history_folder(config, options.run_dir or RUNS / "new"))
    with say.silenced(options.json):
        run = run_chain(local_steps(config, options.run_dir, resume=options.resume, only="benchmark"))
        judgement = remember_run(run)
    if options.json:
        _print_json({"run_dir": str(run.path)} | asdict(steps.benchmark(run)) | {"history": asdict(judgement)})
    if options.fail_on_regression:
        refuse_regressions(judgement)


def _profile(options: argparse.Namespace) -> None:
    from llama_core.records.profiles import read_profiles
    from training_infra.profiling import configured_like, profile_from_terminal

    options.resume = False
    if options.like is not None:
        if options.config is not None:
            raise ConfigError(f"give {options.like} or --config {options.config}, not both")
        options.config = configured_like(RunDirectory(options.like))
    asked = _config(options)
    name = options.like.resolve().name if options.like else asked.spec.name
    options.overrides += ["benchmark.profile=true", f"tracking.run_name=profile-{name}"]
    options.overrides += [] if asked.benchmark.steps else ["benchmark.steps=3"]  # the other run times none
    run = profile_from_terminal(_config(options), options.run_dir, quiet=options.json)
    if options.json:
        _print_json({"run_dir": str(run.path), "profiles": [asdict(one) for one in read_profiles(run)]})


def _sweep(options: argparse.Namespace) -> None:
    from llama_core.sweep import steps as sweeps
    from llama_core.sweep.judgement import Judgement, refuse_regressions
    from training_infra.sweep import predict_from_terminal, sweep_from_terminal

    if options.predict:
        comparison = predict_from_terminal(options.config, options.sweep_dir, quiet=options.json)
        if options.json:
            _print_json(comparison.as_dict())
        return
    sweep = sweep_from_terminal(
        options.config,
        options.sweep_dir,
        resume=options.resume,
        launcher=options.launcher,
        objective=options.objective,
        history=options.history,
        quiet=options.json,
    )
    if options.json:
        _print_json(sweeps.records(sweep))
    if options.fail_on_regression:
        refuse_regressions(Judgement.read(sweep.history))


def _validate_environment(options: argparse.Namespace) -> int:
    from llama_core.chain.environment import validate_environment

    report = validate_environment(_config(options))
    if options.json:
        _print_json(report.as_dict())
    else:
        print_environment(report)
        num_errors = len(report.errors)
        print(
            f"not ready: {num_errors} error{'s' * (num_errors > 1)}" if num_errors else "environment ready for training"
        )
    return 2 if report.errors else 0


def _report(options: argparse.Namespace) -> None:
    from llama_core.chain.runs import load_config
    from training_reports.page import write_report

    run = RunDirectory(options.run_dir)
    load_config(run)
    print(write_report(run))


def _compare(options: argparse.Namespace) -> None:
    from training_reports.compare import write_comparison
    from training_reports.compare_rows import compare_runs

    comparison = compare_runs(options.run_dirs)
    if options.json:
        _print_json(comparison.as_dict())
    else:
        print_runs(comparison)
        print(write_comparison(options.out, comparison))


def _logs(options: argparse.Namespace) -> None:
    from llama_core.chain import steps
    from llama_core.chain.runs import load_config, load_plan
    from llama_core.launch.logs import LogFollower

    run = RunDirectory(options.run_dir)
    num_ranks = max(load_config(run).parallel.gpus, load_plan(run).world_size)  # an attempt may have had fewer nodes
    if options.rank is not None and options.rank not in range(num_ranks):
        ranks = f"ranks 0 to {num_ranks - 1}" if num_ranks > 1 else "only rank 0"
        raise ConfigError(f"--rank {options.rank}: {run.path} has {ranks}")
    if options.lines < 0:
        raise ConfigError(f"--lines {options.lines}: give 0 or more")
    follower = LogFollower(run, options.rank, options.lines)
    job = steps.attach(run) if options.follow else None
    while True:
        at_work = job is not None and job.is_running()
        for rank, line in follower.new_lines(of_all=not at_work):
            print(f"rank {rank}: {line}", flush=True)
        if not at_work:
            return
        time.sleep(FOLLOW_SECONDS)


def _cancel(options: argparse.Namespace) -> None:
    from llama_core.chain import steps

    run = RunDirectory(options.run_dir)
    match steps.cancel(run):
        case None:
            print(f"{run.path}: no job is running")
        case Outcome(status="cancelled") as outcome:
            print(f"{run.path}: {steps.stopped(run, outcome)}")
        case outcome:
            print(f"{run.path}: {outcome.status} after step {outcome.step}; {outcome.next_action}".rstrip("; "))


def _doctor(options: argparse.Namespace) -> int:
    from llama_core.chain.diagnosis import diagnose

    diagnosis = diagnose(RunDirectory(options.run_dir), read=not options.sizes_only)
    if options.json:
        _print_json(diagnosis.as_dict())
    else:
        print_diagnosis(diagnosis)
    return 0 if diagnosis.is_healthy else 1


def _export_hf(options: argparse.Namespace) -> None:
    from llama_core.chain.console import say
    from llama_core.chain.export import export_run

    run, tell = RunDirectory(options.run_dir), partial(say, "export")
    exported = export_run(run, options.out, step=options.step, dtype=options.dtype, merged=options.merged, tell=tell)
    tell(str(exported))


def _generate(options: argparse.Namespace) -> None:
    from llama_core.chain.generate import generate

    names = ("chat", "step", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "tokenizer", "device", "dtype")
    prompt = options.prompt
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode(errors="surrogateescape").removesuffix("\n")
    tell = partial(print, file=sys.stderr)  # standard output holds only the text
    for piece in generate(options.source, prompt, **{name: getattr(options, name) for name in names}, tell=tell):
        print(piece, end="", flush=True)
    print()


def _models(options: argparse.Namespace) -> None:
    from llama_core.chain.variants import list_variants

    variants = list_variants(options.gpu_type)
    if options.json:
        _print_json({variant.spec.name: variant.as_dict() for variant in variants})
    else:
        print_variants(variants, gpu_spec(options.gpu_type).label, markdown=options.markdown)


def _print_json(record: Mapping[str, Any]) -> None:
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    sys.exit(main())
