"""Run a function on several gloo ranks of this machine, and return their results."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llama_core.errors import TrainingFailedError
from llama_core.replacing import replaced_item

_SAFE_PATH = "PYTHONSAFEPATH"


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: int) -> list[Any]:
    """Return the result of ``function(*args)`` on every rank, in rank order.

    Every rank has one thread, and a default process group with the others.

    Args:
        num_ranks: processes to start.
        function: a module-level function; it, its arguments and its result must be picklable.
        args: its arguments.
        timeout_s: seconds that all ranks together may take.

    Raises:
        TrainingFailedError: if a rank raises, dies or does not answer in time; the others are then killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])  # torch is imported once for all ranks
    processes: list[BaseProcess] = []
    answers: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                place = (rank, num_ranks, str(Path(folder) / "store"), timeout_s)
                process: BaseProcess = context.Process(target=_run, args=(sender, place, function, args), daemon=True)
                # Python's servers that fork processes would import from the current folder, as python -c does
                with replaced_item(os.environ, _SAFE_PATH, "1"):
                    process.start()
                sender.close()
                processes.append(process)
                answers.append(receiver)
            return _collect(answers, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(answers: Sequence[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(answers):
        waiting = {answer: rank for rank, answer in enumerate(answers) if rank not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(map(str, waiting.values()))
            raise TrainingFailedError(f"rank {late} of {len(answers)} gave no answer in time")
        for answer in answers:
            if answer in ready:
                results[waiting[answer]] = _received(answer, waiting[answer])
    return [results[rank] for rank in range(len(answers))]


def _received(answer: Connection, rank: int) -> Any:
    try:
        value, error = answer.recv()
    except EOFError:
        value = None
        error = "it died without an error message"
    if error is not None:
        raise TrainingFailedError(f"rank {rank} failed: {error}")
    return value


def _run(
    sender: Connection, place: tuple[int, int, str, int], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    rank, num_ranks, store, timeout_s = place
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        value = function(*args)
        dist.barrier()  # a rank that exits earlier would break the others' connections
        sender.send((value, None))
    except BaseException:
        sender.send((None, traceback.format_exc().strip()))
    finally:
        os._exit(0)  # without waiting for gloo's threads, which are slow to end
