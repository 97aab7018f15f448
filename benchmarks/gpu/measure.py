"""The command: it unpacks wheels, looks at the machine and runs the stages, all within the time that it is given.

However it ends, short of a SIGKILL, ``DIR`` then holds three files. ``gpu.md`` has the tables, what went wrong, and
first of all where the time of a training step goes; ``gpu.json`` has the same numbers; ``logs.tar.gz`` has what the
stages printed, tracebacks, stacks of what did not end, and a trace of the profiled step. They are rewritten after every
stage, so a SIGKILL costs the stage that it interrupts.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from zipfile import BadZipFile, ZipFile

from benchmarks.gpu.processes import ROOT, run_within
from benchmarks.gpu.results import Results
from benchmarks.gpu.stages import CALLS, STAGES, Stage

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WRAP_UP_SECONDS = 6.0
"""Kept back at the end, to kill what runs and to write the results."""
TIMES_ON_CPU = 4
"""How much longer a stage may take on a CPU, whose cores it may share; its limit is for a machine with a GPU."""
MIN_SECONDS = 1.0
"""No process is started for less."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
LOOK_SECONDS = 60.0
"""For the preflight, which takes 5 s where torch has been imported before."""


class EndedEarly(BaseException):
    """A signal asked this process to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code: 1 if a stage failed or was not begun, 130 after a signal."""
    started = time.monotonic()
    options = _parser().parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="llama-gpu-"))
    results = Results(options.out, work / "logs", options.device, 60 * options.minutes)
    try:
        with _ended_by_signals():
            Measurement(results, work, options, started + 60 * options.minutes).run()
    except EndedEarly as signalled:
        results.ended_by = str(signalled)
    finally:
        results.seconds = time.monotonic() - started
        results.write()
        shutil.rmtree(work, ignore_errors=True)
    sys.stdout.write((options.out / "gpu.md").read_text())
    if results.ended_by:
        return 130
    return 0 if results.stages and all(result["ended"] == "done" for result in results.stages) else 1


def _parser() -> argparse.ArgumentParser:
    description = "Measure the engine on one GPU, and leave gpu.md, gpu.json and logs.tar.gz in DIR."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=description)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to test the stages")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--stages", nargs="+", choices=tuple(STAGES), metavar="STAGE", help=f"of {', '.join(STAGES)}")
    which.add_argument("--call", choices=tuple(CALLS), default="first", help="its stages (default: first)")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all of it (default: 8)")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels of packages that this machine lacks")
    return parser


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn the first signal that would end this process into ``EndedEarly``, and ignore later ones."""
    handled = [number for number in ENDING_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, _end) for number in handled}
    try:
        yield
    except EndedEarly:
        raise  # the signals stay ignored while the results are written
    except BaseException:
        _restore(before)
        raise
    _restore(before)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    for one in ENDING_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    raise EndedEarly(signal.Signals(number).name)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Measurement:
    """The processes of a measurement, one after the other.

    Args:
        results: takes what they find.
        work: a folder for packages, caches and logs.
        options: the command line.
        deadline: the ``time.monotonic`` time at which everything is written.
    """

    def __init__(self, results: Results, work: Path, options: argparse.Namespace, deadline: float) -> None:
        self.results = results
        self.work = work
        self.deadline = deadline
        self.device: str = options.device
        self.wheels: Path | None = options.wheels
        whole_call = [stage.name for stage in CALLS[options.call]]
        self.stages = [STAGES[name] for name in dict.fromkeys(options.stages or whole_call)]
        self.packages = work / "packages"
        paths = [str(ROOT), str(self.packages), os.environ.get("PYTHONPATH", "")]
        self.environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def run(self) -> None:
        """Run everything."""
        if self.wheels is not None:
            self._unpack(self.wheels)
        found = self.recorded("preflight", LOOK_SECONDS, "--device", self.device)
        self.results.preflight = found
        for problem in found.get("problems", ()):
            _say(problem)
        if not found.get("hopeless"):
            folder = ("--folder", str(self.work))
            self.environment |= self.recorded("environment", LOOK_SECONDS, "--device", self.device, *folder)
        if (cache := self.environment.get(CACHE)) is not None:
            state = "has compiled blocks" if any(Path(cache).glob("*")) else "is empty"
            found.setdefault("rows", []).append({"what": "compiler's cache", "value": f"{cache} {state}"})
        self.results.write()
        for stage in self.stages:
            self._run_stage(stage)
            self.results.write()

    def _limit(self, most_s: float) -> float:
        return min(most_s, self.deadline - WRAP_UP_SECONDS - time.monotonic())

    def _unpack(self, wheels: Path) -> None:
        """Unpack wheels for this process's children, who import them; a wheel for another Python does no harm."""
        paths = sorted(wheels.glob("*.whl"))
        if not paths:
            self.results.problems.append(f"{wheels} holds no wheels")
        for path in paths:
            try:
                with ZipFile(path) as wheel:
                    wheel.extractall(self.packages)
            except (BadZipFile, OSError) as error:
                self.results.problems.append(f"{path.name} cannot be unpacked: {error}")

    def recorded(self, module: str, most_s: float, *arguments: str) -> dict[str, Any]:
        """Run a module that writes a record, and return the record; empty if it wrote none."""
        limit = self._limit(most_s)
        if limit < MIN_SECONDS:
            return {}
        record = self.work / f"{module}.json"
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments, "--record", str(record)]
        ended = run_within(limit, command, self.results.logs / f"{module}.log", self.environment)
        if ended != "done":
            self.results.problems.append(f"{module}: {ended}")
        return dict(json.loads(record.read_text())) if record.exists() else {}

    def _run_stage(self, stage: Stage) -> None:
        result: dict[str, Any] = {"stage": stage.name, "ended": "cut off", "seconds": 0.0, "rows": []}
        self.results.stages.append(result)
        found = self.results.preflight
        limit = self._limit(stage.seconds * (TIMES_ON_CPU if self.device == "cpu" else 1))
        lacking = [name for name in stage.needs if name in found.get("missing", ())]
        if found.get("hopeless") or lacking:
            result["ended"] = f"not begun: {found.get('hopeless') or 'missing: ' + ', '.join(lacking)}"
        elif limit < MIN_SECONDS:
            result["ended"] = "not begun: no time is left"
        else:
            self._run_for(stage, limit, result)
        _say(f"{stage.name}: {result['ended']}, {result['seconds']:.0f} s")

    def _run_for(self, stage: Stage, limit: float, result: dict[str, Any]) -> None:
        rows = self.work / f"{stage.name}.json"
        folder = self.results.logs / stage.name
        folder.mkdir()
        command = [sys.executable, "-m", "benchmarks.gpu.stage", *stage.sections, "--device", self.device]
        command += ["--seconds", f"{limit:.1f}", "--rows", str(rows), "--folder", str(folder)]
        started = time.monotonic()
        try:
            result["ended"] = run_within(limit, command, self.results.logs / f"{stage.name}.log", self.environment)
        finally:
            result["seconds"] = time.monotonic() - started
            result["rows"] = json.loads(rows.read_text()) if rows.exists() else []


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
