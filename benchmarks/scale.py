"""Measure how what ranks do together grows with their number: ``python -m benchmarks.scale --out DIR``.

Each row is the engine's own code at several numbers of ranks. Real ranks, processes of this machine, connect to each
other; the rest is one process that gets what thousands of ranks would hand it, or leave as files. A law of growth is
fitted to each row, which says what 8,192 ranks take. ``DIR`` then holds ``growth.json`` and ``growth.md``.
"""

import argparse
import math
import os
import pickle
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.control_plane import leave_exits, run_with_logs
from benchmarks.pages import publish
from llama_core.config.hardware import gpu_spec
from llama_core.config.run import RunConfig
from llama_core.launch.logs import LogFollower
from llama_core.launch.ports import free_port
from llama_core.launch.rank.checks import RankFacts, disagreements
from llama_core.launch.verdict import verdict_of_ranks
from llama_core.machine.detect import cpu_model
from llama_core.parallel.ranks import from_first_rank, joined_ranks, on_first_rank, wait_for_all
from llama_core.planning.search.auto import choose_plan
from llama_core.preflight.checks import AMOUNTS, PRODUCT
from llama_core.preflight.preflight import fallen_behind
from llama_core.preflight.stragglers import CORE_WAIT, FIRST_LOOKS, SIGNALS, StragglerJudge, window
from llama_core.records.checkpoints import recorded_sums, write_manifest
from llama_core.records.checksums import FileSum
from llama_core.records.directory import RunDirectory
from llama_core.records.files import timestamp, write_json
from llama_core.records.preflight import PreflightRecord, RankMeasurements, append_preflight
from llama_core.rehearsal.dry_run import rehearse
from llama_core.rehearsal.trace import alone_among
from llama_core.training.index import INDEX
from llama_core.training.reading import PlainReader
from llama_core.training.reports import Reports
from llama_core.training.saving import FILES_PER_RANK, _Writer

MANY = 8192
"""The ranks that each law is computed for."""
PROCESSES = (16, 32, 64)
"""Real ranks that connect to each other."""
RANKS = (512, 2048, 8192)
"""Ranks that one process stands for."""
SHARDS = (8, 32, 128)
"""Ranks of a shard group, each of which has a part of every tensor."""
TENSORS = 512
GPUS_OF_A_NODE = 8
REPEATS = 3

Figures = Mapping[str, float]
Measurement = Callable[[int], Figures]


# --- laws of growth

LAWS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda ranks: 0.0,
    "log ranks": math.log2,
    "ranks": lambda ranks: ranks,
    "ranks²": lambda ranks: ranks**2,
}

_MAX_EXPONENTS = {"constant": 0.15, "log ranks": 0.5, "ranks": 1.5}


@dataclass(frozen=True)
class Growth:
    """A value that is ``constant + slope * law(ranks)``."""

    law: str
    constant: float
    slope: float

    def at(self, ranks: float) -> float:
        """Return the value for a number of ranks."""
        return self.constant + self.slope * LAWS[self.law](ranks)


def growth(sizes: Sequence[float], values: Sequence[float]) -> Growth:
    """Return the law whose exponent is nearest to that of the values, fitted to them.

    Args:
        sizes: numbers of ranks, at least three.
        values: what was measured, above 0.
    """
    exponent = statistics.linear_regression([math.log(size) for size in sizes], [math.log(one) for one in values]).slope
    law = next((law for law, most in _MAX_EXPONENTS.items() if exponent < most), "ranks²")
    return _fitted(law, sizes, values)


