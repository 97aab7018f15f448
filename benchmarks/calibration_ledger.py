"""Compare what a run on the CPU is predicted to take with what it takes: ``python -m benchmarks.calibration_ledger``.

Each shape is trained through the command line, in processes of its own, ``--times`` times. A run's directory holds both
sides: ``estimate.json`` and ``expected.json`` were written before it, ``training.json`` and ``benchmark.json`` after.
The tables are those of ``docs/memory.md`` (bytes) and ``docs/cost.md`` (seconds), which ``--memory-page`` and
``--time-page`` rewrite. The machine should have nothing else to do; bytes hardly depend on that, seconds do.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pages import keep, rewrite
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed
from llama_core.records.measurements import BenchmarkRecord, ExpectedStep, TrainingSummary
from llama_core.units import MIB

ROOT = Path(__file__).parents[1]
NAME = "calibration ledger"
MEMORY_BOUND = 0.05
"""Largest relative error of a memory, on an idle machine."""
TIME_BOUND = 0.10
"""Largest relative error of a step's time, on an idle machine."""


@dataclass(frozen=True)
class Shape:
    """A run to predict and to measure."""

    name: str
    arguments: tuple[str, ...]
    """Of ``training-infra train``, without the directory."""


def shape(name: str, model: str, rows: str, *arguments: str, saves: bool = False) -> Shape:
    """Return a short run of a model.

    Args:
        name: how the tables call it.
        model: a model of the registry.
        rows: sequences of a step and their length, as ``"8 x 128"``.
        arguments: further flags.
        saves: whether a checkpoint is written while steps follow; otherwise only at the end.
    """
    batch_size, seq_len = rows.split(" x ")
    flags = [f"--model={model}", f"--batch-size={batch_size}", f"--seq-len={seq_len}"]
    flags += ["--device=cpu", "--steps=6", f"--checkpoint-every={3 if saves else 0}", *arguments]
    return Shape(f"{name}, {rows}", tuple(flags))


SMALL = "tiny_llama3_50m"
LARGE = "tiny_llama3_150m"
SHAPES = (
    Shape("demo, two minutes", ("--config", str(ROOT / "configs/demo.yaml"))),
    shape("50m", SMALL, "8 x 128", saves=True),
    shape("50m", SMALL, "1 x 2048"),
    shape("150m", LARGE, "2 x 512", saves=True),
    shape("50m, LoRA", SMALL, "4 x 512", "--strategy=lora", saves=True),
    shape("150m, LoRA over NF4", LARGE, "2 x 512", "--strategy=lora", "--lora-base=nf4"),
    shape("50m, 4 experts", SMALL, "4 x 256", "--strategy=moe", "--set=moe.num_experts=4", saves=True),
    shape("50m, Muon", SMALL, "4 x 512", "--optimizer=muon"),
    shape("50m, tp 2", SMALL, "4 x 512", "--gpus=2", "--tensor-parallel=2", saves=True),
    shape("50m, dp 2", SMALL, "4 x 512", "--gpus=2", "--tensor-parallel=1", "--zero-stage=0"),
    shape("50m, pp 2", SMALL, "4 x 512", "--gpus=2", "--pipeline-parallel=2", saves=True),
    shape("50m, zero 3", SMALL, "4 x 512", "--gpus=2", "--tensor-parallel=1", "--zero-stage=3"),
)


@dataclass(frozen=True)
class Figures:
    """A run's predictions and measurements, of the rank that holds most."""

    tensors_predicted: float
    """Bytes alive at the peak that the model and its training take: tensors, the checkpoint copy, rows read ahead."""
    tensors: float
    """The same, measured: the most that was alive in training beyond that before the model was built."""
    process_predicted: float
    """Bytes of the whole process at its peak."""
    process: float
    step_predicted: float | None
    """Seconds of an optimizer step; None where nothing predicts it."""
    step: float
    """The median of the timed steps."""
    waiting_share: float | None
    """Share of the time that threads waited for a core."""


def read_figures(run: RunDirectory) -> Figures:
    """Return what a finished run on the CPU recorded."""
    estimate = MemoryEstimate.from_dict(json.loads(run.estimate.read_text(encoding="utf-8")))
    trained = read_typed(run.training, TrainingSummary)
    timed = read_typed(run.benchmark, BenchmarkRecord)
    assert estimate.host is not None
    return Figures(
        tensors_predicted=estimate.host.alive_bytes(estimate.profile),
        tensors=trained.memory_added_bytes,
        process_predicted=estimate.held_bytes,
        process=trained.memory_reserved_bytes,
        step_predicted=predicted_step(run),
        step=timed.median_seconds,
        waiting_share=timed.waiting_share,
    )


def predicted_step(run: RunDirectory) -> float | None:
    """Return the seconds of a step that a run was told to expect before it started; None if it was not."""
    return read_typed(run.expected, ExpectedStep).seconds if run.expected.exists() else None


def measure(one: Shape, times: int) -> list[Figures]:
    """Train a shape several times, each time in new processes and a new directory, which is then deleted."""
    figures = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder, "run")
            command = [sys.executable, "-m", "training_infra", "train", *one.arguments, f"--run-dir={run_dir}"]
            environment = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "reports")))}
            ended = subprocess.run(
                command, cwd=folder, env=os.environ | environment, check=False, capture_output=True, text=True
            )
            if ended.returncode:
                raise SystemExit(f"{one.name} failed:\n{ended.stdout}{ended.stderr}")
            figures.append(read_figures(RunDirectory(run_dir)))
    return figures


