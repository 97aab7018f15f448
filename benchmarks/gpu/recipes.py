"""Other recipes than pre-training with AdamW: their steps, and the kernel work that they alone have."""

# Shape suffixes: O rows of a matrix, I its columns

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.steps import Steps
from llama_core.config.nf4 import BLOCK
from llama_core.models import nf4

ADAPTERS = {"lora_rank": 16, "target_modules": ["all-linear"]}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, moments in bf16": {"moments": "bf16"},
    "Muon": {"optimizer": "muon"},
}
TUNING: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("8B", {"sections": {"strategy": "lora", "lora": ADAPTERS}}),
    "QLoRA": ("8B", {"sections": {"strategy": "lora", "lora": ADAPTERS | {"base": "nf4"}}}),
    "QLoRA, compiled": ("8B", {"sections": {"strategy": "lora", "lora": ADAPTERS | {"base": "nf4"}}, "compile": True}),
    "DPO": ("1B", {"training": {"objective": "dpo"}}),
}
"""The shape of each, and further arguments of its steps."""


def optimizers(bench: Bench) -> Iterator[Row]:
    """Yield a step of 1B with each optimizer."""
    for name, training in OPTIMIZERS.items():
        if bench.is_late:
            return
        row = {"what": f"1B, {name}"}
        yield bench.attempted(row, _measured, bench, "1B", training=training)


def tuning(bench: Bench) -> Iterator[Row]:
    """Yield steps of tuning."""
    for name, (shape, settings) in TUNING.items():
        if bench.is_late:
            return
        yield bench.attempted({"what": f"{shape}, {name}"}, _measured, bench, shape, **settings)


def _measured(bench: Bench, shape: str, **settings: Any) -> Row:
    compiled = bench.size(settings.pop("compile", False), False)  # other tests compile it on a CPU
    return Steps(bench, shape, recompute="selective", compile=compiled, **settings).measured(repeats=3)


def numbers_in_nf4(bench: Bench) -> Iterator[Row]:
    """Yield whether the device packs and unpacks a matrix as a CPU does, and how long it takes to unpack it."""
    rows, columns = bench.size((14336, 4096), (64, 128))
    matrix_OI = bench.random(rows, columns)
    packed = nf4.pack(matrix_OI)
    on_cpu = nf4.pack(matrix_OI.cpu())
    place = nf4.Place(0, 0, columns // BLOCK)
    of_device = nf4.unpack(packed, place, torch.bfloat16).cpu()
    of_cpu = nf4.unpack(nf4.Packed(*(part.cpu() for part in packed)), place, torch.bfloat16)
    yield {
        "matrix": f"{rows} x {columns}",
        "bytes that differ from a CPU's": int((packed.bytes_OK.cpu() != on_cpu.bytes_OK).sum()),
        "the same numbers of the same bytes": torch.equal(of_device, of_cpu),
    }
    unpack = partial(nf4.unpack, packed, place, torch.bfloat16)
    for name, way in {"eager": unpack, "compiled": torch.compile(unpack)}.items():
        if bench.is_late:
            return
        yield bench.attempted({"unpacking": name}, _time_unpacking, bench, way)


def _time_unpacking(bench: Bench, way: partial[torch.Tensor]) -> Row:
    matrix_OI = way()
    ms = bench.milliseconds(way)
    return {"ms": ms, "GB/s written": matrix_OI.numel() * matrix_OI.element_size() / ms / 1e6}
