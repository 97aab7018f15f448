"""What the device takes and does: memory besides tensors, and the rates of launches, copies and products."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.gpu.bench import Bench, Row, name_of
from llama_core.models.attention import attend
from llama_core.parallel.ranks import joined_ranks
from llama_core.units import GIB

TIMEOUT_S = 30
"""For a communicator of one rank, which waits for nobody."""


def memory(bench: Bench) -> Iterator[Row]:
    """Yield the memory taken besides tensors: by the context, the first product and attention, and a communicator."""
    torch.zeros(1, device=bench.device)
    yield _growth("the context", (0.0, 0.0), _memory_held(bench))
    size = bench.size(4096, 64)
    x = bench.random(size, size)
    before = _memory_held(bench)
    torch.mm(x, x)
    yield _growth("the first product (cuBLAS)", before, _memory_held(bench))
    heads = x.view(1, 1, size, size)[..., :64]
    before = _memory_held(bench)
    attend(heads, heads, heads, None)
    yield _growth("the first attention", before, _memory_held(bench))
    before = _memory_held(bench)
    with joined_ranks(bench.device.type, TIMEOUT_S, even_alone=True):
        dist.all_reduce(torch.ones(2**20, device=bench.device))
        yield _growth("the first communicator (one rank)", before, _memory_held(bench))


def _growth(name: str, before: tuple[float, float], after: tuple[float, float]) -> Row:
    outside, inside = (now - then for now, then in zip(after, before, strict=True))
    return {"memory of": name, "GiB outside the allocator": outside, "GiB inside it": inside}


def _memory_held(bench: Bench) -> tuple[float, float]:
    """Return the GiB in use outside torch's allocator, and the GiB allocated by it."""
    if bench.is_tiny:
        return 0.0, 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / GIB, torch.cuda.memory_allocated() / GIB


def rates(bench: Bench) -> Iterator[Row]:
    """Yield the time to launch a kernel, and the rates of copies and matrix products."""
    one = torch.ones(1, device=bench.device)
    launches = bench.size(1000, 10)
    ms = bench.milliseconds(lambda: [one.add_(1) for _ in range(launches)])
    yield {"what": "launching a kernel, us", "value": 1e3 * ms / launches}
    yield bench.attempted({"what": "copying on the device, read and written, GB/s"}, _copying, bench)
    for dtype, *shape in (
        (torch.bfloat16, 8192, 8192, 8192),
        (torch.bfloat16, 8192, 14336, 4096),
        (torch.bfloat16, 8192, 128256, 2048),
        (torch.float32, 8192, 8192, 8192),
    ):
        rows, columns, inner = (bench.size(size, size // 64) for size in shape)
        name = f"product {rows} x {inner} x {columns}, {name_of(dtype)}, TFLOP/s"
        yield bench.attempted({"what": name}, _product, bench, rows, columns, inner, dtype)


def _copying(bench: Bench) -> Row:
    source = bench.random(bench.size(2**29, 2**16))
    target = torch.empty_like(source)
    ms = bench.milliseconds(partial(target.copy_, source))
    return {"value": 2 * source.nbytes / ms / 1e6}


def _product(bench: Bench, rows: int, columns: int, inner: int, dtype: torch.dtype) -> Row:
    left = bench.random(rows, inner, dtype=dtype)
    right = bench.random(inner, columns, dtype=dtype)
    ms = bench.milliseconds(partial(torch.mm, left, right), repeats=5)
    return {"value": 2 * rows * columns * inner / ms / 1e9}
