"""Measure each overhead of this project against its floor: ``python -m benchmarks.overheads --out DIR``.

An overhead is time that a user waits besides the training itself. Its floor is the least time that the same result
could take: the same bytes written plainly, the same tokenizer alone, an interpreter that does nothing. Times are CPU
seconds, the median of several runs for short ones, so that other load on the machine shows little; those beside
training steps are wall seconds. ``DIR`` then holds ``overheads.json`` and ``overheads.md``.
"""

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.pages import keep, rewrite
from llama_core.machine.detect import cpu_model

ROOT = Path(__file__).parents[1]
DRY_RUN = (
    *("dry-run", "--model", "llama3_405b", "--gpus", "64", "--gpu-type", "h200", "--tensor-parallel", "4"),
    *("--pipeline-parallel", "1", "--zero-stage", "3", "--activation-checkpointing", "--batch-size", "16"),
)
ESTIMATE = ("estimate-memory", "--model", "llama3_8b", "--gpus", "8", "--gpu-type", "h100")

Figures = dict[str, float]
Row = dict[str, Any]


@dataclass(frozen=True)
class Overhead:
    """One overhead, how to measure it, and what it should be."""

    name: str
    """Name of the overhead, by which ``--only`` selects it."""
    measure: Callable[[], Figures]
    """Returns the seconds of ``ours`` and, if there is one, of its ``floor``."""
    floor: str
    """Description of the floor."""
    aim: str
    """The largest ratio or time that is fine."""
    repeats: int = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the overheads, write them, print the table, and return the exit code: 1 if one failed."""
    options = _options(arguments)
    if options.measure is not None:
        found = next(overhead for overhead in OVERHEADS if overhead.name == options.measure)
        output = io.StringIO()
        with redirect_stdout(output):
            figures = found.measure()
        sys.stdout.write(json.dumps(figures) + "\n")
        return 0
    chosen = [one for one in OVERHEADS if any(fnmatchcase(one.name, pattern) for pattern in options.only)]
    if not chosen:
        example = OVERHEADS[0].name
        sys.stderr.write(f"error: --only {' '.join(options.only)} selects no overhead; one is like '{example}'\n")
        return 2
    rows = []
    for overhead in chosen:
        rows.append({"name": overhead.name, "floor_is": overhead.floor, "aim": overhead.aim} | _measured(overhead))
        sys.stdout.write(f"{overhead.name}: {_in_short(rows[-1])}\n")
        sys.stdout.flush()
        keep(options.out, "overheads", {"machine": _machine(), "rows": rows}, as_markdown(_machine(), rows))
    table = as_markdown(_machine(), rows)
    sys.stdout.write("\n" + table)
    rewrite(options.page, "overheads", table)
    return int(any("failed" in row for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overheads", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results; made if not there")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="overheads, such as '*405B*'")
    parser.add_argument("--page", type=Path, help="a page whose table is rewritten, such as docs/performance.md")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _measured(overhead: Overhead) -> Row:
    """Return the medians of an overhead's figures, or its error; each run has a process of its own."""
    command = [sys.executable, "-m", "benchmarks.overheads", "--measure", overhead.name]
    runs: list[Figures] = []
    for _ in range(overhead.repeats):
        run = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
        if run.returncode:
            said = [line for line in run.stderr.splitlines() if line.strip()]
            return {"failed": said[-1] if said else f"ended with code {run.returncode}"}
        runs.append(json.loads(run.stdout))
    return {name: statistics.median(figures[name] for figures in runs) for name in runs[0]}


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": f"{ROOT}:{ROOT / 'reports'}", "OMP_NUM_THREADS": "1"}


def _machine() -> str:
    return f"{cpu_model()}, {os.cpu_count()} cores, Python {platform.python_version()}"


# --- processes


