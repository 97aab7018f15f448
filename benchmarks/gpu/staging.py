"""How fast a checkpoint is copied to the host."""

from collections.abc import Callable, Iterator

from torch.distributed.checkpoint.staging import BlockingAsyncStager

from benchmarks.gpu.bench import Bench, Row
from llama_core.training.saving import KeptStager
from llama_core.units import GB, GIB


def staging(bench: Bench) -> Iterator[Row]:
    """Yield the speed of copying 1 GiB to host memory, pinned as ours is, and as torch's ``async_save`` does."""
    state = {"weights": bench.random(bench.size(2**29, 2**16))}
    pinned = KeptStager(on_gpu=not bench.is_tiny)
    blocking = BlockingAsyncStager(cache_staged_state_dict=False)
    for name, stage in (
        ("in pinned memory that is kept", lambda: pinned.stage(state)),
        ("as async_save does by default", lambda: blocking.stage(state)),
    ):
        num_bytes = state["weights"].nbytes
        yield bench.attempted({"staged": name, "GiB": num_bytes / GIB}, _staged, bench, stage, num_bytes)


def _staged(bench: Bench, stage: Callable[[], object], num_bytes: int) -> Row:
    return {"GB/s": num_bytes / GB / (bench.milliseconds(stage, 2) / 1e3)}
