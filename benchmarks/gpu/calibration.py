"""The profile of the GPU, as ``training-infra calibrate`` measures and keeps it."""

import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.processes import ROOT
from llama_core.calibration.profile import read_profile

START_SECONDS = 20.0
"""Kept back for the processes that measure to start and to end."""
MIN_SECONDS = 3.0
SHOWN = ("product bf16 forward", "attention varlen bf16 forward", "copy", "launch", "sort int64")


def profile(bench: Bench) -> Iterator[Row]:
    """Yield the number of figures of a profile, and the time of the largest size of some kinds.

    The profile itself is among the files that are kept, for ``--machine-profile``.
    """
    path = bench.folder / "profile.json"
    seconds = max(MIN_SECONDS, bench.deadline - time.monotonic() - START_SECONDS)
    command = [sys.executable, "-m", "training_infra", "calibrate", "--device", bench.device.type]
    command += ["--minutes", f"{bench.size(seconds, MIN_SECONDS) / 60:.2f}", "--out", str(path)]
    if bench.is_tiny:
        command += ["--only", "sort"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "calibrate failed")
    measured = read_profile(path)
    yield {"profile of": measured.device, "figures": len(measured.spread), "file": f"{bench.folder.name}/{path.name}"}
    for kind, taken in measured.rates[1].kinds.items():
        if kind in SHOWN and taken.axes:
            largest = tuple(axis[-1] for axis in taken.axes)
            size = "x".join(map(str, largest))
            yield {"kind": kind, "largest size": size, "us": 1e6 * (taken.seconds(largest) or 0.0)}
