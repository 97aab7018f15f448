"""Runs a function on several gloo ranks of this machine and returns what each rank returned."""

import faulthandler
import gc
import multiprocessing
import os
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

TIMEOUT_SECONDS = 300

# A fork of a process that has imported the engine starts in milliseconds, where a fresh one takes seconds. A rank also
# imports the module of its test, and so what tests import. DeepSpeed and compiled blocks need the compiler.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "llama_core.launch.rank.worker",
        "llama_core.rehearsal.dry_run",
        "torch._inductor.compile_fx",
        "torch.testing._internal.distributed.fake_pg",
        "pytest",
        "hypothesis",
        "jinja2",
        "transformers.models.llama.modeling_llama",
        "transformers.models.mixtral.modeling_mixtral",
    ]
)


def run_ranks(world_size, function, *args, timeout=TIMEOUT_SECONDS):
    """Return ``[function(*args) on rank 0, ... on rank 1, ...]``; the function and its values must be picklable.

    Inside, ``torch.distributed`` is initialised with gloo and every rank computes with one thread. The first rank
    that raises ends the others, and its traceback becomes an ``AssertionError``.

    If a rank dies, all run once more, and a warning says how it died: twice in some ten thousand starts it was torch
    that crashed.
    """
    try:
        return _run_once(world_size, function, args, timeout)
    except RankDiedError as death:
        warnings.warn(f"{function.__name__} runs once more: {death}", stacklevel=2)
        return _run_once(world_size, function, args, timeout)


class RankDiedError(AssertionError):
    """A rank ended without an answer."""


def _run_once(world_size, function, args, timeout):
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = FORKS.Pipe(duplex=False)
            process = FORKS.Process(
                target=_run, args=(rank, world_size, Path(folder), sender, function, args), daemon=True
            )
            _stderr(Path(folder), rank).touch()
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, processes, Path(folder), timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes, processes, folder, timeout):
    results = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = multiprocessing.connection.wait(waiting.values(), timeout)
        assert ready, f"ranks {sorted(waiting)} gave no answer within {timeout} s"
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                succeeded, value = waiting.pop(rank).recv()
            except EOFError:
                processes[rank].join()
                printed = _stderr(folder, rank).read_text()
                raise RankDiedError(f"rank {rank} died with exit code {processes[rank].exitcode}\n{printed}") from None
            assert succeeded, f"rank {rank}: {value}"
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _stderr(folder, rank):
    return folder / f"rank-{rank}.stderr"


def _run(rank, world_size, folder, sender, function, args):
    import torch
    import torch.distributed as dist

    gc.freeze()  # collections need not go through the imported modules
    with _stderr(folder, rank).open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    faulthandler.enable(2)

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )
        sender.send((True, function(*args)))
        dist.barrier()  # a rank that leaves earlier would cut the others off
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        os._exit(0)  # gloo's threads end slowly
