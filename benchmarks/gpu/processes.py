"""Run a command within a time limit, and leave none of its processes behind."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository, where the commands run."""
DYING_SECONDS = 5
"""How long to wait for a killed process; one that waits for a broken device may not end at all."""


def run_within(limit_s: float, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> str:
    """Run a command in a process group of its own, and kill the whole group at its end or at the limit.

    Args:
        limit_s: the limit.
        command: program and arguments.
        log: the file that its output is appended to.
        environment: its environment.

    Returns:
        ``done``, or how else it ended.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit_s:.3g} s"
        finally:
            _kill_group(process)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "done" if code == 0 else f"failed: {last_line(log)}"


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(DYING_SECONDS)


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
