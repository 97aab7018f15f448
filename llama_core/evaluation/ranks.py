"""Start the ranks of an evaluation, here or on the nodes of this job, and read what the first of them says."""

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from llama_core import errors
from llama_core.config.settings import Device
from llama_core.errors import EnvironmentMismatchError, RankFailedError, TrainingInfraError
from llama_core.imports import safe_python
from llama_core.launch.jobs.launcher import known_launchers
from llama_core.launch.ports import free_port
from llama_core.launch.rank.supervisor import worker_environment
from llama_core.launch.rank.surroundings import Step, Surroundings

_COMMAND = safe_python("-m", "llama_core.evaluation.worker")
_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 5.0
"""How long the first rank has to say what is wrong after another one has ended with an error."""
_OF_OTHER_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
"""Beginnings of the variables of training's ranks, if one of them has submitted the job."""


@dataclass(frozen=True)
class _Part:
    """A process that is one of the ranks, or starts all of them."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: IO[bytes]
    """What it writes to standard error."""
    step: Step | None = None
    """What it starts, if it starts the ranks."""

    def said(self) -> str:
        """Return its last line, and the first one about a rank that has failed of what has started it."""
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        errors: list[str] = []
        if self.step is not None:
            prefix = self.step.errors
            errors = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
            lines = [line for line in lines if not line.startswith(self.step.notes)]
        return "; ".join([*lines[-1:], *errors[:1]]) or "it said nothing"

    def order(self, order: Mapping[str, Any]) -> None:
        """Write an order to it. Its standard input stays open: a rank ends when that is closed."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and its exit code is told
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Wait until it has ended, and close its pipes."""
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def answers_of_ranks(order: Mapping[str, Any], num_ranks: int, num_nodes: int = 1) -> Iterator[Mapping[str, Any]]:
    """Start the ranks, yield what the first of them says, and end all.

    Args:
        order: what every rank reads from its standard input; it names their ``device``.
        num_ranks: their number.
        num_nodes: nodes of the job around this process that have them, as many each; 1 for this machine.

    Raises:
        EnvironmentMismatchError: if there is no such job.
        TrainingInfraError: the error of the first rank.
        RankFailedError: if a rank has ended without one.
    """
    device = order["device"]
    here = num_nodes == 1
    with _started_here(num_ranks, device) if here else _started_on_nodes(num_ranks, num_nodes, device) as parts:
        for part in parts:
            part.order(order)
        for line in _lines(parts):
            answer = json.loads(line)
            if "error" in answer:
                name, text = answer["error"]
                raise getattr(errors, name, TrainingInfraError)(text)
            yield answer


@contextmanager
def _started_here(num_ranks: int, device: Device) -> Iterator[Sequence[_Part]]:
    """Start the ranks on this machine, for the duration of the block."""
    environment = worker_environment(os.environ, device, num_ranks, None)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    parts: list[_Part] = []
    with ExitStack() as stack:
        stack.callback(_end, parts)
        for rank in range(num_ranks):
            log = stack.enter_context(tempfile.TemporaryFile())
            out = subprocess.PIPE if rank == 0 else log
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=out, stderr=log, env=environment | own)
            parts.append(_Part(f"rank {rank}", process, log))
        yield parts


@contextmanager
def _started_on_nodes(num_ranks: int, num_nodes: int, device: Device) -> Iterator[Sequence[_Part]]:
    """Start the ranks as a step of the job around this process, for the duration of the block."""
    step = _surroundings(num_nodes).step(_COMMAND, num_ranks, num_nodes)
    environment = {name: value for name, value in step.environment.items() if not name.startswith(_OF_OTHER_RANKS)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            step.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=worker_environment(environment, device, num_ranks // num_nodes, None, step.cores),
        )
        part = _Part("a rank", process, log, step)
        try:
            yield [part]
        finally:
            _end([part])


def _surroundings(num_nodes: int) -> Surroundings:
    """Return what is around this process, if that is a job with so many nodes.

    Raises:
        EnvironmentMismatchError: if it is not.
    """
    starters = [launcher for launcher in known_launchers() if launcher.kind.allocates]
    around = next((launcher for launcher in starters if launcher.surroundings.nodes_around()), None)
    if around is not None:
        of_job = around.surroundings.nodes_around()
        if of_job >= num_nodes:
            return around.surroundings
        here = f"this job of {around.kind.title} has {of_job}"
    else:
        here = f"this is no job of {' or '.join(launcher.kind.title for launcher in starters)}"
    inside = [
        launcher.kind.allocates.format(num_nodes=num_nodes) for launcher in starters if around in {None, launcher}
    ]
    raise EnvironmentMismatchError(f"num_nodes={num_nodes}: {here}; run it inside {' or '.join(inside)}")


def _end(parts: Sequence[_Part]) -> None:
    """Kill what has not ended; ranks that one process has started end when it does."""
    for part in parts:
        if part.process.poll() is None:
            part.process.kill()
    for part in parts:
        part.close()


def _lines(parts: Sequence[_Part]) -> Iterator[bytes]:
    """Yield the lines of the first rank until it ends."""
    first = parts[0].process
    out = first.stdout
    assert out is not None
    os.set_blocking(out.fileno(), False)
    begun = b""
    failed_at: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(out, selectors.EVENT_READ)
        while True:
            if selector.select(_LOOK_SECONDS):
                content = out.read()
                if content == b"":
                    break
                *lines, begun = (begun + (content or b"")).split(b"\n")
                yield from lines
                continue
            others = [part for part in parts[1:] if part.process.poll()]
            if others and failed_at is None:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + _PATIENCE_SECONDS:
                break
    failed = [part for part in parts if part.process.poll() not in {None, 0}]
    if not failed and first.wait():
        failed = [parts[0]]
    if failed:
        code = failed[0].process.poll()
        raise RankFailedError(f"{failed[0].name} of the evaluation ended with exit code {code}: {failed[0].said()}")