def cpu_seconds(*command: str) -> float:
    """Return the CPU seconds that a command of Python takes, from start to end.

    Raises:
        RuntimeError: if it fails.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=_environment(), stdout=output, stderr=output
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(output.read().decode(errors="replace").strip().splitlines()[-1])
    return used.ru_utime + used.ru_stime


def command_line(*command: str, floor: Sequence[str]) -> Callable[[], Figures]:
    """Return a function that measures a command; ``floor`` holds the arguments of Python for its floor."""
    return lambda: {
        "ours": cpu_seconds("-m", "training_infra.cli", *command),
        "floor": cpu_seconds(*floor),
    }


def import_facade() -> Figures:
    """Import the Python API; it fails if that loads torch."""
    code = "import sys, training_infra; sys.exit('it loads torch' if 'torch' in sys.modules else 0)"
    return {"ours": cpu_seconds("-c", code), "floor": cpu_seconds("-c", "pass")}


@contextmanager
def timed(figures: Figures, name: str, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """Add the seconds of the block to ``figures[name]``."""
    started = clock()
    try:
        yield
    finally:
        figures[name] = figures.get(name, 0.0) + clock() - started


# --- planning


def plan_of(gpus: int) -> Callable[[], Figures]:
    """Return a function that measures the search for a plan of Llama 3 405B."""

    def measure() -> Figures:
        from llama_core.config.hardware import gpu_spec
        from llama_core.config.run import RunConfig
        from llama_core.planning.search.auto import search
        from llama_core.planning.search.least_memory import NothingFitsError

        device = gpu_spec("h100")
        figures = Figures()
        launch = {"nodes": max(1, gpus // 8), "device": "cuda", "gpu_type": "h100"}
        config = RunConfig.from_mapping(
            {"model": "llama3_405b", "parallel": {"gpus": gpus}, "launch": launch, "training": {"precision": "bf16"}}
        )
        with timed(figures, "ours"):
            try:
                search(config, device.usable_bytes, device)
            except NothingFitsError as error:
                figures["remedies"] = str(error).count(";")
        return {"ours": figures["ours"]}

    return measure


def schedules() -> Figures:
    """Make and time a schedule of 64 ranks and 1024 microbatches; the floor makes its actions and adds their times."""
    from llama_core.schedules.actions import Action
    from llama_core.schedules.clock import simulate
    from llama_core.schedules.registry import build_schedule

    figures = Figures()
    with timed(figures, "ours"):
        timeline = simulate(build_schedule("1f1b", num_ranks=64, num_microbatches=1024))
    with timed(figures, "floor"):
        now = 0.0
        made = []
        for lane in timeline.lanes:
            for one in lane:
                action = Action(one.action.stage, one.action.kind, one.action.microbatch)
                now += 1.0
                made.append((action, now))
    return figures


# --- data


def tokenising() -> Figures:
    """Tokenise the sample into a cache; the floor encodes the same texts with ``tokenizers`` and keeps nothing."""
    import tokenizers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from llama_core.config.models import model_spec
    from llama_core.config.settings import DataConfig
    from llama_core.data.chat import chat_format
    from llama_core.data.find import find_files
    from llama_core.data.formats import FieldNames
    from llama_core.data.sample import sample_file
    from llama_core.data.shards.store import Recipe
    from llama_core.data.shards.token_cache import cached_tokens
    from llama_core.data.tokenizer import load_tokenizer

    figures = Figures()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sample = sample_file(folder)
        texts = [json.loads(line)["text"] for line in sample.read_text(encoding="utf-8").splitlines()]
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = decoders.ByteLevel()
        eos = tokenizers.AddedToken("</s>", special=True)
        trained.train_from_iterator(texts[::20], trainers.BpeTrainer(vocab_size=4000, special_tokens=[eos]))
        trained.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        own = load_tokenizer(str(folder))
        files = find_files(str(sample)).files
        chat = chat_format(DataConfig(), own, model_spec("tiny_llama3_50m"), files)
        with timed(figures, "ours"):
            cached_tokens(files, Recipe(FieldNames(), own, chat, max_bad_lines=0), folder / "cache")
        alone = Tokenizer.from_file(str(folder / "tokenizer.json"))
        with timed(figures, "floor"):
            alone.encode_batch_fast(texts, add_special_tokens=False)
    return figures


# --- a run


def _small_run(folder: Path, **training: Any) -> tuple[Any, Any]:
    """Return the configuration and the directory of a run of ``tiny_llama3_50m`` on this machine."""
    from llama_core.chain.prepare import prepare_run
    from llama_core.config.run import RunConfig

    usual = {"seq_len": 512, "batch_size": 1, "steps": 8, "checkpoint_every": 0, "eval_sequences": 1}
    config = RunConfig.from_mapping(
        {"model": "tiny_llama3_50m", "training": usual | training, "launch": {"device": "cpu"}}
    )
    return config, prepare_run(config, folder / "run")


def _machinery() -> tuple[Figures, float]:
    """Return the seconds of each part of a short run besides its steps, and those of the steps."""
    from llama_core.launch.rank import worker
    from llama_core.records.metrics import read_metrics
    from llama_core.training.checkpoint import Checkpointer
    from llama_core.training.metrics import MetricsSinks

    figures = Figures()

    def with_timer(stack: ExitStack, owner: type, method: str, name: str) -> None:
        original = getattr(owner, method)

        def run(*args: Any, **kwargs: Any) -> Any:
            with timed(figures, name, time.perf_counter):
                return original(*args, **kwargs)

        setattr(owner, method, run)
        stack.callback(setattr, owner, method, original)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        _, run = _small_run(Path(folder), checkpoint_every=4)
        for method in ("write", "flush"):
            with_timer(stack, MetricsSinks, method, "records")
        for method in ("save", "poll"):
            with_timer(stack, Checkpointer, method, "checkpoints")
        code = worker.main([str(run.path), "--only", "train"])
        if code:
            raise RuntimeError(f"the worker ended with code {code}")
        table = read_metrics(run).to_pydict()
    figures["data"] = sum(table["data_seconds"][1:])
    return figures, sum(table["step_seconds"][1:])


def records() -> Figures:
    """Train with metrics, heartbeat and console; the floor is the steps themselves."""
    figures, steps = _machinery()
    return {"ours": figures["records"], "floor": steps}


def loader() -> Figures:
    """Wait for batches; the floor is the steps themselves."""
    figures, steps = _machinery()
    return {"ours": figures["data"], "floor": steps}


def checkpoints() -> Figures:
    """Save and load a checkpoint; the floor writes and reads the same bytes through one file."""
    import torch

    from llama_core.config.run import RunConfig
    from llama_core.planning.plan import ParallelPlan
    from llama_core.training.engine import build_engine

    figures = Figures()
    config = RunConfig.from_mapping({"model": "tiny_llama3_50m", "training": {"precision": "bf16"}})
    engine = build_engine(config, ParallelPlan(), torch.device("cpu"))
    engine.initialize_weights(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        folder.mkdir()
        engine.save(folder).result()  # the first save also makes the moments and the memory of the copy
        with timed(figures, "ours"):
            engine.save(folder).result()
            engine.load(folder)
        whole = bytearray().join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        file = Path(temporary) / "plain"
        with timed(figures, "floor"):
            file.write_bytes(whole)
            file.open("rb").readinto(whole)
    return figures


def report() -> Figures:
    """Write the report of a run of 10,000 steps; the floor reads its metrics into a table."""
    import pandas as pd

    from llama_core.records.measurements import StepRecord
    from llama_core.training.metrics import ParquetSink
    from training_reports.page import write_report

    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        _, run = _small_run(Path(folder))
        sink = ParquetSink(run)
        required = [
            field.name for field in fields(StepRecord) if field.default is MISSING and field.default_factory is MISSING
        ]
        values: dict[str, Any] = dict.fromkeys(required, 1.0) | {
            "total_steps": 10_000,
            "skipped": False,
            "spike": False,
        }
        for step in range(1, 10_001):
            sink.write(StepRecord(**(values | {"step": step, "loss": 5 + 1 / step})))
        sink.close()
        with timed(figures, "ours"):
            write_report(run)
        with timed(figures, "floor"):
            pd.concat(pd.read_parquet(part) for part in sorted(run.metrics.glob("*.parquet")))
    return figures


BARE = ("-c", "pass")
OVERHEADS = [
    Overhead("training-infra --help", command_line("--help", floor=BARE), "`python -c pass`", "-", 5),
    Overhead("import training_infra, without torch", import_facade, "`python -c pass`", "-", 5),
    Overhead(
        "estimate-memory of 8B on 8 GPUs",
        command_line(*ESTIMATE, floor=("-m", "training_infra.cli", "--help")),
        "`--help`",
        "-",
        3,
    ),
    Overhead("plan of 405B on 1024 GPUs", plan_of(1024), "", "2 s", 3),
    Overhead("no plan of 405B on 64 H100", plan_of(64), "", "2 s", 3),
    Overhead(
        "dry run of 405B on 64 GPUs, ZeRO 3",
        command_line(*DRY_RUN, floor=("-c", "import torch")),
        "`import torch`",
        "20 s",
    ),
    Overhead("schedule of 64 ranks x 1024 microbatches", schedules, "to make its actions", "-", 3),
    Overhead("tokenise 10 MB", tokenising, "`tokenizers` alone", "-"),
    Overhead("wait for batches", loader, "the steps", "2 %"),
    Overhead("metrics, heartbeat and console", records, "the steps", "2 %"),
    Overhead("save and load a checkpoint of 50M", checkpoints, "to write and read the bytes", "-"),
    Overhead("report of 10,000 steps", report, "to read the metrics", "-"),
]


# --- the table


def _in_short(row: Row) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}"
    floor = f"; floor {row['floor']:.3g} s ({row['floor_is']})" if "floor" in row else ""
    return f"{row['ours']:.2f} s{floor}"


def _ratio(row: Row) -> str:
    ratio = row["ours"] / row["floor"]
    return f"{ratio:.2g} times" if ratio >= 0.1 else f"{ratio:.2%}"


def as_markdown(machine: str, rows: Iterable[Row]) -> str:
    """Return the table."""
    lines = [f"{machine}; CPU seconds, and wall seconds beside steps.", ""]
    lines += ["| overhead | seconds | floor | seconds | ratio | aim |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        if "failed" in row:
            cells = [row["name"], _in_short(row), row["floor_is"], "-", "-", row["aim"]]
        else:
            floor, ratio = (f"{row['floor']:.3g}", _ratio(row)) if "floor" in row else ("-", "-")
            cells = [row["name"], f"{row['ours']:.3g}", row["floor_is"] or "-", floor, ratio, row["aim"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
