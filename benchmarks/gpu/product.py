"""The product itself: real workers train a small model, undisturbed or killed and resumed, and are compared."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.processes import ROOT, last_line
from benchmarks.gpu.shapes import llama3
from llama_core.chain.planned import plan_anywhere, with_keys
from llama_core.config.run import RunConfig
from llama_core.launch.outcome import read_outcome
from llama_core.records.checkpoints import checkpoint_name, newest_step, recorded_sums
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json, write_json
from llama_core.records.metrics import read_heartbeat, read_metrics

STEPS = 20
CHECKPOINT_EVERY = 5
KILLED_AFTER = 12
"""The step after which a worker is killed: two checkpoints are written or being written, and two are to come."""
POLL_SECONDS = 0.005
DUMP_SECONDS = 2.0
"""How long a worker gets to write its stacks before it is killed."""


class _Run:
    """A run and the worker that trains it.

    Args:
        bench: the device.
        name: its name.
        corpus: a file of texts.
        deterministic: whether to use only deterministic kernels.
        is_killed: whether its worker is killed and started again.
    """

    def __init__(self, bench: Bench, name: str, corpus: Path, *, deterministic: bool, is_killed: bool) -> None:
        self.name = name
        self.deterministic = deterministic
        self.directory = RunDirectory(bench.folder / name.replace(", ", "-").replace(" ", "-"))
        self.is_to_be_killed = is_killed
        self.killed_after = self.resumed_after = 0
        self.log = self.directory.logs / "worker.log"
        self.last_line = ""
        self.began = time.monotonic()
        self.seconds: float | None = None
        """How long it took, once it has ended."""
        config = RunConfig.from_mapping(
            llama3(bench.size("30M", "tiny"))
            | {
                "training": {
                    "batch_size": bench.size(32, 2),
                    "seq_len": bench.size(2048, 64),
                    "steps": STEPS,
                    # a CPU's rate in bf16, which MFU is relative to, takes long to measure where it is emulated
                    "precision": bench.size("bf16", "fp32"),
                    "checkpoint_every": CHECKPOINT_EVERY,
                    "keep_checkpoints": STEPS,
                    "eval_sequences": bench.size(32, 2),
                    "deterministic": deterministic,
                },
                "data": {"source": str(corpus), "cache_dir": str(corpus.parent)},
                "launch": {"device": bench.device.type, "force": True},  # whatever the size of the device
                "tracking": {"tensorboard": False},
                "benchmark": {"warmup_steps": 1, "steps": 2, "profile": not is_killed},
            }
        )
        planned = plan_anywhere(config)
        self.directory.create()
        sizes = {"batch_size": planned.config.batch_size, "seq_len": planned.config.seq_len}
        self.directory.config.write_text(with_keys(planned.config, training=sizes).to_yaml())
        write_json(self.directory.plan, planned.plan.as_dict())
        write_json(self.directory.estimate, planned.estimate.as_dict())
        self.plan = planned.plan.summary() + (", compiled" if planned.plan.compile else "")
        self.worker = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "llama_core.launch.rank.worker", str(self.directory.path)]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def goes_on(self) -> bool:
        """Kill and restart the worker if that is due; return whether it is still running."""
        if self.seconds is not None:
            return False
        if self.is_to_be_killed and (step := self._step()) >= KILLED_AFTER and step < STEPS:
            self.worker.kill()
            self.worker.wait()
            self.is_to_be_killed, self.killed_after = False, self._step()
            self.resumed_after = newest_step(self.directory)
            self.worker = self._start()
        elif self.worker.poll() is not None:
            self.seconds = time.monotonic() - self.began
        return self.seconds is None

    def _step(self) -> int:
        newest = read_heartbeat(self.directory)
        return newest.step if newest is not None else 0

    def stop(self) -> None:
        """Make a worker that still runs write its stacks, and kill it."""
        self.last_line = last_line(self.log)
        self.worker.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            self.worker.wait(DUMP_SECONDS)
        self.worker.kill()
        self.seconds = time.monotonic() - self.began

    def rows(self) -> list[dict[str, Any]]:
        """Return what every step computed."""
        columns = ["step", "loss", "grad_norm", "eval_loss"]
        rows: list[dict[str, Any]] = read_metrics(self.directory).select(columns).to_pylist()
        return rows

    def sums(self) -> dict[str, Any]:
        """Return the checksums of the last checkpoint's tensors: weights and both moments."""
        sums = recorded_sums(self.directory.checkpoints / checkpoint_name(STEPS))
        return {name: one for name, one in sums.items() if name.endswith(".distcp")}

    def result(self) -> Row:
        """Return how it ended.

        Raises:
            RuntimeError: if it did not finish, or could not be killed before it did.
        """
        outcome = read_outcome(self.directory) if self.directory.outcome.exists() else None
        if outcome is None or outcome.status != "finished":
            ended = f"{outcome.status}: {outcome.reason}" if outcome else f"not ended: {_doing(self.directory)}"
            raise RuntimeError(f"{ended}; its log ends: {self.last_line or last_line(self.log)}")
        if self.is_to_be_killed:
            raise RuntimeError(f"it took all {STEPS} steps before it could be killed")
        rows = self.rows()
        return {
            "killed after step": self.killed_after or "-",
            "resumed after step": self.resumed_after or "-",
            "steps": len(rows),
            "first loss": rows[0]["loss"],
            "last loss": rows[-1]["loss"],
            "held-out loss": rows[-1]["eval_loss"],
            "s": self.seconds,
        }


