"""Measure the processes around the ranks of a large job: ``python -m benchmarks.control_plane --out DIR``.

For each number of ranks it starts a real job on this machine: submitit's controller and a real supervisor for each
rank. The workers keep only a heartbeat and a log, because so many of them with torch would not fit. Another process
waits for the job as the command line does. After some seconds, this kills one worker, and the job must end with that
rank named. ``DIR`` then holds ``control_plane.json`` and ``control_plane.md``.

The second part starts no processes. It writes the files that a job of many more ranks leaves, and times the code that
reads them.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.pages import publish
from llama_core.config.run import RunConfig
from llama_core.launch.attempts import LOG_HEADER, RankExit, exit_path, log_path, read_rank_exits
from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.jobs.submission import attach, submit
from llama_core.launch.logs import LogFollower
from llama_core.launch.verdict import verdict_of_ranks
from llama_core.machine.detect import cpu_model
from llama_core.records.directory import RunDirectory
from llama_core.records.files import timestamp, write_json
from llama_core.records.job import JobRecord

WATCHED_SECONDS = 20.0
"""Time for which a running job is watched."""
TRACED_SECONDS = 10
"""Time for which the file operations of a process are counted."""

WORKER = """
import json, os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[-1])
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(76))
step = json.loads((run / "step.json").read_text())
while True:
    step["step"] += 1
    step["time"] = time.time()
    if os.environ["RANK"] == "0":
        (run / ".heartbeat").write_text(json.dumps(step))
        (run / ".heartbeat").rename(sys.argv[-2])
    print("step", step["step"], flush=True)
    time.sleep(5)
