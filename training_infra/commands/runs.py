"""The commands on a run that exists: follow it, end it, look at it."""

import argparse
import sys
import time
from contextlib import suppress
from pathlib import Path

from llama_core.errors import ConfigError, RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import other_owner
from llama_core.records.job import Outcome
from training_infra.commands.command import RUN_DIR, Argument, Command, path_or_url, whole_number
from training_infra.lines import print_json, print_line
from training_infra.tables import print_diagnosis, print_runs

FOLLOW_SECONDS = 0.5
"""Time between two polls of ``logs --follow``."""


def _logs(options: argparse.Namespace) -> None:
    from llama_core.launch.jobs import submission
    from llama_core.launch.logs import LogFollower
    from llama_core.runs.loading import load_config, load_plan

    run = RunDirectory(options.run_dir)
    num_ranks = max(load_config(run).parallel.gpus, load_plan(run).world_size)  # an attempt may have had fewer nodes
    if options.rank is not None and options.rank not in range(num_ranks):
        ranks = f"ranks 0 to {num_ranks - 1}" if num_ranks > 1 else "only rank 0"
        raise ConfigError(f"--rank {options.rank}: {run.path} has {ranks}")
    if options.lines < 0:
        raise ConfigError(f"--lines {options.lines}: give 0 or more")
    follower = LogFollower(run, options.rank, options.lines)
    job = submission.attach(run) if options.follow else None
    if options.follow and (owner := other_owner(run)):
        print_line(f"note: {run.path} belongs to {owner}: nothing is recorded about it", file=sys.stderr)
    while True:
        # Asked before the lines are read, so that none is lost which the job prints before it ends.
        at_work = job is not None and job.is_running()
        for rank, line in follower.new_lines(of_all=not at_work):
            print_line(f"rank {rank}: {line}")
        if not at_work:
            return
        time.sleep(FOLLOW_SECONDS)


LOGS = Command(
    "logs",
    "show the output of a run's ranks",
    _logs,
    only_prints=True,
    examples=("runs/mine --follow", "runs/mine --rank 3"),
    arguments=(
        RUN_DIR,
        Argument("--follow", action="store_true", help="keep printing until the run's job ends"),
        Argument("--rank", type=int, metavar="3", help="only this rank"),
        Argument(
            "--lines",
            type=whole_number,
            default=10,
            metavar="50",
            help="start with each rank's last lines; default: 10",
        ),
    ),
)


def _cancel(options: argparse.Namespace) -> None:
    from llama_core.runs.stopping import cancel, stopped

    run = RunDirectory(options.run_dir)
    match cancel(run):
        case None:
            print_line(f"{run.path}: no job is running")
        case Outcome(status="cancelled") as outcome:
            print_line(f"{run.path}: {stopped(run, outcome)}")
        case outcome:
            print_line(f"{run.path}: {outcome.status} after step {outcome.step}; {outcome.next_action}".rstrip("; "))


CANCEL = Command(
    "cancel",
    "end a run's job after its current step, with a checkpoint, wherever it runs",
    _cancel,
    examples=("runs/mine",),
    arguments=(RUN_DIR,),
)


def _doctor(options: argparse.Namespace) -> int:
    from llama_core.runs.diagnosis import diagnose

    diagnosis = diagnose(RunDirectory(options.run_dir), read=not options.sizes_only)
    if options.json:
        print_json(diagnosis.as_dict())
    else:
        print_diagnosis(diagnosis)
    return 0 if diagnosis.is_healthy else 1


DOCTOR = Command(
    "doctor",
    "show a run's state, how its attempts ended, which checkpoints are good, and how to continue",
    _doctor,
    examples=("runs/mine", "runs/mine --sizes-only --json"),
    arguments=(
        RUN_DIR,
        Argument(
            "--sizes-only", action="store_true", help="compare only the sizes of checkpoint files; read none of them"
        ),
        Argument("--json", action="store_true", help="print JSON"),
    ),
)


def _report(options: argparse.Namespace) -> None:
    from llama_core.launch.jobs.submission import attach
    from llama_core.runs.loading import load_config
    from training_reports.page import write_report

    run = RunDirectory(options.run_dir)
    load_config(run)
    job = None
    with suppress(RunDirectoryError):  # the page is about a run whose job cannot be seen from here, too
        job = attach(run)
    print_line(write_report(run, job=job.state if job else ""))


REPORT = Command(
    "report",
    "write report.html of a run, finished or not",
    _report,
    examples=("runs/mine",),
    arguments=(RUN_DIR,),
)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a whole number from 0 to 65535")
    return int(text)


def _watch(options: argparse.Namespace) -> None:
    from training_reports.watch import WatchServer

    with WatchServer(options.run_dir, options.host, options.port) as server:
        print_line(f"{server.url} shows {options.run_dir} until Ctrl-C")
        server.serve_forever()


WATCH = Command(
    "watch",
    "show a run or a sweep in a browser while it goes on",
    _watch,
    examples=("runs/mine", "sweeps/mine --port 9000", "runs/mine --host 0.0.0.0"),
    arguments=(
        Argument("run_dir", type=path_or_url, metavar="RUN_DIR|SWEEP_DIR", help="the directory of a run or a sweep"),
        Argument("--port", type=_port, metavar="9000", default=8642, help="0 for any free one; default: 8642"),
        Argument(
            "--host",
            metavar="0.0.0.0",
            help="address for browsers of other machines, which then need the token of the printed address; default: "
            "this machine only, without a token",
        ),
    ),
)


def _compare(options: argparse.Namespace) -> None:
    from training_reports.compare import write_comparison
    from training_reports.run_comparison import compare_runs

    comparison = compare_runs(options.run_dirs)
    if options.json:
        print_json(comparison.as_dict())
    else:
        print_runs(comparison)
        print_line(write_comparison(options.out, comparison))


COMPARE = Command(
    "compare",
    "compare runs on the terminal and on one page: settings, loss, speed, memory, cost",
    _compare,
    examples=("runs/first runs/second", "runs/first runs/second runs/third --out first-three.html"),
    arguments=(
        Argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the directories of the runs"),
        Argument(
            "--out", type=Path, metavar="mine.html", default=Path("comparison.html"), help="default: comparison.html"
        ),
        Argument("--json", action="store_true", help="print the comparison as JSON; write no page"),
    ),
)
