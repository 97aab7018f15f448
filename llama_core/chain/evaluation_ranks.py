"""Start the ranks of an evaluation on this machine, and read what the first of them says."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

from llama_core import errors
from llama_core.errors import RankFailedError, TrainingInfraError
from llama_core.launch.ports import free_port
from llama_core.machine.detect import available_cores

_COMMAND = (sys.executable, "-P", "-m", "llama_core.chain.evaluation_rank")
_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 5.0
"""How long the first rank has to say what is wrong after another one has ended with an error."""


def answers_of_ranks(order: Mapping[str, Any], num_ranks: int) -> Iterator[Mapping[str, Any]]:
    """Start the ranks, yield what the first of them says, and end all.

    Args:
        order: what every rank reads from its standard input.
        num_ranks: their number.

    Raises:
        TrainingInfraError: the error of the first rank.
        RankFailedError: if a rank has ended without one.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(num_ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, ranks)
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, available_cores() // num_ranks)))
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            out = subprocess.PIPE if rank == 0 else log
            process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=out, stderr=log, env=os.environ | variables | own
            )
            ranks.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()  # it stays open: a rank ends when it is closed
        for line in _lines(ranks, logs):
            answer = json.loads(line)
            if "error" in answer:
                name, text = answer["error"]
                raise getattr(errors, name, TrainingInfraError)(text)
            yield answer


def _lines(ranks: Sequence["subprocess.Popen[bytes]"], logs: Sequence[IO[bytes]]) -> Iterator[bytes]:
    """Yield the lines of the first rank until it ends."""
    out = ranks[0].stdout
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
            others = [rank for rank in ranks[1:] if rank.poll()]
            if others and failed_at is None:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + _PATIENCE_SECONDS:
                break
    failed = [rank for rank in ranks if rank.poll() not in {None, 0}] or ([ranks[0]] if ranks[0].wait() else [])
    if failed:
        place = ranks.index(failed[0])
        said = _last_line(logs[place])
        raise RankFailedError(f"rank {place} of the evaluation ended with exit code {failed[0].poll()}: {said}")


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def _end(ranks: Sequence["subprocess.Popen[bytes]"]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait()
        for pipe in (rank.stdin, rank.stdout):
            if pipe is not None:
                pipe.close()