def _fitted(law: str, sizes: Sequence[float], values: Sequence[float]) -> Growth:
    """Fit by least squares of the relative errors; a constant below 0 is left out."""
    terms = [LAWS[law](size) for size in sizes]
    if law == "constant":
        return Growth(law, math.exp(sum(map(math.log, values)) / len(values)), 0.0)
    weights = [1 / value**2 for value in values]
    total = sum(weights)
    mean_term = sum(w * term for w, term in zip(weights, terms, strict=True)) / total
    mean_value = sum(w * value for w, value in zip(weights, values, strict=True)) / total
    spread = sum(w * (term - mean_term) ** 2 for w, term in zip(weights, terms, strict=True))
    both = sum(
        w * (term - mean_term) * (value - mean_value) for w, term, value in zip(weights, terms, values, strict=True)
    )
    slope = both / spread
    constant = mean_value - slope * mean_term
    if constant >= 0:
        return Growth(law, constant, slope)
    products = sum(w * term * value for w, term, value in zip(weights, terms, values, strict=True))
    return Growth(law, 0.0, products / sum(w * term**2 for w, term in zip(weights, terms, strict=True)))


# --- real ranks


def connected(num_ranks: int) -> Figures:
    """Let processes join as ranks do, agree, gather and wait, with all connections made at once and as needed."""
    at_once = _sockets(num_ranks, lazy=False)
    as_needed = _sockets(num_ranks, lazy=True)
    middle = num_ranks // 2
    return {
        "sockets of a rank, connected to all at once": at_once[middle],
        "sockets of a rank, connected as needed": as_needed[middle],
        "sockets of the first rank, connected as needed": as_needed[0],
    }


def _sockets(num_ranks: int, *, lazy: bool) -> list[int]:
    """Return the sockets that each rank has once it has done what ranks do before the first step."""
    port = free_port()
    receiver, sender = os.pipe()
    closing, closed = os.pipe()
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            os.close(closed)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"MASTER_PORT": str(port), "TORCH_GLOO_LAZY_INIT": str(int(lazy))}
            before = _own_sockets()
            with joined_ranks("cpu", timeout_s=600):
                from_first_rank(rank)
                on_first_rank(rank)
                torch.distributed.all_gather_object([None] * num_ranks, rank)
                wait_for_all()
                os.write(sender, f"{rank} {_own_sockets() - before}\n".encode())
                os.read(closing, 1)  # until all have counted
            os._exit(0)
        children.append(child)
    os.close(sender)
    os.close(closing)
    with os.fdopen(receiver) as lines:
        told = [lines.readline().split() for _ in range(num_ranks)]
        counted = {int(rank): int(sockets) for rank, sockets in told}
    os.close(closed)
    for child in children:
        os.waitpid(child, 0)
    return [counted[rank] for rank in range(num_ranks)]


def _own_sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own is gone
            found += str(entry.readlink()).startswith("socket:")
    return found


# --- what one rank does with what all have told it


def facts(num_ranks: int) -> Figures:
    """Compare what all ranks are, as each rank does at the start, and write it down as the first one does."""
    ranks = [
        RankFacts(rank, f"node{rank // GPUS_OF_A_NODE:04}", "NVIDIA H100 80GB HBM3", 85 * 10**9, "3.11.7", "2.13.0",
                  "2.28.9", "0123456789ab", "0123456789ab")
        for rank in range(num_ranks)
    ]  # fmt: skip
    told = [pickle.dumps(one) for one in ranks]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "environment.json"
        write = _ms(lambda: write_json(record, {"ranks": [asdict(one) for one in ranks]}))
        size = record.stat().st_size
    return {
        "facts that each rank gets at the start, bytes": sum(map(len, told)),
        "read and compare them, ms": _ms(lambda: disagreements([pickle.loads(one) for one in told])),
        "environment.json, bytes": size,
        "write it, ms": write,
    }