def memory_table(ledger: Mapping[str, Sequence[Figures]]) -> str:
    """Return the predicted and measured bytes of each shape, with the error of every run."""
    lines = [
        f"Bound: {MEMORY_BOUND:.0%}. {_within(ledger, memory_errors, MEMORY_BOUND)}",
        "",
        "| run | alive, predicted | measured | errors | process, predicted | measured | errors |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in ledger.items():
        alive = _cells(runs, lambda one: one.tensors_predicted, lambda one: one.tensors, MIB, "{:.1f} MiB")
        process = _cells(runs, lambda one: one.process_predicted, lambda one: one.process, MIB, "{:.0f} MiB")
        lines.append(f"| {name} | {alive} | {process} |")
    return "\n".join(lines) + "\n"


def time_table(ledger: Mapping[str, Sequence[Figures]]) -> str:
    """Return the predicted and measured seconds of each shape, with the error of every run."""
    lines = [
        f"Bound: {TIME_BOUND:.0%}. {_within(ledger, time_errors, TIME_BOUND)}",
        "",
        "| run | step, predicted | measured | errors | threads waited for a core |",
        "|---|---|---|---|---|",
    ]
    for name, runs in ledger.items():
        step = _cells(runs, lambda one: one.step_predicted, lambda one: one.step, 1, "{:.3f} s")
        waits = [one.waiting_share for one in runs if one.waiting_share is not None]
        waited = f"{max(waits):.0%}" if waits else ""
        lines.append(f"| {name} | {step} | {waited} |")
    return "\n".join(lines) + "\n"


def memory_errors(figures: Figures) -> list[float]:
    """Return the relative errors of a run's two memories."""
    return [figures.tensors_predicted / figures.tensors - 1, figures.process_predicted / figures.process - 1]


def time_errors(figures: Figures) -> list[float]:
    """Return the relative error of a run's step; none if nothing predicts it."""
    return [] if figures.step_predicted is None else [figures.step_predicted / figures.step - 1]


def _within(ledger: Mapping[str, Sequence[Figures]], errors: Callable[[Figures], list[float]], bound: float) -> str:
    """Return how many runs keep a bound, in words."""
    told = [errors(one) for runs in ledger.values() for one in runs]
    known = [of_run for of_run in told if of_run]
    kept = [of_run for of_run in known if max(map(abs, of_run)) <= bound]
    return f"{len(kept)} of {len(known)} runs are within it."


def _cells(
    runs: Sequence[Figures],
    predicted: Callable[[Figures], float | None],
    measured: Callable[[Figures], float],
    unit: float,
    how: str,
) -> str:
    """Return the prediction, the median measurement and every run's error, as cells of a table."""
    predictions = [predicted(one) for one in runs]
    told = [one for one in predictions if one is not None]
    errors = [
        f"{100 * (one / measured(run) - 1):+.1f} %"
        for run, one in zip(runs, predictions, strict=True)
        if one is not None
    ]
    first = how.format(median(told) / unit) if told else ""
    return f"{first} | {how.format(median(map(measured, runs)) / unit)} | {', '.join(errors)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results and print the tables."""
    options = _options(arguments)
    chosen = [one for one in SHAPES if fnmatch.fnmatch(one.name, f"*{options.only}*")]
    if not chosen:
        raise SystemExit(f"no shape matches {options.only!r}; there are {', '.join(one.name for one in SHAPES)}")
    ledger = {}
    for one in chosen:
        ledger[one.name] = measure(one, options.times)
        sys.stderr.write(memory_table({one.name: ledger[one.name]}).splitlines()[-1] + "\n")
    here = this_machine()
    memory = f"{here}\n\n{memory_table(ledger)}"
    seconds = f"{here}\n\n{time_table(ledger)}"
    records: dict[str, Any] = {name: [asdict(run) for run in runs] for name, runs in ledger.items()}
    keep(options.out, NAME, records, f"{memory}\n{seconds}")
    sys.stdout.write(f"{memory}\n{seconds}")
    rewrite(options.memory_page, NAME, memory)
    rewrite(options.time_page, NAME, seconds)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration_ledger", description=description)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results; made if not there")
    parser.add_argument("--memory-page", type=Path, help="a page whose table is rewritten, such as docs/memory.md")
    parser.add_argument("--time-page", type=Path, help="a page whose table is rewritten, such as docs/cost.md")
    parser.add_argument("--only", default="", metavar="PATTERN", help="shapes whose names contain it, such as 'tp 2'")
    parser.add_argument("--times", type=int, default=3, help="runs of each shape")
    return parser.parse_args(arguments)


def this_machine() -> str:
    """Return the name and the size of this machine, its torch, and the precision that runs get by themselves."""
    import torch

    from llama_core.machine.detect import cpu_model, detect_machine

    machine = detect_machine()
    memory = machine.memory_bytes / 2**30
    cores = len(os.sched_getaffinity(0))
    precision = "bf16" if machine.cpu_native_bf16 else "fp32"
    return f"{cpu_model()}, {cores} cores, {memory:.0f} GiB, torch {torch.__version__}, {precision}"


if __name__ == "__main__":
    sys.exit(main())