def _doing(run: RunDirectory) -> str:
    return str(read_json(run.activity)["doing"]) if run.activity.exists() else "it had not begun"


def interrupted_runs(bench: Bench) -> Iterator[Row]:
    """Yield runs that went undisturbed and runs that were killed and resumed, and how they differ.

    All of them run at once: four small models fit any device, and a start takes longer than twenty steps.
    """
    corpus = _corpus(bench.folder)
    runs: list[_Run] = []
    for deterministic in bench.size((False, True), (True,)):  # all kernels of a CPU are deterministic
        suffix = ", deterministic" if deterministic else ""
        runs.append(_Run(bench, f"undisturbed{suffix}", corpus, deterministic=deterministic, is_killed=False))
        runs.append(_Run(bench, f"killed and resumed{suffix}", corpus, deterministic=deterministic, is_killed=True))
    yield {"plan": runs[0].plan}
    _wait(bench, runs)
    for run in runs:
        yield bench.attempted({"run": run.name}, run.result)
    for undisturbed, resumed in zip(runs[::2], runs[1::2], strict=True):
        row = {"compared": "deterministic" if resumed.deterministic else "default kernels"}
        yield bench.attempted(row, _compared, undisturbed, resumed)


def _corpus(folder: Path) -> Path:
    """Write the paragraphs of this project's documentation as texts, which are short beside a row."""
    corpus = folder / "checkpoints" / "texts.jsonl"  # a folder that stays out of the archive
    corpus.parent.mkdir(exist_ok=True)
    paragraphs = [
        text for page in sorted((ROOT / "docs").glob("*.md")) for text in re.split(r"\n{2,}", page.read_text())
    ]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs if text.strip()))
    return corpus


def _wait(bench: Bench, runs: Sequence[_Run]) -> None:
    """Wait for the runs to end; near the stage's own end, stop those that have not."""
    while any([run.goes_on() for run in runs]):  # noqa: C419 (every run is looked at)
        if time.monotonic() > bench.ends - DUMP_SECONDS * len(runs):
            break
        time.sleep(POLL_SECONDS)
    for run in runs:
        if run.seconds is None:
            run.stop()


def _compared(undisturbed: _Run, resumed: _Run) -> Row:
    """Return how far the metrics and the last checkpoint of two runs differ."""
    ours = resumed.rows()
    theirs = undisturbed.rows()
    if not len(ours) == len(theirs) == STEPS:
        raise RuntimeError(f"the runs took {len(theirs)} and {len(ours)} of {STEPS} steps")
    losses = [(one["loss"], other["loss"]) for one, other in zip(ours, theirs, strict=True)]
    return {
        "largest relative deviation of a loss": max(abs(one - other) / other for one, other in losses),
        "of the last loss": abs(losses[-1][0] - losses[-1][1]) / losses[-1][1],
        "metrics equal to the bit": ours == theirs,
        "weights and moments equal to the bit": resumed.sums() == undisturbed.sums(),
    }