"""
STEP = {
    "step": 0, "total_steps": 10**6, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 1,
    "tokens_per_second": 1.0, "step_seconds": 5.0, "data_seconds": 0.0, "forward_backward_seconds": 5.0,
    "optimizer_seconds": 0.0, "mfu": None, "memory_allocated_bytes": 1, "memory_peak_bytes": 1, "loss_scale": 1.0,
    "skipped": False, "eval_loss": None, "time": 0.0,
}  # fmt: skip

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure jobs of each size, write and print the tables, and return the exit code."""
    options = _options(arguments)
    if options.wait is not None:
        handle = attach(RunDirectory(options.wait))
        if handle is not None:
            handle.wait(lambda step: None, lambda rank, line: None, lambda line: None)
        return 0
    jobs = [_job_of(num_ranks) for num_ranks in options.ranks]
    files = [_files_of(num_ranks) for num_ranks in options.files]
    figures = {"jobs": jobs, "files": files}
    publish("control plane", figures, as_markdown(jobs, files), folder=options.out, page=options.page)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=summary)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results; made if not there")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256], help="ranks of the real jobs")
    parser.add_argument("--files", type=int, nargs="+", default=[256, 2048], help="ranks of the jobs that leave files")
    parser.add_argument("--page", type=Path, help="a page whose tables are rewritten, such as docs/scale.md")
    parser.add_argument("--wait", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# --- real supervisors


def _job_of(num_ranks: int) -> Row:
    """Run a job of ``num_ranks`` supervisors from start to outcome."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "run")
        run.create()
        (run.path / "step.json").write_text(json.dumps(STEP))
        config = RunConfig.from_mapping({"launch": {"device": "cpu", "launcher": "local"}})
        handle = submit(run, config, num_ranks, worker=(sys.executable, "-S", "-c", WORKER, str(run.heartbeat)))
        try:
            return {"ranks": num_ranks} | _followed(run, handle, num_ranks)
        finally:
            handle.cancel(grace_seconds=0)


def _followed(run: RunDirectory, handle: JobHandle, num_ranks: int) -> Row:
    controller = psutil.Process(int(handle.record.job_id))
    submitted = datetime.fromisoformat(handle.record.submitted_at).timestamp()
    while len(list(run.logs.glob("rank-*.log"))) < num_ranks or not run.heartbeat.exists():
        if not handle.is_running():
            raise RuntimeError(f"the job of {num_ranks} ranks ended: {handle.wait().reason}")
        time.sleep(0.1)
    row: Row = {"start_s": time.time() - submitted}
    waiter = psutil.Popen([sys.executable, "-m", "benchmarks.control_plane", "--wait", str(run.path)])
    supervisors = controller.children()
    row["start_cpu_s_per_rank"] = _cpu(supervisors) / num_ranks
    time.sleep(5)
    row |= _watched(supervisors, controller, waiter)
    row["supervisor_mib"] = statistics.median(one.memory_full_info().uss for one in supervisors) / 2**20
    row["waiter_mib"] = waiter.memory_full_info().uss / 2**20
    row["supervisor_file_calls_per_s"] = _file_calls(supervisors[num_ranks // 2].pid)
    row["first_supervisor_file_calls_per_s"] = _file_calls(supervisors[0].pid)
    row["waiter_file_calls_per_s"] = _file_calls(waiter.pid)
    (lost,) = supervisors[num_ranks // 2].children()
    failed = time.monotonic()
    lost.kill()
    waiter.wait()
    row["end_s"] = time.monotonic() - failed
    outcome = handle.wait()
    row["outcome"] = f"{outcome.status}: {outcome.reason}"
    files = [path for path in run.path.rglob("*") if path.is_file()]
    row["files_per_rank"] = len(files) / num_ranks
    row["bytes_per_rank"] = sum(path.stat().st_size for path in files) / num_ranks
    return row


def _watched(supervisors: Sequence[psutil.Process], controller: psutil.Process, waiter: psutil.Process) -> Row:
    """Return the CPU milliseconds per second that each part takes while nothing happens."""
    parts = {"supervisor": supervisors, "controller": [controller], "waiter": [waiter]}
    before = {name: _cpu(processes) for name, processes in parts.items()}
    began = time.monotonic()
    time.sleep(WATCHED_SECONDS)
    passed = time.monotonic() - began
    return {
        f"{name}_cpu_ms_per_s": 1e3 * (_cpu(processes) - before[name]) / passed / len(processes)
        for name, processes in parts.items()
    }


def _cpu(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds that processes have taken, without their children."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _file_calls(pid: int) -> float | None:
    """Return a process's system calls per second that name a file (open, stat, readlink...); None without strace."""
    if shutil.which("strace") is None:
        return None
    traced = ["timeout", "-s", "INT", str(TRACED_SECONDS), "strace", "-f", "-c", "-e", "trace=%file", "-p", str(pid)]
    told = subprocess.run(traced, capture_output=True, text=True, check=False).stderr
    total = re.search(r"^100\.00 +\S+ +\S+ +(\d+) .*total$", told, re.MULTILINE)
    return int(total[1]) / TRACED_SECONDS if total else 0.0


# --- the files of many ranks


def run_with_logs(folder: Path, num_ranks: int) -> tuple[RunDirectory, JobRecord]:
    """Return a run in ``folder`` in which each rank of a job has a log, and the job."""
    run = RunDirectory(folder / "run")
    run.create()
    for rank in range(num_ranks):
        log_path(run, rank).write_text(f"{LOG_HEADER}4242, rank {rank} ===\nINFO step 1\n")
    return run, JobRecord("slurm", "4242", platform.node(), timestamp(), folder=str(folder))


def leave_exits(run: RunDirectory, job: JobRecord, num_ranks: int) -> None:
    """Write how each rank ended: the middle one first, and the others because it was gone."""
    for rank in range(num_ranks):
        path = exit_path(run, job, 0, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        failed = rank == num_ranks // 2
        end = RankExit(rank, 1 if failed else 75, None, False, False, num_ranks, time.time() - failed)
        write_json(path, end, durable=False)


def _files_of(num_ranks: int) -> Row:
    """Time the code that reads the files of a job of ``num_ranks``: to follow its logs, and to find how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        run, job = run_with_logs(Path(folder), num_ranks)
        follower = LogFollower(run)
        row: Row = {"ranks": num_ranks, "quiet_look_ms": 1e3 * _seconds(lambda: list(follower.new_lines()))}
        for rank in range(num_ranks):
            with log_path(run, rank).open("a") as log:
                log.write("WARNING the loss scale fell\n")
        row["look_with_a_line_each_ms"] = 1e3 * _seconds(lambda: list(follower.new_lines()))
        leave_exits(run, job, num_ranks)
        row["exits_ms"] = 1e3 * _seconds(lambda: read_rank_exits(run, job, 0))
        row["verdict_ms"] = 1e3 * _seconds(lambda: verdict_of_ranks(run, job, 0))
        row["verdict"] = verdict_of_ranks(run, job, 0).reason
    return row


def _seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


# --- tables

JOB_COLUMNS = {
    "ranks": "ranks",
    "submission to the first step, s": "start_s",
    "CPU s of a supervisor until then": "start_cpu_s_per_rank",
    "CPU ms of a supervisor each second": "supervisor_cpu_ms_per_s",
    "of the controller": "controller_cpu_ms_per_s",
    "of the waiting process": "waiter_cpu_ms_per_s",
    "files named each second by a supervisor": "supervisor_file_calls_per_s",
    "by the first one": "first_supervisor_file_calls_per_s",
    "by the waiting process": "waiter_file_calls_per_s",
    "memory of a supervisor, MiB": "supervisor_mib",
    "memory of the waiting process, MiB": "waiter_mib",
    "a worker's death to the outcome, s": "end_s",
    "files of a rank": "files_per_rank",
    "bytes of a rank": "bytes_per_rank",
}
FILE_COLUMNS = {
    "ranks": "ranks",
    "look at quiet logs, ms": "quiet_look_ms",
    "look at new lines, ms": "look_with_a_line_each_ms",
    "read how each rank ended, ms": "exits_ms",
    "find the rank to blame, ms": "verdict_ms",
}


def as_markdown(jobs: Sequence[Row], files: Sequence[Row]) -> str:
    """Return the tables; a column is a job, since there are fewer jobs than figures."""
    machine = f"{cpu_model()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    tables = (_table("a real job on this machine", JOB_COLUMNS, jobs), _table("files alone", FILE_COLUMNS, files))
    return "\n\n".join([f"{machine}.", *("\n".join(table) for table in tables)]) + "\n"


def _table(title: str, columns: dict[str, str], rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {title} |{' |' * len(rows)}"
    yield f"|---|{'---|' * len(rows)}"
    for name, key in columns.items():
        yield f"| {name} | {' | '.join(_figure(row[key]) for row in rows)} |"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


if __name__ == "__main__":
    sys.exit(main())