def preflight(num_ranks: int) -> Figures:
    """Find the ranks that fall behind before the first step, and record the check."""
    ranks = _measurements(num_ranks, slow=0)
    checks = AMOUNTS["cuda"].checks
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "run")
        run.create()
        append_preflight(run, PreflightRecord(timestamp(), 1.0, tuple(ranks)))
        size = run.preflights.stat().st_size
    half = _measurements(num_ranks, slow=num_ranks // 2)
    return {
        "preflight's record, bytes": size,
        "preflight's judgement, ms": _ms(lambda: list(fallen_behind(ranks, checks))),
        "preflight's judgement where half are slow, ms": _ms(lambda: list(fallen_behind(half, checks))),
    }


def _measurements(num_ranks: int, slow: int) -> list[RankMeasurements]:
    drawn = random.Random(0)
    return [
        RankMeasurements(
            rank,
            f"node{rank // GPUS_OF_A_NODE:04}",
            f"NVIDIA H100 80GB HBM3, cuda:{rank % GPUS_OF_A_NODE}",
            {name: (1 + (rank < slow)) * (1 + 0.01 * drawn.random()) for name in AMOUNTS["cuda"].checks},
        )
        for rank in range(num_ranks)
    ]


def stragglers(num_ranks: int) -> Figures:
    """Send with a step what all ranks measured, and look at it on the first one."""
    reports = Reports()
    reports.declare("wait", "max")
    report = [reports.declare_of_ranks(name) for name in SIGNALS["cuda"]]
    with alone_among(num_ranks, 0):
        for one in report:
            one(1.0)
        looked = reports.send(torch.device("cpu")).values
        other = reports.send(torch.device("cpu")).values
    return {
        "bytes that travel with a step after a look at stragglers": looked.nbytes,
        "with any other step": other.nbytes,
        "look at stragglers, ms": _look_ms(num_ranks, slow=0),
        "look at stragglers where half are slow, ms": _look_ms(num_ranks, slow=num_ranks // 2),
    }


def _look_ms(num_ranks: int, slow: int) -> float:
    values = [one.seconds[PRODUCT] for one in _measurements(num_ranks, slow)]
    signals = {PRODUCT: values, CORE_WAIT: [0.01] * num_ranks}
    judge = StragglerJudge(SIGNALS["cuda"], num_ranks)
    looks = max(window(num_ranks), FIRST_LOOKS)
    for step in range(looks):
        list(judge.look(step, signals))
    return _ms(lambda: list(judge.look(looks, signals)))


def planning(num_ranks: int) -> Figures:
    """Plan Llama 3 405B for the ranks, and rehearse a rank of a small model among as many."""
    device = gpu_spec("h100")
    launch = {"device": "cuda", "gpu_type": "h100", "launcher": "slurm", "nodes": num_ranks // GPUS_OF_A_NODE}
    large = {"model": "llama3_405b", "parallel": {"gpus": num_ranks}, "training": {"batch_size": num_ranks}}
    small = {
        "model": "tiny_llama3_50m",
        "parallel": {"gpus": num_ranks, "tp": 2, "pp": 2, "dp_replicate": num_ranks // 32},
        "training": {"batch_size": num_ranks, "seq_len": 512, "precision": "bf16"},
    }
    config = RunConfig.from_mapping(small | {"launch": launch})
    plan = choose_plan(config, device.memory_bytes, device)
    whole = RunConfig.from_mapping(large | {"launch": launch})
    return {
        "plan llama3_405b, ms": _ms(lambda: choose_plan(whole, device.memory_bytes, device), repeats=1),
        "rehearse a rank, ms": _ms(lambda: rehearse(config, plan, 0), repeats=2),
    }


# --- files


def left_by_ranks(num_ranks: int) -> Figures:
    """Follow the logs of all ranks, show their ends in a report, and find the rank to blame."""
    from training_reports.files import outputs_of_ranks

    with tempfile.TemporaryDirectory() as folder:
        run, job = run_with_logs(Path(folder), num_ranks)
        leave_exits(run, job, num_ranks)
        follower = LogFollower(run)
        list(follower.new_lines())
        return {
            "look at the logs, ms": _ms(lambda: list(follower.new_lines())),
            "the logs in a report, ms": _ms(lambda: outputs_of_ranks(run)),
            "find the rank to blame, ms": _ms(lambda: verdict_of_ranks(run, job, 0)),
        }


def checkpoint_files(num_ranks: int) -> Figures:
    """Write and read the manifest of a checkpoint of ranks on GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        names = [f"__{rank}_{number}.distcp" for rank in range(num_ranks) for number in range(FILES_PER_RANK)]
        for name in names:
            (path / name).touch()
        sums = {name: FileSum(10**9, f"{number:08x}") for number, name in enumerate(names)}
        return {
            "files of a checkpoint": len(names),
            "write its manifest, ms": _ms(lambda: write_manifest(path, sums)),
            "its manifest, bytes": (path / "manifest.json").stat().st_size,
            "read it, ms": _ms(lambda: recorded_sums(path)),
        }


def index(num_shards: int) -> Figures:
    """Write what is where in a checkpoint, as the first rank does, and read it, as every rank does."""
    rows = 64
    names = [f"optim.state.layers.{number}.attention.wq.weight.exp_avg" for number in range(TENSORS)]
    properties = TensorProperties(torch.float32)
    size = torch.Size((rows * num_shards, 16))
    part = torch.Size((rows, 16))
    chunks = [ChunkStorageMetadata(torch.Size((rows * shard, 0)), part) for shard in range(num_shards)]
    written = [
        [
            WriteResult(
                MetadataIndex(name, chunk.offsets), 4096, _StorageInfo(f"__{shard}_0.distcp", 4096 * place, 4096)
            )
            for place, name in enumerate(names)
        ]
        for shard, chunk in enumerate(chunks)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)

        def write() -> None:
            stored: dict[str, TensorStorageMetadata | BytesStorageMetadata]
            stored = {name: TensorStorageMetadata(properties, size, chunks) for name in names}
            _Writer(path, 1).finish(Metadata(stored), written)

        return {
            "write a tensor's parts, ms": _ms(write) / TENSORS,
            "its parts in the index, bytes": (path / INDEX).stat().st_size / TENSORS,
            "read them, ms": _ms(lambda: PlainReader(path)) / TENSORS,
            "what the first rank hears of them, bytes": sum(len(pickle.dumps(one)) for one in written) / TENSORS,
        }


def _ms(do: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the fewest milliseconds of CPU in a few calls, on which other work has least influence."""
    least = math.inf
    for _ in range(repeats):
        began = time.process_time()
        do()
        least = min(least, time.process_time() - began)
    return 1e3 * least


# --- tables

GROUPS: Sequence[tuple[str, Sequence[int], Sequence[Measurement]]] = (
    ("real ranks", PROCESSES, (connected,)),
    ("ranks", RANKS, (stragglers, facts, preflight, left_by_ranks, checkpoint_files, planning)),
    ("ranks of a shard group", SHARDS, (index,)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print the tables, and return the exit code."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=summary)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results; made if not there")
    parser.add_argument("--page", type=Path, help="a page whose tables are rewritten, such as docs/scale.md")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    figures = {
        title: {"sizes": list(sizes), "rows": _measured(sizes, measurements)} for title, sizes, measurements in GROUPS
    }
    publish("growth", figures, as_markdown(figures), folder=options.out, page=options.page)
    return 0


def _measured(sizes: Sequence[int], measurements: Sequence[Measurement]) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {}
    for measurement in measurements:
        for size in sizes:
            for name, value in measurement(size).items():
                rows.setdefault(name, []).append(value)
    return rows


def as_markdown(figures: Mapping[str, Any]) -> str:
    """Return a table for each group of rows, with the law of each row and what it gives for ``MANY`` ranks."""
    machine = f"{cpu_model()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    tables = ["\n".join(_table(title, group["sizes"], group["rows"])) for title, group in figures.items()]
    return "\n\n".join([f"{machine}; ms are of CPU.", *tables]) + "\n"


def _table(title: str, sizes: Sequence[int], rows: Mapping[str, Sequence[float]]) -> Iterator[str]:
    is_computed = MANY not in sizes
    columns = [title, *(f"{size:,}" for size in sizes), "grows with", *([f"{MANY:,}, computed"] if is_computed else [])]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for name, values in rows.items():
        law = growth(sizes, values)
        cells = [name, *map(_figure, values), law.law if law.law != "constant" else "nothing"]
        if is_computed:
            cells.append(_figure(law.at(MANY)))
        yield f"| {' | '.join(cells)} |"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


if __name__ == "__main__":
    sys.exit(main())
