"""Measure the engine on one GPU in about ten minutes: ``python -m benchmarks.gpu --out DIR``.

Needs torch 2.11 or newer and the packages that ``llama_core`` imports (pydantic, pyyaml, psutil); on a machine without
a network, ``--wheels FOLDER`` installs them from wheels. Every stage runs in its own process with a time limit and
writes its rows as they come, so a stage that fails or hangs costs only itself. ``DIR`` then holds ``STAGE.json`` and
``STAGE.log`` of each stage, all rows in ``gpu.json``, and the tables in ``gpu.md``.

``--device cpu`` runs the same code on tiny sizes: it tests every stage but measures nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

STAGES = {
    "machine": 40,
    "parity": 60,
    "attention": 80,
    "loss": 30,
    "fp8": 60,
    "training": 240,
    "peer": 120,
    "profile": 60,
    "memory": 40,
    "large": 90,
    "precision": 60,
}
"""The stages of ``benchmarks.gpu_stages`` in order, with the time limit of each in seconds."""
GRACE_SECONDS = 10
"""Extra time before a stage is killed; the stage itself starts no row after four fifths of its limit."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages and return the exit code: 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to test the stages")
    parser.add_argument("--stages", nargs="+", choices=tuple(STAGES), default=list(STAGES), help="which, in this order")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all stages; those left are not begun")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of packages that this machine lacks")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), *_installed(options.wheels, options.out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    deadline = time.monotonic() + 60 * options.minutes
    results = []
    for stage in options.stages:
        limit = min(STAGES[stage], deadline - time.monotonic())
        results.append(run_stage(stage, options.device, options.out, limit, environment))
        sys.stdout.write(f"{stage}: {results[-1]['ended']}, {results[-1]['seconds']:.0f} s\n")
        sys.stdout.flush()
        (options.out / "gpu.json").write_text(json.dumps(results, indent=1))
        (options.out / "gpu.md").write_text(as_markdown(results))
    sys.stdout.write(as_markdown(results))
    return int(any(result["ended"] != "done" for result in results))


def _installed(wheels: Path | None, out: Path) -> list[str]:
    """Install the wheels beside the results, and return the folders for the path."""
    if wheels is None:
        return []
    target = out / "packages"
    files = sorted(map(str, wheels.glob("*.whl")))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target), *files]
    subprocess.run(command, check=True)
    return [str(target)]


def run_stage(
    stage: str, device: str, out: Path, limit: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run one stage in its own process, and return its rows and how it ended."""
    rows, log = out / f"{stage}.json", out / f"{stage}.log"
    rows.unlink(missing_ok=True)
    started = time.monotonic()
    if limit <= 0:
        return {"stage": stage, "ended": "not begun: no time is left", "seconds": 0.0, "rows": []}
    command = [sys.executable, "-m", "benchmarks.gpu_stages", stage, "--device", device, "--seconds", f"{limit:.0f}"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--rows", str(rows)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its compiler processes can be killed with it
        )
        try:
            ended = "done" if process.wait(limit + GRACE_SECONDS) == 0 else f"failed: {_last_line(log)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f"stopped after {limit:.3g} s"
    measured = json.loads(rows.read_text()) if rows.exists() else []
    return {"stage": stage, "ended": ended, "seconds": time.monotonic() - started, "rows": measured}


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def as_markdown(results: Iterable[Mapping[str, Any]]) -> str:
    """Return every stage's rows as a table; rows with other columns start a new table."""
    lines = []
    for result in results:
        ended = "" if result["ended"] == "done" else f": {result['ended']}"
        lines += [f"### {result['stage']} ({result['seconds']:.0f} s){ended}", ""]
        columns: list[str] = []
        for row in result["rows"]:
            if list(row) != columns:
                columns = list(row)
                lines += [""] * bool(lines[-1]) + [_line(columns), _line(["---"] * len(columns))]
            lines.append(_line([_cell(row[column]) for column in columns]))
        lines.append("")
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
