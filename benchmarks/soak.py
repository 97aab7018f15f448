"""Preempt and resume one run again and again, and look for leaks: ``python -m benchmarks.soak --out DIR``.

A tiny model trains on two ranks, with evaluation, an asynchronous checkpoint every few steps and TensorBoard. Each
cycle ends it after some steps: by SIGTERM, as a preemption does, or every third time by ``kill -9`` of one of its
processes. Every cycle reads memory and file handles some steps after the start, and counts what is left after the end.
Then the same run trains once undisturbed, for thousands of steps in one attempt: memory and handles must stay the same
within it, and every loss must equal the resumed run's, bit for bit.

``DIR`` then holds ``soak.json`` and ``soak.md``. The exit code is 1 if something leaks, a checkpoint too many is kept,
or a loss differs.
"""

import argparse
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from benchmarks.pages import publish
from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.jobs.submission import submit
from llama_core.machine.detect import cpu_model
from llama_core.records.checkpoints import list_checkpoints, newest_step
from llama_core.records.directory import RunDirectory
from llama_core.records.files import now
from llama_core.records.metrics import read_heartbeat, read_metrics
from llama_core.runs.loading import load_config, load_plan
from llama_core.units import KIB, MIB, format_duration

RANKS = 2
KEPT = 2
MEASURED_AFTER = 10
"""Steps of an attempt after which its processes are measured."""
KILL_EVERY = 3
"""Every third cycle ends by ``kill -9``."""
WARM_UP = 0.2
"""Share of the long attempt that its slopes leave out, in which allocators still grow."""
GROWTH = 0.02
"""Share of the mean by which a figure that must stay the same may grow over the whole soak."""
FEW_PARAMETERS = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 512}
TRAINING = {
    "batch_size": 4, "seq_len": 32, "steps": 1_000_000, "precision": "fp32", "eval_every": 8, "eval_sequences": 4,
    "checkpoint_every": 3, "keep_checkpoints": KEPT,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What a rank and its supervisor hold."""

    step: int
    rank_bytes: int
    """Resident set of the first rank."""
    rank_own_bytes: int
    """The same without files that it has mapped, such as the tokens: the kernel takes those pages back if need be."""
    rank_handles: int
    """Its open files and sockets."""
    supervisor_bytes: int
    supervisor_handles: int


@dataclass(frozen=True)
class Cycle:
    """One attempt of the run, from its start to its end."""

    first_step: int
    """The step that it resumed after."""
    last_step: int
    """The step of its newest checkpoint when it had ended."""
    ended_by: str
    sizes: Sizes
    checkpoints: int
    """Complete checkpoints on disk when it had ended."""
    run_bytes: int
    """Bytes in the run directory, without metrics and checkpoints."""
    disk_bytes: int
    """Bytes on disk of the run directory and of the folder for temporary files."""
    temporary_files: tuple[str, ...]
    """Files and folders of unfinished writes, in the run directory or in the folder for temporary files."""
    processes: int
    """Processes of the job that still live."""


@dataclass(frozen=True)
class Soak:
    """Everything that was measured."""

    machine: str
    at: str
    seconds: float
    """Wall time of the cycles."""
    cycles: tuple[Cycle, ...]
    long: tuple[Sizes, ...]
    """The undisturbed attempt, in order of steps."""
    compared_steps: int
    different_steps: int
    """Steps whose loss, gradient norm or held-out loss differ from the undisturbed run's."""

    @property
    def resumed(self) -> list[Sizes]:
        """The sizes of all attempts but the first, which loads no checkpoint."""
        return [one.sizes for one in self.cycles[1:]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, write and print the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results; made if not there")
    parser.add_argument("--minutes", type=float, default=20, help="time for cycles; default: 20")
    parser.add_argument("--cycles", type=int, help="number of cycles, instead of a time")
    parser.add_argument("--long-steps", type=int, default=3000, help="least steps of the long attempt; default: 3000")
    parser.add_argument("--page", type=Path, help="a page whose table is rewritten, such as docs/reliability.md")
    options = parser.parse_args(arguments)
    with _own_folder() as folder:
        soak = run_soak(folder, 60 * options.minutes, options.cycles, options.long_steps)
    publish("soak", asdict(soak), as_markdown(soak), folder=options.out, page=options.page)
    found = problems(soak)
    sys.stderr.writelines(f"error: {problem}\n" for problem in found)
    return int(bool(found))


@contextmanager
def _own_folder() -> Iterator[Path]:
    """Yield a folder whose ``tmp`` gets the temporary files of every process of the run."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(folder / "tmp")
        try:
            yield folder
        finally:
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before


# --- the run


def run_soak(folder: Path, seconds: float, num_cycles: int | None, long_steps: int) -> Soak:
    """Preempt and resume a run below ``folder`` for ``seconds`` or ``num_cycles``, then train it undisturbed."""
    dice = random.Random(0)
    began = time.monotonic()
    run = RunDirectory(folder / "soaked")
    cycles = list[Cycle]()
    while time.monotonic() - began < seconds if num_cycles is None else len(cycles) < num_cycles:
        cycles.append(_cycle(folder, run, dice, len(cycles) + 1))
        sys.stdout.write(f"cycle {len(cycles)}: {cycles[-1]}\n")
        sys.stdout.flush()
    taken = time.monotonic() - began
    undisturbed = RunDirectory(folder / "undisturbed")
    last_step = newest_step(run)
    long = tuple(_long_attempt(folder, undisturbed, max(long_steps, last_step)))
    ours, theirs = (_losses(one, last_step) for one in (run, undisturbed))
    different = sum(ours.get(step) != theirs[step] for step in theirs)
    machine = f"{cpu_model()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return Soak(machine, now(), taken, tuple(cycles), long, len(theirs), different)


@contextmanager
def _job(folder: Path, run: RunDirectory) -> Iterator[JobHandle]:
    """Start the run's job, or continue the run; kill the job if it still runs at the end of the block."""
    config = RunConfig.from_mapping(
        {
            "architecture": FEW_PARAMETERS,
            "training": TRAINING,
            "parallel": {"gpus": RANKS, "zero_stage": 2},
            "data": {"cache_dir": str(folder / "cache")},
            "launch": {"device": "cpu"},
            "benchmark": {"steps": 0},
        }
    )
    run = prepare_run(config, run.path, resume=run.config.exists())
    handle = submit(run, load_config(run), load_plan(run).world_size)
    try:
        yield handle
    finally:
        if handle.is_running():
            handle.cancel(grace_seconds=0)


def _cycle(folder: Path, run: RunDirectory, dice: random.Random, number: int) -> Cycle:
    first_step = newest_step(run)
    with _job(folder, run) as handle:
        _until_step(handle, first_step + MEASURED_AFTER)
        supervisors, workers = _processes(handle)
        sizes = _sizes(handle, workers[0], supervisors[0])
        _until_step(handle, first_step + MEASURED_AFTER + dice.randrange(60))
        controller = psutil.Process(int(handle.record.job_id))
        if number % KILL_EVERY:
            ended_by = "SIGTERM"
            controller.terminate()
        else:
            victims = {"the controller": controller, "a supervisor": supervisors[-1]}
            victims |= {f"rank {rank}": worker for rank, worker in enumerate(workers)}
            name = sorted(victims)[number // KILL_EVERY % len(victims)]
            ended_by = f"kill -9 of {name}"
            victims[name].kill()
        handle.wait()
    alive = [one for one in (controller, *supervisors, *workers) if one.is_running() and one.status() != "zombie"]
    others = (run.metrics, run.checkpoints)
    files = [path for path in run.path.rglob("*") if path.is_file() and not any(o in path.parents for o in others)]
    return Cycle(
        first_step=first_step,
        last_step=newest_step(run),
        ended_by=ended_by,
        sizes=sizes,
        checkpoints=len(list_checkpoints(run)),
        run_bytes=sum(path.stat().st_size for path in files),
        disk_bytes=sum(512 * path.lstat().st_blocks for root in (run.path, folder / "tmp") for path in root.rglob("*")),
        temporary_files=tuple(path.name for path in (*unfinished(run), *_others(folder / "tmp"))),
        processes=len(alive),
    )


def unfinished(run: RunDirectory) -> list[Path]:
    """Return the files that unfinished writes have left in the run directory."""
    return [path for path in run.path.rglob(".*") if path.suffix in {".tmp", ".writing"}]


def _others(temporary: Path) -> list[Path]:
    """Return the files in a folder for temporary files, except the cache that torch keeps there for each user."""
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def _long_attempt(folder: Path, run: RunDirectory, num_steps: int) -> Iterator[Sizes]:
    """Train undisturbed for at least ``num_steps``; yield the sizes a hundred times."""
    with _job(folder, run) as handle:
        for step in range(num_steps // 100, num_steps + 1, max(1, num_steps // 100)):
            _until_step(handle, step)
            supervisors, workers = _processes(handle)
            yield _sizes(handle, workers[0], supervisors[0])
        _until_step(handle, num_steps)
        psutil.Process(int(handle.record.job_id)).terminate()
        handle.wait()


def _until_step(handle: JobHandle, step: int) -> None:
    """Wait until the job has taken ``step``.

    Raises:
        RuntimeError: if it ends before.
    """
    submitted = datetime.fromisoformat(handle.record.submitted_at).timestamp()
    while (newest := read_heartbeat(handle.run)) is None or newest.time < submitted or newest.step < step:
        if not handle.is_running():
            raise RuntimeError(f"the job ended before step {step}: {handle.wait().reason}")
        time.sleep(0.01)


def _processes(handle: JobHandle) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the supervisors and the workers of a job, by rank."""
    supervisors = psutil.Process(int(handle.record.job_id)).children()
    pairs = [(one, worker) for one in supervisors for worker in one.children()]
    pairs.sort(key=lambda pair: int(pair[1].environ()["RANK"]))
    return [one for one, _ in pairs], [worker for _, worker in pairs]


def _sizes(handle: JobHandle, worker: psutil.Process, supervisor: psutil.Process) -> Sizes:
    newest = read_heartbeat(handle.run)
    memory = worker.memory_info()
    return Sizes(
        step=newest.step if newest else 0,
        rank_bytes=memory.rss,
        rank_own_bytes=memory.rss - memory.shared,
        rank_handles=worker.num_fds(),
        supervisor_bytes=supervisor.memory_info().rss,
        supervisor_handles=supervisor.num_fds(),
    )


def _losses(run: RunDirectory, last_step: int) -> dict[int, tuple[float, ...]]:
    """Return the loss, gradient norm and held-out loss of every step until ``last_step``."""
    table = read_metrics(run).select(["step", "loss", "grad_norm", "eval_loss"]).to_pylist()
    return {row["step"]: tuple(row.values()) for row in table if row["step"] <= last_step}


# --- the table


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the slope of the line of least squares through points, and its standard error; at least three points."""
    mean_x = sum(x) / len(x)
    mean_y = sum(y) / len(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    found = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - found * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return found, (rest / (len(x) - 2) / spread) ** 0.5


Figure = tuple[str, float, str, Callable[[Sizes], float]]
FLAT: tuple[Figure, ...] = (
    ("resident set of a rank, MiB", MIB, "KiB", lambda sizes: sizes.rank_bytes),
    ("that without mapped files, MiB", MIB, "KiB", lambda sizes: sizes.rank_own_bytes),
    ("file handles of a rank", 1, "", lambda sizes: sizes.rank_handles),
    ("resident set of its supervisor, MiB", MIB, "KiB", lambda sizes: sizes.supervisor_bytes),
    ("file handles of its supervisor", 1, "", lambda sizes: sizes.supervisor_handles),
)
"""Figures that must stay the same: name, divisor, unit of the slope, and value."""


def problems(soak: Soak) -> list[str]:
    """Return a sentence for each leak or difference."""
    found = []
    long = warm(soak.long)
    series = {
        "from attempt to attempt": (range(len(soak.resumed)), soak.resumed),
        "within an attempt": ([one.step for one in long], long),
    }
    for where, (x, sizes) in series.items():
        for name, _, _, value in FLAT:
            if len(sizes) < 3:
                continue
            y = [value(one) for one in sizes]
            rise, error = slope(x, y)
            growth = rise * (x[-1] - x[0])
            if rise > 3 * error and growth > GROWTH * sum(y) / len(y):
                found.append(f"{where}, the {name.partition(',')[0]} grows, by {growth:.4g} in all")
    for number, one in enumerate(soak.cycles, 1):
        cleanly = one.ended_by == "SIGTERM"
        if one.checkpoints > KEPT + (not cleanly):  # a new one is there before an old one is deleted
            found.append(f"{one.checkpoints} checkpoints are left after cycle {number}, not {KEPT}")
        if one.processes or (cleanly and one.temporary_files):
            left = f"{one.processes} processes and {len(one.temporary_files)} temporary files"
            found.append(f"{left} are left after cycle {number} ({one.ended_by})")
    if soak.different_steps:
        found.append(f"{soak.different_steps} of {soak.compared_steps} steps differ from the undisturbed run's")
    return found


def warm(long: Sequence[Sizes]) -> Sequence[Sizes]:
    """Return the sizes that slopes are fitted to."""
    return long[round(WARM_UP * len(long)) :]


def as_markdown(soak: Soak) -> str:
    """Return the table."""
    kills = sum(one.ended_by != "SIGTERM" for one in soak.cycles)
    attempts = range(len(soak.cycles))
    long = warm(soak.long)
    lines = [
        f"{soak.machine}; {soak.at[:10]}. {len(soak.cycles)} cycles in {format_duration(soak.seconds)}, {kills} "
        f"of them ended by `kill -9` and the others by SIGTERM, up to step {soak.cycles[-1].last_step}; then one "
        f"attempt of {soak.long[-1].step} steps.",
        "",
        f"| figure | mean at step {MEASURED_AFTER} of a resumed attempt | slope for each attempt "
        "| mean in the long attempt | slope for each 1,000 steps |",
        "|---|---|---|---|---|",
    ]
    for name, unit, small, value in FLAT:
        cells = []
        among_attempts = range(len(soak.resumed)), soak.resumed, 1
        for x, among, scale in (among_attempts, ([one.step for one in long], long, 1000)):
            y = [value(one) for one in among]
            cells += [f"{sum(y) / len(y) / unit:.4g}", _slope(x, y, scale, small)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    grown = [("run directory without metrics and checkpoints", "run_bytes"), ("all of it on disk", "disk_bytes")]
    lines += ["", "| figure | after the first attempt | after the last | slope for each attempt |", "|---|---|---|---|"]
    for name, field in grown:
        y = [getattr(one, field) for one in soak.cycles]
        lines.append(f"| {name}, MiB | {y[0] / MIB:.3g} | {y[-1] / MIB:.3g} | {_slope(attempts, y, 1, 'KiB')} |")
    clean = [one for one in soak.cycles if one.ended_by == "SIGTERM"]
    killed = [one for one in soak.cycles if one.ended_by != "SIGTERM"]
    lines += ["", "| most of all cycles | after SIGTERM | after `kill -9` |", "|---|---|---|"]
    for name, value in (
        (f"checkpoints, with keep_checkpoints={KEPT}", lambda one: one.checkpoints),
        ("temporary files left", lambda one: len(one.temporary_files)),
        ("processes left", lambda one: one.processes),
    ):
        most = [str(max(map(value, some), default="-")) for some in (clean, killed)]
        lines.append(f"| {name} | {' | '.join(most)} |")
    same = "the same" if not soak.different_steps else f"different in {soak.different_steps} steps"
    lines += ["", f"Loss, gradient norm and held-out loss of all {soak.compared_steps} steps: {same}, bit for bit."]
    return "\n".join(lines) + "\n"


def _slope(x: Sequence[float], y: Sequence[float], scale: float, unit: str) -> str:
    if len(y) < 3:
        return "-"
    found, error = (scale * one / (KIB if unit else 1) for one in slope(x, y))
    return f"{_figure(found)} ± {_figure(error)}{f' {unit}' if unit else ''}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # either way, the run's job ends with it
    sys.exit(main())
