"""One side of a comparison: a process that takes a step whenever it is told to. Imports nothing but torch.

A job is a folder: ``job.json`` says what to train, ``weights.pt`` holds the initial weights and adapters by the names
of transformers and PEFT, and ``batches.pt`` the tokens of every step, [steps, B, S + 1].
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STEP = "step\n"
WEIGHTS = "weights.pt"
BATCHES = "batches.pt"

Step = Callable[[Tensor, Tensor], float]
"""Takes an optimizer step on tokens and their targets, [B, S] each, and returns the mean loss before it."""


def read_job(folder: Path) -> dict[str, Any]:
    """Return the job in a folder."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    return job


def serve(folder: Path, build: Callable[[dict[str, Any]], Step]) -> None:
    """Build a model, then take a step for each line of the standard input, and write a line of JSON about it."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints goes to the log
    step = build(read_job(folder))
    batches = torch.load(folder / BATCHES)
    _tell(answers, torch=torch.__version__, threads=torch.get_num_threads())
    for number, line in enumerate(sys.stdin):
        if line != STEP:
            raise ValueError(f"unknown order {line!r}")
        tokens = batches[number][:, :-1].contiguous()
        targets = batches[number][:, 1:].contiguous()
        _reset_peak()
        faults = _page_faults()
        cpu_started = time.process_time()
        started = time.perf_counter()
        loss = step(tokens, targets)
        _tell(
            answers,
            seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - cpu_started,
            loss=loss,
            faults=_page_faults() - faults,
            peak_bytes=_peak_bytes(),
        )


def _tell(answers: Any, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Return the largest resident set since ``_reset_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
