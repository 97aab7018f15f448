"""Measures on one rank: ``python -m llama_core.calibration.worker FOLDER``, with ``RANK`` and ``WORLD_SIZE`` set.

``FOLDER/request.json`` says what; the answer is in ``FOLDER/rank-N.json``. The ranks begin each operation together, so
that they share cores, caches and memory as those of a run do.
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from llama_core.imports import importing_torch
from llama_core.machine.shared_cores import sleeping_beside_others
from llama_core.records.files import read_json, write_json

with importing_torch():
    import torch
    import torch.distributed as dist

    from llama_core.calibration.timing import measure
    from llama_core.calibration.whole import time_whole
    from llama_core.config.run import RunConfig
    from llama_core.training.flash import activate_flash_attention

_TIMEOUT = timedelta(seconds=120)
_RUN_OF_FLASH = {"model": "llama3_8b", "training": {"precision": "bf16"}, "data": {"document_mask": True}}
"""A run that wants flash attention."""


def main(arguments: list[str]) -> int:
    """Measure what a folder asks for, and write the answer there."""
    folder = Path(arguments[0])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    request = read_json(folder / "request.json")
    torch.manual_seed(rank)
    on_cuda = request["device"] == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
        # training would, too; its choice depends on a model only in its heads
        activate_flash_attention(RunConfig.from_mapping(_RUN_OF_FLASH), device)
    if num_ranks > 1:
        store = dist.FileStore(str(folder / "store"), num_ranks)
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
    with sleeping_beside_others():
        answer = _operations(request, device, _until(request["until"], num_ranks))
        if num_ranks > 1:
            _any_rank(answer=False)
            dist.destroy_process_group()  # each rank has a whole model of its own
        if request["whole"] is not None:
            config = RunConfig.from_mapping(request["whole"]["config"])
            answer["whole"] = time_whole(config, request["whole"]["rows"], device)
    write_json(folder / f"rank-{rank}.json", answer)
    return 0


def _until(end: float | None, num_ranks: int) -> Callable[[], bool]:
    """Return what ranks ask before each operation: they wait for each other, and stop together when the time is up."""

    def goes_on() -> bool:
        is_over = end is not None and time.monotonic() >= end
        return not (_any_rank(answer=is_over) if num_ranks > 1 else is_over)

    return goes_on


def _any_rank(*, answer: bool) -> bool:
    """Return whether the answer of any rank is yes, once all of them have given it."""
    flag = torch.tensor(float(answer))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _operations(request: dict[str, Any], device: torch.device, goes_on: Callable[[], bool]) -> dict[str, Any]:
    queries = [(kind, tuple(sizes)) for kind, sizes in request["queries"]]
    answer = measure(queries, device, goes_on)
    timed = [answer.found.get(query) for query in queries]
    return {
        "seconds": [one and one.seconds for one in timed],
        "spread": [one and one.spread for one in timed],
        "failed": [answer.failed.get(query, "") for query in queries],
    }


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # without waiting for gloo's threads, which are slow to end
