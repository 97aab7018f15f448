"""Time steps of this engine and of its peers on one CPU, taking turns: ``python -m benchmarks.peers --out DIR``.

Each case trains one model in two processes, this engine's and a peer's, from equal weights on equal tokens. They take
turns step by step, so that whatever else the machine does slows both. A case counts if the two losses of every step
agree. ``DIR`` then holds ``peers.json`` and ``peers.md``, which are written as cases end, and the log of each process.

The peers transformers and PEFT are in the development environment; ``benchmarks/peers/setup.sh`` makes an environment
for each of the others. A peer without one is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.pages import keep, rewrite
from benchmarks.peers.turns import BATCHES, STEP
from llama_core.config.config_json.writing import config_json
from llama_core.config.run import RunConfig
from llama_core.config.settings import Precision
from llama_core.launch.rank.supervisor import MALLOC_TUNABLES, worker_environment
from llama_core.machine.detect import available_cores, cpu_model
from llama_core.planning.time.step_time import flops_per_token
from llama_core.training.measure import product_rate
from llama_core.units import GIB

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llama-training-infra" / "peers"
OWN_ENVIRONMENT = ("litgpt", "torchtitan")
"""The peers that need an environment of their own."""
SETTINGS = ("as it comes", "tuned")
"""``tuned``: the peer is compiled, its AdamW is fused, and it has the C library's settings that our launcher makes."""
LOSS_LIMITS: dict[Precision, float] = {"bf16": 3e-2, "fp32": 1e-4}
"""How far apart the losses of a step may be. Adam's first updates have the size of the learning rate however small the
gradient is, so rounding in bf16 may flip the sign of one."""
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
MAX_GRAD_NORM = 1.0
LORA_RANK = 16

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What one comparison trains."""

    model: str
    precision: Precision
    batch_size: int
    seq_len: int
    setting: str
    peer: str

    @property
    def name(self) -> str:
        """The name of the case, by which ``--only`` selects it."""
        return f"{self.model}/{self.precision}/{self.batch_size}x{self.seq_len}/{self.setting}/{self.peer}"

    def config(self) -> RunConfig:
        """Return our side's configuration."""
        training = {
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "precision": self.precision,
            "weight_decay": ADAMW["weight_decay"],
            "init_from": None,
        }
        lora = {"strategy": "lora", "lora": {"lora_rank": LORA_RANK, "target_modules": "all-linear"}}
        return RunConfig.from_mapping(
            {
                "model": self.model,
                "training": training,
                "data": {"document_mask": False},
                "launch": {"device": "cpu"},
            }
            | (lora if self.peer == "peft" else {})
        )


