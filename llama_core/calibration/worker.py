"""Measures on one rank: ``python -m llama_core.calibration.worker FOLDER``, with ``RANK`` and ``WORLD_SIZE`` set.

``FOLDER/request.json`` says what; the answer is in ``FOLDER/rank-N.json``. The ranks begin each operation together, so
that they share cores, caches and memory as those of a run do.
"""

import os
import sys
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

_TIMEOUT = timedelta(seconds=120)


def main(arguments: list[str]) -> int:
    """Measure what a folder asks for, and write the answer there."""
    folder = Path(arguments[0])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    request = read_json(folder / "request.json")
    torch.manual_seed(rank)
    device = torch.device(request["device"])
    begin: Callable[[], object] = lambda: None  # noqa: E731
    if num_ranks > 1:
        store = dist.FileStore(str(folder / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
        begin = dist.barrier
    with sleeping_beside_others():
        answer = _operations(request, device, begin)
        if num_ranks > 1:
            dist.barrier()
            dist.destroy_process_group()  # each rank has a whole model of its own
        if request["whole"] is not None:
            config = RunConfig.from_mapping(request["whole"]["config"])
            answer["whole"] = time_whole(config, request["whole"]["rows"], device)
    write_json(folder / f"rank-{rank}.json", answer)
    return 0


def _operations(request: dict[str, Any], device: torch.device, begin: Callable[[], object]) -> dict[str, Any]:
    queries = [(kind, tuple(sizes)) for kind, sizes in request["queries"]]
    found = measure(queries, device, begin)
    return {
        "seconds": [found[query].seconds for query in queries],
        "spread": [found[query].spread for query in queries],
    }


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # without waiting for gloo's threads, which are slow to end
