"""Measure how CPU threads should wait for each other: ``python -m benchmarks.busy_machine --out DIR``.

After each operation, torch's threads meet at a barrier of OpenMP. A thread that spins there is fastest while it has a
core to itself; beside other processes it burns the time in which the thread that it waits for could run. Each way to
wait takes optimizer steps of the demo's model in a process of its own, as it is chosen when OpenMP starts. The
processes take turns: on the machine as it is, beside busy processes on half of its cores, and beside one busy process
more than it has cores. ``DIR`` then holds ``busy_machine.md`` and ``busy_machine.json``. The machine should have
nothing else to do.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.pages import publish
from llama_core.imports import SPINS
from llama_core.machine.shared_cores import sleeping_beside_others

ROOT = Path(__file__).parents[1]
SLEEPS = "SLEEPS_BESIDE_OTHERS"
"""Variable of a process whose threads also sleep while others have the cores, as those of runs do."""
WAYS: dict[str, dict[str, str]] = {
    "OpenMP's default": {},
    "as runs do": {"GOMP_SPINCOUNT": SPINS, SLEEPS: "1"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "GOMP_SPINCOUNT=500": {"GOMP_SPINCOUNT": "500"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=2000": {"GOMP_SPINCOUNT": "2000"},
    "GOMP_SPINCOUNT=4000": {"GOMP_SPINCOUNT": "4000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
}
DEMO = ROOT / "configs" / "demo.yaml"
BUSY = "while True: pass"

Speeds = dict[str, list[float]]
"""Steps per second of each turn, by the way to wait."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results and print the table."""
    options = _options(arguments)
    if options.take_steps:
        take_steps()
        return 0
    cores = len(os.sched_getaffinity(0))
    with takers(options.ways) as processes:
        speeds = {"idle": measure(options.turns, options.seconds, processes)}
        for number in (max(1, cores // 2), cores + 1):
            with neighbours(number):
                busy = "1 busy process" if number == 1 else f"{number} busy processes"
                speeds[f"beside {busy}"] = measure(options.turns, options.seconds, processes)
    table = f"{_machine(cores)}, median of {options.turns} turns\n\n{as_markdown(speeds)}"
    publish("busy machine", speeds, table, folder=options.out, page=options.page)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy_machine", description=description)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results; made if not there")
    parser.add_argument("--page", type=Path, help="a page whose table is rewritten, such as docs/performance.md")
    parser.add_argument("--turns", type=int, default=7, help="turns of each way to wait")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for the steps of a turn")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="ways to wait")
    parser.add_argument("--take-steps", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(turns: int, seconds: float, takers: dict[str, subprocess.Popen[str]]) -> Speeds:
    """Return the steps per second of each way to wait; their processes take turns."""
    speeds: Speeds = {way: [] for way in takers}
    for _ in range(turns):
        for way, process in takers.items():
            speeds[way].append(_ask(process, seconds))
    return speeds


def _ask(process: subprocess.Popen[str], seconds: float) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{seconds}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


@contextmanager
def takers(ways: Sequence[str]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Have a process that takes steps for each way to wait."""
    known = {name for variables in WAYS.values() for name in variables} | {"OMP_NUM_THREADS"}
    inherited = {name: value for name, value in os.environ.items() if name not in known}
    command = [sys.executable, "-m", "benchmarks.busy_machine", "--take-steps"]
    with ExitStack() as stack:
        started = {}
        for way in ways:
            environment = inherited | WAYS[way]
            started[way] = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(started[way].kill)
        for process in started.values():
            _ask(process, 0.0)  # it has started
        yield started


def take_steps() -> None:
    """Take steps for as many seconds as each line of the input says, and print how many it were per second."""
    import torch

    from llama_core.config.run import RunConfig
    from llama_core.models.batch import Batch
    from llama_core.planning.plan import ParallelPlan
    from llama_core.training.engine import build_engine, train_step

    config = RunConfig.load(DEMO, ["training.precision=bf16"])
    shape_BS = config.first_batch_size, config.seq_len
    engine = build_engine(config, ParallelPlan(microbatch_size=shape_BS[0]), torch.device("cpu"))
    engine.initialize_weights(0)
    tokens_BS = torch.randint(0, config.spec.vocab_size, shape_BS, generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens_BS, tokens_BS.roll(-1, 1), None)
    with sleeping_beside_others() if SLEEPS in os.environ else nullcontext():
        for line in sys.stdin:
            seconds = float(line)
            taken = 0
            began = time.perf_counter()
            while taken < 1 or time.perf_counter() - began < seconds:
                train_step(engine, [batch], learning_rate=1e-3, max_grad_norm=1.0)
                taken += 1
            sys.stdout.write(f"{taken / (time.perf_counter() - began)}\n")
            sys.stdout.flush()


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Keep as many processes busy for the duration of the block."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def as_markdown(speeds: dict[str, Speeds]) -> str:
    """Return a table of the median speeds, and of each way's over that of OpenMP's default, turn by turn."""
    lines = ["| threads wait | " + " | ".join(f"{load}: steps/s | over the default" for load in speeds) + " |"]
    lines.append("|---" * (1 + 2 * len(speeds)) + "|")
    default = next(iter(WAYS))
    for way in next(iter(speeds.values())):
        cells: list[Any] = [way]
        for of_load in speeds.values():
            ratios = [one / other for one, other in zip(of_load[way], of_load[default], strict=True)]
            cells += [f"{statistics.median(of_load[way]):.3g}", f"{statistics.median(ratios):.3g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _machine(cores: int) -> str:
    import torch

    from llama_core.machine.detect import cpu_model

    return f"{cpu_model()}, {cores} cores, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