def all_cases() -> list[Case]:
    """Return the cases of a whole measurement, the most informative first."""
    peers = ("litgpt", "torchtitan", "transformers")
    small = [
        Case("tiny_llama3_50m", precision, 1, 2048, setting, peer)
        for setting, precision, peer in product(reversed(SETTINGS), LOSS_LIMITS, peers)
    ]
    adapters = [replace(case, peer="peft") for case in small if case.peer == "transformers"]
    larger = [
        Case("tiny_llama3_150m", precision, 1, 1024, "tuned", peer) for precision in LOSS_LIMITS for peer in peers
    ]
    batches = [Case("tiny_llama3_50m", "bf16", 4, 2048, "tuned", peer) for peer in peers]
    return [*small, *adapters, *larger, *batches]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases, write them, print the table, and return the exit code: 1 if a case failed."""
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    cases = [case for case in all_cases() if any(fnmatchcase(case.name, pattern) for pattern in options.only)]
    if options.seq_len:
        cases = [replace(case, seq_len=options.seq_len) for case in cases]
    if not cases:
        example = all_cases()[0].name
        sys.stderr.write(f"error: --only {' '.join(options.only)} selects no case; a case is like {example}\n")
        return 2
    torch.set_num_threads(options.threads)
    peaks = {precision: product_rate(precision) for precision in LOSS_LIMITS}
    machine = _machine(peaks)
    rows: list[Row] = []
    for case in cases:
        row = asdict(case)
        python = _python(case.peer, options.environments)
        if python is None:
            row["left_out"] = f"no environment in {options.environments}; make it with benchmarks/peers/setup.sh"
        else:
            row |= measure(case, python, options.out, warmup=options.warmup, steps=options.steps)
            row |= figures(case, row, peaks[case.precision]) if "ours" in row else {}
        rows.append(row)
        sys.stdout.write(f"{case.name}: {_in_short(row)}\n")
        sys.stdout.flush()
        keep(options.out, "peers", {"machine": machine, "rows": rows}, as_markdown(machine, rows))
    table = as_markdown(machine, rows)
    sys.stdout.write("\n" + table)
    rewrite(options.page, "peers", table)
    return int(any("failed" in row for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="folder that setup.sh filled")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cases, such as '*/bf16/*/tuned/*'")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each side before the timed ones")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each side")
    parser.add_argument(
        "--threads", type=int, default=available_cores(), help="threads of each side; default: all cores"
    )
    parser.add_argument("--seq-len", type=int, help="tokens per sequence, instead of each case's own")
    parser.add_argument("--page", type=Path, help="a page whose table is rewritten, such as docs/performance.md")
    return parser.parse_args(arguments)


def _python(peer: str, environments: Path) -> Path | None:
    """Return the interpreter that has the peer; None if there is none."""
    if peer not in OWN_ENVIRONMENT:
        return Path(sys.executable)
    python = environments / peer / "bin" / "python"
    return python if python.exists() else None


def _machine(peaks: Mapping[Precision, float]) -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "product_gflops": {precision: peak / 1e9 for precision, peak in peaks.items()},
    }


# --- two processes that take turns


class Side:
    """A process that takes a step when asked to.

    Args:
        python: the interpreter.
        module: what it runs.
        folder: the job.
        environment: its environment variables.
        log: where it writes everything but its answers.
    """

    def __init__(self, python: Path, module: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-m", module, str(folder)],
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self.about = self._answer()

    def step(self) -> Row:
        """Let it take a step while the other side waits, and return what it says."""
        assert self._process.stdin is not None
        self._process.stdin.write(STEP)
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            raise RuntimeError(lines[-1] if lines else f"ended with code {self._process.returncode}")
        answer: Row = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def measure(case: Case, python: Path, out: Path, *, warmup: int, steps: int) -> Row:
    """Let both sides of a case take turns, and return the steps of each, or the error of one."""
    plain = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    plain |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    ours = worker_environment(plain, "cpu", 1, out)
    theirs = ours | {"GLIBC_TUNABLES": MALLOC_TUNABLES if case.setting == "tuned" else ""}
    sides: list[Side] = []
    stem = case.name.replace("/", "-").replace(" ", "-")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _write_job(case, folder, warmup + steps)
        try:
            # ours first: it writes the weights
            sides.append(Side(Path(sys.executable), "benchmarks.peers.ours", folder, ours, out / f"{stem}-ours.log"))
            sides.append(Side(python, "benchmarks.peers.theirs", folder, theirs, out / f"{stem}.log"))
            taken = [[side.step() for side in sides] for _ in range(warmup + steps)]
        except RuntimeError as error:
            return {"failed": str(error)}
        finally:
            for side in sides:
                side.close()
    return {"warmup": warmup, "about": sides[1].about, "ours": [a for a, _ in taken], "theirs": [b for _, b in taken]}


def _write_job(case: Case, folder: Path, num_steps: int) -> None:
    config = case.config()
    spec = config.spec
    job = {
        "peer": case.peer,
        "config": config.model_dump(mode="json"),
        "compile_ours": False,
        "tuned": case.setting == "tuned",
        "precision": case.precision,
        "seq_len": case.seq_len,
        "learning_rate": ADAMW["lr"],
        "max_grad_norm": MAX_GRAD_NORM,
        "adamw": ADAMW,
        "hugging_face": config_json(spec),
        "shape": {
            name: getattr(spec, name)
            for name in (
                *("vocab_size", "hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
                *("norm_eps", "rope_theta"),
            )
        },
    }
    if spec.lora is not None:
        rank = spec.lora.lora_rank
        targets = list(spec.lora.target_modules)
        job["lora"] = {"r": rank, "lora_alpha": spec.lora.scale * rank, "target_modules": targets}
    (folder / "job.json").write_text(json.dumps(job))
    generator = torch.Generator().manual_seed(0)
    shape = (num_steps, case.batch_size, case.seq_len + 1)
    torch.save(torch.randint(0, spec.vocab_size, shape, generator=generator), folder / BATCHES)


# --- figures


def figures(case: Case, row: Row, peak: float) -> Row:
    """Return the figures of a case from its steps."""
    ours, theirs = (row[side][row["warmup"] :] for side in ("ours", "theirs"))
    ratios, cpu_ratios = (
        [b[clock] / a[clock] for a, b in zip(ours, theirs, strict=True)] for clock in ("seconds", "cpu_seconds")
    )
    difference = max(abs(a["loss"] - b["loss"]) for a, b in zip(row["ours"], row["theirs"], strict=True))
    flops = case.batch_size * case.seq_len * flops_per_token(case.config().spec, case.seq_len, causal=True)
    return {
        "times_faster": _quartiles(ratios),
        "times_less_cpu": _quartiles(cpu_ratios),
        "loss_difference": difference,
        "counts": difference <= LOSS_LIMITS[case.precision],
        "memory_share": _peak(ours) / _peak(theirs),
    } | {
        side: {
            "seconds": _quartiles([step["seconds"] for step in steps]),
            "peak_gib": _peak(steps) / GIB,
            "faults": statistics.median(step["faults"] for step in steps),
            "gflops": flops / statistics.median(step["seconds"] for step in steps) / 1e9,
            "share_of_products": flops / statistics.median(step["seconds"] for step in steps) / peak,
        }
        for side, steps in (("ours_in_short", ours), ("theirs_in_short", theirs))
    }


def _peak(steps: Iterable[Row]) -> int:
    peak: int = max(step["peak_bytes"] for step in steps)
    return peak


def _quartiles(values: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def _in_short(row: Row) -> str:
    for reason in ("left_out", "failed"):
        if reason in row:
            return f"{reason.replace('_', ' ')}: {row[reason]}"
    counted = "" if row["counts"] else f", but does not count: the losses differ by {row['loss_difference']:.1e}"
    return f"{row['times_faster'][1]:.2f} times as fast{counted}"


COLUMNS = (
    *("model", "batch", "precision", "peer", "setting", "times as fast (quartiles)", "by CPU time", "step, s"),
    *("peak memory, GiB", "share of the peer's memory", "page faults of a step", "GFLOP/s", "share of a product's"),
    "loss differs by",
)


def as_markdown(machine: Mapping[str, Any], rows: Iterable[Row]) -> str:
    """Return the table; two numbers in a cell are ours and the peer's."""
    rates = ", ".join(f"{rate:.0f} GFLOP/s in {name}" for name, rate in machine["product_gflops"].items())
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}; a product of matrices: {rates}.",
        "",
        _line(COLUMNS),
        _line(["---"] * len(COLUMNS)),
        *(_line(_cells(row)) for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> Iterator[str]:
    yield from (row["model"], f"{row['batch_size']} x {row['seq_len']}", row["precision"], row["peer"], row["setting"])
    if "times_faster" not in row:
        yield _in_short(row)
        yield from ["-"] * (len(COLUMNS) - 6)
        return
    low, middle, high = row["times_faster"]
    ours = row["ours_in_short"]
    theirs = row["theirs_in_short"]
    yield f"{middle:.2f} ({low:.2f} to {high:.2f})"
    low, middle, high = row["times_less_cpu"]
    yield f"{middle:.2f} ({low:.2f} to {high:.2f})"
    yield f"{ours['seconds'][1]:.2f}, {theirs['seconds'][1]:.2f}"
    yield f"{ours['peak_gib']:.2f}, {theirs['peak_gib']:.2f}"
    yield f"{row['memory_share']:.2f}"
    yield f"{ours['faults']:.0f}, {theirs['faults']:.0f}"
    yield f"{ours['gflops']:.0f}, {theirs['gflops']:.0f}"
    yield f"{ours['share_of_products']:.0%}, {theirs['share_of_products']:.0%}"
    yield f"{row['loss_difference']:.1e}" + ("" if row["counts"] else ": does not count")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
